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
from collections.abc import Iterable
from contextlib import suppress
from typing import TYPE_CHECKING

from headrace.device import lanes
from headrace.device.protocol import Buffer
from headrace.errors import DeviceError, HeadraceError, SessionLost, UsageError, VolumeError, VolumeFull
from headrace.volume import layout
from headrace.volume.catalog.catalog import cover
from headrace.volume.catalog.changes import Changes, Outcome
from headrace.volume.catalog.commit import LogWriter
from headrace.volume.catalog.log import LogReader
from headrace.volume.catalog.usage import usage_of
from headrace.volume.data.absent import absent
from headrace.volume.data.durable import write_through
from headrace.volume.data.objects import Range, space_of
from headrace.volume.layout import CLOSED, CLOSED_OUTSTANDING, Blob, SessionEntry
from headrace.volume.media.members import Members
from headrace.volume.space.allocator import Allocator, TableSpace, count_space
from headrace.volume.space.deallocate import Deallocator
from headrace.volume.writing import copies, fence, heartbeat, past
from headrace.volume.writing.allocation import Allocation, may_still_be_written
from headrace.volume.writing.grant import Grant, Receipt
from headrace.volume.writing.heartbeat import HeartbeatBlock
from headrace.volume.writing.holdings import Holdings, window_ranges
from headrace.volume.writing.parts import Parts
from headrace.volume.writing.transaction import Transaction

if TYPE_CHECKING:
    from headrace.volume.volume import Volume


class Session(Holdings):
    """Made by `Volume.session`. Thread-safe; belongs to the process that opened it."""

    def __init__(
        self, volume: Volume, *, run_id: str, takeover: str, heartbeat_s: float, missed_beats: int, unfenced: bool
    ) -> None:
        super().__init__(volume, run_id)
        self._next_transaction = 1
        #: Birth -> how many open transactions mean to refer to the blob.
        self._pins: dict[int, int] = {}
        #: Their space, where they were deleted since.
        self._parked: dict[int, list[Range]] = {}
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
        if volume.other_side and volume.keep is None:
            # Who went on without the others, and committed nothing so far, may be about to.
            others = [copy for copy in range(layout.LOG_COPIES) if copy not in volume.log.copies]
            heartbeat.judge(
                HeartbeatBlock(volume.superblock, volume.devices, others),
                run_id=run_id,
                takeover=takeover,
                missed_beats=missed_beats,
                where=where,
                last_session=0,
            )
        self._fence = fence.take(volume.devices, judged=holder, last=volume.lagging)
        try:
            self.writing = lanes(self._fence.devices, "checkpoint")
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
        away = bool(volume.lagging)
        number = max(mine.session, verdict.number + 1)
        if past.look_back(verdict, number, self._fence, away=away).settled:
            mine = mine._replace(flags=layout.SETTLED)
        mine = heartbeat.claim(block, mine, where=where, fenced=self._fence.reserved, judged=verdict.number)
        self.number = mine.session
        before = past.look_back(verdict, self.number, self._fence, away=away)
        self._settled = before.settled
        self._log = LogReader(found.superblock, devices, usable)
        # Tables do not change, and the volume reads them after this session, too.
        self._log.nodes = volume.log.nodes
        try:
            self._start_heart(block, mine)
        except BaseException:
            # Whoever comes next need not wait for its silence.
            with suppress(HeadraceError):
                heartbeat.sign_off(block, mine, CLOSED_OUTSTANDING, confirm=not self._fence.reserved)
            raise
        try:
            # What follows writes to the log: a claim that fails from here on may have left commands behind.
            with self.lost_if_fenced():
                self._writer = self._take_log(mine, before, found)
            self._allocator = self._count_space()
            #: No session before had this number, so no allocation had these.
            self._next_birth = (self.number << 32) + 1
            space = TableSpace(self._allocator, self._lose_space)
            self._writer.with_tables(space, self.new_birth, self.volume.lock)
            if self._outstanding:
                self._allocator.log_reach()
            with self.lost_if_fenced():
                self._writer.compact_now(self.number)
            if self._writer.stands_once() and self._allocator.members_with(self.catalog.table_bytes) > 1:
                # A member that was missing is here again: the loss of another must not take the catalogue along.
                with self.lost_if_fenced():
                    self._writer.gather(self.number)
            self._allocator.reserve_bytes = self._writer.reserve_bytes
        except BaseException:
            with suppress(HeadraceError):
                self._beat.stop(CLOSED_OUTSTANDING)
            # Whoever closes the volume must not say instead that all of it has ended.
            self._closed = True
            if hasattr(self, "_writer"):
                volume.end_session(self._writer)
            raise

    # ---- opening and closing ----

    def _take_log(self, mine: layout.Heartbeat, before: past.Past, found: Members) -> LogWriter:
        volume = self.volume
        volume.mend_superblocks(self._fence.devices)
        catalog, cursor = self._log.load(every_copy=True)
        # One that was lost on its way in had not moved away from those before it yet, or has only begun to.
        opened = catalog.session == self.number - 1
        clean = before.gone and (before.earlier_gone or opened)
        other_pair = before.earlier_gone and opened and self._log.superblock.area_count > 2
        if not clean and not other_pair and self._fence.reserved:
            past.wait_until_quiet(self.check, volume.uris)
            catalog, cursor = self._log.load(every_copy=True)
            self._settled = True
            self._halt()
            self._beat_on()
        if copies.settle(self._log, found, degraded=volume.degraded):
            volume.look_again(self._fence.devices)
            self._halt()
            self._beat_on()
        for number, ranges in catalog.windows.items():
            catalog.windows[number] = cover(ranges, window_ranges(volume.superblock))
        writer = LogWriter(self._log, catalog, cursor)
        writer.look, writer.number = self.look, self.number
        adopted = writer.adopt()
        if self.number <= catalog.session:
            # Who was stopped since its claim has been followed by another one, and says that it is lost.
            self._beat.check()
            # The heartbeat block was lost: the log knows better which numbers were used.
            raise VolumeError(
                "the heartbeat block is older than the log",
                found=f"session {self.number} after {catalog.session}",
                next_step="open the session again",
            )
        flags = 0 if clean else layout.UNCLEAN_PREDECESSOR
        if clean and self._fence.reserved and not self._settled:
            flags = layout.EARLIER_UNSETTLED
        if not adopted:
            flags |= layout.BEGAN_WITH_FACTS
        entry = SessionEntry(
            self.number,
            flags,
            mine.nonce,
            mine.started_ns,
            mine.run_id,
            mine.host,
        )
        # No move of a session before this one, finished or not, can have used a generation that this one does.
        writer.before = self.number - cursor.header.session
        if not clean or cursor.findings or cursor.header.epoch != self._log.superblock.log_epoch:
            writer.move(say_so=clean)
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
        self._counts = usage.slices
        spaces, quarantined = count_space(superblock, usage.ranges(), windows, catalog.table_space())
        for member, end in usage.ends.items():
            spaces[member].cursor = end
        allocator = Allocator(
            spaces,
            stripe_bytes=superblock.stripe_bytes,
            log_window=self._log_window,
            make_room=self._room_for_window,
            ghosts=self._ghosts_in_data,
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
            self._look_whole()
            self._writer.catalog.mend_tables(self._fence.devices, everything=True)

    def write_structure(self, member: int, offset: int, data: bytes) -> None:
        """Bytes that belong there and are not: whole, padded to a block, durable when this returns. The caller knows
        that the place is theirs, and holds the session's lock.
        """
        with self.lost_if_fenced():
            self._look_whole()
            write_through(self._fence.devices[member], offset, data.ljust(layout.align_up(len(data)), b"\0"))

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
                # One that was committed a moment before is no matter.
                with suppress(UsageError):
                    transaction.abort()
            self._closed = True
            self._writer.close()
            half = self._half_way
            outstanding = self._outstanding or self._writer.broken is not None or self._fence.unsettled
            # Where another thread is still writing, its transaction is left, too.
            outstanding = outstanding or half is not None or bool(self._transactions)
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
            self._end_abandoned()
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

    def _room_for_commit(self, payload_bytes: int, *, growing: bool) -> None:
        """VolumeFull where the log, or the tables, have no room for a commit of so many bytes: nothing of it was
        written. To make room the log may move, and recent changes become a table."""
        writer = self._writer
        with self.lost_if_fenced():
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

    def check_room(self, record_bytes: int) -> None:
        """VolumeFull where a commit record of this size would not fit into the log."""
        with self._lock:
            self.check()
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
        allocation.granted = True
        return allocation

    def write_grant(self, grant: Grant, buffer: Buffer | Parts) -> Receipt:
        """`Volume.write_grant`, by the session's own process. UsageError where the grant's transaction has ended."""
        self.check()
        transaction = self._transactions.get(grant.transaction)
        if transaction is None:
            raise UsageError(
                "the transaction of this grant has ended",
                where=f"object {grant.name!r}",
                next_step="a grant is good for the transaction that gave it, once: allocate again in an open one",
            )
        return transaction.write_grant(grant, buffer)

    def commit(self, transaction: Transaction) -> int:
        with self._lock:
            self.look()
            transaction.check_not_aborted()
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
                    # What was written for a pack that Ctrl-C kept from being noted is nobody's.
                    if allocation.own or allocation.birth in outcome.counts:
                        self._allocator.commit(allocation.space)
                        allocation.committed = True
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
            with suppress(HeadraceError), self.lost_if_fenced():
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

    def ended(self, transaction: Transaction) -> None:
        """It is committed, or not, and no thread does anything more in it: what becomes of its space."""
        with self._lock:
            if self._transactions.pop(transaction.number, None) is None:
                return
            self._unpin(transaction.sources)
            for allocation in transaction.allocations.values():
                taken = sum(length for _, _, length in allocation.space)
                self._reservations.under_way(allocation.share, -taken)
                if allocation.committed:
                    continue
                if may_still_be_written(allocation):
                    self._allocator.quarantine(allocation.space)
                    self._outstanding = True
                else:
                    self._allocator.free(allocation.space)


def commit_records(writer: LogWriter, outcome: Outcome, sequence: int, session: int) -> layout.Record:
    """The atomicity rule: one record holds the whole transaction, or the table that does."""
    return writer.commit_changes(outcome.changes, outcome.payload_bytes, sequence, outcome.totals, session)
