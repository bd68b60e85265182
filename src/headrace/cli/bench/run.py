"""`headrace bench run`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench.together import MEET, MEET_PORT, meeting_of
from headrace.cli.output import check_page, print_result
from headrace.cli.sizes import parse_size

if TYPE_CHECKING:
    from headrace.bench.suite import Result


def run(
    path: Annotated[
        str,
        typer.Argument(
            metavar="PATH|DEVICE|URI",
            help="A folder or file on any file system, a block device, nvme+tcp://…, or a volume: headrace:// "
            "($HEADRACE_VOLUME) or headrace://URI,URI… with its members.",
            show_default=False,
        ),
    ],
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            "--pattern",
            "-p",
            metavar="NAME",
            help="ingest, sequential, random, latency, load, checkpoint, mixed; may be given again. [default: all that "
            "the path can do]",
            show_default=False,
        ),
    ] = None,
    flows: Annotated[str, typer.Option(metavar="N,N…", help="Readers at once, one after another.")] = "1,2,4,8",
    sample: Annotated[
        list[str] | None,
        typer.Option(
            metavar="SIZE", help="Of random samples; may be given again. [default: 128KiB]", show_default=False
        ),
    ] = None,
    size: Annotated[str, typer.Option(metavar="SIZE", help="Data that are read.")] = "1GiB",
    save: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What all ranks save together. [default: as --size]", show_default=False),
    ] = None,
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="Of a round.")] = 2.0,
    rounds: Annotated[int, typer.Option(metavar="N", help="Of each piece of work; the median is shown.")] = 3,
    depth: Annotated[int, typer.Option(metavar="N", help="Requests that a flow has under way.")] = 8,
    cache: Annotated[
        str, typer.Option(metavar="HOW", help="The page cache of this machine: dropped, direct (O_DIRECT) or warm.")
    ] = "dropped",
    model: Annotated[
        str, typer.Option(metavar="NAME", help="Layout of checkpoints, MLPerf's for Llama: 8b, 70b, 405b, 1t.")
    ] = "8b",
    ranks: Annotated[int, typer.Option(metavar="N", help="Processes that save and restore.")] = 4,
    scale: Annotated[
        float | None,
        typer.Option(
            metavar="SHARE",
            help="Of the layout's sizes, in place of --save; 1: as large as they are.",
            show_default=False,
        ),
    ] = None,
    seed: Annotated[int, typer.Option(metavar="N", help="The same reads the same samples.", min=0)] = 0,
    limit: Annotated[
        float | None,
        typer.Option(metavar="SECONDS", help="All of it ends then, with what it has.", show_default=False),
    ] = None,
    existing: Annotated[
        bool, typer.Option("--existing", help="Of a folder: read the files that are there, and write none to be read.")
    ] = False,
    scratch: Annotated[
        bool, typer.Option("--scratch", help="A device or volume may be written to. What a device holds is lost.")
    ] = False,
    unfenced: Annotated[
        bool,
        typer.Option("--unfenced", help="Write to a volume where the target has no reservations, too."),
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before --scratch.")] = False,
    meet: Annotated[Path | None, MEET] = None,
    meet_port: Annotated[int | None, MEET_PORT] = None,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML page, too.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as one object of JSON.")] = False,
) -> None:
    """Measure one path: sequential and random reads with more and more flows, small reads, loads, saves, both at once.

    Says before it begins what it will write, read and take at most. Into a folder it writes files of its own, which it
    removes; a device or a volume is only read without --scratch. Medians of interleaved rounds, with their noise; what
    was done about caches, and what could not be. Under torchrun or srun all ranks run each round at one moment, and
    rank 0 shows what came to all of them.

    Example: `headrace bench /mnt/data`
    """
    from headrace.bench.page import build
    from headrace.bench.places import open_place
    from headrace.bench.report import to_json
    from headrace.bench.suite import SuiteOptions, budget_of, run_suite
    from headrace.cli.progress import Progress

    suite = SuiteOptions(
        patterns=pattern or (), flows=_numbers(flows),
        samples=[parse_size("--sample", one) for one in sample or ["128KiB"]],
        size_bytes=parse_size("--size", size), save_bytes=None if save is None else parse_size("--save", save),
        seconds=seconds, rounds=rounds, depth=depth, cache=cache, model=model, ranks=ranks, scale=scale, seed=seed,
        limit_s=limit,
    )  # fmt: skip
    with meeting_of(meet, meet_port, scratch) as meeting:
        first = meeting is None or meeting.seat.rank == 0
        if first:
            check_page(html)
        job, world = ("", 1) if meeting is None else (meeting.seat.token, meeting.seat.world)
        with open_place(path, scratch=scratch, existing=existing, unfenced=unfenced, job=job) as place:
            budget = budget_of(place, suite, world)
            for line in budget.lines if first else ():
                print(line, file=sys.stderr)
            if scratch:
                from headrace.cli.volume.common import confirm

                confirm(f"Write to {path}?", yes)
            with Progress("bench", quiet=json or not first) as progress:
                result = run_suite(place, suite, budget, progress.show, meeting)
    if not first:
        return
    print_result(
        json=(lambda: to_json(result)) if json else None, text=lambda: _print(result), html=html,
        page=lambda: build(result).html(),
    )  # fmt: skip


def _numbers(text: str) -> list[int]:
    from headrace.errors import UsageError

    words = text.split(",")
    if not all(word.strip().isascii() and word.strip().isdigit() and len(word) < 9 for word in words):
        raise UsageError("--flows", expected="whole numbers with commas between, as 1,2,4,8", found=repr(text)[:60])
    return [int(word) for word in words]


def _print(result: Result) -> None:
    from headrace.bench import report
    from headrace.cli.output import print_table

    print_table(report.COLUMNS, report.rows(result.outcomes), right=(2, 4), page=True)
    print()
    for name, text in result.facts.items():
        print(f"{name}: {text}")
    for note in report.notes(result):
        print(f"note: {note}")
    print()
    print(report.sentence(result))
