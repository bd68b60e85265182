"""Members that went on without each other, as the second readers see it: has one side committed nothing?

Written from the format's page (1.2), as the checker is; strictly, since commits are at stake. Given up by itself is a
side with a single epoch of its own, in which the log moved once, and behind its snapshot nothing but the SESSION record
of who moved it (which found nothing in flight), windows and markers.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping

from headrace.errors import DeviceError, VolumeDamaged
from headrace.volume import layout
from headrace.volume.layout import ALIGN, RECORD_BYTES, AreaHeader, Record, RecordHead, SessionEntry, Superblock

#: Read at once where nothing is expected.
_PIECE_BLOCKS = 256
#: Member, offset, length; DeviceError.
Read = Callable[[int, int, int], bytes]


def given_up(blocks: Mapping[int, Superblock], read: Read) -> list[int]:
    """Of the members' own superblocks: the members of a side that has committed nothing, where there are two sides, and
    the other one goes on. Empty where there are not, or where both may have commits."""
    pair = [blocks.get(member) for member in next(iter(blocks.values())).log_member]
    # Where neither has committed anything, opening goes on with the first.
    for copy in reversed(range(len(pair))):
        block, other = pair[copy], pair[1 - copy]
        if block is None or other is None or _knows(other, block) or _knows(block, other):
            continue
        try:
            if _committed_nothing(block, copy, other, read):
                return [index for index, one in blocks.items() if one.epoch.same(block.epoch)]
        except (DeviceError, VolumeDamaged):
            continue
    return []


def _knows(block: Superblock, other: Superblock) -> bool:
    return any(epoch.same(other.epoch) for epoch in block.epochs)


def _committed_nothing(block: Superblock, copy: int, other: Superblock, read: Read) -> bool:
    own, *before = block.epochs
    if not before or before[0].flags & layout.GIVEN_UP or not any(before[0].same(epoch) for epoch in other.epochs):
        return False
    member = block.log_member[copy]
    headers: dict[int, AreaHeader] = {}
    for area in range(block.area_count):
        data = read(member, block.area_offset(copy, area), ALIGN)
        header = AreaHeader.decode(data, block.volume_id, area)
        if header is not None:
            headers[area] = header
        elif any(data):
            # It may have been the newest.
            return False
    if not headers:
        return False
    area, header = max(headers.items(), key=lambda item: (item[1].epoch, item[1].generation))
    if header.epoch != own.number or header.session == header.mover:
        return False
    kinds = []
    for number, record in enumerate(_records(block, copy, area, header.generation, read)):
        if number < header.snapshot_records:
            continue
        kinds.append(record.kind)
        if record.kind == layout.SESSION:
            session = SessionEntry.decode(record.payload, f"log record {record.sequence}")
            if session.number != header.mover or not session.flags & layout.BEGAN_WITH_FACTS:
                return False
    return kinds[:1] == [layout.SESSION] and set(kinds[1:]) <= {layout.MARKER, layout.WINDOW}


def _records(block: Superblock, copy: int, area: int, generation: int, read: Read) -> Iterator[Record]:
    """One after another. VolumeDamaged where there are more behind one that is lost."""
    member, start, end = block.log_member[copy], block.area_offset(copy, area), block.area_blocks
    position, previous = 1, 0
    while position < end:
        data = read(member, start + position * ALIGN, ALIGN)
        head = RecordHead.decode(data[:RECORD_BYTES], block.volume_id, position)
        if head is None or (head.generation, head.previous) != (generation, previous) or position + head.blocks > end:
            break
        data = read(member, start + position * ALIGN, head.blocks * ALIGN)
        record = head.with_payload(data[RECORD_BYTES : RECORD_BYTES + head.payload_bytes])
        if record is None:
            break
        yield record
        position, previous = position + record.blocks, record.crc
    # At `position` there may be a torn one.
    for first in range(position + 1, end, _PIECE_BLOCKS):
        count = min(_PIECE_BLOCKS, end - first)
        data = read(member, start + first * ALIGN, count * ALIGN)
        for index in range(count):
            at = index * ALIGN
            head = RecordHead.decode(data[at : at + RECORD_BYTES], block.volume_id, first + index)
            if head is not None and head.generation == generation:
                raise VolumeDamaged("a record of the log is lost", where=f"block {position}")
