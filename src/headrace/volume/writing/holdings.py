"""The space of a session: what it may hand out, what it keeps for whom, and what has to wait, and for what."""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from headrace.errors import UsageError, VolumeFull
from headrace.volume import layout
from headrace.volume.catalog.catalog import Catalog
from headrace.volume.catalog.commit import LogWriter
from headrace.volume.data.checksums import table_page_bytes
from headrace.volume.data.extents import Extents
from headrace.volume.data.names import check_length
from headrace.volume.data.objects import Range
from headrace.volume.space.allocator import Allocator
from headrace.volume.space.deallocate import Deallocator
from headrace.volume.writing import fence
from headrace.volume.writing.allocation import Allocation
from headrace.volume.writing.renewal import Renewal
from headrace.volume.writing.reserve import Reservation, Reservations
from headrace.volume.writing.tenure import Tenure
from headrace.volume.writing.transaction import Transaction

if TYPE_CHECKING:
    from headrace.volume.volume import Volume

_T = TypeVar("_T")

#: How long space is waited for that the target is giving back.
SPACE_S = 30.0


def window_ranges(superblock: layout.Superblock) -> int:
    """How many ranges the windows of a session have at most: two sessions' must fit into an area beside all else."""
    return min(superblock.area_bytes // 8, 32 << 10) // layout.EXTENT.itemsize


class Holdings(Tenure):
    """The middle part of a session: space, for whoever writes."""

    _allocator: Allocator
    _deallocator: Deallocator
    _writer: LogWriter
    _next_birth: int
    #: Slices of every blob that has a key: who deletes the last one deletes the blob.
    _counts: dict[int, int]

    def __init__(self, volume: Volume, run_id: str) -> None:
        super().__init__(volume, run_id)
        self._transactions: dict[int, Transaction] = {}
        #: Of these, some that nobody will end: aborted when the session is asked for a transaction or for space.
        self.abandoned: deque[Transaction] = deque()
        self._reservations = Reservations()
        #: Told when a deallocation has ended.
        self._given_back = threading.Condition(self._lock)
        #: Something of this session may still be written by a command that nobody will ever answer for.
        self._outstanding = False
        #: With so much space, and more than so many entries, there was too little to gather tables in.
        self._no_room = (0, 0)
        #: Where a command of a rank that was given up may still land.
        self._haunted: list[Range] = []
        #: Where a command of a host that this session once was may still land, since no target confirmed its end.
        self._never_quiet: list[Range] = []
        #: Somebody wanted space that a renewal would make free.
        self._wanted = False

    @property
    def catalog(self) -> Catalog:
        """What is committed. Whoever looks holds the session's lock."""
        return self._writer.catalog

    @property
    def open_transactions(self) -> list[Transaction]:
        return list(self._transactions.values())

    def _end_abandoned(self) -> bool:
        """False where there were none."""
        some = bool(self.abandoned)
        while self.abandoned:
            self.abandoned.popleft().abort()
        return some

    def _ghosts(self) -> list[Range]:
        return self._never_quiet + self._restless()

    def _ghosts_in_data(self) -> list[Range]:
        """The log, whose writes are sent again like others, is no space to hand out."""
        result = []
        for member, offset, length in self._ghosts():
            row = self.volume.superblock.members[member]
            start, end = max(offset, row.data_offset), min(offset + length, row.data_end)
            if start < end:
                result.append((member, start, end - start))
        return result

    def _restless(self) -> list[Range]:
        """Of these, where a renewal can rule it out."""
        return self._haunted + fence.unsettled(self._fence.devices)

    def _to_be_settled(self) -> bool:
        """Would a renewal make anything better?"""
        return bool(self._restless()) or (self._wanted and self._outstanding and not self._undrained)

    def haunt(self, space: Sequence[Range]) -> None:
        """A rank wrote there, and a copy of its write may still land."""
        with self._lock:
            self._haunted += space

    def renew(self) -> bool:
        """Become another host, which preempts the one that this session was: no command of that can land any more, so
        that all space is free which waited for one. True where the targets confirm that.

        UsageError where a member keeps no reservations, or while transactions are open: their grants would be void.
        """
        with self._lock:
            self.check()
            self._end_abandoned()
            if not self._fence.reserved:
                raise UsageError("only targets with reservations can confirm that nothing is under way any more")
            if self._transactions:
                raise UsageError(
                    "a session with open transactions cannot be renewed", next_step="commit or abort them first"
                )
            restless = self._outstanding or bool(self._ghosts())
            if self._renewal is None:
                self._renewal = Renewal(self._fence, self.volume.devices)
            renewal = self._renewal
            with self._deallocator.paused():
                drained = self._become(renewal, restless)
            if not drained or self._undrained:
                self._never_quiet += renewal.lost + self._haunted
                self._haunted.clear()
                self._outstanding |= self._undrained
                if self._undrained:
                    self._allocator.until = Allocator.until
                return False
            self._haunted.clear()
            self._allocator.settle()
            self._outstanding = False
            self._wanted = False
            self._deallocator.go_on()
            return True

    def _log_window(self, ranges: list[Range]) -> None:
        self.look()
        rows = np.array([(member, 0, offset, length) for member, offset, length in ranges], layout.EXTENT)
        rows["flags"][0] = layout.INSTEAD
        with self.lost_if_fenced():
            record = self._writer.append(layout.WINDOW, rows.tobytes(), self.number)
        with self.volume.lock:
            self._writer.catalog.apply(record)

    def _room_for_window(self, ranges: int) -> None:
        with self.lost_if_fenced():
            self._writer.ensure_room(layout.record_blocks(ranges * layout.EXTENT.itemsize))

    def _lose_space(self) -> None:
        """A write of a table failed, and may still land."""
        self._outstanding = True

    @property
    def free_bytes(self) -> int:
        """Space that can still be handed out by this session, in bytes."""
        with self._lock:
            return self._allocator.available

    @property
    def quarantined_bytes(self) -> int:
        """Space that late writes may still hit, in bytes; not handed out by this session."""
        with self._lock:
            return self._allocator.quarantined_bytes

    @property
    def unreachable_bytes(self) -> int:
        """Space that nothing uses on members that are missing, in bytes."""
        with self._lock:
            return self._allocator.absent_bytes

    @property
    def deallocating_bytes(self) -> int:
        """Space of deletions that a device is being told of: free in a moment, and who needs it waits for that."""
        with self._lock:
            return self._allocator.deallocating_bytes

    @property
    def building_bytes(self) -> int:
        """Space of the catalogue's tables that are being written, or were replaced a moment ago."""
        with self._lock:
            return self._writer.building_bytes

    def _take(self, allocation: Allocation, length_bytes: int, block_bytes: int) -> Extents:
        def take() -> tuple[layout.Rows, layout.Rows]:
            kept = self._reservations.kept(allocation.share, length_bytes)
            self._make_room(length_bytes + kept)
            return self._allocator.allocate(length_bytes, block_bytes, kept=kept)

        runs, columns = self._when_there_is_space(take)
        return Extents(
            runs,
            columns,
            length_bytes=length_bytes,
            block_bytes=block_bytes,
            stripe_bytes=self.volume.superblock.stripe_bytes,
        )

    def _when_there_is_space(self, take: Callable[[], _T]) -> _T:
        """What is being deallocated is waited for: it is free in a moment. What waits for late writes is free when the
        session has renewed itself, which it does before the next transaction."""
        while True:
            try:
                return take()
            except VolumeFull:
                if self._end_abandoned():
                    continue
                self._wanted = True
                if not self._allocator.deallocating_bytes or not self._given_back.wait(SPACE_S):
                    raise

    def _make_room(self, length_bytes: int) -> None:
        """Where there is less: the tables of a catalogue out of which much was deleted take more space than they need,
        and keep as much free. Holds the session's lock."""
        if self._allocator.available - self._allocator.reserve_bytes < length_bytes:
            self._gather()

    def _gather(self) -> bool:
        """Tables that mostly say what holds no longer become one; False where there are none, or no space for it."""
        space, writer = self._allocator, self._writer
        live = self.catalog.totals.object_count + len(self._counts)
        before, most = self._no_room
        if not writer.is_stale(live) or (space.available <= before and live > most):
            return False
        self._look_whole()
        with self.lost_if_fenced():
            gathered = writer.gather(self.number) and not writer.is_stale(live)
        # With less of it, or not much less to say, it is not tried again.
        self._no_room = (0, 0) if gathered else (space.available, live * 7 // 8)
        space.reserve_bytes = writer.reserve_bytes
        return gathered

    def take(self, allocation: Allocation, length_bytes: int, block_bytes: int) -> Extents:
        """More space for an allocation. VolumeFull."""
        with self._lock:
            self.check()
            extents = self._take(allocation, length_bytes, block_bytes)
            self._hand_out(allocation, extents.used())
        return extents

    def take_blob(self, allocation: Allocation, length_bytes: int, block_bytes: int) -> tuple[Extents, list[Extents]]:
        """Space for all of a blob and each copy of its checksum table. VolumeFull: nothing was taken."""
        with self._lock:
            self.check()
            data = self._take(allocation, length_bytes, block_bytes)
            try:
                tables = self._take_tables(allocation, -(-length_bytes // block_bytes))
            except BaseException:
                self._allocator.give_back(data.used())
                raise
            self._hand_out(allocation, [one for extents in (data, *tables) for one in extents.used()])
        return data, tables

    def take_tables(self, allocation: Allocation, block_count: int) -> list[Extents]:
        """Space for each copy of the table of so many checksums; none where it lies in the entry. VolumeFull."""
        with self._lock:
            self.check()
            tables = self._take_tables(allocation, block_count)
            self._hand_out(allocation, [one for table in tables for one in table.used()])
        return tables

    def _take_tables(self, allocation: Allocation, block_count: int) -> list[Extents]:
        superblock = self.volume.superblock
        page, length = table_page_bytes(block_count, superblock.stripe_bytes), block_count * 4
        if not page:
            return []
        if not superblock.incompat & layout.PAIRED_CHECKSUMS:
            # A volume that was made before tables stood twice stays readable by what could read it.
            return [self._take(allocation, length, page)]
        pair = self._when_there_is_space(
            lambda: self._allocator.allocate_pair(
                length, page, kept=self._reservations.kept(allocation.share, 2 * layout.align_up(length))
            )
        )
        return [
            Extents(runs, columns, length_bytes=length, block_bytes=page, stripe_bytes=superblock.stripe_bytes)
            for runs, columns in pair
        ]

    def _hand_out(self, allocation: Allocation, space: list[Range]) -> None:
        allocation.space.extend(space)
        self._reservations.under_way(allocation.share, sum(length for _, _, length in space))

    def reserve(self, length_bytes: int, prefix: str) -> Reservation:
        """Keep space for objects whose names begin with `prefix`: `length_bytes` for all of them together, those that
        are there already counted. VolumeFull at once where there is not so much: what a job needs for its checkpoints
        is certain when it starts. A second time for the same prefix changes how much.

        It lasts until it is released, or the session ends; `Volume.info().reserved_bytes` shows what is held.
        """
        with self._lock:
            self.check()
            self._end_abandoned()
            self._make_room(check_length(length_bytes))
            available = self._allocator.available + self._allocator.deallocating_bytes - self._allocator.reserve_bytes
            return self._reservations.reserve(self, self.catalog, prefix, length_bytes, available)

    @property
    def reserved_bytes(self) -> int:
        """Of `free_bytes`, what is kept for reservations."""
        with self._lock:
            return self._reservations.held()

    @property
    def deallocation(self) -> Deallocator:
        """How much of what was deleted was given back to the target, and whether that went well."""
        return self._deallocator

    def _begin_deallocation(self, ranges: list[Range]) -> list[Range]:
        with self._lock:
            self._look_whole()
            return self._allocator.take_freed(ranges)

    def _end_deallocation(self, ranges: list[Range], well: bool) -> None:
        with self._lock:
            self._allocator.deallocating_bytes -= sum(length for _, _, length in ranges)
            if well:
                self._allocator.renew(ranges)
            else:
                self._allocator.quarantine(ranges)
                self._outstanding |= bool(ranges)
            self._given_back.notify_all()

    def new_birth(self) -> int:
        """A number that no other allocation of this volume ever had."""
        with self._lock:
            birth = self._next_birth
            self._next_birth += 1
        return birth
