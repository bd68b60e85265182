"""`headrace volume cp`: files and folders in, out, and from volume to volume."""

from __future__ import annotations

import time
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.sizes import parse_size
from headrace.cli.volume.common import (
    AsJson,
    Degraded,
    TakeOver,
    Unfenced,
    VolumeOption,
    holding,
    open_reading,
    open_writing,
    shown,
)

if TYPE_CHECKING:
    from headrace.volume.copy import CopyOptions, CopyReport, Problem
    from headrace.volume.copy import Progress as Now


class Existing(Enum):
    refuse = "refuse"
    skip = "skip"
    replace = "replace"
    update = "update"


def cp(
    paths: Annotated[
        list[str],
        typer.Argument(
            metavar="SOURCE... DESTINATION",
            help="`:NAME` is in the volume (`:` its root), everything else a path here.",
            show_default=False,
        ),
    ],
    members: VolumeOption = None,
    to: Annotated[
        list[str] | None,
        typer.Option(
            "--to-volume",
            "-T",
            metavar="URI",
            help="Members of another volume, which the destination is in; once for each.",
            show_default=False,
        ),
    ] = None,
    recursive: Annotated[bool, typer.Option("--recursive", "-r", help="Folders, with all that is in them.")] = False,
    existing: Annotated[
        Existing,
        typer.Option(
            help="What is there already under the destination's name: refuse it, skip it, replace it, or replace it "
            "where it differs (update)."
        ),
    ] = Existing.refuse,
    follow: Annotated[
        bool, typer.Option("--follow", "-L", help="Copy what symbolic links in folders point to.")
    ] = False,
    keep_going: Annotated[
        bool,
        typer.Option("--keep-going", "-k", help="Copy what can be copied, and name the rest. Exit status 1 then, too."),
    ] = False,
    verify: Annotated[
        bool, typer.Option("--verify", help="Afterwards read everything back and compare it with its source.")
    ] = False,
    checksum_block: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes with one checksum, in the volume.")
    ] = "64KiB",
    jobs: Annotated[int, typer.Option("--jobs", "-j", metavar="N", help="Threads; each has a buffer of 16 MiB.")] = 4,
    takeover: TakeOver = False,
    unfenced: Unfenced = False,
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """Copy files and folders into a volume, out of it, or from one volume into another.

    Where things go is what `cp -r` would do. Everything is looked at first: links, pipes, unreadable folders, names
    that no object can have and what is there already are named, one a line, before a byte is moved. Into a volume, a
    copy is one commit: all of it, or nothing, also after Ctrl-C; with `--keep-going`, one for each pack of small files
    or large file. Out of it, a file has its name when it is whole, and every block is verified. Within a volume no data
    are moved: both names share them.

    Example: `headrace volume cp -r ./results :archive --volume file:/data/a.img`

    Example: `headrace volume cp -r :archive/results /scratch --volume file:/data/a.img`
    """
    from dataclasses import asdict

    from headrace.checkpoint import is_manifest
    from headrace.cli.output import print_json
    from headrace.errors import CopyFailed, UsageError
    from headrace.volume.copy import CopyOptions, copy_between, copy_in, copy_out, plan_between, plan_in

    if len(paths) < 2:
        raise UsageError("nothing to copy to", expected="SOURCE... DESTINATION", next_step="see --help")
    *sources, destination = paths
    inside = [path.startswith(":") for path in sources]
    if any(inside) != all(inside):
        raise UsageError("some sources are in the volume and some are not", found=" ".join(sources))
    if not inside[0] and not destination.startswith(":"):
        raise UsageError(
            "neither the source nor the destination is in the volume", found=" ".join(paths),
            next_step="write names in the volume as :NAME",
        )  # fmt: skip
    if to and not (inside[0] and destination.startswith(":")):
        raise UsageError("--to-volume is for a copy from one volume into another", found=" ".join(paths))
    options = CopyOptions(
        recursive=recursive,
        existing=existing.value,
        follow_links=follow,
        keep_going=keep_going,
        last=is_manifest,
        verify=verify,
        checksum_block_bytes=parse_size("--checksum-block", checksum_block),
        workers=jobs,
    )
    names = [source.removeprefix(":") for source in sources]
    target = destination.removeprefix(":")
    try:
        with _Shower(json) as shower:
            if not inside[0]:
                with open_writing(members, degraded=degraded) as volume:
                    plan = plan_in(volume, sources, target, options, problem=shower.problem)
                    with holding(volume, "cp", takeover, unfenced) as session:
                        report = copy_in(session, sources, target, progress=shower.show, plan=plan)
            elif not destination.startswith(":"):
                with open_reading(members, degraded=degraded) as volume:
                    report = copy_out(volume, names, target, options, progress=shower.show, problem=shower.problem)
            else:
                with (
                    open_reading(members, degraded=degraded) as volume,
                    open_writing(to or members, degraded=degraded and not to) as other,
                ):
                    plan = plan_between(volume, other, names, target, options, problem=shower.problem)
                    with holding(other, "cp", takeover, unfenced) as session:
                        report = copy_between(volume, session, names, target, progress=shower.show, plan=plan)
    except CopyFailed as error:
        if json:
            print_json({"files": 0, "problems": [asdict(one) for one in error.problems]})
        raise
    _tell(report, options, json)


class _Shower:
    """Progress and problems, as they come."""

    def __init__(self, json: bool) -> None:
        from headrace.cli.progress import Progress

        self._json = json
        self._progress = Progress("looking", quiet=json)
        self._started = 0.0
        self._verifying = False

    def __enter__(self) -> _Shower:
        self._progress.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.__exit__(*exc)

    def problem(self, problem: Problem) -> None:
        if not self._json:
            self._progress.say(f"headrace: {shown(problem.source)}: {shown(problem.why)}")

    def show(self, now: Now) -> None:
        from headrace.cli.progress import speed

        if not self._started or now.verifying != self._verifying:
            self._started, self._verifying = time.monotonic(), now.verifying
        text = f"{'verifying' if now.verifying else 'copying'} {now.done_files:,} of {now.total_files:,}, "
        text += speed(now.done_bytes, now.total_bytes, time.monotonic() - self._started)
        self._progress.show(now.done_bytes / max(now.total_bytes, 1), text)


def _tell(report: CopyReport, options: CopyOptions, json: bool) -> None:
    from dataclasses import asdict

    from headrace.cli.output import print_json
    from headrace.errors import CopyFailed
    from headrace.units import format_bytes, format_seconds

    if json:
        print_json({**asdict(report), "verified": options.verify})
    else:
        text = f"copied {report.files:,} file{'' if report.files == 1 else 's'}, {format_bytes(report.bytes)}"
        if report.shared:
            text += " (shared with what they were copied from: no data were moved)"
        elif report.seconds:
            text += f" in {format_seconds(report.seconds)} ({format_bytes(report.bytes / report.seconds)}/s)"
        if len(report.sequences) == 1:
            text += f", commit {report.sequences[0]}"
        elif report.sequences:
            text += f", {len(report.sequences):,} commits"
        if report.skipped:
            text += f"; {report.skipped:,} {'were' if report.skipped > 1 else 'was'} there already"
        if report.empty_folders:
            text += f"; {report.empty_folders:,} empty folders left out"
        print(text + ("; read back and compared" if options.verify else ""))
    if report.problems:
        raise CopyFailed(
            f"{len(report.problems):,} of {report.planned:,} were not copied, "
            f"the first: {shown(str(report.problems[0]))}"
        )
