"""`headrace dataset stage`: a copy of a dataset on a medium of this node, which loaders read from."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.sizes import parse_size
from headrace.cli.volume.common import AsJson, Degraded, VolumeOption, open_reading, shown

if TYPE_CHECKING:
    from headrace.dataset import StageProgress, StageReport


def stage(
    names: Annotated[list[str] | None, typer.Argument(metavar="NAME...", help="Datasets.", show_default=False)] = None,
    to: Annotated[
        str,
        typer.Option(
            "--to",
            metavar="PLACE",
            help="A folder of this node (made where there is none); for one NAME also `file:/PATH` or a block device.",
            show_default=False,
        ),
    ] = "",
    members: VolumeOption = None,
    limit: Annotated[
        str | None, typer.Option(metavar="SIZE", help="Read at most so many bytes a second.", show_default=False)
    ] = None,
    share: Annotated[
        float, typer.Option(metavar="SHARE", help="Read in this share of the time only: 0.3 leaves 0.7 of the link.")
    ] = 1.0,
    most: Annotated[
        str | None,
        typer.Option("--max", metavar="SIZE", help="The stage takes at most this. [default: what is free]"),
    ] = None,
    partial: Annotated[
        bool,
        typer.Option(
            "--partial",
            help="Where not all fits, stage the part that does; the rest is read from the volume. Default: nothing, "
            "and say so.",
        ),
    ] = False,
    verify: Annotated[
        bool,
        typer.Option(
            "--verify", help="Read it all back from the medium in the end, and copy again what does not verify."
        ),
    ] = False,
    jobs: Annotated[int, typer.Option("--jobs", "-j", metavar="N", help="Threads; each has a buffer of 4 MiB.")] = 4,
    force: Annotated[
        bool,
        typer.Option(
            "--force", help="Destroy what else the file or device of PLACE holds, also the stage of another dataset."
        ),
    ] = False,
    status: Annotated[bool, typer.Option("--status", help="Show what is staged there, and copy nothing.")] = False,
    drop: Annotated[
        bool, typer.Option("--drop", help="Take away what is staged there: of the datasets NAME, or all.")
    ] = False,
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """Copy datasets from a volume to a medium of this node, verified, while training reads or before it begins.

    Loaders that are given the same place (`stage="PLACE"`) read what is there by then from there, and the rest from the
    volume; so training starts at once. Every block that is read is held against the volume's own checksum: a stage that
    is damaged, of another volume, or of a dataset that was replaced since, costs time, never a wrong byte. Interrupted
    or killed it goes on where it was. On a node, one process copies; others of the same dataset wait for it, and go on
    where it dies.

    Example: `headrace dataset stage corpus --to /local/nvme --share 0.3 --volume file:/data/a.img`

    Example: `headrace dataset stage --to /local/nvme --status`
    """
    from headrace.errors import UsageError

    if not to:
        raise UsageError("no place for a stage was named", expected="--to PLACE", next_step="see --help")
    if status and drop:
        raise UsageError("--status and --drop exclude each other")
    if status:
        _status(names, to, json)
        return
    if drop:
        _drop(names, to, json)
        return
    if not names:
        raise UsageError("no dataset was named", expected="NAME...", next_step="`headrace dataset ls` lists them")
    from dataclasses import asdict

    from headrace.cli.output import print_json
    from headrace.dataset import StageOptions
    from headrace.dataset import stage as stage_it
    from headrace.volume.stage.store import names_itself

    if len(set(names)) > 1 and names_itself(to):
        raise UsageError(
            "a file or device is the stage of one dataset", where=to, expected="one NAME",
            found=", ".join(map(shown, names)), next_step="name a folder, in which each has a file",
        )  # fmt: skip

    options = StageOptions(
        limit_bytes_s=None if limit is None else parse_size("--limit", limit),
        share=share,
        most_bytes=None if most is None else parse_size("--max", most),
        partial=partial,
        verify=verify,
        workers=jobs,
        force=force,
    )
    with open_reading(members, degraded=degraded) as volume, _Shower(json) as shower:
        for name in names:
            shower.begin(name)
            report = stage_it(volume, name, to, options, progress=shower.show)
            if json:
                print_json(asdict(report))
            else:
                _tell(report)


class _Shower:
    """Progress, as it comes."""

    def __init__(self, json: bool) -> None:
        from headrace.cli.progress import Progress

        self._progress = Progress("looking", quiet=json)
        self._name = ""
        self._doing = ""
        self._started = 0.0
        self._before = 0

    def begin(self, name: str) -> None:
        self._name, self._doing = name, ""

    def __enter__(self) -> _Shower:
        self._progress.__enter__()
        return self

    def __exit__(self, *exc: object) -> None:
        self._progress.__exit__(*exc)

    def show(self, now: StageProgress) -> None:
        from headrace.cli.progress import speed

        if now.doing != self._doing:
            self._doing, self._started, self._before = now.doing, time.monotonic(), now.done_bytes
        passed = time.monotonic() - self._started
        fraction = now.done_bytes / max(1, now.total_bytes)
        if now.doing == "verifying":
            text = f"verifying {shown(self._name)}: {now.done_bytes:,} of {now.total_bytes:,} chunks"
        else:
            text = speed(now.done_bytes - self._before, now.total_bytes - self._before, passed)
            text = f"{now.doing} {shown(self._name)}: {text}"
            if now.doing == "waiting":
                text += ", by another process"
        self._progress.show(fraction, text)


def _tell(report: StageReport) -> None:
    from headrace.units import format_bytes, format_seconds

    rate = report.copied_bytes / max(report.seconds, 1e-9)
    done = f"{format_bytes(report.copied_bytes)} copied in {format_seconds(report.seconds)}, {format_bytes(rate)}/s"
    if report.by_another:
        done = "copied by another process"
    elif not report.copied_bytes:
        done = "it was there already"
    if report.mended_chunks:
        done += f"; {report.mended_chunks} chunks did not verify and were copied again"
    if report.verified == "medium":
        done += "; read back from the medium"
    elif report.verified:
        done += "; read back, but out of memory, in which the kernel keeps what is there"
    size = format_bytes(report.wanted_bytes)
    if not report.complete and report.wanted_bytes < report.dataset_bytes:
        size += f", a part of {format_bytes(report.dataset_bytes)},"
    print(f"{shown(report.dataset)}: {size} at {report.where}; {done}")


def _status(names: list[str] | None, to: str, json: bool) -> None:
    from dataclasses import asdict

    from headrace.cli.output import print_json, print_table
    from headrace.dataset import stages
    from headrace.units import format_bytes

    rows = []
    for found in stages(to):
        if names and found.dataset not in names:
            continue
        if json:
            print_json(asdict(found))
            continue
        share = found.there_chunks / found.dataset_chunks if found.dataset_chunks else 0.0
        state = "complete" if found.complete else "being filled" if found.busy else found.problem or "not complete"
        if state == "not complete" and found.there_chunks >= found.wanted_chunks:
            state = "a part (--partial)"
        size = format_bytes(found.dataset_bytes)
        rows.append((shown(found.dataset) or "-", f"{share:.1%}", size, shown(state), found.where))
    if not json:
        print_table(["dataset", "there", "size", "state", "where"], rows, right=[1, 2])


def _drop(names: list[str] | None, to: str, json: bool) -> None:
    from headrace.cli.output import print_json
    from headrace.dataset import drop_stage, stages
    from headrace.errors import ObjectNotFound

    dropped = []
    for found in stages(to):
        if not names or found.dataset in names:
            drop_stage(found.where)
            dropped.append((found.dataset, found.where))
            if not json:
                print(f"{shown(found.dataset) or '-'}: dropped, {found.where}")
    missing = set(names or ()) - {dataset for dataset, _ in dropped}
    if json:
        print_json({"dropped": [{"dataset": dataset, "where": where} for dataset, where in dropped]})
    if missing:
        raise ObjectNotFound("not staged there", where=to, found=", ".join(sorted(map(shown, missing))))
