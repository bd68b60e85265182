"""`headrace volume scrub`: the second reader, over everything."""

from __future__ import annotations

import time
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.sizes import parse_size
from headrace.cli.volume.common import AsJson, Members, addresses_of, shown

if TYPE_CHECKING:
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
    from headrace.cli.output import print_json
    from headrace.errors import UsageError, VolumeDamaged
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
    fatal = sum(finding.fatal for finding in report.findings)
    if json:
        print_json(_as_dict(report))
    else:
        print(
            f"commit {report.sequence}: {report.object_count:,} object{'' if report.object_count == 1 else 's'}, "
            f"{format_bytes(report.bytes_read)} read" + ("" if report.findings else ": everything is good")
        )
    # All that was found is said by now: another session may hold the volume.
    repaired = _repair(members, report) if repair and len(report.findings) > fatal else False
    if repaired and not json:
        copies = len(report.findings) - fatal
        print(f"{copies:,} bad cop{'y was' if copies == 1 else 'ies were'} written again")
    if report.findings and not (repaired and not fatal):
        mended = len(report.findings) - fatal
        text = f"{fatal:,} thing{' is' if fatal == 1 else 's are'} damaged beyond their copies" if fatal else ""
        if mended:
            text += ", and " if text else ""
            text += f"{mended:,} cop{'y is' if mended == 1 else 'ies are'} bad while the other one is good"
        raise VolumeDamaged(
            text,
            next_step="restore the objects from another copy" if fatal else "--repair writes it again",
        )


def _repair(members: list[str] | None, report: ScrubReport) -> bool:
    """Everything that has a good copy."""
    from headrace.cli.volume.common import writing
    from headrace.errors import VolumeDamaged
    from headrace.volume.repair.mend import mend

    # Opening the session mends what opening reads.
    with writing(members, "scrub", False, False) as session:
        left = mend(session, report.findings)
    if left:
        raise VolumeDamaged(f"not all bad copies could be written again, the first: {shown(left[0])}")
    return True


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
