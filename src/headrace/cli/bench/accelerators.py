"""`headrace bench accelerators`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench.together import MEET, MEET_PORT, meeting_of
from headrace.cli.output import check_page, print_result
from headrace.cli.sizes import parse_size

if TYPE_CHECKING:
    from headrace.bench.accelerators.run import Emulation


def accelerators(
    path: Annotated[
        str | None,
        typer.Argument(metavar="PATH|DEVICE|URI", help="As `headrace bench run` takes it.", show_default=False),
    ] = None,
    workload: Annotated[
        str, typer.Option("--workload", "-w", metavar="NAME", help="One of --list, as it is or changed.")
    ] = "unet3d-h100",
    list_all: Annotated[bool, typer.Option("--list", help="Show the workloads, and stop.")] = False,
    batch: Annotated[int | None, typer.Option(metavar="N", help="Samples of a batch.", show_default=False)] = None,
    sample: Annotated[str | None, typer.Option(metavar="SIZE", help="Of a sample.", show_default=False)] = None,
    compute: Annotated[
        float | None, typer.Option(metavar="SECONDS", help="Of computing, each step.", show_default=False)
    ] = None,
    per_file: Annotated[
        int | None, typer.Option(metavar="N", help="Samples that lie together.", show_default=False)
    ] = None,
    au: Annotated[
        float | None, typer.Option(metavar="SHARE", help="The utilisation that is enough, as 0.9.", show_default=False)
    ] = None,
    count: Annotated[
        int | None,
        typer.Option(
            "--accelerators", "-n", metavar="N", help="Try so many, and search no further.", show_default=False
        ),
    ] = None,
    most: Annotated[int, typer.Option(metavar="N", help="The search ends there, over all nodes.")] = 64,
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="Of a trial; five steps at least.")] = 10.0,
    limit: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="No trial begins after that.", show_default=False),
    ] = None,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Data that are read.")] = "4GiB",
    depth: Annotated[int, typer.Option(metavar="N", help="Requests that each loader has under way.")] = 8,
    cache: Annotated[
        str, typer.Option(metavar="HOW", help="The page cache of this machine: direct (O_DIRECT), dropped or warm.")
    ] = "direct",
    seed: Annotated[int, typer.Option(metavar="N", help="The same reads the same samples.", min=0)] = 0,
    existing: Annotated[
        bool, typer.Option("--existing", help="Of a folder: read the files that are there, and write none to be read.")
    ] = False,
    scratch: Annotated[
        bool, typer.Option("--scratch", help="A device or volume may be written to. What a device holds is lost.")
    ] = False,
    unfenced: Annotated[
        bool, typer.Option("--unfenced", help="Write to a volume where the target has no reservations, too.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before --scratch.")] = False,
    whole_files: Annotated[
        bool,
        typer.Option(
            "--whole-files",
            help="With --existing: a sample is a file, or files of one name; each is opened, read, closed.",
        ),
    ] = False,
    meet: Annotated[Path | None, MEET] = None,
    meet_port: Annotated[int | None, MEET_PORT] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML page, too.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as one object of JSON.")] = False,
) -> None:
    """How many accelerators can this path feed? Emulated as MLPerf Storage does, without any accelerator.

    Each emulated accelerator waits for a batch, sleeps as long as computing takes, and waits for the others; its loader
    reads ahead. AU is the share of the time that it computes. The most accelerators whose AU is enough are searched
    for, and the search's bracket is told. Under torchrun or srun the nodes do it together. No MLPerf result.

    Example: `headrace bench accelerators /mnt/data -w resnet50-h100`
    """
    from headrace.bench.accelerators.page import build
    from headrace.bench.accelerators.run import planned, run, to_json
    from headrace.bench.accelerators.workloads import workload_of
    from headrace.bench.places import open_place
    from headrace.cli.progress import Progress
    from headrace.errors import UsageError
    from headrace.units import format_seconds

    if list_all:
        _print_workloads()
        return
    if path is None:
        raise UsageError("which path?", expected="a folder, a device, nvme+tcp://… or headrace://, or --list")
    what = workload_of(
        workload, batch=batch, sample_bytes=None if sample is None else parse_size("--sample", sample),
        compute_s=compute, samples_per_file=per_file, au=au,
    )  # fmt: skip
    if whole_files and (sample is not None or per_file is not None):
        raise UsageError("--sample and --per-file", expected="neither with --whole-files: samples are as files are")
    data = parse_size("--size", size)
    if not 0 < seconds < 86400 or not (limit is None or 0 < limit < 1e7):
        raise UsageError("--seconds and --limit", expected="a number of seconds above 0")
    start, end = (1, most) if count is None else (count, count)
    budget_s = planned(what, seconds, end if count is None else 1) if limit is None else limit
    with (
        meeting_of(meet, meet_port, scratch) as meeting,
        open_place(
            path, scratch=scratch, existing=existing, unfenced=unfenced, whole=whole_files,
            job="" if meeting is None else meeting.seat.token,
        ) as place,
    ):  # fmt: skip
        first = meeting is None or meeting.seat.rank == 0
        if first:
            check_page(html)
        for line in (*place.plan(data, 0), f"trials of {seconds:g} s: about {format_seconds(budget_s)} at most in all"):
            if first:
                print(line, file=sys.stderr)
        if scratch:
            from headrace.cli.volume.common import confirm

            confirm(f"Write to {path}?", yes)
        with Progress("accelerators", quiet=json or not first) as progress:
            found = run(
                place, what, most=end, start=start, only=count is not None, seconds=seconds, budget_s=budget_s,
                depth=depth, cache=cache, seed=seed, data_bytes=data, whole=whole_files,
                meeting=meeting, tell=progress.show,
            )  # fmt: skip
    if not first:
        return
    print_result(
        json=(lambda: to_json(found)) if json else None, text=lambda: _print(found), html=html,
        page=lambda: build(found).html(),
    )  # fmt: skip


def _print_workloads() -> None:
    from headrace.bench.accelerators.workloads import WORKLOADS
    from headrace.bench.sustained import rate
    from headrace.cli.output import print_table

    rows = [
        [
            one.name, str(one.batch), f"{one.sample_bytes:,}", f"{one.compute_s:g} s", f"{one.au:.0%}",
            rate(one.demand_bytes_per_s), one.source,
        ]
        for one in WORKLOADS.values()
    ]  # fmt: skip
    print_table(
        ["workload", "batch", "bytes of a sample", "computing", "AU", "an accelerator reads", "from"], rows,
        right=(1, 2, 3, 4, 5), page=True,
    )  # fmt: skip


def _print(found: Emulation) -> None:
    from headrace.bench.accelerators.run import COLUMNS, rows
    from headrace.cli.output import print_table

    print_table(list(COLUMNS), rows(found), right=(0, 1, 2, 3), page=True)
    print()
    print(f"workload: {found.workload.source}")
    if found.cache:
        print(f"cache: {found.cache}")
    for note in found.notes:
        print(f"note: {note}")
    print(found.sentence)
