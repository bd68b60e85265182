"""Writing the log: how a commit becomes a fact.

The order of writes is the whole of it. Each arrow is "acknowledged, with FUA: durable".

    data, checksum tables    by every rank, flushed by it (`durable.py`), before it answers
        |
        v
    COMMIT record N          on log copy 0, then on copy 1: one record holds the whole transaction, so it is there whole
        |                    or not at all
        v
    MARKER N+1               "N is durable on every copy": now readers believe N, and now it is acknowledged
        |
        v
    catalog, space           the new objects appear; space of deleted ones becomes free

A power cut before the COMMIT record is whole on one copy leaves no trace of the transaction. After that, the next
session finds it at the end of the log, writes the same bytes to both copies again, and marks it: it was in flight, and
is now whole. Nobody ever overwrites a log block whose fate is unknown with other bytes: `adopt` repeats identical ones,
and a session whose predecessor did not end cleanly goes on in the other pair of areas, where no late write of the
predecessor can land (`refuge`).

Areas. When the log has grown by a fraction of an area it goes on in the other one of the pair: what the log said since
the last table is written there again, or, where that is much, into a table, and that area's header last. An area is in
force when its header is the highest valid one. A crash at any write before leaves the old area in force, untouched. A
commit with much in it is written as a table, and its record says only where that is. So the log stays short.
"""

from __future__ import annotations

import time
from bisect import bisect_left
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext, suppress
from typing import Protocol

from headrace.errors import SessionLost, VolumeError, VolumeFull
from headrace.units import format_bytes
from headrace.volume import layout
from headrace.volume.catalog.bulk import Changed
from headrace.volume.catalog.catalog import Catalog
from headrace.volume.catalog.compact import MANY_TABLES, Compaction
from headrace.volume.catalog.log import Cursor, LogReader
from headrace.volume.catalog.tables import Builder, Merge, Space, Table
from headrace.volume.catalog.tables.table import Image
from headrace.volume.data.durable import write_through
from headrace.volume.data.objects import Range
from headrace.volume.layout import ALIGN, AreaHeader, Operation, Record, Root, Totals
from headrace.volume.layout.table import TABLE_COPIES, node_bytes

#: Kept free at the end of an area: the marker of the last record, and MOVED.
RESERVE_BLOCKS = 2
#: The log goes on in the other area when it has grown by this since its snapshot ...
LOG_BYTES = 128 << 10
#: ... and what it said since the last table is written as one where it is more than this.
RECENT_BYTES = 64 << 10
#: A commit of more than this is a table of its own.
BULK_BYTES = 64 << 10
#: Generations that belong to one session, of the moves out of one area: each time that one is tried takes another.
GENERATIONS = 1 << 10


def refuge(cursor: Cursor, area_count: int, number: int, last_session: int) -> int:
    """Where session `number` goes on whose predecessor is of unknown fate: late writes of that may hit the area in
    force, and the one that it was moving to, which is the other one of the pair.

    So the other pair. Where nobody waits for sessions that were lost on their way in (`writing/past.py`), they may have
    written there, too: one after another takes the one and the other area. If the area in force was made by a session
    that had no SESSION record yet, the other pair is its predecessor's, of which nobody knows either, and it wrote to
    none but this area of the pair.
    """
    if area_count < 4 or cursor.header.mover > last_session:
        return cursor.area ^ 1
    return cursor.area & 2 ^ 2 | number & 1


class SpaceForTables(Space, Protocol):
    """What the log needs of a session to write tables."""

    def commit(self, ranges: Iterable[Range]) -> None:
        """A record refers to it: it is the catalogue's."""

    def free(self, ranges: Iterable[Range]) -> None:
        """No record refers to it any more, and that is durable."""


class LogWriter:
    """The log, for the one session that writes it. Not thread-safe: the session's lock guards it.

    After any failed write the log is `broken`: what stands at its end is unknown, so nothing more may be written there.
    """

    def __init__(self, reader: LogReader, catalog: Catalog, cursor: Cursor) -> None:
        self.reader = reader
        self.catalog = catalog
        self.cursor = cursor
        self.broken: BaseException | None = None
        #: Raises where another session has taken over: before an area that may be in force is made so, and after.
        self.look: Callable[[], None] = lambda: None
        #: Of the session that writes.
        self.number = 0
        #: Sessions since the one that made the area in force: to the generations of each it may have begun to move.
        self.before = 0
        #: How often it was begun to move out of this area.
        self._tries = 0
        area = reader.superblock.area_bytes
        self._log_blocks = min(LOG_BYTES, area * 3 // 8) // ALIGN
        self._recent_bytes = min(RECENT_BYTES, area // 8)
        #: A commit of more is a table.
        self.bulk_bytes = min(BULK_BYTES, area // 4)
        self._moving = False
        self._space: SpaceForTables | None = None
        self._new_birth: Callable[[], int] = int
        self._lock: AbstractContextManager[object] = nullcontext()
        self._session = 0
        self._compaction: Compaction | None = None
        #: Space of tables that a record replaced, and no marker behind it yet.
        self._replaced: list[Range] = []

    def with_tables(
        self, space: SpaceForTables, new_birth: Callable[[], int], lock: AbstractContextManager[object]
    ) -> None:
        """From now on tables can be written. `lock`: guards the catalog from its readers."""
        self._space, self._new_birth, self._lock = space, new_birth, lock
        self._compaction = Compaction(self._builder, self._replace)

    @property
    def _volume_id(self) -> bytes:
        return self.reader.superblock.volume_id

    def _write(self, area: int, block: int, data: bytes) -> None:
        """The same blocks on every copy of the log that counts."""
        if self.broken is not None:
            raise SessionLost(
                "this session can no longer write the log: an earlier write to it failed",
                found=str(self.broken) or type(self.broken).__name__,
                next_step="open a new session; it will find out what became durable",
            )
        try:
            for copy in self.reader.copies:
                offset = self.reader.superblock.area_offset(copy, area) + block * ALIGN
                write_through(self.reader.device(copy), offset, data)
        except BaseException as error:
            # Ctrl-C too: what was under way may still land, so no other bytes may follow to the same place.
            self.broken = error
            raise

    def append(self, kind: int, payload: bytes, session: int) -> Record:
        """One record at the end of the log, durable on every copy when this returns."""
        self.ensure_room(layout.record_blocks(len(payload)))
        return self._append(kind, payload, session)

    def _append(self, kind: int, payload: bytes, session: int) -> Record:
        cursor = self.cursor
        record = Record(
            kind, cursor.sequence + 1, cursor.durable, cursor.header.generation, session, cursor.previous, payload
        )
        data, crc = record.encode(self._volume_id, cursor.block)
        with self._or_broken():
            self._write(cursor.area, cursor.block, data)
            cursor.block += record.blocks
            cursor.sequence = record.sequence
            cursor.previous = crc
        return record._replace(crc=crc)

    @contextmanager
    def _or_broken(self) -> Iterator[None]:
        """What is written and what is remembered of it go together: Ctrl-C in between must not let the session go on at
        a place where the log is not."""
        try:
            yield
        except BaseException as error:
            self.broken = self.broken or error
            raise

    def mark(self, session: int) -> None:
        """Say that everything so far is durable on every copy, which it is: this is what readers wait for."""
        self.cursor.durable = self.cursor.sequence
        self._append(layout.MARKER, b"", session)
        if self._space is not None and self._replaced:
            replaced, self._replaced = self._replaced, []
            self._space.free(replaced)

    def commit(self, payload: bytes, session: int) -> Record:
        """A COMMIT record and its marker. The caller applies it to the catalog."""
        record = self.append(layout.COMMIT, payload, session)
        self.mark(session)
        return record

    def bounded(self, payload_bytes: int) -> int:
        """What a commit takes in the log, whose operations have so many bytes: many go into a table."""
        return payload_bytes if self._space is None else min(payload_bytes, self.bulk_bytes)

    def table_bytes(self, payload_bytes: int) -> int:
        """Space that a commit of so many bytes takes in a table, about, now or when the log moves."""
        if self._space is None or payload_bytes <= self.bulk_bytes:
            return TABLE_COPIES * payload_bytes
        return TABLE_COPIES * _expected(0, payload_bytes + self.catalog.recent_bytes)

    def commit_changes(
        self, changes: Mapping[bytes, bytes | None], payload_bytes: int, sequence: int, totals: Totals, session: int
    ) -> Record:
        """A COMMIT record and its marker, of new values (None: deleted): in the record, or in a table where they are
        many. `payload_bytes`: what they would take in the record, at least. The caller applies it to the catalog."""
        if self._space is None or payload_bytes <= self.bulk_bytes:
            operations = [
                Operation(layout.DELETE, key, b"") if value is None else Operation(layout.PUT, key, value)
                for key, value in sorted(changes.items())
            ]
            return self.commit(layout.encode_operations(operations, sequence, totals), session)
        # With its deletions, also where no table is: the record says nothing else of them, and a move on the way may
        # make one of what is recent now.
        changed = changes if isinstance(changes, Changed) else Changed(dict(changes))
        root, image, space = self._write_table(changed.over(self.catalog.recent), deletions=True)
        assert root is not None
        adopt = Operation(layout.ADOPT, b"", root.encode())
        try:
            self.ensure_room(layout.record_blocks(layout.PAYLOAD_BYTES + adopt.encoded_bytes))
        except BaseException:
            self._space.give_back(space)
            raise
        self.catalog.images[root.birth] = image
        record = self.commit(layout.encode_operations([adopt], sequence, totals), session)
        self._space.commit(space)
        return record

    # ---- tables ----

    def _builder(self, expected_bytes: int, image: Image | None = None) -> Builder:
        assert self._space is not None
        return Builder(
            self.reader.devices, self._volume_id, self._new_birth(), self._space, expected_bytes=expected_bytes,
            image=Image() if image is None else image,
        )  # fmt: skip

    def _write_table(self, changed: Changed, *, deletions: bool) -> tuple[Root | None, Image, list[Range]]:
        """Durable, and nothing refers to it yet. VolumeFull: nothing was taken."""
        image = Image()
        if not deletions:
            changed = Changed({key: value for key, value in changed.loose.items() if value is not None}, changed.bulk)
        keys = sorted(changed.loose)
        values = [changed.loose[key] for key in keys]
        builder = self._builder(_expected(len(changed), changed.size_bytes()), image)
        try:
            # Loose changes, with all of the bulk that comes before each.
            done = start = 0
            while done < len(changed.bulk.keys):
                key = changed.bulk.keys[done]
                end = bisect_left(keys, key, start)
                builder.extend(keys[start:end], values[start:end])
                start = end
                stop = len(changed.bulk.keys) if end == len(keys) else bisect_left(changed.bulk.keys, keys[end], done)
                builder.extend_bulk(changed.bulk, done, stop)
                done = stop
            builder.extend(keys[start:], values[start:])
            return builder.finish(), image, builder.space()
        except VolumeFull:
            builder.abandon(failed=False)
            raise
        except BaseException:
            builder.abandon(failed=True)
            raise

    def compact(self, added_bytes: int, session: int) -> None:
        """After a commit of so many bytes: some of the work that keeps the tables few."""
        self._session = session
        if self._compaction is not None and self.broken is None:
            self._compaction.work(lambda: self.catalog.tables, added_bytes)

    def compact_now(self, session: int) -> None:
        """Sessions that were too short for any merge to end may have left many tables."""
        self._session = session
        if self._compaction is not None:
            self._compaction.finish(lambda: self.catalog.tables, MANY_TABLES)

    def is_stale(self, live: int) -> bool:
        """Do the tables say much that holds no longer? `live`: entries that there are."""
        said = sum(table.root.entry_count for table in self.catalog.tables)
        return said - live > said // 8

    def stands_once(self) -> bool:
        """Is there a table with both copies on one member? So it is where the others were missing, or full."""
        tables = (table.root.copies for table in self.catalog.tables)
        return any(bool((first["member"] == second["member"]).any()) for first, second in tables)

    def give_back(self, session: int) -> bool:
        """Free the space that merges hold, and that of tables that were replaced; False where there is none."""
        if self._compaction is None or self.broken is not None or not self.building_bytes:
            return False
        self._compaction.stop()
        if self._replaced:
            self.ensure_room(1)
            self.mark(session)
        return True

    def gather(self, session: int) -> bool:
        """All tables become one, with what is recent, and their space is free when this returns. False where there is
        no space for it."""
        self._session = session
        if self._compaction is None or self.broken is not None:
            return False
        self.give_back(session)
        if self.catalog.recent and (flushed := self._flush(0)) is not None:
            with suppress(VolumeFull):
                self._move_to(flushed, self.cursor.area ^ 1, say_so=True)
        if not self._compaction.gather(lambda: self.catalog.tables):
            return False
        self.mark(session)
        return True

    def _replace(self, merge: Merge) -> None:
        """One record: these tables are that one. Their space is free behind the next marker."""
        assert self._space is not None
        added = [] if merge.root is None else [merge.root]
        changed = layout.TablesChanged([table.birth for table in merge.tables], added)
        space = merge.builder.space()
        if merge.root is not None:
            assert merge.builder.image is not None
            self.catalog.images[merge.root.birth] = merge.builder.image
        payload = changed.encode()
        self.ensure_room(layout.record_blocks(len(payload)))
        # Else a later record could replace tables that the log does not have any more: nobody could read on there.
        with self._or_broken():
            record = self.append(layout.TABLES_CHANGED, payload, self._session)
            with self._lock:
                self.catalog.apply(record)
            self._space.commit(space)
            self._replaced += [one for table in merge.tables for one in table.root.space()]

    @property
    def reserve_bytes(self) -> int:
        """Space to keep for tables: all that is recent in one, and all tables once more while they become one."""
        # What is free lies in pieces, and not all of them are used to the end.
        return self.catalog.table_bytes * 9 // 8 + 2 * TABLE_COPIES * self.catalog.recent_bytes

    @property
    def building_bytes(self) -> int:
        """Space of tables that are being written, or were replaced and are not free yet."""
        building = 0 if self._compaction is None else self._compaction.space_bytes
        return building + sum(length for _, _, length in self._replaced)

    def close(self) -> None:
        """The session ends."""
        if self._compaction is not None:
            self._compaction.stop()

    def adopt(self) -> bool:
        """Make a fact of what a dead session left at the end: the same bytes on every copy again, and their marker.
        False where all of it is one."""
        waiting, cursor = self.cursor.waiting, self.cursor
        if all(record.kind == layout.MARKER for record in waiting):
            # The usual end: nothing was in flight.
            waiting.clear()
            return False
        block = cursor.block - sum(record.blocks for record in waiting)
        for record in waiting:
            data, _ = record._replace(crc=0).encode(self._volume_id, block)
            self._write(cursor.area, block, data)
            block += record.blocks
        if waiting[-1].kind == layout.COMMIT:
            # Byte for byte what its own session would have written next.
            self.mark(waiting[-1].session)
        for record in waiting:
            self.catalog.apply(record)
        waiting.clear()
        return True

    # ---- areas ----

    def room_blocks(self) -> int:
        """Blocks that records can still take in this area."""
        return self.reader.superblock.area_blocks - self.cursor.block - RESERVE_BLOCKS

    def check_room(self, payload_bytes: int, *, growing: bool = True) -> None:
        """VolumeFull where a record of this payload would not fit beside the catalog into an area, and there is no
        space for a table either.

        `growing`: an eighth of the area is left, so that a full catalog can still log deletions and windows.
        """
        payload_bytes = self.bounded(payload_bytes)
        if self._lacking(payload_bytes, growing):
            flushed = self._flush()
            if flushed is not None:
                self._move_to(flushed, self.cursor.area ^ 1, say_so=True)
        lacking = self._lacking(payload_bytes, growing)
        if lacking:
            raise VolumeFull(
                "the volume's catalog is full",
                expected=f"{format_bytes(lacking)} more of log area, or free space",
                next_step="delete objects, or make a volume with a larger log_bytes",
            )

    def _lacking(self, payload_bytes: int, growing: bool) -> int:
        need = layout.record_blocks(payload_bytes) * ALIGN + self.catalog.snapshot_bytes()
        area = self.reader.superblock.area_bytes
        return max(0, need - (area - (1 + RESERVE_BLOCKS) * ALIGN - (area // 8 if growing else 0)))

    def ensure_room(self, blocks: int) -> None:
        """Move to the other area where this one has not so much room left, or the log has become long."""
        if self._moving:
            # A window for the table that the move writes.
            if blocks > self.room_blocks():
                raise VolumeFull("the log has no room for a window")
            return
        if blocks > self.room_blocks() or self.cursor.block - self.cursor.begin > self._log_blocks:
            self.move(say_so=True)
            if blocks > self.room_blocks():
                raise VolumeFull(
                    "the volume's catalog is full",
                    expected=f"{format_bytes(blocks * ALIGN)} of log area",
                    found=format_bytes(max(0, self.room_blocks()) * ALIGN),
                    next_step="delete objects, or make a volume with a larger log_bytes",
                )

    def _flush(self, most: int | None = None) -> tuple[Root | None, Image, list[Range]] | None:
        """Recent changes as a table, where they are more than `most` bytes; None where they are not, or there is no
        space for it."""
        if self._space is None or self.catalog.recent_bytes <= (self._recent_bytes if most is None else most):
            return None
        self._moving = True
        try:
            # Where there is no table, a deletion has nothing to hide.
            return self._write_table(Changed(self.catalog.recent), deletions=bool(self.catalog.tables))
        except VolumeFull:
            return None
        finally:
            self._moving = False

    def move(self, *, say_so: bool) -> None:
        """Write what is recent into another area, or into a table, and go on there.

        `say_so`: append MOVED to the old area, which is the other one of the pair. Not after a predecessor of unknown
        fate, whose late write may hit that block: then the log goes where no such write can land.
        """
        area = self.cursor.area ^ 1
        if not say_so:
            area = refuge(self.cursor, self.reader.superblock.area_count, self.number, self.catalog.session)
        self._move_to(self._flush(), area, say_so=say_so)

    def _move_to(self, flushed: tuple[Root | None, Image, list[Range]] | None, area: int, *, say_so: bool) -> None:
        try:
            self._move(flushed, area, say_so=say_so)
        except VolumeFull:
            if flushed is not None and self._space is not None:
                self._space.give_back(flushed[2])
            raise

    def _move(self, flushed: tuple[Root | None, Image, list[Range]] | None, area: int, *, say_so: bool) -> None:
        old = self.cursor
        generation = old.header.generation + 1 + self.before * GENERATIONS + self._tries
        base = old.sequence
        block, previous, count = 1, 0, 0
        limit = self.reader.superblock.area_blocks - RESERVE_BLOCKS
        roots = [table.root for table in self.catalog.tables]
        if flushed is not None and flushed[0] is not None:
            roots.insert(0, flushed[0])
        records = []
        for kind, session, payload in self.catalog.snapshot(roots, None if flushed is None else {}):
            record = Record(kind, base, base, generation, session, previous, payload)
            if block + record.blocks > limit:
                raise VolumeFull(
                    "the volume's catalog does not fit into a log area",
                    found=f"{self.catalog.totals.object_count} objects",
                    next_step="delete objects",
                )
            data, previous = record.encode(self._volume_id, block)
            records.append((block, data))
            block += record.blocks
            count += 1
        with self._or_broken():
            # What was written by the one before stands there, and may still land: never two records of one generation.
            self._tries += 1
            if self._tries > GENERATIONS:
                raise VolumeError("the log could not be moved", found=f"{GENERATIONS} attempts")
        for at, data in records:
            self._write(area, at, data)
        header = AreaHeader(
            generation, self.reader.superblock.log_epoch, base, count, self.catalog.session, time.time_ns(), self.number
        )
        self.look()
        with self._or_broken():
            self._write_header(area, header)
            self.look()
            if say_so:
                self._append(layout.MOVED, b"", self.catalog.session)
            self.before = self._tries = 0
            self.cursor = Cursor(area, header, block=block, sequence=base, previous=previous, durable=base, begin=block)
            if flushed is not None and self._space is not None:
                root, image, space = flushed
                with self._lock:
                    self.catalog.flushed(None if root is None else Table(root, self.catalog.store, image))
                self._space.commit(space)

    def _write_header(self, area: int, header: AreaHeader) -> None:
        self._write(area, 0, header.encode(self._volume_id, area))


def _expected(entries: int, size: int) -> int:
    """Bytes of one copy of a table: leaves are not quite full, and inner nodes are few."""
    return node_bytes(entries, size, 0) * 17 // 16 + 2 * ALIGN
