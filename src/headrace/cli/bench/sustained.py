"""`headrace bench sustained`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.bench.together import alone
from headrace.cli.output import check_page, print_result
from headrace.cli.sizes import parse_size

if TYPE_CHECKING:
    from headrace.bench.figures import Outcome
    from headrace.bench.sustained import Judgement


def sustained(
    path: Annotated[
        str, typer.Argument(metavar="PATH|DEVICE|URI", help="As `headrace bench run` takes it.", show_default=False)
    ],
    write: Annotated[bool, typer.Option("--write", help="Write, and not read.")] = False,
    seconds: Annotated[float, typer.Option(metavar="SECONDS", help="It ends then.")] = 300.0,
    most: Annotated[str, typer.Option(metavar="SIZE", help="Or when so much was moved.")] = "1TiB",
    size: Annotated[str, typer.Option(metavar="SIZE", help="Data that are read, or written over, again.")] = "4GiB",
    flows: Annotated[int, typer.Option(metavar="N", help="Readers or writers at once.")] = 4,
    depth: Annotated[int, typer.Option(metavar="N", help="Requests that a flow has under way.")] = 8,
    cache: Annotated[
        str, typer.Option(metavar="HOW", help="The page cache of this machine: direct (O_DIRECT), dropped or warm.")
    ] = "direct",
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
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML page, too.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as one object of JSON.")] = False,
) -> None:
    """Does the rate last? Reads or writes for long, and says where throttling or the end of burst credits begins.

    Levels of the rate are found by change points: neither noise nor one stall makes one. Take it longer than credits
    last: those of cloud volumes may last half an hour.

    Example: `headrace bench sustained /mnt/data --seconds 1800`
    """
    from headrace.bench.figures import to_json
    from headrace.bench.patterns import sustained as reading
    from headrace.bench.patterns import sustained_write as writing
    from headrace.bench.patterns.options import Options
    from headrace.bench.places import open_place
    from headrace.bench.sustained import size as said
    from headrace.bench.sustained_page import build
    from headrace.cli.progress import Progress
    from headrace.units import format_seconds

    data, budget = parse_size("--size", size), parse_size("--most", most)
    options = Options(flows=flows, depth=depth, seconds=seconds, budget_bytes=budget, cache=cache)
    check_page(html)
    alone("sustained")
    with open_place(path, scratch=scratch, existing=existing, unfenced=unfenced) as place:
        room = writing.room_bytes(place, options, data) if write else 0
        for line in place.plan(0 if write else data, room):
            print(line, file=sys.stderr)
        verb = "writes" if write else "reads"
        print(f"{verb} for {format_seconds(seconds)}, at most {said(budget)}", file=sys.stderr)
        if scratch:
            from headrace.cli.volume.common import confirm

            confirm(f"Write to {path}?", yes)
        with Progress("sustained", quiet=json) as progress:
            if write:
                found, judgement = writing.run(place, options, progress.show, data)
            else:
                place.prepare(data, tell=progress.show)
                found, judgement = reading.run(place, options, progress.show)
        facts = dict(place.describe())
    everything = {**to_json(judgement), "outcome": to_json(found), "path": facts}
    print_result(
        json=(lambda: everything) if json else None, text=lambda: _print(path, found, judgement), html=html,
        page=lambda: build(found, judgement, facts).html(),
    )  # fmt: skip


def _print(path: str, found: Outcome, judgement: Judgement) -> None:
    from headrace.bench.sustained_page import COLUMNS, rows
    from headrace.cli.output import print_table

    print_table(list(COLUMNS), rows(judgement), right=(0, 1, 2, 3, 4), page=True)
    print()
    for text in (found.cache and f"cache: {found.cache}", found.durable and f"durable when: {found.durable}"):
        if text:
            print(text)
    print(f"{path}: {judgement.sentence}")
