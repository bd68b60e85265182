"""A session: the one writer of a volume. Transactions: everything or nothing.

session = volume.session(run_id="...")          claim, read the log, adopt what was in flight
with session.transaction() as tx:               any number of objects, from any number of ranks
    tx.put(name, data)
    grant = tx.allocate(name, length)           -> volume.write_grant(grant, buffer) on a rank -> receipt
    tx.accept(receipt)
    tx.delete(name)
tx.sequence                                     committed; an exception inside aborts instead
session.close()                                 the next session opens at once
"""

from __future__ import annotations

import os
import threading
import time
import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, TypeVar

import numpy as np

from headrace.device import BlockDevice, lanes
from headrace.errors import DeviceError, HeadraceError, SessionLost, UsageError, VolumeError, VolumeFull, WriterActive
from headrace.volume import layout
from headrace.volume.catalog.catalog import Catalog, cover
from headrace.volume.catalog.changes import Changes, Outcome
from headrace.volume.catalog.commit import LogWriter
from headrace.volume.catalog.log import LogReader
from headrace.volume.catalog.usage import usage_of
from headrace.volume.data.absent import absent
from headrace.volume.data.checksums import table_page_bytes
from headrace.volume.data.durable import write_through
from headrace.volume.data.extents import Extents
from headrace.volume.data.names import check_length
from headrace.volume.data.objects import Range, space_of
from headrace.volume.layout import CLOSED, CLOSED_OUTSTANDING, Blob, SessionEntry
from headrace.volume.media.members import Members
from headrace.volume.space.allocator import Allocator, TableSpace, count_space
from headrace.volume.space.deallocate import Deallocator
from headrace.volume.writing import copies, fence, heartbeat
from headrace.volume.writing.fence import Ticket
from headrace.volume.writing.grant import Grant
from headrace.volume.writing.heartbeat import HeartbeatBlock
from headrace.volume.writing.renewal import Renewal
from headrace.volume.writing.reserve import Reservation, Reservations
from headrace.volume.writing.transaction import COMMITTED, Allocation, Transaction, may_still_be_written

if TYPE_CHECKING:
    from headrace.volume.volume import Volume

_T = TypeVar("_T")

#: How long space is waited for that the target is giving back.
SPACE_S = 30.0


def window_ranges(superblock: layout.Superblock) -> int:
    """How many ranges the windows of a session have at most: two sessions' must fit into an area beside all else."""
    return min(superblock.area_bytes // 8, 32 << 10) // layout.EXTENT.itemsize


class Session:
    """Made by `Volume.session`. Thread-safe; belongs to the process that opened it."""

    def __init__(
        self, volume: Volume, *, run_id: str, takeover: str, heartbeat_s: float, missed_beats: int, unfenced: bool
    ) -> None:
        self.volume = volume
        self.run_id = run_id
        self._lock = threading.RLock()
        #: Told when a deallocation has ended.
        self._given_back = threading.Condition(self._lock)
        self._pid = os.getpid()
        self._lost: SessionLost | None = None
        self._closed = False
        self._transactions: dict[int, Transaction] = {}
        self._next_transaction = 1
        #: Birth -> how many open transactions mean to refer to the blob.
        self._pins: dict[int, int] = {}
        #: Their space, where they were deleted since.
        self._parked: dict[int, list[Range]] = {}
        self._reservations = Reservations()
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
        #: There may be such commands; whoever takes over from this session cannot rule them out either.
        self._undrained = False
        #: One that has begun, and could not be ended yet.
        self._renewal: Renewal | None = None
        where = ", ".join(volume.uris)
        fence.check(volume.devices, unfenced=unfenced)
        # First who holds, then whether that one lives, then the take-over from exactly that one.
        first = fence.first(volume.devices, volume.lagging)
        holder = fence.holder(first)
        verdict = heartbeat.judge(
            HeartbeatBlock(volume.superblock, volume.devices, volume.log.copies),
            run_id=run_id,
            takeover=takeover,
            missed_beats=missed_beats,
            where=where,
            last_session=volume.catalog_session(),
            holder=holder,
        )
        self._fence = fence.take(volume.devices, judged=holder, last=volume.lagging)
        try:
            #: What data are written with: beside the structures of the log, which go through the devices themselves, so
            #: that neither holds up a heartbeat or a commit. Reads have the volume's own associations.
            self.writing: list[BlockDevice] = lanes(self._fence.devices, "checkpoint")
            self._deallocator = Deallocator(self.writing, self._begin_deallocation, self._end_deallocation)
            self._begin(verdict, heartbeat_s, where)
        except BaseException:
            with suppress(HeadraceError):
                self._fence.close()
            raise

    def _begin(self, verdict: heartbeat.Verdict, heartbeat_s: float, where: str) -> None:
        volume, devices = self.volume, self._fence.devices
        # Again, now that nobody else writes: another one may have begun an epoch since the volume was opened.
        found = volume.look_again(devices)
        usable = copies.usable(found, devices) if volume.degraded else found.copies
        block = HeartbeatBlock(found.superblock, devices, usable)
        mine = heartbeat.new_heartbeat(
            copies.first_number(found, devices, volume.catalog_session() + 1),
            self.run_id,
            heartbeat_s,
            nonce=self._fence.hostid.bytes,
            key=self._fence.key if self._fence.ticket(b"", 0) else 0,
        )
        mine = heartbeat.claim(block, mine, where=where, fenced=self._fence.reserved)
        self.number = mine.session
        self._log = LogReader(found.superblock, devices, usable)
        # Tables do not change, and the volume reads them after this session, too.
        self._log.nodes = volume.log.nodes
        self._start_heart(block, mine)
        try:
            # What follows writes to the log: a claim that fails from here on may have left commands behind.
            with self.lost_if_fenced():
                self._writer = self._take_log(mine, verdict, found)
            self._allocator = self._count_space()
            #: No session before had this number, so no allocation had these.
            self._next_birth = (self.number << 32) + 1
            space = TableSpace(self._allocator, self._lose_space)
            self._writer.with_tables(space, self.new_birth, self.volume.lock)
            if self._outstanding:
                self._allocator.log_reach()
            self._writer.compact_now(self.number)
            self._allocator.reserve_bytes = self._writer.reserve_bytes
        except BaseException:
            with suppress(HeadraceError):
                self._beat.stop(CLOSED_OUTSTANDING)
            raise

    # ---- opening and closing ----

    def _take_log(self, mine: layout.Heartbeat, verdict: heartbeat.Verdict, found: Members) -> LogWriter:
        volume = self.volume
        volume.mend_superblocks(self._fence.devices)
        catalog, cursor = self._log.load(every_copy=True)
        if copies.settle(self._log, found, degraded=volume.degraded):
            volume.look_again(self._fence.devices)
            self._beat.halt()
            self._beat_on()
        # Of a predecessor that the targets confirm to have drained no command can land any more.
        last = verdict.last
        clean = verdict.clean or (
            last is not None
            and last.session == catalog.session
            and not last.flags & layout.UNDRAINED
            and self._fence.drained(last.key)
        )
        for number, ranges in catalog.windows.items():
            catalog.windows[number] = cover(ranges, window_ranges(volume.superblock))
        writer = LogWriter(self._log, catalog, cursor)
        writer.look = self.look
        writer.adopt()
        if self.number <= catalog.session:
            # Who was stopped since its claim has been followed by another one, and says that it is lost.
            self._beat.check()
            # The heartbeat block was lost: the log knows better which numbers were used.
            raise VolumeError(
                "the heartbeat block is older than the log",
                found=f"session {self.number} after {catalog.session}",
                next_step="open the session again",
            )
        entry = SessionEntry(
            self.number,
            0 if clean else layout.UNCLEAN_PREDECESSOR,
            mine.nonce,
            mine.started_ns,
            mine.run_id,
            mine.host,
        )
        # No move of a session before this one, finished or not, can have used this generation.
        writer.skip = 0 if clean else self.number - catalog.session
        if not clean or cursor.findings or cursor.header.epoch != self._log.superblock.log_epoch:
            writer.move(say_so=clean)
        writer.skip = 0
        record = writer.append(layout.SESSION, entry.encode(), self.number)
        # Marked, so that whoever opens the volume next knows this number as used.
        writer.mark(self.number)
        with volume.lock:
            catalog.apply(record)
            volume.adopt_state(catalog, writer, self)
        return writer

    def _count_space(self) -> Allocator:
        superblock, catalog = self.volume.superblock, self._writer.catalog
        with self.volume.lock:
            # From the one copy and from the other in turn, so that no damage is never met.
            catalog.load_tables(self.number % layout.TABLE_COPIES)
            with self.lost_if_fenced():
                catalog.mend_tables(self._fence.devices)
        missing = absent(self._fence.devices)
        windows = [one for ranges in catalog.windows.values() for one in ranges if one[0] not in missing]
        carried = [one for ranges in catalog.windows.values() for one in ranges if one[0] in missing]
        # When that member is back, late writes may still hit it: the successor must not take this one's end for clean.
        self._outstanding |= bool(carried)
        usage = usage_of(catalog, superblock.stripe_bytes)
        #: Slices of every blob that has a key: who deletes the last one deletes the blob.
        self._counts: dict[int, int] = usage.slices
        spaces, quarantined = count_space(superblock, usage.ranges(), windows, catalog.table_space())
        for member, end in usage.ends.items():
            spaces[member].cursor = end
        allocator = Allocator(
            spaces,
            stripe_bytes=superblock.stripe_bytes,
            log_window=self._log_window,
            make_room=self._room_for_window,
            ghosts=self._ghosts,
            absent=missing,
            carried=carried,
            most_ranges=window_ranges(superblock),
        )
        if self._fence.reserved:
            allocator.until = "end the open transactions (the next one begins by ruling late writes out)"
        allocator.quarantined_bytes = allocator.predecessor_bytes = quarantined
        return allocator

    def mend_tables(self) -> None:
        """Read both copies of all tables of the catalogue, and write what either lacks again."""
        with self._lock, self.lost_if_fenced():
            self.look()
            self._writer.catalog.mend_tables(self._fence.devices, everything=True)

    def write_structure(self, member: int, offset: int, data: bytes) -> None:
        """Bytes that belong there and are not: whole, padded to a block, durable when this returns. The caller knows
        that the place is theirs, and holds the session's lock.
        """
        with self.lost_if_fenced():
            self.look()
            write_through(self._fence.devices[member], offset, data.ljust(layout.align_up(len(data)), b"\0"))

    # ---- what keeps others out ----

    @property
    def fence(self) -> str:
        """What keeps out a writer that was taken over from, on the worst member: "persistent", "until-restart", "node",
        "machine", "process" or "none" (`headrace.volume.writing.fence`)."""
        return self._fence.strength

    @property
    def ticket(self) -> Ticket | None:
        """For other processes of this job: `Volume.open(..., ticket=...)`, so that they write as this session does.
        Each grant carries it, too. None where no member keeps reservations."""
        return self._fence.ticket(self.volume.superblock.volume_id, self.number)

    @contextmanager
    def lost_if_fenced(self) -> Iterator[None]:
        """A write that the target refuses is the end of this session."""
        try:
            with fence.lost_if_fenced():
                yield
        except SessionLost as lost:
            self._lost = self._lost or lost
            raise

    def _ghosts(self) -> list[Range]:
        return self._never_quiet + self._restless()

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

    def _become(self, renewal: Renewal, restless: bool) -> bool:
        """Another host, on every member; on some of them where it raises, and then it may go on later. True where the
        targets confirm that nothing of the old one can land. `restless`: something may."""

        def changed(index: int) -> None:
            self.writing[index : index + 1] = lanes(self._fence.devices[index : index + 1], "checkpoint")

        try:
            self._beat.halt()
            with self.lost_if_fenced():
                renewal.go_on(changed)
            drained = renewal.after.drained(renewal.before.key)
            # Nor can a later renewal tell: the host that it would have to ask about is gone.
            self._undrained |= not drained and (restless or bool(renewal.lost))
            self._fence, self._renewal = renewal.end(), None
        except WriterActive as active:
            self._lost = fence.lost(str(active))
            raise self._lost from active
        finally:
            if self._lost is None:
                self._beat_on()
        return drained

    @property
    def _half_way(self) -> Renewal | None:
        """A renewal that has to end before anything but a beat is written."""
        return self._renewal if self._renewal is not None and self._renewal.begun else None

    def _beat_on(self) -> None:
        """The heart again, after it was halted, through the associations that the session has now."""
        half = self._half_way
        named = self._fence if half is None else half.after
        last = self._beat.last()
        mine = last._replace(
            nonce=named.hostid.bytes,
            key=named.key,
            beat=last.beat + 1,
            due_ns=time.time_ns(),
            flags=layout.UNDRAINED if self._undrained or half is not None else 0,
        )
        block = HeartbeatBlock(self._log.superblock, self._fence.devices, self._log.copies)
        # Also where a target is away just now: a session whose heart stands still gets taken over.
        with suppress(DeviceError), self.lost_if_fenced():
            block.write(mine)
        self._start_heart(block, mine)

    def _start_heart(self, block: HeartbeatBlock, mine: layout.Heartbeat) -> None:
        on_lost = weakref.WeakMethod(self._on_lost)
        watch = heartbeat.Watch(
            on_lost=lambda lost: None if (told := on_lost()) is None else told(lost),
            confirm=not self._fence.reserved,
            ask=self._fence.ask if self._fence.has_to_ask else None,
        )
        self._beat = heartbeat.start_heart(block, mine, watch)
        # A session that nobody holds any more must not look alive.
        weakref.finalize(self, self._beat.abandon)

    def _log_window(self, ranges: list[Range]) -> None:
        self.look()
        rows = np.array([(member, 0, offset, length) for member, offset, length in ranges], layout.EXTENT)
        rows["flags"][0] = layout.INSTEAD
        with self.lost_if_fenced():
            record = self._writer.append(layout.WINDOW, rows.tobytes(), self.number)
        with self.volume.lock:
            self._writer.catalog.apply(record)

    def _room_for_window(self, ranges: int) -> None:
        self._writer.ensure_room(layout.record_blocks(ranges * layout.EXTENT.itemsize))

    def _lose_space(self) -> None:
        """A write of a table failed, and may still land."""
        self._outstanding = True

    def _on_lost(self, lost: SessionLost) -> None:
        self._lost = lost

    def check(self) -> None:
        """Raises SessionLost where this session is known to be lost, UsageError where it was closed. Reads nothing."""
        if self._pid != os.getpid():
            raise UsageError(
                "a session belongs to the process that opened it", next_step="pass grants to other processes"
            )
        if self._closed:
            raise UsageError("the session is closed")
        if self._lost is not None:
            raise self._lost

    def look(self) -> None:
        """`check`, and see in the heartbeat block that nobody took the volume over: before every write to the log.
        Where the targets keep others out there is nothing to look at: they refuse the write. Those behind the
        kernel's block devices are asked whether they still do."""
        self.check()
        self._ask_block()

    def _ask_block(self) -> None:
        if self._fence.reserved:
            return
        try:
            self._beat.check()
            self._fence.ask()
        except SessionLost as lost:
            self._lost = lost
            raise

    def _confirm(self) -> None:
        """Whoever took the volume over before the marker was durable may have read the log without this commit. Only
        one whose claim comes after this look is sure to find it, so only now is it acknowledged."""
        self.check()
        self._ask_block()
        self._look_at_log()

    def _look_at_log(self) -> None:
        """See that our log is the one in force. A heart that was stopped between its look and its beat has named us in
        the heartbeat block again; but whoever takes over from a session that did not end moves the log first.
        """
        if self._fence.reserved:
            return
        if self._writer.reader.newer(self._writer.cursor):
            self._lost = SessionLost(
                "another session took the volume over",
                found="the log went on in its other area",
                next_step="nothing more can be committed here; end this run",
            )
            raise self._lost

    def close(self) -> None:
        """Abort what is open, and mark the session closed, so that the next one opens at once. Never raises
        SessionLost.
        """
        if self._closed or self._pid != os.getpid():
            return
        self._deallocator.stop()
        with self._lock:
            for transaction in list(self._transactions.values()):
                transaction.abort()
            self._closed = True
            self._writer.close()
            half = self._half_way
            outstanding = self._outstanding or self._writer.broken is not None or self._fence.unsettled
            outstanding = outstanding or half is not None
            self.volume.end_session(self._writer)
        try:
            self._beat.stop(None if self._lost is not None else CLOSED_OUTSTANDING if outstanding else CLOSED)
        except SessionLost as lost:
            self._lost = lost
        finally:
            # The reservation stays: until the next session takes it, nobody can write.
            self._fence.close()
            if self._renewal is not None:
                self._renewal.after.step_back()

    def __enter__(self) -> Session:
        return self

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
            return
        # What went wrong in the block is the news; a close that then fails for the same reason must not hide it.
        with suppress(HeadraceError):
            self.close()

    # ---- transactions ----

    def transaction(self) -> Transaction:
        """A transaction, for `with`. Several may be open at a time; each is committed whole, in the order of their
        ends.
        """
        with self._lock:
            self.look()
            if not self._transactions and self._fence.reserved and (self._half_way or self._to_be_settled()):
                # Nothing of ours is under way but what was given up: a good moment to rule that out. Where a target is
                # away just now, it waits for the next one.
                try:
                    self.renew()
                except DeviceError:
                    if self._half_way is not None:
                        raise
            transaction = Transaction(self, self._next_transaction)
            self._transactions[transaction.number] = transaction
            self._next_transaction += 1
        return transaction

    @property
    def catalog(self) -> Catalog:
        """What is committed. Whoever looks holds the session's lock."""
        return self._writer.catalog

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
            kept = self._reservations.held(allocation.name)
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
        self.look()
        with self.lost_if_fenced():
            gathered = writer.gather(self.number) and not writer.is_stale(live)
        # With less of it, or not much less to say, it is not tried again.
        self._no_room = (0, 0) if gathered else (space.available, live * 7 // 8)
        space.reserve_bytes = writer.reserve_bytes
        return gathered

    def _room_for_commit(self, payload_bytes: int, *, growing: bool) -> None:
        """VolumeFull where the log, or the tables, have no room for a commit of so many bytes. Nothing was written."""
        writer = self._writer
        if growing:
            # Sooner or later they are in a table; and as much again stays free, to merge it, or to delete it all.
            need = 2 * writer.table_bytes(payload_bytes)
            self._make_room(need)
            self._allocator.check(need)
        try:
            writer.check_room(payload_bytes, growing=growing)
        except VolumeFull:
            if not self._gather():
                raise
            writer.check_room(payload_bytes, growing=growing)

    def _record(self, outcome: Outcome, sequence: int) -> layout.Record:
        """The commit in the log. Where there is no space for its table, nothing was written: merges give back what they
        have taken, and it is tried once more."""
        try:
            return commit_records(self._writer, outcome, sequence, self.number)
        except VolumeFull:
            if not self._writer.give_back(self.number) and not self._gather():
                raise
        try:
            return commit_records(self._writer, outcome, sequence, self.number)
        except VolumeFull:
            if not self._gather():
                raise
        return commit_records(self._writer, outcome, sequence, self.number)

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
            lambda: self._allocator.allocate_pair(length, page, kept=self._reservations.held(allocation.name))
        )
        return [
            Extents(runs, columns, length_bytes=length, block_bytes=page, stripe_bytes=superblock.stripe_bytes)
            for runs, columns in pair
        ]

    def _hand_out(self, allocation: Allocation, space: list[Range]) -> None:
        allocation.space.extend(space)
        self._reservations.under_way(allocation.name, sum(length for _, _, length in space))

    def reserve(self, length_bytes: int, prefix: str) -> Reservation:
        """Keep space for objects whose names begin with `prefix`: `length_bytes` for all of them together, those that
        are there already counted. VolumeFull at once where there is not so much: what a job needs for its checkpoints
        is certain when it starts. A second time for the same prefix changes how much.

        It lasts until it is released, or the session ends; `Volume.info().reserved_bytes` shows what is held.
        """
        with self._lock:
            self.check()
            self._make_room(check_length(length_bytes))
            available = self._allocator.available + self._allocator.deallocating_bytes - self._allocator.reserve_bytes
            return self._reservations.reserve(self, self.catalog, prefix, length_bytes, available)

    @property
    def reserved_bytes(self) -> int:
        """Of `free_bytes`, what is kept for reservations."""
        with self._lock:
            return self._reservations.held()

    @property
    def open_transactions(self) -> list[Transaction]:
        return list(self._transactions.values())

    @property
    def deallocation(self) -> Deallocator:
        """How much of what was deleted was given back to the target, and whether that went well."""
        return self._deallocator

    def _begin_deallocation(self, ranges: list[Range]) -> list[Range]:
        with self._lock:
            self.look()
            if self._half_way is not None:
                raise DeviceError("the session is on its way to be another host", where=self.volume.uris[0])
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

    def check_room(self, record_bytes: int) -> None:
        """VolumeFull where a commit record of this size would not fit into the log."""
        with self._lock:
            self._room_for_commit(record_bytes, growing=True)

    def allocate(self, transaction: Transaction, name: str, length_bytes: int, checksum_block_bytes: int) -> Allocation:
        """Space for one object, with the grant that says where it is."""
        superblock = self.volume.superblock
        allocation = Allocation(name, self.new_birth())
        data, tables = self.take_blob(allocation, length_bytes, checksum_block_bytes)
        allocation.grant = Grant(
            volume_id=superblock.volume_id,
            session=self.number,
            transaction=transaction.number,
            name=name,
            birth=allocation.birth,
            length_bytes=length_bytes,
            checksum_block_bytes=checksum_block_bytes,
            table_page_bytes=tables[0].block_bytes if tables else 0,
            stripe_bytes=superblock.stripe_bytes,
            runs=data.runs.tobytes(),
            columns=data.columns.tobytes(),
            table_runs=b"".join(table.runs.tobytes() for table in tables),
            table_columns=b"".join(table.columns.tobytes() for table in tables),
            table_copies=len(tables),
            ticket="" if (ticket := self.ticket) is None else ticket.to_json(),
        )
        allocation.begin()
        return allocation

    def commit(self, transaction: Transaction) -> int:
        with self._lock:
            self.look()
            catalog = self._writer.catalog
            sequence = self._writer.cursor.sequence + 1
            changes = Changes(catalog, self._counts, catalog.totals, sequence, self._pins)
            transaction.collect(changes, sequence)
            outcome = changes.finish()
            if not outcome.changes:
                return catalog.sequence
            payload_bytes = outcome.payload_bytes
            self._room_for_commit(payload_bytes, growing=transaction.growing)
            with self.lost_if_fenced():
                self._writer.ensure_room(layout.record_blocks(self._writer.bounded(payload_bytes)))
            reserved = self._reservations.changes(catalog, outcome.changes)
            transaction.committing = True
            try:
                with self.lost_if_fenced():
                    record = self._record(outcome, sequence)
                with self.volume.lock:
                    catalog.apply(record)
                    self.volume.forget_objects()
                for allocation in transaction.allocations.values():
                    self._allocator.commit(allocation.space)
                    allocation.state = COMMITTED
                freed: list[Range] = []
                for blob in outcome.gone:
                    space = space_of(blob, self.volume.stripe_bytes)
                    if blob.birth in self._pins:
                        self._parked[blob.birth] = space
                    else:
                        self._allocator.free(space)
                        freed += space
                self._reservations.committed(reserved)
                self._deallocator.freed(freed)
                for birth, count in outcome.counts.items():
                    self._counts[birth] = count
                    if not count:
                        del self._counts[birth]
            except VolumeFull:
                # Nothing was recorded, and nothing is under way.
                transaction.committing = False
                raise
            except DeviceError:
                # The log knows that it is broken.
                raise
            except BaseException as error:
                # Ctrl-C between the record and what follows from it: log and memory say different things from now on.
                self._writer.broken = self._writer.broken or error
                raise
            self._confirm()
            # The commit is a fact, whatever becomes of a merge. Where that broke the log, the next commit says so.
            with suppress(HeadraceError):
                self._writer.compact(payload_bytes, self.number)
            self._allocator.reserve_bytes = self._writer.reserve_bytes
            return sequence

    def pin(self, blobs: Iterable[Blob]) -> None:
        """An open transaction means to refer to these: until it ends, their space is not handed out, whoever deletes
        the objects that they are part of. Holds the session's lock.
        """
        for blob in blobs:
            self._pins[blob.birth] = self._pins.get(blob.birth, 0) + 1

    def _unpin(self, births: Iterable[int]) -> None:
        for birth in births:
            self._pins[birth] -= 1
            if not self._pins[birth]:
                del self._pins[birth]
                space = self._parked.pop(birth, None)
                if space is not None and birth not in self._counts:
                    self._allocator.free(space)

    @property
    def lock(self) -> threading.RLock:
        """Guards the session's state, which its transactions look at."""
        return self._lock

    def after_fork(self) -> None:
        """In the child, to which nothing of this session belongs."""
        self._fence.after_fork()

    def ended(self, transaction: Transaction) -> None:
        with self._lock:
            if self._transactions.pop(transaction.number, None) is not None:
                self._unpin(transaction.sources)
                for allocation in transaction.allocations.values():
                    taken = sum(length for _, _, length in allocation.space)
                    self._reservations.under_way(allocation.name, -taken)

    def settle(self, allocations: Iterable[Allocation]) -> None:
        """What becomes of the space of an aborted transaction."""
        with self._lock:
            for allocation in allocations:
                if allocation.state == COMMITTED:
                    continue
                if may_still_be_written(allocation):
                    self._allocator.quarantine(allocation.space)
                    self._outstanding = True
                else:
                    self._allocator.free(allocation.space)


def commit_records(writer: LogWriter, outcome: Outcome, sequence: int, session: int) -> layout.Record:
    """The atomicity rule: one record holds the whole transaction, or the table that does."""
    return writer.commit_changes(outcome.changes, outcome.payload_bytes, sequence, outcome.totals, session)
