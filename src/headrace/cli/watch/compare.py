"""`headrace watch compare`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from collections.abc import Sequence

    from headrace.measure.watch.predict import Prediction, Stalls


def compare(
    runs: Annotated[
        list[Path],
        typer.Argument(
            metavar="SYNTHETIC CACHED STORAGE",
            help="Three runs of one loop: with data out of memory, from a warm cache, from storage. Files or folders.",
        ),
    ],
    rate: Annotated[
        list[str] | None,
        typer.Option(
            metavar="RATE",
            help="What other storage would give each rank, as 2GB/s: utilisation with it; may be given again.",
            show_default=False,
        ),
    ] = None,
    step_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="What a step reads, where the loader did not say.", show_default=False),
    ] = None,
    warm: Annotated[
        int, typer.Option(metavar="N", min=0, help="Steps at the begin of each run that do not count.")
    ] = 3,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write a page with pictures, too.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """What storage and preparation cost a loop, by subtraction, and what other storage would give.

    Fetch stall is what a step takes longer from storage than from a warm cache; preparation stall what it takes longer
    from there than with data that need none.

    Example: `headrace watch compare runs/synthetic runs/cached runs/storage --rate 2GB/s`
    """
    from headrace.cli.output import check_page, print_result
    from headrace.cli.sizes import parse_rate, parse_size
    from headrace.errors import UsageError
    from headrace.measure.watch.compare_page import page
    from headrace.measure.watch.differential import RUNS, stalls_of_files

    check_page(html)
    if len(runs) != len(RUNS):
        raise UsageError("compare", expected="three runs: synthetic, cached, storage", found=str(len(runs)))
    found = stalls_of_files(
        dict(zip(RUNS, runs, strict=True)), warm=warm,
        step_bytes=None if step_bytes is None else parse_size("--step-bytes", step_bytes),
    )  # fmt: skip
    predictions = [found.predict(parse_rate("--rate", each)) for each in rate or []]
    told = [vars(each) | {"sentence": each.sentence} for each in predictions]
    print_result(
        json=(lambda: found.to_json() | {"predictions": told}) if json else None,
        text=lambda: _print(found, predictions), html=html, page=lambda: page(found, predictions),
    )  # fmt: skip


def _print(found: Stalls, predictions: Sequence[Prediction]) -> None:
    from headrace.cli.output import print_facts, print_sentence
    from headrace.measure.watch.tell import facts_of_stalls

    print_sentence(found.sentence)
    print()
    print_facts(facts_of_stalls(found))
    for prediction in predictions:
        print_sentence(prediction.sentence)
