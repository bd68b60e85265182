"""`headrace watch explain`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.measure.blackbox.explanation import Explanation


def explain(
    dumps: Annotated[
        list[Path],
        typer.Argument(
            metavar="DUMP...",
            help="Dumps of black boxes (rank-NNNNN.blackbox), or their folder; files of watches (rank-NNNNN.jsonl) "
            "where there is no dump: these know of no single command.",
        ),
    ],
    flight_recorder: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="A dump of PyTorch's Flight Recorder, pickle or JSON, or a folder of them; the name ends with the "
            "rank. Several times for several.",
            show_default=False,
        ),
    ] = None,
    step: Annotated[
        int | None,
        typer.Option(
            metavar="N",
            min=0,
            show_default=False,
            help="This step, not the slowest one; of those after a dump the file of the watch tells.",
        ),
    ] = None,
    price: Annotated[
        float | None,
        typer.Option("--gpu-hour-price", metavar="DOLLARS", help="Of an accelerator hour.", show_default=False),
    ] = None,
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page with a time line of the step, too.", show_default=False),
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """Why a step was slow, or hangs: what it waited for, on which rank, by which path to which target, and what it
    cost; or that it was not storage.

    Takes the step that was slowest beside the others, or that was under way when the dumps were written. Give it the
    dumps of all ranks: what those that are missing leave open is said.

    Example: `headrace watch explain runs/a/watch --flight-recorder /tmp/nccl_trace_rank_0`
    """
    from headrace.cli.output import check_page, print_result
    from headrace.measure.arithmetic import dollars
    from headrace.measure.blackbox import tell
    from headrace.measure.blackbox.evidence import gather
    from headrace.measure.blackbox.explain import explain as found_in
    from headrace.measure.blackbox.page import page

    check_page(html)
    if price is not None:
        dollars(0.0, price)
    evidence = gather(dumps, flight_recorder or [], step)
    found = found_in(evidence, step)
    print_result(
        json=(lambda: tell.to_json(found, price)) if json else None, text=lambda: _print(found, price), html=html,
        page=lambda: page(found, evidence, gpu_hour_price=price),
    )  # fmt: skip


def _print(found: Explanation, price: float | None) -> None:
    from headrace.cli.output import print_facts, print_sentence, print_table
    from headrace.measure.blackbox import tell

    print_sentence(tell.sentence(found, price))
    print()
    print_facts(tell.facts(found))
    for columns, rows, right in (
        (*tell.findings_table(found, price), (1, 2) if price is None else (1, 2, 3)),
        (*(tell.ranks_table(found) if len(found.rows) > 1 else ([], [])), range(12)),
        (*tell.paths_table(found), (0, *range(3, 11))),
    ):
        if rows:
            print()
            print_table(columns, rows, right=tuple(right), page=True)
