"""`headrace bench compare`."""

from __future__ import annotations

import sys
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench.together import alone
from headrace.cli.output import check_page, print_result
from headrace.cli.sizes import parse_size

if TYPE_CHECKING:
    from headrace.bench.compare import Comparison


def compare(
    paths: Annotated[
        list[str],
        typer.Argument(metavar="A B [C]", help="Two or three paths, as `headrace bench run` takes them."),
    ],
    pattern: Annotated[
        list[str] | None,
        typer.Option(
            "--pattern",
            "-p",
            metavar="NAME",
            help="sequential, random, latency, load, ingest; may be given again. "
            "[default: sequential, random, latency]",
            show_default=False,
        ),
    ] = None,
    flows: Annotated[int, typer.Option(metavar="N", help="Readers at once.")] = 4,
    sample: Annotated[str, typer.Option(metavar="SIZE", help="Of random samples.")] = "128KiB",
    size: Annotated[str, typer.Option(metavar="SIZE", help="Data that are read, on each path.")] = "1GiB",
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="Of a round of one piece of work.")] = 2.0,
    rounds: Annotated[
        int | None,
        typer.Option(
            metavar="N", help="Of all of it. [default: as many as it takes to tell paths apart]", show_default=False
        ),
    ] = None,
    depth: Annotated[int, typer.Option(metavar="N", help="Requests that a flow has under way.")] = 8,
    cache: Annotated[
        str, typer.Option(metavar="HOW", help="The page cache of this machine: dropped, direct (O_DIRECT) or warm.")
    ] = "dropped",
    seed: Annotated[int, typer.Option(metavar="N", help="The same reads the same samples.", min=0)] = 0,
    existing: Annotated[
        bool, typer.Option("--existing", help="Of folders: read the files that are there, and write none to be read.")
    ] = False,
    scratch: Annotated[
        bool, typer.Option("--scratch", help="Devices and volumes may be written to. What a device holds is lost.")
    ] = False,
    yes: Annotated[bool, typer.Option("--yes", "-y", help="Do not ask before --scratch.")] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML page, too.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as one object of JSON.")] = False,
) -> None:
    """The same work on two or three paths, in turns: which one is faster at what, and by how much at least.

    Rounds go A B C, then C B A, so that what changes with time meets all of them alike. A path is called faster only
    where that is beyond noise, with a chance of 5 % to be wrong anywhere in the table.

    Example: `headrace bench compare /mnt/nfs headrace://`
    """
    from headrace.bench.compare import LETTERS, check_rounds, rounds_needed, run
    from headrace.bench.compare_page import build
    from headrace.bench.compare_works import WORKS, plan_of
    from headrace.bench.places import is_folder, open_place
    from headrace.cli.progress import Progress
    from headrace.errors import UsageError

    if not 2 <= len(paths) <= len(LETTERS):
        raise UsageError("paths to be compared", expected="two or three", found=str(len(paths)))
    names = list(dict.fromkeys(pattern or ("sequential", "random", "latency")))
    unknown = [name for name in names if name not in WORKS]
    if unknown:
        raise UsageError("no such pattern to be compared", expected=", ".join(WORKS), found=repr(unknown[0])[:60])
    check_page(html)
    alone("compare")
    count = rounds_needed(len(names), len(paths)) if rounds is None else rounds
    check_rounds(count)
    data = parse_size("--size", size)
    with ExitStack() as opened:
        places = []
        for path in paths:
            # A folder is written to without it, and refuses it.
            device = scratch and not is_folder(path)
            folder = existing and is_folder(path)
            places.append(opened.enter_context(open_place(path, scratch=device, existing=folder)))
        works = plan_of(
            places, names, flows=flows, depth=depth, sample=parse_size("--sample", sample), seconds=seconds,
            size_bytes=data, cache=cache, seed=seed,
        )  # fmt: skip
        for line in works.lines(count):
            print(line, file=sys.stderr)
        if scratch:
            from headrace.cli.volume.common import confirm

            confirm(f"Write to {' and '.join(paths)}?", yes)
        with Progress("compare", quiet=json) as progress:
            works.prepare(progress.show)
            facts = {place.name: place.describe() for place in places}
            found = run(paths, works.works(), rounds=count, tell=progress.show, facts=facts)
    print_result(
        json=found.to_json if json else None, text=lambda: _print(found), html=html, page=lambda: build(found).html()
    )


def _print(found: Comparison) -> None:
    from headrace.bench.compare import LETTERS
    from headrace.bench.compare_page import cells, columns
    from headrace.cli.output import print_table

    for index, path in enumerate(found.paths):
        print(f"{LETTERS[index]}  {path}")
    print()
    print_table(columns(found), [cells(row) for row in found.rows], page=True)
    print()
    for note in found.notes:
        print(f"note: {note}")
    print(found.sentence)
