"""The checker's reading of the log: both copies, block after block, written from the format's text."""

from __future__ import annotations

from dataclasses import dataclass, field

from headrace.errors import DeviceError, VolumeDamaged
from headrace.volume import layout
from headrace.volume.layout import (
    ALIGN,
    AreaHeader,
    Operation,
    Record,
    RecordHead,
    Root,
    Superblock,
    Tables,
    TablesChanged,
    Totals,
)
from headrace.volume.repair.findings import Reader, ScrubReport
from headrace.volume.repair.scrub_tables import read_table


@dataclass
class State:
    """What the log says: tables, newest first; what changed since the newest; what all of it adds up to."""

    roots: list[Root] = field(default_factory=list)
    #: None: deleted.
    recent: dict[bytes, bytes | None] = field(default_factory=dict)
    totals: Totals | None = None
    #: Tables and recent changes together.
    values: dict[bytes, bytes] = field(default_factory=dict)
    #: Has any session ever been?
    session: bool = False
    #: Every node of every table has a good copy; else what only that one said is not in `values`.
    whole: bool = True


def check_heartbeats(superblock: Superblock, read: Reader, used: bool) -> None:
    """A copy of the heartbeat block that is missing, or older, where the other one is there, or that is missing where a
    session has been.
    """
    found = []
    for copy in read.copies:
        member, offset = superblock.log_member[copy], superblock.log_offset[copy]
        try:
            found.append(layout.Heartbeat.decode(read(member, offset, ALIGN), superblock.volume_id))
        except DeviceError:
            found.append(None)
    best = max((one for one in found if one is not None), key=lambda one: (one.session, one.beat), default=None)
    for copy, one in zip(read.copies, found, strict=True):
        place = superblock.log_member[copy], superblock.log_offset[copy]
        if one is None and (best is not None or used):
            read.note(f"log copy {copy} lacks the heartbeat block", *place, fatal=best is None)
        elif one != best:
            read.note(f"log copy {copy} has an older heartbeat block", *place, fatal=False)


def read_log(superblock: Superblock, read: Reader) -> State:
    """The state as of the last commit; a finding for whatever one copy of the log or of a table lacks."""
    area, generation = _in_force(superblock, read)
    held = [_records(superblock, copy, area, generation, read) for copy in read.copies]
    records: list[Record] = []
    position, previous, durable = 1, 0, 0
    while True:
        choices = [records_of.get(position) for records_of in held]
        chosen = next((one for one in choices if one is not None and one.previous == previous), None)
        if chosen is None:
            break
        records.append(chosen)
        durable = max(durable, chosen.durable)
        for copy, one in zip(read.copies, choices, strict=True):
            if one is None or one.crc != chosen.crc:
                _note(read, superblock, copy, area, position, f"log copy {copy} lacks record {chosen.sequence}")
        position, previous = position + chosen.blocks, chosen.crc
    if any(block > position for records_of in held for block in records_of):
        what = "a record is damaged on every log copy, and there are later ones"
        _note(read, superblock, read.copies[0], area, position, what, fatal=True)
    elif records and records[-1].kind == layout.MOVED:
        _note(
            read,
            superblock,
            read.copies[0],
            area ^ 1,
            0,
            "the log moved to an area that has no valid header",
            fatal=True,
        )
    else:
        _check_headless(superblock, area, generation, read)
    state = State()
    for record in records:
        if record.sequence <= durable:
            _follow(state, record, superblock, read.report)
    values: dict[bytes, bytes | None] = {}
    for root in reversed(state.roots):
        found, whole = read_table(superblock, root, read)
        values.update(found)
        state.whole &= whole
    values.update(state.recent)
    state.values = {key: value for key, value in values.items() if value is not None}
    return state


def _note(
    read: Reader, superblock: Superblock, copy: int, area: int, block: int, what: str, *, fatal: bool = False
) -> None:
    offset = superblock.area_offset(copy, area) + block * ALIGN
    read.note(what, superblock.log_member[copy], offset, fatal=fatal)


def _in_force(superblock: Superblock, read: Reader) -> tuple[int, int]:
    """Area and generation; a finding for each copy that does not say so. VolumeDamaged where none says anything."""
    headers: dict[tuple[int, int], tuple[int, int]] = {}
    for copy in read.copies:
        for area in range(superblock.area_count):
            try:
                data = read(superblock.log_member[copy], superblock.area_offset(copy, area), ALIGN)
            except DeviceError:
                continue
            header = AreaHeader.decode(data, superblock.volume_id, area)
            if header is not None:
                headers[copy, area] = header.epoch, header.generation
    if not headers:
        places = ", ".join(
            f"member {superblock.log_member[copy]} offset {superblock.area_offset(copy, area)}"
            for copy in read.copies
            for area in range(superblock.area_count)
        )
        raise VolumeDamaged(
            "no copy of the log has a valid header",
            where=places,
            next_step="`headrace volume salvage` finds records without one",
        )
    (_, area), newest = max(headers.items(), key=lambda item: item[1])
    for copy in read.copies:
        if headers.get((copy, area)) != newest:
            _note(read, superblock, copy, area, 0, f"log copy {copy} lacks the header of area {area}")
    return area, newest[1]


def _check_headless(superblock: Superblock, in_force: int, generation: int, read: Reader) -> None:
    """A finding for an area with records behind a snapshot of a higher generation: it was in force, and no copy has its
    header.
    """
    for area in range(superblock.area_count):
        if area == in_force:
            continue
        sequences: dict[int, set[int]] = {}
        for copy in read.copies:
            member, start = superblock.log_member[copy], superblock.area_offset(copy, area)
            try:
                if AreaHeader.decode(read(member, start, ALIGN), superblock.volume_id, area) is not None:
                    sequences.clear()
                    break
            except DeviceError:
                continue
            for block in range(1, superblock.area_blocks):
                try:
                    head = RecordHead.decode(read(member, start + block * ALIGN, ALIGN), superblock.volume_id, block)
                except DeviceError:
                    continue
                if head is not None and head.generation > generation:
                    sequences.setdefault(head.generation, set()).add(head.sequence)
        if any(len(found) > 1 for found in sequences.values()):
            what = "the header of the log's newest area is damaged on every copy"
            _note(read, superblock, read.copies[0], area, 0, what, fatal=True)


def _records(
    superblock: Superblock, copy: int, area: int, generation: int, read: Reader
) -> dict[int, Record]:  # fmt: skip
    """By block. Every block is tried, so that what lies behind a damaged record is found as well."""
    member, start = superblock.log_member[copy], superblock.area_offset(copy, area)
    found: dict[int, Record] = {}
    for block in range(1, superblock.area_blocks):
        try:
            data = read(member, start + block * ALIGN, ALIGN)
            head = RecordHead.decode(data, superblock.volume_id, block)
            if head is None or head.generation != generation or block + head.blocks > superblock.area_blocks:
                continue
            if head.blocks > 1:
                data = read(member, start + block * ALIGN, head.blocks * ALIGN)
        except DeviceError:
            continue
        record = head.with_payload(data[layout.RECORD_BYTES : layout.RECORD_BYTES + head.payload_bytes])
        if record is not None:
            found[block] = record
    return found


def _follow(state: State, record: Record, superblock: Superblock, report: ScrubReport) -> None:
    where = f"log record {record.sequence}"
    operations: list[Operation] = []
    if record.kind == layout.SESSION:
        state.session = True
    elif record.kind == layout.TABLES:
        report.sequence, objects, used, state.roots = Tables.decode(record.payload, where)
        state.totals = Totals(objects, used)
    elif record.kind == layout.TABLES_CHANGED:
        _replace(state, TablesChanged.decode(record.payload, where), where)
    elif record.kind in (layout.COMMIT, layout.SNAPSHOT) and superblock.version == 1:
        sequence, operations = layout.decode_version1(record.payload, where)
        report.sequence = record.sequence if record.kind == layout.COMMIT else sequence
    elif record.kind in (layout.COMMIT, layout.SNAPSHOT):
        report.sequence, state.totals, operations = layout.decode_operations(record.payload, where)
    for operation in operations:
        if operation.kind == layout.ADOPT:
            state.roots.insert(0, Root.decode(operation.value, where))
            state.recent.clear()
        else:
            state.recent[operation.key] = operation.value if operation.kind == layout.PUT else None


def _replace(state: State, changed: TablesChanged, where: str) -> None:
    births, removed = [root.birth for root in state.roots], changed.removed
    first = births.index(removed[0]) if removed and removed[0] in births else -1
    if first < 0 or births[first : first + len(removed)] != removed:
        raise VolumeDamaged("tables are replaced that do not stand next to each other", where=where)
    state.roots[first : first + len(removed)] = changed.added
