"""Salvage, the log: every valid record of any generation on any copy, and what they add up to.

What is believed, in this order: the newest generation of the log whose snapshot is whole, and what comes after it.
Where that snapshot has holes, what older generations say comes first, and what only they know is `doubtful`: it may
have been deleted since. Where a record in the middle is destroyed, what comes behind it is taken all the same, and so
what was there before is doubtful, too.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from heapq import heappop, heappush
from typing import NamedTuple

from headrace.errors import VolumeDamaged
from headrace.volume import layout
from headrace.volume.layout import ALIGN, Operation, Record, RecordHead, Superblock
from headrace.volume.layout.table import Root, Tables, TablesChanged
from headrace.volume.repair.salvage_media import Lost, Media
from headrace.volume.repair.salvage_tables import Entries, TableReader

#: Read at once of an area.
_READ_BYTES = 4 << 20
#: Payloads that are held, and payloads read of one area, as often as it is long: records that begin one within another
#: would be read for ever. A log of ours has some 100 KiB behind a snapshot.
_HELD_BYTES = 64 << 20
_ROUNDS = 8
#: Merges of one generation; there are some ten.
_MOST_MERGES = 1000


class Layer(NamedTuple):
    """A table, and what it was made of: of which it says all, as long as it is whole."""

    root: Root
    parts: Sequence[Step] = ()


Step = Layer | Operation


class _Generation(NamedTuple):
    """Records of one generation of the log, those of its snapshot first."""

    records: list[Record]
    #: Its snapshot is whole, and so stands for itself.
    whole: bool
    #: Blocks before which records are lost.
    gaps: list[int]


def _parts(records: dict[int, Record]) -> _Generation:
    position, previous = 1, 0
    base = records[min(records)].sequence
    snapshot: list[Record] = []
    rest: list[Record] = []
    gaps: list[int] = []
    whole = True
    for index in sorted(records):
        record = records[index]
        if index != position or record.previous != previous:
            gaps.append(index)
            whole &= bool(rest)
        (rest if rest or record.sequence != base else snapshot).append(record)
        position, previous = index + record.blocks, record.crc
    whole = whole and any(record.kind in (layout.SNAPSHOT, layout.TABLES) for record in snapshot)
    return _Generation(snapshot + rest, whole, gaps)


def _become_one(steps: list[Step], changed: TablesChanged) -> None:
    """The new table stands where the newest of those was that it was made of. Changes between them are in it, too: a
    table has all that was recent when it came. So are deletions, which it need not say."""
    removed = set(changed.removed)
    layers = [(index, step.root.birth) for index, step in enumerate(steps) if isinstance(step, Layer)]
    places = [index for index, birth in layers if birth in removed]
    # Where the log has lost all of those, it is older than all that is known.
    first, end = (places[0], places[-1] + 1) if places else (0, 0)
    first = max((index + 1 for index, _ in layers if index < first), default=0)
    # One at most is added (3.8): what it was made of is then part of one thing only.
    steps[first:end] = [Layer(root, steps[first:end]) for root in changed.added[:1]]


class Values:
    """Keys and values, as far as they are known."""

    def __init__(self) -> None:
        #: With the number of doubts that there were before each.
        self._values: dict[bytes, tuple[bytes, int]] = {}
        self._doubts = 0

    def set(self, key: bytes, value: bytes | None) -> None:
        """None: deleted."""
        if value is None:
            self._values.pop(key, None)
        else:
            self._values[key] = value, self._doubts

    def doubt(self) -> None:
        """What is there by now may have been deleted since."""
        self._doubts += 1

    def items(self) -> Iterator[tuple[bytes, bytes, bool]]:
        """(key, value, doubtful), by key."""
        for key, (value, doubts) in sorted(self._values.items()):
            yield key, value, doubts < self._doubts


def read_log(superblock: Superblock, media: Media, copies: Sequence[int], lost: Lost) -> Values:
    """What the records of these copies add up to, forgiving all that is not there."""
    state = _State(superblock, media, lost)
    records = _records(superblock, media, copies, lost)
    if not records:
        lost.say("the log: no valid record on any copy")
    newest = max(records, default=0)
    parts = {generation: _parts(found) for generation, found in records.items()}
    # What came before a whole snapshot is not looked at: its tables may be overwritten long since.
    first = max((generation for generation in parts if parts[generation].whole), default=0)
    for generation in sorted(records):
        if generation >= first:
            state.apply(generation, parts[generation], newest)
    if records and not parts[newest].whole and len(records) > 1:
        lost.say("the newest snapshot of the catalogue: what older ones say stands in for it")
    return state.values


# ---- records ---------------------------------------------------------------------------------------------------------


def _records(
    superblock: Superblock, media: Media, copies: Sequence[int], lost: Lost
) -> dict[int, dict[int, Record]]:  # fmt: skip
    """By generation and block, from whichever copy has each. Where they are too many: the newest generations, whichever
    copy and area they are in, and of one that is too large alone what comes first."""
    found: dict[int, dict[int, Record]] = {}
    held: dict[int, int] = {}
    total = 0
    #: Generations that are held, the oldest first.
    oldest: list[int] = []
    #: Those up to it are left out, and of this one there is no more.
    too_old = full = -1
    for copy in copies:
        for area in range(superblock.area_count):
            for index, record in _area(superblock, media, copy, area, lost):
                generation, length = record.generation, len(record.payload)
                if generation <= too_old or generation == full or index in found.get(generation, ()):
                    continue
                if generation not in found:
                    found[generation], held[generation] = {}, 0
                    heappush(oldest, generation)
                while total + length > _HELD_BYTES and oldest[0] < generation:
                    too_old = heappop(oldest)
                    total -= held.pop(too_old)
                    del found[too_old]
                if total + length > _HELD_BYTES:
                    full = max(full, generation)
                else:
                    found[generation][index] = record
                    held[generation] += length
                    total += length
                if full >= 0 or too_old >= 0:
                    lost.say(f"the log: more than {_HELD_BYTES >> 20} MiB of records, the oldest are left out")
    return {generation: records for generation, records in found.items() if records}


def _area(superblock: Superblock, media: Media, copy: int, area: int, lost: Lost) -> Iterator[tuple[int, Record]]:
    """(block, record) of all that are whole, wherever they begin."""
    member, start = superblock.log_member[copy], superblock.area_offset(copy, area)
    left = _ROUNDS * superblock.area_bytes
    behind = 1
    for first in range(0, superblock.area_blocks, _READ_BYTES // ALIGN):
        count = min(_READ_BYTES // ALIGN, superblock.area_blocks - first)
        data, why = media.read(member, start + first * ALIGN, count * ALIGN)
        if data is None:
            lost.say(f"log copy {copy}, area {area}: {why}")
            continue
        for index in range(max(first, behind), first + count):
            at = (index - first) * ALIGN
            head = RecordHead.decode(data[at : at + layout.RECORD_BYTES], superblock.volume_id, index)
            if head is None or index < behind or index + head.blocks > superblock.area_blocks:
                continue
            left -= head.payload_bytes
            if left < 0:
                lost.say(f"log copy {copy}, area {area}: its records lie on top of each other: the rest is left out")
                return
            if at + head.blocks * ALIGN <= len(data):
                whole: bytes | None = data[at : at + head.blocks * ALIGN]
            else:
                whole, why = media.read(member, start + index * ALIGN, head.blocks * ALIGN)
            if whole is None:
                lost.say(f"log copy {copy}, area {area}: {why}")
                continue
            record = head.with_payload(whole[layout.RECORD_BYTES : layout.RECORD_BYTES + head.payload_bytes])
            if record is not None:
                # What lies in its payload is no record, whatever it looks like.
                behind = index + record.blocks
                yield index, record


# ---- what they say ---------------------------------------------------------------------------------------------------


class _State:
    def __init__(self, superblock: Superblock, media: Media, lost: Lost) -> None:
        self.values = Values()
        self._version = superblock.version
        self._tables = TableReader(superblock.volume_id, media, lost)
        self._lost = lost

    def apply(self, generation: int, parts: _Generation, newest: int) -> None:
        """One generation's records in order."""
        if generation == newest:
            for index in parts.gaps:
                self._lost.say(f"the log: records before block {index} of generation {generation}, on every copy")
        # Older generations stand in where the snapshot has holes: they may know objects that are gone.
        self.values.doubt()
        self._take(self._steps(generation, parts.records))
        if parts.gaps and parts.whole:
            self.values.doubt()

    def _steps(self, generation: int, records: Sequence[Record]) -> list[Step]:
        """Tables and single changes in the order in which they take effect."""
        steps: list[Step] = []
        merges = 0
        for record in records:
            where = f"log record {record.sequence} of generation {generation}"
            try:
                if record.kind == layout.TABLES:
                    # Oldest first, so that newer entries stand.
                    steps += map(Layer, reversed(Tables.decode(record.payload, where).roots))
                elif record.kind == layout.TABLES_CHANGED:
                    merges += 1
                    if merges > _MOST_MERGES:
                        raise VolumeDamaged("tables become one more often than can be", where=where)
                    _become_one(steps, TablesChanged.decode(record.payload, where))
                elif record.kind in (layout.COMMIT, layout.SNAPSHOT):
                    steps += self._operations(record, where)
            except VolumeDamaged as error:
                self._lost.say(str(error))
        return steps

    def _operations(self, record: Record, where: str) -> Iterable[Step]:
        if self._version == 1:
            return layout.decode_version1(record.payload, where)[1]
        operations = layout.decode_operations(record.payload, where)[2]
        return [Layer(Root.decode(one.value, where)) if one.kind == layout.ADOPT else one for one in operations]

    def _take(self, steps: Sequence[Step]) -> None:
        #: What is to be done, the next at the end, and whether that stands in for something that was lost. Tables are
        #: made of tables that are made of tables: a stack, which has no bound of its own.
        waiting: list[tuple[Step | Entries, bool]] = [(step, False) for step in reversed(steps)]
        while waiting:
            step, instead = waiting.pop()
            if isinstance(step, Operation):
                self.values.set(step.key, step.value if step.kind == layout.PUT else None)
            elif isinstance(step, Layer):
                entries, whole = self._tables.read(step.root, quiet=instead)
                if whole or not step.parts:
                    self._set(entries)
                    continue
                # What it was made of stands in, where that is still there; some of it may have been deleted since.
                waiting.append((entries, instead))
                waiting += [(part, True) for part in reversed(step.parts)]
            else:
                self.values.doubt()
                self._set(step)

    def _set(self, entries: Entries) -> None:
        for key, value in entries:
            self.values.set(key, value)
