"""What every place can do, whatever it is: said what it is, read by flows, and, where it may be, written.

    with open_place("/mnt/data") as place:                  # looks, and refuses; nothing is written
        place.prepare(1 << 30, cold=True, tell=tell)        # makes what is read, or takes what is there
        reader = place.reader(depth=8)                      # one flow: a connection or file handles of its own
        pending = reader.start(ranges)                      # any number of ranges, under way at once
        pending.wait()                                      # all of them have come

A *flow* is what one worker of a training job is to storage: it has connections (`nvme+tcp:`, volumes) or file handles
(folders) of its own, and is used by one thread. What it has under way at once is its *depth*.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.bench.cache import DROPPED

I64: TypeAlias = npt.NDArray[np.int64]
U8: TypeAlias = npt.NDArray[np.uint8]
#: How far long work is, 0 to 1, and in words.
Tell: TypeAlias = Callable[[float, str], None]


class Item(NamedTuple):
    """Something that can be read: a file, an object, or the whole of a device."""

    name: str
    length_bytes: int


class Ranges(NamedTuple):
    """int64[n] each: of which item, from where, how many bytes. Any offset and length: none need be aligned."""

    item: I64
    offset: I64
    length: I64

    @property
    def total_bytes(self) -> int:
        return int(self.length.sum())


class Pending(Protocol):
    """Reads under way."""

    @property
    def bytes(self) -> int: ...

    def done(self) -> bool:
        """All of them have ended; never waits."""

    def wait(self, timeout_s: float | None = None) -> None:
        """Until all of them have ended; the first error is raised. What was read is nobody's then: its memory is used
        again. `DeviceTimeout`: it takes longer than this (None: than the place's own bound)."""


class Reader(Protocol):
    """One flow. Of one thread."""

    def start(self, ranges: Ranges) -> Pending:
        """Start to read all of these. A folder reads `depth` of all pendings at once, others as many as their queues
        hold: who wants `depth` under way starts no more. Several pendings may be under way."""

    def read(self, item: int, offset: int, length: int) -> None:
        """One read, alone, until it has come: what latencies are taken of."""

    def close(self) -> None: ...


class Shard(NamedTuple):
    """A file to be written: a name (letters, digits, `-`, `_`, `.`, `/`) and a length."""

    name: str
    length_bytes: int


class Writer(Protocol):
    """One writer: a rank that saves, a flow that ingests. It lives in any process: `Room.for_writer` is JSON."""

    def save(self, shards: Sequence[int], seen: Callable[[int], None]) -> list[str]:
        """Write these of the room's shards whole, and until they are durable. `seen(bytes)` as they are written. Gives
        what `Room.commit` needs, as text. ENOSPC and what else the storage says is a `HeadraceError`."""

    def restore(self, shards: Sequence[int], seen: Callable[[int], None]) -> int:
        """Read them whole, and look whether each 4 KiB block is the one that was written; ChecksumMismatch. Bytes."""

    def close(self) -> None: ...


class Room(Protocol):
    """Space for shards, while the context lasts; what was written is gone after it."""

    shards: Sequence[Shard]

    def for_writer(self) -> dict[str, Any]:
        """All that another process needs: `open_writer(room.for_writer())`."""

    def commit(self, proofs: Iterable[str]) -> None:
        """All writers have saved: make it one thing that readers see. Does nothing where a file is there by itself."""

    def forget(self) -> None:
        """Drop from this machine's caches what was written, as far as that can be done."""

    def state(self) -> str:
        """Of the caches, in words, for what is read next."""


class Place(Protocol):
    """A path that is measured. A context manager: on the way out, whatever the reason, what it made is gone."""

    #: As the user named it.
    name: str
    #: "folder", "block device", "namespace", "volume".
    kind: str
    size_bytes: int
    #: None: it may be written to; else why not, for an error.
    why_read_only: str | None
    #: What is read is written first; else it is there.
    makes: bool
    #: In words: when a write counts as done here.
    durable: str
    #: What was read once comes from this machine's page cache the next time.
    keeps: bool

    @property
    def items(self) -> Sequence[Item]:
        """What is read. Empty until `prepare`."""

    def describe(self) -> Mapping[str, str]:
        """What it is, for a report: medium, transport, engine, mount options."""

    def plan(self, read_bytes: int, room_bytes: int) -> list[str]:
        """What `prepare(read_bytes)` and rooms of `room_bytes` at a time would do, in words: what is written and
        overwritten; 0: it will not be asked for. UsageError where that cannot be: too little space, nothing to be read,
        not allowed."""

    def prepare(self, total_bytes: int, *, tell: Tell) -> None:
        """Make what is read, or take what is there: about `total_bytes`, less where there is less."""

    def forget(self, cache: str) -> str:
        """Before a round: bring caches into this state as far as it can be done, and say in words how they are."""

    def reader(self, *, depth: int, cache: str = DROPPED) -> Reader:
        """A new flow."""

    def room(self, shards: Sequence[Shard], cache: str = DROPPED) -> AbstractContextManager[Room]:
        """UsageError where it may not be written to, or there is too little space."""

    def close(self) -> None: ...

    def __enter__(self) -> Place: ...

    def __exit__(self, *_: object) -> None: ...
