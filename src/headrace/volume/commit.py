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
and a session whose predecessor did not end cleanly goes on in the other area, where no late write of the predecessor
can land.

Areas. When an area is nearly full the catalog is written into the other one, and that area's header last: an area is in
force when its header is the highest valid one. A crash at any write before leaves the old area in force, untouched.
"""

from __future__ import annotations

import time

from headrace.errors import SessionLost, VolumeFull
from headrace.units import format_bytes
from headrace.volume import layout
from headrace.volume.catalog import Catalog
from headrace.volume.durable import write_through
from headrace.volume.layout import ALIGN, AreaHeader, Record
from headrace.volume.log import Cursor, LogReader

#: Kept free at the end of an area: the marker of the last record, and MOVED.
RESERVE_BLOCKS = 2


class LogWriter:
    """The log, for the one session that writes it. Not thread-safe: the session's lock guards it.

    After any failed write the log is `broken`: what stands at its end is unknown, so nothing more may be written there.
    """

    def __init__(self, reader: LogReader, catalog: Catalog, cursor: Cursor) -> None:
        self.reader = reader
        self.catalog = catalog
        self.cursor = cursor
        self.broken: BaseException | None = None
        #: Generations that a move leaves out: those that a predecessor of unknown fate may be moving to.
        self.skip = 0

    @property
    def _volume_id(self) -> bytes:
        return self.reader.superblock.volume_id

    def _write(self, area: int, block: int, data: bytes) -> None:
        """The same blocks on every copy of the log."""
        if self.broken is not None:
            raise SessionLost(
                "this session can no longer write the log: an earlier write to it failed",
                found=str(self.broken) or type(self.broken).__name__,
                next_step="open a new session; it will find out what became durable",
            )
        try:
            for copy in range(layout.LOG_COPIES):
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
        self._write(cursor.area, cursor.block, data)
        cursor.block += record.blocks
        cursor.sequence = record.sequence
        cursor.previous = crc
        return record._replace(crc=crc)

    def mark(self, session: int) -> None:
        """Say that everything so far is durable on every copy, which it is: this is what readers wait for."""
        self.cursor.durable = self.cursor.sequence
        self._append(layout.MARKER, b"", session)

    def commit(self, payload: bytes, session: int) -> Record:
        """A COMMIT record and its marker. The caller applies it to the catalog."""
        record = self.append(layout.COMMIT, payload, session)
        self.mark(session)
        return record

    def adopt(self) -> None:
        """Make a fact of what a dead session left at the end: the same bytes on every copy again, and their marker."""
        waiting, cursor = self.cursor.waiting, self.cursor
        if all(record.kind == layout.MARKER for record in waiting):
            # The usual end: nothing was in flight.
            waiting.clear()
            return
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

    # ---- areas ----

    def room_blocks(self) -> int:
        """Blocks that records can still take in this area."""
        return self.reader.superblock.area_blocks - self.cursor.block - RESERVE_BLOCKS

    def check_room(self, payload_bytes: int, *, growing: bool = True) -> None:
        """VolumeFull where a record of this payload would not fit beside the catalog into an area.

        `growing`: an eighth of the area is left, so that a full catalog can still log deletions and windows.
        """
        need = layout.record_blocks(payload_bytes) * ALIGN + self.catalog.snapshot_bytes()
        area = self.reader.superblock.area_bytes
        room = area - (1 + RESERVE_BLOCKS) * ALIGN - (area // 8 if growing else 0)
        if need > room:
            raise VolumeFull(
                "the volume's catalog is full",
                expected=f"{format_bytes(need)} of log area",
                found=format_bytes(room),
                next_step="delete objects, or make a volume with a larger log_bytes",
            )

    def ensure_room(self, blocks: int) -> None:
        """Move to the other area where this one has not so much room left."""
        if blocks > self.room_blocks():
            self.move(say_so=True)
            if blocks > self.room_blocks():
                raise VolumeFull(
                    "the volume's catalog is full",
                    expected=f"{format_bytes(blocks * ALIGN)} of log area",
                    found=format_bytes(max(0, self.room_blocks()) * ALIGN),
                    next_step="delete objects, or make a volume with a larger log_bytes",
                )

    def move(self, *, say_so: bool) -> None:
        """Write the catalog into the other area and go on there.

        `say_so`: append MOVED to the old area. Not after a predecessor of unknown fate, whose late write may hit that
        block.
        """
        old = self.cursor
        area, generation, base = 1 - old.area, old.header.generation + 1 + self.skip, old.sequence
        block, previous, count = 1, 0, 0
        limit = self.reader.superblock.area_blocks - RESERVE_BLOCKS
        for kind, session, payload in self.catalog.snapshot():
            record = Record(kind, base, base, generation, session, previous, payload)
            if block + record.blocks > limit:
                raise VolumeFull(
                    "the volume's catalog does not fit into a log area",
                    found=f"{self.catalog.totals.object_count} objects",
                    next_step="delete objects",
                )
            data, previous = record.encode(self._volume_id, block)
            self._write(area, block, data)
            block += record.blocks
            count += 1
        header = AreaHeader(
            generation, self.reader.superblock.log_epoch, base, count, self.catalog.session, time.time_ns()
        )
        self._write_header(area, header)
        if say_so:
            self._append(layout.MOVED, b"", self.catalog.session)
        self.cursor = Cursor(area, header, block=block, sequence=base, previous=previous, durable=base)

    def _write_header(self, area: int, header: AreaHeader) -> None:
        self._write(area, 0, header.encode(self._volume_id, area))
