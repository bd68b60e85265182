"""Space handed out in a transaction, and what is known of the commands to it: whether one may still land there."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.device import BlockDevice
from headrace.volume import layout
from headrace.volume.data.durable import write_durably
from headrace.volume.data.extents import Extents
from headrace.volume.data.objects import Range
from headrace.volume.layout import Blob
from headrace.volume.writing.grant import Grant
from headrace.volume.writing.pack import Packed


@dataclass
class Allocation:
    """A blob in the making: space handed out in a transaction, and what is known of the commands to it."""

    #: Of the object that it is for, for messages.
    name: str
    birth: int
    #: All of it is the object `name`; else objects get slices of it.
    own: bool = True
    #: The objects that get slices of it, where they are many.
    pack: Packed | None = None
    space: list[Range] = field(default_factory=list)
    #: All of it is written.
    blob: Blob | None = None
    created_ns: int = 0
    grant: Grant | None = None
    #: It is in the catalogue.
    committed: bool = False
    #: Somebody may write there by the grant.
    granted: bool = False
    #: It was to be an object of its own, and is not wanted any more.
    given_up: bool = False
    #: Writes that have begun, less those that were answered: one that failed counts for ever, as it may still land.
    under_way: int = 0
    _lock: threading.Lock = field(default_factory=threading.Lock)

    def share(self, prefix: str, taken: int) -> int:
        """Of `taken` bytes of its space, those for objects whose names begin with `prefix`."""
        if self.pack is not None:
            return self.pack.share(prefix, taken)
        return taken if self.name.startswith(prefix) else 0

    def begin(self) -> None:
        """Commands go there from now on."""
        with self._lock:
            self.under_way += 1

    def end(self) -> None:
        """Every command since `begin` has been answered. Where this is not reached, one may still land."""
        with self._lock:
            self.under_way -= 1

    def run(self, devices: Sequence[BlockDevice], write: Callable[[], None]) -> None:
        """Write durably."""
        self.begin()
        write_durably(devices, write)
        self.end()

    def written(self, *, data: Extents, tables: Sequence[Extents], roots: layout.U32) -> None:
        """All of it is written; it is durable, too, when the transaction's flush has succeeded. Who had the grant has
        answered."""
        self.blob = Blob(
            birth=self.birth,
            length_bytes=data.length_bytes,
            checksum_block_bytes=data.block_bytes,
            table_page_bytes=tables[0].block_bytes if tables else 0,
            runs=data.runs,
            columns=data.columns,
            table_runs=np.concatenate([data.runs[:0], *(table.runs for table in tables)]),
            table_columns=np.concatenate([data.columns[:0], *(table.columns for table in tables)]),
            roots=roots,
            table_copies=max(len(tables), 1),
        )
        self.created_ns = time.time_ns()
        self.granted = False


def may_still_be_written(allocation: Allocation) -> bool:
    """The quarantine rule: may a command to this space be under way somewhere, to land later?"""
    return allocation.granted or allocation.under_way > 0
