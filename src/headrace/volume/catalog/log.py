"""Reading the log: which area is in force, and record after record from either copy.

Both copies of the log hold the same bytes at the same places. A record is taken from the first copy that has it whole;
a place where neither has one is the end. The end moves only forwards, so following the log is one small read there.

Believing: a record is a fact only once a later one says that it was durable (`durable`); until then a power cut may
still take it back, and a reader that had shown it would see a commit vanish. `follow` hands out facts only.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from enum import Enum

import numpy as np

from headrace.device import BlockDevice
from headrace.errors import DeviceError, VolumeDamaged
from headrace.volume import layout
from headrace.volume.catalog.catalog import Catalog
from headrace.volume.catalog.headless import was_in_force
from headrace.volume.catalog.tables import NodeStore
from headrace.volume.data.patience import read_into
from headrace.volume.layout import ALIGN, AreaHeader, Record, RecordHead, Superblock

#: Blocks read at once where records are expected, and where probably nothing new is.
_AHEAD_BLOCKS = 16
_TAIL_BLOCKS = 4
#: Where a record is missing, a later one is looked for in so many blocks: more than a commit ever takes.
_BEHIND_BLOCKS = 40
#: Blocks read at once where all of an area is looked through.
_SCAN_BLOCKS = 256
#: A reader starts over when the log moves under it; each move means that it has grown by much of an area.
_LOAD_ATTEMPTS = 20
_SALVAGE = "`headrace volume salvage` copies out what still verifies"


def believed(record: Record, durable: int) -> bool:
    """The marker rule: is `record` a fact, now that `durable` is known to be the highest durable sequence?"""
    return record.sequence <= durable


def age(header: AreaHeader) -> tuple[int, int]:
    """The area of the highest one is in force. A reader that has not heard of a new epoch yet may look at a copy that
    does not count any more."""
    return header.epoch, header.generation


class Followed(Enum):
    """What following the log found."""

    SAME = "nothing new"
    NEW = "new commits"
    MOVED = "the writer went on in the other area: load again"


@dataclass
class Cursor:
    """A place in the log: the next record goes to `block` of `area`."""

    area: int
    header: AreaHeader
    block: int = 1
    sequence: int = 0
    previous: int = 0
    #: Highest sequence known to be durable on all copies.
    durable: int = 0
    #: Snapshot records still to come; they all carry the base sequence, and the log proper counts on from it.
    snapshot_left: int = 0
    #: Where the snapshot ends and the log proper begins.
    begin: int = 1
    #: Look at each record on all copies, not only on the first that has it: what a session does when it opens.
    every_copy: bool = False
    #: Read, valid, not yet believed.
    waiting: list[Record] = field(default_factory=list)
    #: What one copy lacked and the other had.
    findings: list[str] = field(default_factory=list)


class LogReader:
    """The log copies of one volume, for reading."""

    def __init__(self, superblock: Superblock, devices: Sequence[BlockDevice], copies: Sequence[int]) -> None:
        self.superblock = superblock
        self.devices = devices
        #: Those that count and are there; a copy that was left behind is never looked at.
        self.copies = tuple(copies)
        #: Nodes of the catalogue's tables.
        self.nodes = NodeStore(devices, superblock.volume_id)
        #: Areas that were in force before, and whose header no copy lets be read.
        self.unread: list[str] = []
        self._chunks: list[tuple[int, bytes] | None] = [None] * layout.LOG_COPIES

    def use(self, superblock: Superblock, copies: Sequence[int]) -> None:
        """Another epoch began: these copies count."""
        self.superblock, self.copies = superblock, tuple(copies)
        self.forget_chunks()

    def device(self, copy: int) -> BlockDevice:
        return self.devices[self.superblock.log_member[copy]]

    def _read(self, copy: int, offset: int, length: int) -> bytes:
        buffer = np.empty(length, np.uint8)
        read_into(self.device(copy), offset, buffer)
        return buffer.tobytes()

    def _places(self, area: int, block: int, copies: Sequence[int] | None = None) -> str:
        """Where a block of an area stands, for messages."""
        return " and ".join(
            f"member {self.superblock.log_member[copy]} ({self.device(copy).uri}) "
            f"offset {self.superblock.area_offset(copy, area) + block * ALIGN}"
            for copy in (self.copies if copies is None else copies)
        )

    # ---- headers ----

    def header(self, area: int) -> tuple[AreaHeader | None, list[str]]:
        """The area's header from whichever copy has it, and what is wrong with the other."""
        found: dict[int, AreaHeader | None] = {}
        problems = []
        errors = []
        for copy in self.copies:
            try:
                data = self._read(copy, self.superblock.area_offset(copy, area), ALIGN)
                found[copy] = AreaHeader.decode(data, self.superblock.volume_id, area)
            except DeviceError as error:
                errors.append(error)
                found[copy] = None
        if len(errors) == len(self.copies):
            raise errors[0]
        best = max((header for header in found.values() if header is not None), default=None, key=age)
        for copy, header in found.items():
            if best is not None and header != best:
                problems.append(
                    f"log copy {copy}: the header of area {area} is missing or old at {self._places(area, 0, [copy])}"
                )
        return best, problems

    def _headers(
        self, but: int | None = None
    ) -> tuple[dict[int, tuple[AreaHeader | None, list[str]]], dict[int, DeviceError]]:
        """`header` of every area, or of all but one, and why it cannot be read on any copy."""
        found: dict[int, tuple[AreaHeader | None, list[str]]] = {}
        failed: dict[int, DeviceError] = {}
        for area in range(self.superblock.area_count):
            if area == but:
                continue
            try:
                found[area] = self.header(area)
            except DeviceError as error:
                failed[area] = error
        return found, failed

    def _is_older(self, area: int, than: AreaHeader) -> bool:
        """Does the first record show that this area, whose header cannot be read, is not the one in force? Who moves
        the log writes that first, and the header last."""
        shown = []
        for copy in self.copies:
            try:
                data = self._read(copy, self.superblock.area_offset(copy, area) + ALIGN, ALIGN)
            except DeviceError:
                continue
            head = RecordHead.decode(data[: layout.RECORD_BYTES], self.superblock.volume_id, 1)
            # Nobody ever moved there.
            shown.append(not any(data) if head is None else head.generation <= than.generation)
        return bool(shown) and all(shown)

    def _leave_out(self, failed: dict[int, DeviceError], header: AreaHeader) -> None:
        """Raises where one of these areas may be newer."""
        self.unread = []
        for area, error in failed.items():
            if not self._is_older(area, header):
                raise error
            self.unread.append(f"the header of area {area} of the log cannot be read at {self._places(area, 0)}")

    def start(self) -> Cursor:
        """The beginning of the area in force. Raises VolumeDamaged where no copy of any area has a header, DeviceError
        where the header of the newest one cannot be read."""
        best: Cursor | None = None
        found, failed = self._headers()
        for area, (header, problems) in found.items():
            if header is not None and (best is None or age(header) > age(best.header)):
                best = Cursor(
                    area,
                    header,
                    sequence=header.base_sequence,
                    durable=header.base_sequence,
                    snapshot_left=header.snapshot_records,
                )
                best.findings.extend(problems)
        if best is not None:
            self._leave_out(failed, best.header)
        elif failed:
            raise min(failed.items())[1]
        else:
            raise VolumeDamaged(
                "no copy of the log has a valid header",
                where=f"{self._places(0, 0)}, and {self._places(1, 0)}",
                next_step=_SALVAGE,
            )
        return best

    def newer(self, cursor: Cursor) -> bool:
        """Has the writer moved on to another area?"""
        found, failed = self._headers(cursor.area)
        if any(header is not None and age(header) > age(cursor.header) for header, _ in found.values()):
            return True
        self._leave_out(failed, cursor.header)
        return False

    def tail(self, cursor: Cursor, copy: int) -> bytes:
        """What stands where the next record goes on this copy: one small read. Where it changes, `follow`."""
        if cursor.block >= self.superblock.area_blocks:
            return b""
        return self._read(copy, self.superblock.area_offset(copy, cursor.area) + cursor.block * ALIGN, ALIGN)

    # ---- records ----

    def forget_chunks(self) -> None:
        """What was read ahead may have changed."""
        self._chunks = [None] * layout.LOG_COPIES

    def _blocks(self, copy: int, area: int, block: int, count: int, ahead: int) -> bytes:
        """`count` blocks of an area, out of the chunk that was read ahead or from the device."""
        chunk = self._chunks[copy]
        if chunk is not None:
            first, data = chunk
            start = (block - first) * ALIGN
            if first <= block and start + count * ALIGN <= len(data):
                return data[start : start + count * ALIGN]
        length = min(max(count, ahead), self.superblock.area_blocks - block)
        data = self._read(copy, self.superblock.area_offset(copy, area) + block * ALIGN, length * ALIGN)
        self._chunks[copy] = (block, data)
        return data[: count * ALIGN]

    def _record_of(self, copy: int, cursor: Cursor, ahead: int) -> Record | None:
        """The next record as this copy has it; None where it has none."""
        block, room = cursor.block, self.superblock.area_blocks - cursor.block
        if room < 1:
            return None
        head = RecordHead.decode(self._blocks(copy, cursor.area, block, 1, ahead), self.superblock.volume_id, block)
        if (
            head is None
            or head.generation != cursor.header.generation
            or head.previous != cursor.previous
            or head.sequence != cursor.sequence + (0 if cursor.snapshot_left else 1)
            or head.blocks > room
        ):
            return None
        data = self._blocks(copy, cursor.area, block, head.blocks, ahead)
        return head.with_payload(data[layout.RECORD_BYTES : layout.RECORD_BYTES + head.payload_bytes])

    def next(self, cursor: Cursor, ahead: int = _AHEAD_BLOCKS) -> Record | None:
        """The record at the cursor, which moves behind it; None at the end. DeviceError where no copy can be read."""
        record = None
        errors: list[DeviceError] = []
        lacking = []
        for copy in self.copies:
            found = None
            try:
                found = self._record_of(copy, cursor, ahead)
            except DeviceError as error:
                errors.append(error)
            if found is None:
                lacking.append(copy)
            record = record or found
            if record is not None and not cursor.every_copy:
                break
        if record is None:
            # Within a snapshot there is one: on the copy that cannot be read, where it is on no other.
            if len(errors) == len(self.copies) or (errors and cursor.snapshot_left):
                raise errors[0]
            return None
        for copy in lacking:
            cursor.findings.append(
                f"log copy {copy}: no valid record at block {cursor.block} of area {cursor.area}, "
                f"{self._places(cursor.area, cursor.block, [copy])}"
            )
        cursor.block += record.blocks
        cursor.previous = record.crc
        cursor.sequence = record.sequence
        cursor.durable = max(cursor.durable, record.durable)
        if cursor.snapshot_left:
            cursor.snapshot_left -= 1
            cursor.begin = cursor.block
        return record

    def load(self, *, every_copy: bool = False) -> tuple[Catalog, Cursor]:
        """The catalog and the cursor behind the last valid record of the area in force.

        `every_copy`: also find what single copies lack, which costs reading them all.
        """
        for _ in range(_LOAD_ATTEMPTS):
            self.forget_chunks()
            cursor = self.start()
            cursor.every_copy = every_copy
            catalog = Catalog(self.superblock.version, self.nodes)
            for index in range(cursor.header.snapshot_records):
                record = self.next(cursor)
                if record is None:
                    if self.newer(cursor):
                        break
                    raise VolumeDamaged(
                        "the catalog is damaged on every log copy",
                        where=f"block {cursor.block} of area {cursor.area}, {self._places(cursor.area, cursor.block)}",
                        expected=f"{cursor.header.snapshot_records} snapshot records",
                        found=str(index),
                        next_step=_SALVAGE,
                    )
                catalog.apply(record)
            else:
                if catalog.session < cursor.header.session:
                    # Its successor would have a number that was there, and a generation.
                    raise VolumeDamaged(
                        "the header of the log's newest area names a session that the log does not know",
                        where=self._places(cursor.area, 0),
                        expected=f"session {catalog.session}",
                        found=f"session {cursor.header.session}",
                        next_step=_SALVAGE,
                    )
                if self.follow(cursor, catalog, ahead=_AHEAD_BLOCKS) is Followed.MOVED:
                    continue
                headless = self._headless(cursor)
                if headless is not None:
                    if self.newer(cursor):
                        continue
                    raise VolumeDamaged(
                        "the header of the log's newest area is damaged on every log copy",
                        where=self._places(headless, 0),
                        expected=f"a generation after {cursor.header.generation}",
                        next_step=_SALVAGE,
                    )
                end = cursor.block
                if not self._more(cursor, self.superblock.area_blocks if every_copy else _BEHIND_BLOCKS):
                    return catalog, cursor
                # A writer may have gone on meanwhile; else a record at the end is destroyed, and not torn.
                if self.follow(cursor, catalog, ahead=_AHEAD_BLOCKS) is Followed.MOVED:
                    continue
                if cursor.block == end:
                    raise VolumeDamaged(
                        "a record of the log is damaged on every log copy, and there are later ones",
                        where=f"block {cursor.block} of area {cursor.area}, {self._places(cursor.area, cursor.block)}",
                        expected=f"record {cursor.sequence + 1}",
                        next_step=_SALVAGE,
                    )
                return catalog, cursor
        raise VolumeDamaged("the log moves faster than it can be read", next_step="try again")

    def _headless(self, cursor: Cursor) -> int | None:
        """An area that was in force after this one, and has lost its header on every copy. Where a header is there, as
        almost always, or was never written, this costs a block.
        """
        for area, (header, _) in self._headers(cursor.area)[0].items():
            if header is None and was_in_force(self._pieces(area), self.superblock.volume_id, cursor.header.generation):
                return area
        return None

    def _pieces(self, area: int) -> Iterator[tuple[int, bytes]]:
        """All of an area that was ever used, from each copy, as far as it can be read: the first block, bytes."""
        for copy in self.copies:
            for block in range(0, self.superblock.area_blocks, _SCAN_BLOCKS):
                count = min(_SCAN_BLOCKS, self.superblock.area_blocks - block)
                start = self.superblock.area_offset(copy, area)
                try:
                    if not block and not any(self._read(copy, start, ALIGN)):
                        break
                    yield block, self._read(copy, start + block * ALIGN, count * ALIGN)
                except DeviceError:
                    continue

    def _more(self, cursor: Cursor, blocks: int) -> bool:
        """Is there a later record of this area in the `blocks` behind the cursor? Nothing is ever written behind a
        record that is not durable, so behind a torn one there is none.
        """
        first, end = cursor.block + 1, min(cursor.block + 1 + blocks, self.superblock.area_blocks)
        for block in range(first, end, _SCAN_BLOCKS):
            count = min(_SCAN_BLOCKS, end - block)
            for copy in self.copies:
                offset = self.superblock.area_offset(copy, cursor.area) + block * ALIGN
                try:
                    data = self._read(copy, offset, count * ALIGN)
                except DeviceError:
                    continue
                for index in range(count):
                    head = RecordHead.decode(
                        data[index * ALIGN : index * ALIGN + layout.RECORD_BYTES],
                        self.superblock.volume_id,
                        block + index,
                    )
                    if head is not None and head.generation == cursor.header.generation:
                        return True
                break
        return False

    def follow(self, cursor: Cursor, catalog: Catalog, ahead: int = _TAIL_BLOCKS) -> Followed:
        """Apply every record that has become a fact.

        The records are read first, then the other areas' headers: a record that a fenced-off writer appended after the
        log had moved is then never applied, because the move is seen. What is not believed yet is read again each
        time: it may have vanished, and others stand in its place.
        """
        before = catalog.sequence
        if cursor.waiting:
            first = cursor.waiting[0]
            cursor.block -= sum(record.blocks for record in cursor.waiting)
            cursor.sequence, cursor.previous = first.sequence - 1, first.previous
            cursor.waiting.clear()
        moved = False
        while True:
            record = self.next(cursor, ahead)
            if record is None:
                break
            moved |= record.kind == layout.MOVED
            cursor.waiting.append(record)
        self.forget_chunks()
        if self.newer(cursor):
            return Followed.MOVED
        if moved:
            raise VolumeDamaged(
                "the log moved to an area that has no valid header on any copy",
                where=self._places(cursor.area ^ 1, 0),
                expected=f"a generation after {cursor.header.generation}",
                next_step=_SALVAGE,
            )
        cursor.every_copy = False
        while cursor.waiting and believed(cursor.waiting[0], cursor.durable):
            # Raises before it is taken off, so that no record is ever left out.
            catalog.apply(cursor.waiting[0])
            del cursor.waiting[0]
        return Followed.NEW if catalog.sequence != before else Followed.SAME
