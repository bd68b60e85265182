"""The checker: reads everything and verifies it. A second reader of the format; it shares only `layout` with the first.

It is written for plainness, not for speed: block after block, in the order of the format's text.

A job may write meanwhile. What is then seen between two of its writes is no damage: what the two copies of the log
differ in is believed when it is still so at another look, and a bad block when its blob is still in the last commit.
"""

from __future__ import annotations

import struct
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import numpy as np

from headrace.device import BlockDevice, crc32c
from headrace.errors import DeviceError, HeadraceError, NotAVolume, VolumeDamaged
from headrace.volume import layout
from headrace.volume.layout import (
    ALIGN,
    AreaHeader,
    Blob,
    ObjectValue,
    Operation,
    Record,
    RecordHead,
    Root,
    Superblock,
    Tables,
    TablesChanged,
    Totals,
)
from headrace.volume.repair.scrub_tables import read_table

#: Read at once.
_PIECE = 1 << 20
#: A rate that was not used may be made up for, by so many seconds of it.
_BURST_S = 0.1
#: How often something is looked at before it is taken for damage, and the time in between.
_LOOKS = 4
_BETWEEN_LOOKS_S = 0.05


@dataclass(frozen=True, kw_only=True)
class Finding:
    """Something that is not as it should be. `fatal`: no other copy has it."""

    what: str
    member: int
    #: On the member, in bytes.
    offset: int
    fatal: bool
    object_name: str | None = None
    #: In the object, in bytes.
    object_offset: int | None = None

    def __str__(self) -> str:
        text = f"{self.what}: member {self.member} offset {self.offset}"
        if self.object_name is not None:
            text += f", object {self.object_name!r} offset {self.object_offset}"
        return text


@dataclass
class ScrubReport:
    """`sequence`: of the commit that was checked."""

    sequence: int = 0
    object_count: int = 0
    bytes_read: int = 0
    findings: list[Finding] = field(default_factory=list)

    @property
    def clean(self) -> bool:
        return not self.findings


@dataclass(frozen=True, kw_only=True)
class ScrubProgress:
    """How far it is. `name`: the object that is read now, and what `start` takes to go on from here another time."""

    name: str
    objects_done: int
    object_count: int
    #: Of data and checksum tables; blobs that were left out by `start` are not among them.
    bytes_done: int
    total_bytes: int
    findings: int


class _Reader:
    """Reads at a limited rate, and counts."""

    def __init__(self, devices: Sequence[BlockDevice], bytes_per_s: float | None, report: ScrubReport) -> None:
        self.devices = devices
        self.report = report
        self._bytes_per_s = bytes_per_s
        #: When what was read so far is paid for.
        self._due_s = time.monotonic()

    def __call__(self, member: int, offset: int, length: int) -> bytes:
        device = self.devices[member]
        buffer = np.empty(layout.align_up(length, device.block_bytes), np.uint8)
        device.read_into(offset, buffer)
        self.report.bytes_read += length
        if self._bytes_per_s:
            # Time in which a slow device could not keep up is not made up for in a burst.
            self._due_s = max(self._due_s, time.monotonic() - _BURST_S) + length / self._bytes_per_s
            while (ahead := self._due_s - time.monotonic()) > 0:
                time.sleep(min(ahead, 1.0))
        return buffer[:length].tobytes()


def scrub(
    devices: Sequence[BlockDevice],
    *,
    bytes_per_s: float | None = None,
    on_object: Callable[[str], None] | None = None,
    start: str = "",
    progress: Callable[[ScrubProgress], None] | None = None,
    on_finding: Callable[[Finding], None] | None = None,
) -> ScrubReport:
    """Verify every superblock, heartbeat, log record, checksum table and data block. `devices`: all members, in any
    order.

    `bytes_per_s`: upper bound of the rate. `on_object`: called with each name before it is read, in the order of names;
    `progress`: after each piece; `on_finding`: as soon as something is sure. `start`: objects below this name are left
    out, to go on from there. The volume may be written meanwhile; what is checked is the commit that was the last when
    it began. Raises only what makes a volume unrecognisable (NotAVolume, VolumeTooNew, VolumeDamaged) and DeviceError;
    all else is in the report.
    """
    report = ScrubReport()
    superblock, ordered = _superblocks(devices, report)
    read = _Reader(ordered, bytes_per_s, report)
    state = _settled(superblock, read, report)
    objects, blobs = _objects(superblock, state.values, state.totals, report)
    _space(superblock, blobs, state.roots, report)
    for finding in report.findings if on_finding is not None else ():
        on_finding(finding)  # type: ignore[misc]
    wanted = {name: births for name, births in objects.items() if name >= start}
    total = sum(_read_bytes(blobs[birth].blob) for birth in {birth for births in wanted.values() for birth in births})
    before, current = report.bytes_read, ""

    def tell() -> None:
        if progress is not None:
            done = min(report.bytes_read - before, total)
            progress(
                ScrubProgress(
                    name=current,
                    objects_done=report.object_count,
                    object_count=len(wanted),
                    bytes_done=done,
                    total_bytes=total,
                    findings=len(report.findings),
                )
            )

    checked: set[int] = set()
    for current, births in wanted.items():
        if on_object is not None:
            on_object(current)
        for birth in births:
            if birth in checked:
                continue
            checked.add(birth)
            known = len(report.findings)
            _blob(superblock, blobs[birth], read, report, tell)
            found = report.findings[known:]
            if found and not _still_there(superblock, birth, read):
                # Deleted meanwhile, and its space used again.
                del report.findings[known:]
            elif on_finding is not None:
                for finding in found:
                    on_finding(finding)
        report.object_count += 1
        tell()
    return report


# ---- superblocks -----------------------------------------------------------------------------------------------------


def _superblocks(devices: Sequence[BlockDevice], report: ScrubReport) -> tuple[Superblock, list[BlockDevice]]:
    by_index: dict[int, tuple[Superblock, BlockDevice]] = {}
    bad: list[tuple[BlockDevice, int, HeadraceError]] = []
    for device in devices:
        good = []
        for offset in layout.superblock_offsets(device.size_bytes):
            buffer = np.empty(layout.SUPERBLOCK_BYTES, np.uint8)
            device.read_into(offset, buffer)
            try:
                good.append(Superblock.decode(buffer.tobytes(), f"{device.uri} offset {offset}"))
            except (NotAVolume, VolumeDamaged) as error:
                bad.append((device, offset, error))
        if not good:
            raise bad[-1][2]
        best = max(good, key=lambda block: block.generation)
        by_index[best.member_index] = (best, device)
    first = by_index[min(by_index)][0]
    if set(by_index) != set(range(len(first.members))) or len({block.volume_id for block, _ in by_index.values()}) > 1:
        raise NotAVolume(
            "these are not the members of one volume", expected=f"{len(first.members)}", found=f"{sorted(by_index)}"
        )
    ordered = [by_index[index][1] for index in sorted(by_index)]
    for device, offset, problem in bad:
        report.findings.append(Finding(what=problem.what, member=ordered.index(device), offset=offset, fatal=False))
    return first, ordered


# ---- the log ---------------------------------------------------------------------------------------------------------


@dataclass
class _State:
    """What the log says: tables, newest first; what changed since the newest; what all of it adds up to."""

    roots: list[Root] = field(default_factory=list)
    #: None: deleted.
    recent: dict[bytes, bytes | None] = field(default_factory=dict)
    totals: Totals | None = None
    #: Tables and recent changes together.
    values: dict[bytes, bytes] = field(default_factory=dict)


def _settled(superblock: Superblock, read: _Reader, report: ScrubReport) -> _State:
    """The last commit, and what is wrong with the copies of the log: at one look, and still at the next ones. A writer
    that is between two writes is past them by then.
    """
    known = [*report.findings]
    lasting: set[Finding] | None = None
    for look in range(_LOOKS):
        if look:
            time.sleep(_BETWEEN_LOOKS_S)
        report.findings = []
        try:
            _heartbeats(superblock, read, report)
            state = _log(superblock, read, report)
        except VolumeDamaged:
            if look == _LOOKS - 1:
                raise
            continue
        found = report.findings
        lasting = set(found) if lasting is None else lasting & set(found)
        if not lasting:
            break
    report.findings = known + [finding for finding in found if finding in (lasting or ())]
    return state


def _still_there(superblock: Superblock, birth: int, read: _Reader) -> bool:
    """Is this blob part of the last commit?"""
    aside = ScrubReport()
    quiet = _Reader(read.devices, None, aside)
    for _ in range(_LOOKS):
        try:
            values = _log(superblock, quiet, aside).values
            _, blobs = _objects(superblock, values, None, aside)
        except VolumeDamaged:
            continue
        return birth in blobs
    return True


def _heartbeats(superblock: Superblock, read: _Reader, report: ScrubReport) -> None:
    """A copy of the heartbeat block is missing where the other one is there."""
    found = []
    for copy in range(layout.LOG_COPIES):
        member, offset = superblock.log_member[copy], superblock.log_offset[copy]
        try:
            found.append(layout.Heartbeat.decode(read(member, offset, ALIGN), superblock.volume_id))
        except DeviceError:
            found.append(None)
    for copy, one in enumerate(found):
        if one is None and any(other is not None for other in found):
            report.findings.append(
                Finding(
                    what=f"log copy {copy} lacks the heartbeat block",
                    member=superblock.log_member[copy],
                    offset=superblock.log_offset[copy],
                    fatal=False,
                )
            )


def _log(superblock: Superblock, read: _Reader, report: ScrubReport) -> _State:
    """The state as of the last commit; a finding for whatever one copy of the log or of a table lacks."""
    copies = [_area(superblock, copy, read) for copy in range(layout.LOG_COPIES)]
    best = max((generation for generation, _, _ in copies), default=0)
    if best == 0:
        raise VolumeDamaged("no copy of the log has a valid header")
    area = next(area for generation, area, _ in copies if generation == best)
    records: list[Record] = []
    position, previous, durable = 1, 0, 0
    held = [dict(found) if g == best else {} for g, _, found in copies]
    while True:
        choices = [records_of.get(position) for records_of in held]
        chosen = next((one for one in choices if one is not None and one.previous == previous), None)
        if chosen is None:
            break
        records.append(chosen)
        durable = max(durable, chosen.durable)
        for copy, one in enumerate(choices):
            if one is None or one.crc != chosen.crc:
                report.findings.append(
                    Finding(
                        what=f"log copy {copy} lacks record {chosen.sequence}",
                        member=superblock.log_member[copy],
                        offset=superblock.area_offset(copy, area) + position * ALIGN,
                        fatal=False,
                    )
                )
        position, previous = position + chosen.blocks, chosen.crc
    if any(block > position for records_of in held for block in records_of):
        report.findings.append(
            Finding(
                what="a record is damaged on every log copy, and there are later ones",
                member=superblock.log_member[0],
                offset=superblock.area_offset(0, area) + position * ALIGN,
                fatal=True,
            )
        )
    state = _State()
    for record in records:
        if record.sequence <= durable:
            _follow(state, record, superblock, report)
    values: dict[bytes, bytes | None] = {}

    def bad(what: str, member: int, offset: int, fatal: bool) -> None:
        report.findings.append(Finding(what=what, member=member, offset=offset, fatal=fatal))

    for root in reversed(state.roots):
        values.update(read_table(superblock, root, read, bad))
    values.update(state.recent)
    state.values = {key: value for key, value in values.items() if value is not None}
    return state


def _follow(state: _State, record: Record, superblock: Superblock, report: ScrubReport) -> None:
    where = f"log record {record.sequence}"
    operations: list[Operation] = []
    if record.kind == layout.TABLES:
        report.sequence, objects, used, state.roots = Tables.decode(record.payload, where)
        state.totals = Totals(objects, used)
    elif record.kind == layout.TABLES_CHANGED:
        changed = TablesChanged.decode(record.payload, where)
        births = [root.birth for root in state.roots]
        first = births.index(changed.removed[0])
        if births[first : first + len(changed.removed)] != changed.removed:
            raise VolumeDamaged("tables are replaced that do not stand next to each other", where=where)
        state.roots[first : first + len(changed.removed)] = changed.added
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


def _area(superblock: Superblock, copy: int, read: _Reader) -> tuple[int, int, list[tuple[int, Record]]]:
    """Generation, index and (block, record) of the area in force on one log copy; generation 0 where there is none.

    Every block is tried, so that what lies behind a damaged record is found as well.
    """
    member = superblock.log_member[copy]
    headers: list[tuple[int, int]] = []
    for area in (0, 1):
        try:
            data = read(member, superblock.area_offset(copy, area), ALIGN)
        except DeviceError:
            continue
        header = AreaHeader.decode(data, superblock.volume_id, area)
        if header is not None:
            headers.append((header.generation, area))
    if not headers:
        return 0, 0, []
    generation, area = max(headers)
    start = superblock.area_offset(copy, area)
    found = []
    for block in range(1, superblock.area_blocks):
        data = read(member, start + block * ALIGN, ALIGN)
        head = RecordHead.decode(data, superblock.volume_id, block)
        if head is None or head.generation != generation or block + head.blocks > superblock.area_blocks:
            continue
        if head.blocks > 1:
            data = read(member, start + block * ALIGN, head.blocks * ALIGN)
        record = head.with_payload(data[layout.RECORD_BYTES : layout.RECORD_BYTES + head.payload_bytes])
        if record is not None:
            found.append((block, record))
    return generation, area, found


# ---- space and objects -----------------------------------------------------------------------------------------------


def _units(superblock: Superblock, runs: layout.Rows, columns: layout.Rows) -> Iterator[tuple[int, int, int]]:
    """(member, offset, bytes) of every stripe unit, in the order of the bytes."""
    column_base = 0
    for length, width, _ in runs.tolist():
        unit = superblock.stripe_bytes if width > 1 else length
        for k in range(-(-length // unit)):
            member, _, offset = columns[column_base + k % width].tolist()
            yield member, offset + k // width * unit, min(unit, length - k * unit)
        column_base += width


def _read_bytes(blob: Blob) -> int:
    """What reading a blob costs."""
    return blob.length_bytes + int(blob.table_runs["length"].sum())


def _cut(units: Iterator[tuple[int, int, int]], most: int) -> Iterator[tuple[int, int, int]]:
    """The same, in pieces of at most so many bytes: a run on one member is one unit, however long."""
    for member, offset, length in units:
        for at in range(0, length, most):
            yield member, offset + at, min(most, length - at)


@dataclass
class _Use:
    """A blob, and the objects that it is part of: (name, where in the object, where in the blob, bytes)."""

    blob: Blob
    slices: list[tuple[str, int, int, int]] = field(default_factory=list)


def _objects(
    superblock: Superblock, values: dict[bytes, bytes], totals: Totals | None, report: ScrubReport
) -> tuple[dict[str, list[int]], dict[int, _Use]]:
    """The blobs of every object, and every blob; a finding for each that contradicts another."""

    def wrong(what: str, name: str | None = None) -> None:
        offset = superblock.log_offset[0]
        finding = Finding(
            what=what, member=superblock.log_member[0], offset=offset, fatal=True, object_name=name, object_offset=0
        )
        report.findings.append(finding)

    objects: dict[str, list[int]] = {}
    blobs: dict[int, _Use] = {}
    for key, value in values.items():
        if key[:1] == layout.BLOB_KEY:
            birth = int.from_bytes(key[1:], "big")
            blobs[birth] = _Use(layout.decode_blob(value, birth))
    for key, value in sorted(values.items()):
        if key[:1] == layout.BLOB_KEY:
            continue
        name = layout.name_of(key)
        entry = ObjectValue.decode(value, name)
        objects[name] = []
        position = 0
        if entry.blob is not None:
            if entry.blob.birth in blobs:
                wrong(f"blob {entry.blob.birth:#x} is there twice", name)
                continue
            blobs[entry.blob.birth] = _Use(entry.blob)
        slices = entry.slices.tolist() if entry.blob is None else [(entry.blob.birth, 0, entry.length_bytes)]
        for birth, start, length in slices:
            if birth not in blobs or start + length > blobs[birth].blob.length_bytes:
                wrong(f"a slice leaves blob {birth:#x}, or there is none", name)
                continue
            blobs[birth].slices.append((name, position, start, length))
            objects[name].append(birth)
            position += length
    for birth, use in blobs.items():
        if not use.slices:
            wrong(f"nothing refers to blob {birth:#x}")
    found = Totals(len(objects), sum(use.blob.stored_bytes for use in blobs.values()))
    if totals is not None and totals != found:
        wrong(f"the log counts {totals}, and there are {found}")
    return objects, blobs


def _space(superblock: Superblock, blobs: dict[int, _Use], roots: list[Root], report: ScrubReport) -> None:
    """No two blobs or tables share space, and all of it is data space."""
    taken: list[tuple[int, int, int, str]] = []
    for root in roots:
        for member, offset, length in root.space():
            taken.append((member, offset, offset + length, f"table {root.birth:#x}"))
    for use in blobs.values():
        name = use.slices[0][0] if use.slices else f"blob {use.blob.birth:#x}"
        for runs, columns in ((use.blob.runs, use.blob.columns), (use.blob.table_runs, use.blob.table_columns)):
            for member, offset, length in _units(superblock, runs, columns):
                taken.append((member, offset, offset + layout.align_up(length), name))
    taken.sort()
    last = (-1, 0, 0, "")
    for member, start, end, name in taken:
        if member >= len(superblock.members):
            report.findings.append(
                Finding(what="no such member", member=member, offset=start, fatal=True, object_name=name)
            )
            continue
        room = superblock.members[member]
        if start < room.data_offset or end > room.data_end:
            report.findings.append(
                Finding(
                    what="an object lies outside the data", member=member, offset=start, fatal=True, object_name=name
                )
            )
        if last[0] == member and start < last[2]:
            report.findings.append(
                Finding(what=f"shared with {last[3]!r}", member=member, offset=start, fatal=True, object_name=name)
            )
        last = (member, start, end, name)


def _blob(
    superblock: Superblock, use: _Use, read: _Reader, report: ScrubReport, tell: Callable[[], None] = lambda: None
) -> None:
    blob = use.blob

    def blocks(
        runs: layout.Rows, columns: layout.Rows, block_bytes: int, mark: int, expected: Sequence[int], what: str
    ) -> Iterator[bytes]:
        position = index = 0
        for member, offset, length in _cut(_units(superblock, runs, columns), max(_PIECE, block_bytes)):
            try:
                data = read(member, offset, length)
                tell()
            except DeviceError as error:
                found = f"{what} cannot be read ({error.what})"
                report.findings += _of(use, found, member, offset, None if mark else (position, position + length))
                data = bytes(length)
            for at in range(0, length, block_bytes):
                part = data[at : at + block_bytes]
                identity = superblock.volume_id + struct.pack("<QQ", blob.birth, mark | index)
                if index >= len(expected) or crc32c(part, crc32c(identity)) != expected[index]:
                    damaged = (position + at, position + at + len(part))
                    report.findings += _of(
                        use, f"{what} does not match its checksum", member, offset + at, None if mark else damaged
                    )
                index += 1
            position += length
            yield data

    roots = blob.roots.tolist()
    checksums = roots
    if blob.table_page_bytes:
        pages = blocks(
            blob.table_runs, blob.table_columns, blob.table_page_bytes, layout.TABLE_BLOCK, roots, "checksum table"
        )
        checksums = np.frombuffer(b"".join(pages), "<u4").tolist()
    for _ in blocks(blob.runs, blob.columns, blob.checksum_block_bytes, 0, checksums, "data"):
        pass


def _of(use: _Use, what: str, member: int, offset: int, damaged: tuple[int, int] | None) -> Iterator[Finding]:
    """A finding for every object that has bytes of the damaged part of the blob, or of all of it (None)."""
    low, high = damaged or (0, use.blob.length_bytes)
    hit = [
        (name, position + max(low - start, 0))
        for name, position, start, length in use.slices
        if start < high and low < start + length
    ]
    for name, at in hit or [(f"blob {use.blob.birth:#x}", low)]:
        yield Finding(what=what, member=member, offset=offset, fatal=True, object_name=name, object_offset=at)
