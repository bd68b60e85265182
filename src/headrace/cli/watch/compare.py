"""`headrace watch compare`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


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
            metavar="SIZE",
            help="Bytes a second of other storage, for each rank: what would it give?",
            show_default=False,
        ),
    ] = None,
    step_bytes: Annotated[
        str | None,
        typer.Option(metavar="SIZE", help="That a step reads, where the loader did not say.", show_default=False),
    ] = None,
    warm: Annotated[int, typer.Option(metavar="N", min=0, help="Steps at the begin of each that do not count.")] = 3,
    json: Annotated[bool, typer.Option("--json", help="Print JSON.")] = False,
) -> None:
    """What storage and preparation cost a loop, by subtraction, and what other storage would give.

    Fetch stall is what a step takes longer from storage than from a warm cache; preparation stall what it takes longer
    from there than with data that need none.

    Example: `headrace watch compare runs/synthetic runs/cached runs/storage --rate 2GB`
    """
    from headrace.cli.output import print_facts, print_json
    from headrace.cli.sizes import parse_size
    from headrace.errors import UsageError
    from headrace.measure.watch.differential import RUNS, stalls_of_files
    from headrace.units import format_bytes, format_seconds

    if len(runs) != len(RUNS):
        raise UsageError("compare", expected="three runs: synthetic, cached, storage", found=str(len(runs)))
    found = stalls_of_files(
        dict(zip(RUNS, runs, strict=True)), warm=warm,
        step_bytes=None if step_bytes is None else parse_size("--step-bytes", step_bytes),
    )  # fmt: skip
    predictions = [found.predict(parse_size("--rate", each)) for each in rate or []]
    if json:
        told = [vars(each) | {"sentence": each.sentence} for each in predictions]
        print_json(found.to_json() | {"predictions": told})
        return
    print(found.sentence)
    print()
    means = {"synthetic": found.synthetic, "cached": found.cached, "storage": found.storage}
    facts = {
        name: f"{format_seconds(mean.mean_s)} ± {format_seconds(mean.error_s)} a step, {mean.steps} steps"
        for name, mean in means.items()
    }
    if found.step_bytes:
        facts["a step reads"] = format_bytes(found.step_bytes)
    ways = {0.0: "when it is asked", 1.0: "ahead", None: "not known whether ahead"}
    facts["the loader reads"] = ways.get(found.overlap, f"ahead by {found.overlap}")
    print_facts(facts)
    for prediction in predictions:
        print(prediction.sentence)
