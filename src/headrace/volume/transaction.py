"""Transactions: everything or nothing, over any number of objects, ranks and members."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.device import BlockDevice
from headrace.device.protocol import Buffer
from headrace.errors import ObjectNotFound, UsageError, VolumeError
from headrace.volume import layout
from headrace.volume.changes import Changes, already_exists
from headrace.volume.durable import write_durably
from headrace.volume.extents import Extents
from headrace.volume.grant import Grant, Receipt
from headrace.volume.layout import Blob
from headrace.volume.names import check_checksum_block, check_length, check_name
from headrace.volume.objects import Range
from headrace.volume.stream import write_stream
from headrace.volume.write import buffer_bytes

if TYPE_CHECKING:
    from headrace.volume.session import Session

DEFAULT_CHECKSUM_BLOCK = 64 << 10

#: Somebody may be writing there, or may have failed to.
GRANTED = "granted"
#: Nothing is under way, and not all is written.
QUIET = "quiet"
#: Everything is durable.
WRITTEN = "written"


@dataclass
class Allocation:
    """Space handed out in a transaction, and what is known of the commands to it."""

    name: str
    space: list[Range]
    state: str = GRANTED
    blob: Blob | None = None
    created_ns: int = 0
    grant: Grant | None = None

    def run(self, devices: Sequence[BlockDevice], write: Callable[[], None]) -> None:
        """Write durably; where that fails, or is interrupted, its commands may still land."""
        self.state = GRANTED
        write_durably(devices, write)
        self.state = QUIET

    def written(self, *, birth: int, data: Extents, table: Extents | None, roots: layout.U32) -> None:
        """Everything is durable."""
        self.blob = Blob(
            birth=birth,
            length_bytes=data.length_bytes,
            checksum_block_bytes=data.block_bytes,
            table_page_bytes=0 if table is None else table.block_bytes,
            runs=data.runs,
            columns=data.columns,
            table_runs=data.runs[:0] if table is None else table.runs,
            table_columns=data.columns[:0] if table is None else table.columns,
            roots=roots,
        )
        self.created_ns = time.time_ns()
        self.state = WRITTEN


def may_still_be_written(allocation: Allocation) -> bool:
    """The quarantine rule: may a command to this space be under way somewhere, to land later?"""
    return allocation.state == GRANTED


class Transaction:
    """Made by `Session.transaction`. Thread-safe where several threads put objects at once."""

    def __init__(self, session: Session, number: int) -> None:
        self._session = session
        self.number = number
        self.allocations: dict[int, Allocation] = {}
        self.deleted: list[str] = []
        self.committing = False
        self._ended = False
        self._sequence: int | None = None
        self._lock = threading.Lock()
        self._names: set[str] = set()
        self._deleted_names: set[str] = set()
        #: Bytes of the commit record so far.
        self._record_bytes = 0

    @property
    def sequence(self) -> int:
        """Of the durable commit record. UsageError before the commit."""
        if self._sequence is None:
            raise UsageError("the transaction is not committed")
        return self._sequence

    def __enter__(self) -> Transaction:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.commit()
        else:
            self.abort()

    @property
    def session(self) -> Session:
        return self._session

    def _open(self) -> None:
        if self._ended:
            raise UsageError("the transaction has ended")

    # ---- what it does ----

    def allocate(self, name: str, length_bytes: int, *, checksum_block_bytes: int = DEFAULT_CHECKSUM_BLOCK) -> Grant:
        """Space for one object that somebody else writes, with `Volume.write_grant`; `accept` takes the answer.

        VolumeFull before anything is written; ObjectExists; UsageError for a bad name or checksum block.
        """
        allocation = self._reserve(name, length_bytes, checksum_block_bytes)
        assert allocation.grant is not None
        return allocation.grant

    def _reserve(self, name: str, length_bytes: int, checksum_block_bytes: int) -> Allocation:
        check_name(name)
        check_checksum_block(checksum_block_bytes, self._session.volume.superblock.stripe_bytes)
        length_bytes = check_length(length_bytes)
        with self._lock:
            self._check_new(name)
            allocation = self._session.allocate(self, name, length_bytes, checksum_block_bytes)
            grant = allocation.grant
            assert grant is not None
            self._register(grant.birth, allocation, 4 * grant.root_count + len(grant.runs) + len(grant.columns))
        return allocation

    def begin(self, name: str, checksum_block_bytes: int) -> tuple[int, Allocation]:
        """A birth number and an allocation without space yet, for a stream."""
        check_name(name)
        check_checksum_block(checksum_block_bytes, self._session.volume.superblock.stripe_bytes)
        with self._lock:
            self._check_new(name)
            birth, allocation = self._session.new_birth(), Allocation(name, [], QUIET)
            self._register(birth, allocation, 0)
        return birth, allocation

    def _check_new(self, name: str) -> None:
        self._open()
        if name in self._names:
            raise UsageError("the transaction has this object already", where=f"object {name!r}")
        if name not in self._deleted_names and name in self._session.volume:
            raise already_exists(name)
        self._session.check_room(self._record_bytes + len(name) * 4 + 4096)

    def _register(self, birth: int, allocation: Allocation, entry_bytes: int) -> None:
        self.allocations[birth] = allocation
        self._names.add(allocation.name)
        self._record_bytes += 128 + len(allocation.name.encode()) + entry_bytes

    def withdraw(self, grant: Grant) -> None:
        """The grant was handed to nobody, and never will be: if the transaction aborts, its space is free at once."""
        with self._lock:
            allocation = self.allocations.get(grant.birth)
            if allocation is not None and allocation.state == GRANTED:
                allocation.state = QUIET

    def accept(self, receipt: Receipt) -> None:
        """A rank's answer: the bytes of its grant are durable. UsageError where it does not belong here."""
        with self._lock:
            self._open()
            allocation = self.allocations.get(receipt.birth)
            grant = None if allocation is None else allocation.grant
            if (
                allocation is None
                or grant is None
                or (receipt.session, receipt.transaction) != (self._session.number, self.number)
                or (receipt.name, receipt.length_bytes) != (grant.name, grant.length_bytes)
                or len(receipt.roots) != 4 * grant.root_count
            ):
                raise UsageError(
                    "the receipt belongs to no grant of this transaction", where=f"object {receipt.name!r}"
                )
            data, table = grant.data_extents(), grant.table_extents()
            allocation.written(birth=grant.birth, data=data, table=table, roots=np.frombuffer(receipt.roots, "<u4"))

    def put(self, name: str, data: Buffer, *, checksum_block_bytes: int = DEFAULT_CHECKSUM_BLOCK) -> None:
        """One object from this process's memory."""
        allocation = self._reserve(name, buffer_bytes(data), checksum_block_bytes)
        assert allocation.grant is not None
        self.accept(self._session.volume.write_grant(allocation.grant, data))

    def write_stream(
        self,
        name: str,
        buffers: Iterable[Buffer],
        *,
        length_bytes: int | None = None,
        checksum_block_bytes: int = DEFAULT_CHECKSUM_BLOCK,
    ) -> int:
        """One object from buffers that come one after another; returns its length in bytes.

        Memory is bounded by one staging buffer (some stripes for each member), whatever the length. With `length_bytes`
        the space is taken first, so that VolumeFull comes before any data is written, and another length is a
        UsageError.
        """
        if length_bytes is not None:
            length_bytes = check_length(length_bytes)
        return write_stream(self, name, buffers, length_bytes=length_bytes, checksum_block_bytes=checksum_block_bytes)

    def delete(self, name: str) -> None:
        """The object ends with this transaction; its space is used again, last, once that is durable."""
        with self._lock:
            self._open()
            if name in self._deleted_names or name not in self._session.volume:
                raise ObjectNotFound(
                    f"there is no object {name!r} to delete", next_step="`headrace volume ls` lists what is there"
                )
            self.deleted.append(name)
            self._deleted_names.add(name)
            self._record_bytes += 80 + len(name.encode())

    # ---- its end ----

    def collect(self, changes: Changes) -> None:
        """Tell what is to change. For the session. VolumeError where something is not written yet."""
        for name in self.deleted:
            changes.delete(name)
        for allocation in self.allocations.values():
            if allocation.blob is None:
                raise VolumeError(
                    "a grant was not answered",
                    where=f"object {allocation.name!r}",
                    next_step="accept the receipt of every grant before the transaction ends",
                )
            changes.put_blob(allocation.name, allocation.blob, allocation.created_ns)

    def commit(self) -> int:
        """Everything becomes visible and durable, or nothing does; returns the sequence. Aborts where it raises."""
        with self._lock:
            self._open()
        try:
            self._sequence = self._session.commit(self)
        except BaseException:
            self.abort()
            raise
        self._finish()
        return self._sequence

    def abort(self) -> None:
        """Nothing of it is ever visible. Space that a command may still reach is not used again by this session."""
        if self._ended:
            return
        self._finish()
        if self.committing:
            # The record may be durable: its space belongs to whoever reads the log next.
            for allocation in self.allocations.values():
                allocation.state = GRANTED
        self._session.settle(self.allocations.values())

    def _finish(self) -> None:
        self._ended = True
        self._session.ended(self)
