"""The checker: reads everything and verifies it. A second reader of the format; it shares only `layout` with the first.

It is written for plainness, not for speed: block after block, in the order of the format's text.

A job may write meanwhile. What is then seen between two of its writes is no damage: what the two copies of the log
differ in is believed when it is still so at another look, and a bad block when its blob is still in the last commit.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np

from headrace.device import BlockDevice
from headrace.errors import HeadraceError, NotAVolume, VolumeDamaged, VolumeDiverged
from headrace.volume import layout
from headrace.volume.layout import Superblock
from headrace.volume.media.foreign import foreign_signature
from headrace.volume.repair.findings import Finding, Reader, ScrubReport
from headrace.volume.repair.scrub_data import check_blob, read_bytes
from headrace.volume.repair.scrub_log import State, check_heartbeats, read_log
from headrace.volume.repair.scrub_objects import check_space, contents_of
from headrace.volume.repair.sides import given_up

#: How often something is looked at before it is taken for damage, and the time in between.
_LOOKS = 4
_BETWEEN_LOOKS_S = 0.05
#: Whether damaged blobs are still there is asked for many at once: when so often what it costs was read since.
_BETWEEN_ASKED = 4


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


def scrub(
    devices: Sequence[BlockDevice],
    *,
    bytes_per_s: float | None = None,
    on_object: Callable[[str], None] | None = None,
    start: str = "",
    progress: Callable[[ScrubProgress], None] | None = None,
    on_finding: Callable[[Finding], None] | None = None,
    structures_only: bool = False,
) -> ScrubReport:
    """Verify every superblock, heartbeat, log record, checksum table and data block. `devices`: all members, in any
    order.

    `bytes_per_s`: upper bound of the rate. `on_object`: called with each name before it is read, in the order of names;
    `progress`: after each piece; `on_finding`: when something is sure. `start`: objects below this name are left out,
    to go on from there; `structures_only`: all are. The volume may be written meanwhile; what is checked is the commit
    that was the last when it began. Raises only what makes a volume unrecognisable (NotAVolume, VolumeTooNew,
    VolumeDamaged, VolumeDiverged) and DeviceError; all else is in the report. What has a good copy elsewhere
    `headrace.volume.repair.mend` writes again.
    """
    report = ScrubReport()
    superblock, ordered, copies = _superblocks(devices, report)
    read = Reader(ordered, report, bytes_per_s, copies)
    cost = report.bytes_read
    state = _settled(superblock, read, report)
    cost = report.bytes_read - cost
    contents = contents_of(superblock, state.values, state.totals, read, whole=state.whole)
    blobs = contents.blobs
    check_space(superblock, blobs, state.roots, read)
    report.structure_findings = len(report.findings)
    for finding in report.findings if on_finding is not None else ():
        on_finding(finding)  # type: ignore[misc]
    wanted = {} if structures_only else {name: births for name, births in contents.objects.items() if name >= start}
    total = sum(read_bytes(blobs[birth].blob) for birth in {birth for births in wanted.values() for birth in births})
    before, current = report.bytes_read, ""
    suspects: dict[int, list[Finding]] = {}
    aside = read.aside()

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

    def settle() -> None:
        """Findings of blobs that are still part of the last commit stand; others were deleted meanwhile, and their
        space is used again."""
        for birth in _still_there(superblock, suspects, aside):
            report.findings += suspects[birth]
            for finding in suspects[birth] if on_finding is not None else ():
                on_finding(finding)  # type: ignore[misc]
        suspects.clear()

    checked: set[int] = set()
    asked = report.bytes_read
    for current, births in wanted.items():
        if on_object is not None:
            on_object(current)
        for birth in births:
            if birth in checked:
                continue
            checked.add(birth)
            known = len(report.findings)
            check_blob(superblock, blobs[birth], read, tell)
            if len(report.findings) > known:
                suspects[birth] = report.findings[known:]
                del report.findings[known:]
            if suspects and report.bytes_read - asked >= _BETWEEN_ASKED * cost:
                settle()
                asked = report.bytes_read
        report.object_count += 1
        tell()
    if suspects:
        settle()
        tell()
    report.bytes_read += aside.report.bytes_read
    return report


# ---- superblocks -----------------------------------------------------------------------------------------------------


def _superblocks(
    devices: Sequence[BlockDevice], report: ScrubReport
) -> tuple[Superblock, list[BlockDevice], list[int]]:
    """The superblock of the current epoch, the members in order, the log copies that count."""
    by_index: dict[int, tuple[Superblock, BlockDevice]] = {}
    first: Superblock | None = None
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
            problem = bad[-1][2]
            if isinstance(problem, NotAVolume):
                problem.where, problem.found = device.uri, foreign_signature(device)
            raise problem
        best = max(good, key=lambda block: block.generation)
        if len(good) > 1 and good[0] != good[1]:
            bad.append((device, offset, VolumeDamaged("the two copies of the superblock differ")))
        first = first or best
        _check_member(best, device, first, by_index)
        by_index[best.member_index] = (best, device)
    assert first is not None
    missing = [index for index in range(len(first.members)) if index not in by_index]
    if missing:
        raise NotAVolume(
            "members of the volume are missing",
            where=", ".join(device.uri for device in devices),
            expected=f"{len(first.members)} members",
            found=f"{len(by_index)}; number {', '.join(map(str, missing))} not among them",
            next_step="give the addresses of all members; `headrace volume salvage` takes those that are left",
        )
    ordered = [by_index[index][1] for index in sorted(by_index)]
    for device, offset, problem in bad:
        why = "there is none" if isinstance(problem, NotAVolume) else problem.what
        report.findings.append(
            Finding(
                what=f"a copy of the superblock is bad ({why})",
                member=ordered.index(device), offset=offset, fatal=False, uri=device.uri,
                expected=problem.expected, found=problem.found,
            )
        )  # fmt: skip
    blocks = {index: block for index, (block, _) in by_index.items()}
    left = given_up(blocks, Reader(ordered, report))
    going_on = (block for index, block in blocks.items() if index not in left)
    current = max(going_on, key=lambda block: (block.log_epoch, block.generation))
    for index, (block, device) in sorted(by_index.items()):
        if index in left:
            what = "the member went on without the others, and nothing was committed there: it is left behind"
            report.findings.append(Finding(what=what, member=index, offset=0, fatal=False, uri=device.uri))
        else:
            _check_history(block, current, index, device, report)
    copies = []
    for copy, member in enumerate(current.log_member):
        own = by_index[member][0].epoch
        here = (own.number, own.identity) == (current.epoch.number, current.epoch.identity)
        if here and current.epoch.copies >> copy & 1:
            copies.append(copy)
            continue
        what = f"log copy {copy} does not count in epoch {current.log_epoch}"
        offset = current.log_offset[copy]
        report.findings.append(Finding(what=what, member=member, offset=offset, fatal=False, uri=ordered[member].uri))
    return current, ordered, copies


def _check_member(
    block: Superblock, device: BlockDevice, first: Superblock, by_index: dict[int, tuple[Superblock, BlockDevice]]
) -> None:
    """Is this one more member of the same volume, as large as it was?"""
    if block.volume_id != first.volume_id:
        raise NotAVolume(
            "the members belong to different volumes",
            where=device.uri,
            expected=f"volume {first.volume_id.hex()}",
            found=f"volume {block.volume_id.hex()}",
        )
    if block.member_index in by_index:
        other = by_index[block.member_index][1]
        raise NotAVolume("a member was given twice", where=f"{other.uri} and {device.uri}")
    size = block.members[block.member_index].size_bytes
    if device.size_bytes < size:
        raise VolumeDamaged(
            "the member is smaller than it was",
            where=device.uri,
            expected=f"{size} bytes",
            found=f"{device.size_bytes} bytes",
        )


def _check_history(
    block: Superblock, current: Superblock, index: int, device: BlockDevice, report: ScrubReport
) -> None:  # fmt: skip
    """Is what this member knows as the current epoch one of those that the right one knows (1.2)? VolumeDiverged."""
    epoch = block.epoch.number, block.epoch.identity
    known = [(one.number, one.identity) for one in current.epochs]
    holds_log = index in current.log_member
    if epoch not in known and (holds_log or len(known) < layout.MAX_EPOCHS or epoch[0] >= known[-1][0]):
        raise VolumeDiverged(
            "members of the volume went on without each other",
            where=f"member {current.member_index} and member {index}",
            found=f"epochs {current.log_epoch} and {block.log_epoch}",
            next_step="look at each side without the other (--degraded), copy what only one of them has, then name a "
            "member of the side that goes on: `headrace volume takeover --keep MEMBER`",
        )
    if epoch != known[0] and not holds_log:
        what = f"the member was left behind: it knows epoch {epoch[0]}, not {known[0][0]}"
        report.findings.append(Finding(what=what, member=index, offset=0, fatal=False, uri=device.uri))


# ---- beside a job that writes ----------------------------------------------------------------------------------------


def _settled(superblock: Superblock, read: Reader, report: ScrubReport) -> State:
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
            state = read_log(superblock, read)
            check_heartbeats(superblock, read, state.session)
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


def _still_there(superblock: Superblock, births: Iterable[int], aside: Reader) -> list[int]:
    """Which of these blobs are part of the last commit?"""
    for _ in range(_LOOKS):
        try:
            there = contents_of(superblock, read_log(superblock, aside).values, None, aside).blobs
        except VolumeDamaged:
            continue
        return [birth for birth in births if birth in there]
    return [*births]
