"""`headrace volume scrub`: the second reader, over everything."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.sizes import parse_size
from headrace.cli.volume.common import AsJson, Members, addresses_of, shown

if TYPE_CHECKING:
    from headrace.errors import VolumeDamaged
    from headrace.volume.repair.findings import Finding, ScrubReport
    from headrace.volume.repair.scrub import ScrubProgress

#: Seconds between two notes of how far it is.
_NOTE_EVERY_S = 5.0


def scrub(
    members: Members = None,
    rate: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="Read at most so much a second. [default: no limit]", show_default=False),
    ] = None,
    start: Annotated[
        str, typer.Option("--from", metavar="NAME", help="Leave out objects below this name: go on from there.")
    ] = "",
    checkpoint: Annotated[
        Path | None,
        typer.Option(
            metavar="FILE",
            help="Keep in FILE how far it is, and go on from there.",
            show_default=False,
        ),
    ] = None,
    repair: Annotated[
        bool,
        typer.Option("--repair", help="Write bad copies again where another is good, in a session of its own."),
    ] = False,
    json: AsJson = False,
) -> None:
    """Read everything with an independent reader: both copies of every structure, every checksum, every block.

    It names object, offset and member of what is wrong, and changes nothing without `--repair`. A job may write
    meanwhile; give `--rate` so as not to disturb it. Exit status 1 if anything is damaged, also where another copy
    still has it, unless that was repaired.

    Example: `headrace volume scrub file:/data/a.img --rate 200MiB`
    """
    from dataclasses import asdict

    from headrace.cli.output import print_json
    from headrace.errors import HeadraceError, UsageError
    from headrace.units import format_bytes
    from headrace.volume.media.members import close_all, open_all
    from headrace.volume.repair.scrub import scrub as run

    bytes_per_s = None if rate is None else parse_size("--rate", rate)
    if bytes_per_s == 0:
        raise UsageError("--rate: nothing a second is never", expected="at least 1 KiB")
    if checkpoint is not None:
        start = _resume(checkpoint) or start
    devices = open_all(addresses_of(members), read_only=True)
    try:
        with _Shower(json, checkpoint) as shower:
            report = run(devices, bytes_per_s=bytes_per_s, start=start, progress=shower.show, on_finding=shower.finding)
        if checkpoint is not None:
            checkpoint.unlink(missing_ok=True)
    finally:
        close_all(devices)
    if not json:
        print(
            f"commit {report.sequence}: {report.object_count:,} object{'' if report.object_count == 1 else 's'}, "
            f"{format_bytes(report.bytes_read)} read" + ("" if report.findings else ": everything is good")
        )
    left, why = report.findings, ""
    if repair and report.findings:
        try:
            left, why = _repair(members, report, bytes_per_s)
        except HeadraceError:
            # All that was found is said all the same: another session may hold the volume.
            if json:
                print_json(_as_dict(report))
            raise
    written = len(report.findings) - len(left)
    if json:
        again = {"written_again": written, "left": [asdict(finding) for finding in left]} if repair else {}
        print_json({**_as_dict(report), **again})
    elif written:
        print(f"{written:,} bad cop{'y was' if written == 1 else 'ies were'} written again")
    if left:
        raise _remains(left, why, written, repair)


def _repair(members: list[str] | None, report: ScrubReport, bytes_per_s: float | None) -> tuple[list[Finding], str]:
    """Write everything again that has a good copy. Returns what is still not as it should be, and why that is."""
    from headrace.cli.volume.common import writing
    from headrace.errors import VolumeDamaged
    from headrace.volume.media.members import close_all, open_all
    from headrace.volume.repair.mend import mend
    from headrace.volume.repair.scrub import scrub as run

    try:
        # Opening the session mends what opening reads.
        with writing(members, "scrub", False, False) as session:
            problems = mend(session, report.findings)
    except VolumeDamaged as error:
        return report.findings, f"the volume cannot be opened for writing: {shown(str(error))}"
    devices = open_all(addresses_of(members), read_only=True)
    try:
        left = run(devices, bytes_per_s=bytes_per_s, structures_only=True).findings
    finally:
        close_all(devices)
    of_blobs = report.findings[report.structure_findings :]
    failed = {(problem.birth, problem.page) for problem in problems}
    left += [one for one in of_blobs if one.fatal or (one.birth, one.page) in failed]
    return left, shown(str(problems[0])) if problems else ""


def _remains(left: Sequence[Finding], why: str, written: int, repair: bool) -> VolumeDamaged:
    """What is not as it should be, and what to do about it."""
    from headrace.errors import VolumeDamaged

    fatal = [finding for finding in left if finding.fatal]
    copies = len(left) - len(fatal)
    said = []
    if fatal:
        said.append("1 thing is damaged beyond its copies")
        if len(fatal) > 1:
            said = [f"{len(fatal):,} things are damaged beyond their copies"]
    if copies:
        said.append(f"{copies:,} cop{'y is' if copies == 1 else 'ies are'} bad while the other one is good")
    text = ", and ".join(said)
    if repair:
        text = f"{written:,} bad cop{'y was' if written == 1 else 'ies were'} written again; what remains: {text}"
    names = [*dict.fromkeys(one.object_name for one in fatal if one.object_name is not None)]
    if names:
        text += f"; {len(names):,} object{' is' if len(names) == 1 else 's are'} hit, the first {shown(names[0])!r}"
    steps = []
    if copies and not repair:
        steps.append(f"--repair writes {'it' if copies == 1 else 'them'} again")
    if names:
        steps.append("restore what is hit from another copy (`headrace volume cp --existing replace`)")
    if any(one.object_name is None for one in fatal):
        steps.append("`headrace volume salvage --to FOLDER` copies out what still verifies, for a new volume")
    if copies and repair:
        steps.append("see to the members that cannot be written, and repair again")
    return VolumeDamaged(text, found=why or None, next_step=", ".join(steps))


class _Shower:
    def __init__(self, json: bool, checkpoint: Path | None) -> None:
        from headrace.cli.progress import Progress

        self._progress = Progress("reading the log", quiet=json)
        self._json = json
        self._checkpoint = checkpoint
        self._started = time.monotonic()
        self._noted = self._started

    def __enter__(self) -> _Shower:
        self._progress.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.__exit__(*exc)

    def finding(self, finding: Finding) -> None:
        if not self._json:
            self._progress.say(f"{'DAMAGED' if finding.fatal else 'bad copy'} {shown(str(finding))}")

    def show(self, now: ScrubProgress) -> None:
        from headrace.cli.progress import speed

        moment = time.monotonic()
        if self._checkpoint is not None and moment - self._noted >= _NOTE_EVERY_S:
            self._noted = moment
            _note(self._checkpoint, now.name)
        text = f"scrubbing {now.objects_done:,} of {now.object_count:,}, "
        text += speed(now.bytes_done, now.total_bytes, moment - self._started)
        self._progress.show(now.bytes_done / max(now.total_bytes, 1), text)


def _note(checkpoint: Path, name: str) -> None:
    import json

    beside = checkpoint.with_name(checkpoint.name + ".new")
    beside.write_text(json.dumps({"from": name}) + "\n", encoding="utf-8")
    beside.replace(checkpoint)


def _resume(checkpoint: Path) -> str | None:
    import json

    from headrace.errors import UsageError

    try:
        found: Any = json.loads(checkpoint.read_text(encoding="utf-8"))
        name = found["from"]
        if not isinstance(name, str):
            raise ValueError("no name")
    except FileNotFoundError:
        return None
    except (ValueError, KeyError, TypeError) as error:
        raise UsageError(
            "this is no checkpoint of a scrub", where=str(checkpoint), found=str(error), next_step="give another file"
        ) from None
    return name


def _as_dict(report: ScrubReport) -> dict[str, Any]:
    from dataclasses import asdict

    return {**asdict(report), "clean": report.clean}
