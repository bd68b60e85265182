"""`headrace watch show`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

if TYPE_CHECKING:
    from headrace.measure.watch.join import Attribution

#: Seconds between two looks at files that grow.
EVERY_S = 1.0


def show(
    files: Annotated[
        list[Path], typer.Argument(metavar="FILE...", help="Of all ranks, or the folder in which they are.")
    ],
    price: Annotated[
        float | None,
        typer.Option("--gpu-hour-price", metavar="DOLLARS", help="Of an accelerator hour.", show_default=False),
    ] = None,
    worst: Annotated[int, typer.Option(metavar="N", min=0, max=1000, help="Worst steps that are told.")] = 5,
    follow: Annotated[
        bool, typer.Option("--follow", "-f", help="The last steps of a job that runs, again and again, until Ctrl-C.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with pictures, too.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """What the accelerators of a job were lost to, all ranks together: causes, money, slowest rank, worst steps.

    A step ends for all ranks when it ends for the slowest, and all pay for what that one did.

    Example: `headrace watch show runs/a/watch --gpu-hour-price 2.50 --html page.html`
    """
    from headrace.cli.output import check_page, print_result
    from headrace.errors import UsageError
    from headrace.measure.arithmetic import dollars
    from headrace.measure.watch.join import attribute
    from headrace.measure.watch.page import page
    from headrace.measure.watch.record import files_of
    from headrace.measure.watch.silence import unfinished
    from headrace.measure.watch.verdict import sentence

    check_page(html)
    if price is not None:
        dollars(0.0, price)
    paths = files_of(files)
    if follow:
        if html is not None or json:
            raise UsageError("--follow shows a table", expected="no --html and no --json")
        _follow(files, price, worst)
        return
    found = attribute(paths, worst=worst)
    besides = unfinished(found, paths)
    said = sentence(found, price) + besides
    print_result(
        json=(lambda: found.to_json(price) | {"sentence": said}) if json else None,
        text=lambda: _print(found, said, price), html=html,
        page=lambda: page(found, title=f"headrace watch: {files[0].name}", gpu_hour_price=price, besides=besides),
    )  # fmt: skip


def _print(found: Attribution, said: str, price: float | None) -> None:
    from headrace.cli.output import print_facts, print_sentence, print_table
    from headrace.measure.watch import tell

    print_sentence(said)
    print()
    print_facts(tell.facts(found))
    for columns, rows, right in (
        (*tell.lost_table(found, price), (1, 2) if price is None else (1, 2, 3)),
        (*tell.worst_table(found), (0, 1, 2, 3)),
        (*(tell.ranks_table(found) if len(found.ranks) > 1 else ([], [])), range(14)),
    ):
        if rows:
            print()
            print_table(columns, rows, right=tuple(right), page=True)


def _follow(files: list[Path], price: float | None, worst: int) -> None:
    """Steps that end meanwhile are seen a moment later; ranks that come later, too."""
    import time

    from headrace.measure.watch.join import recent
    from headrace.measure.watch.record import files_of
    from headrace.measure.watch.silence import waiting
    from headrace.measure.watch.verdict import sentence

    def look() -> Attribution:
        return recent(files_of(files), worst=worst)

    if not sys.stdout.isatty():
        while True:
            found = look()
            said = waiting(found, time.time()) + sentence(found, price) if found.steps else _none(found)
            print(said, flush=True)
            time.sleep(5 * EVERY_S)
    from rich.live import Live

    with Live(auto_refresh=False, screen=False) as live:
        while True:
            live.update(_view(look(), price, live.console.width), refresh=True)
            time.sleep(EVERY_S)


def _none(found: Attribution) -> str:
    return "no step of all ranks yet" + (f": {found.why_none}" if found.why_none else "")


def _view(found: Attribution, price: float | None, width: int) -> Any:
    import time

    from rich.console import Group
    from rich.text import Text

    from headrace.cli.output import table_within
    from headrace.measure.watch import tell
    from headrace.measure.watch.silence import waiting
    from headrace.measure.watch.verdict import sentence

    if not found.steps:
        return Text(_none(found))
    parts: list[Any] = [
        Text(waiting(found, time.time()) + sentence(found, price), style="bold"),
        Text(f"the last steps: {tell.facts(found)['steps']}"),
    ]
    for columns, rows, right in (
        (*tell.lost_table(found, price), (1, 2) if price is None else (1, 2, 3)),
        (*tell.worst_table(found), (0, 1, 2, 3)),
    ):
        grid = table_within(width, columns, rows, right=right)
        # Of text rich would take addresses like [fe80::1]:4420 for its own marks.
        parts += ["", Text(grid) if isinstance(grid, str) else grid]
    return Group(*parts)
