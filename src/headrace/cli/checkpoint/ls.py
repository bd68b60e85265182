"""`headrace checkpoint ls`: the committed checkpoints of a volume, one a line."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.checkpoint.common import when
from headrace.cli.volume.common import AsJson, Degraded, Members, open_reading, shown


def ls(
    members: Members = None,
    run: Annotated[str | None, typer.Option(help="Of this run only.", show_default=False)] = None,
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """The committed checkpoints of a volume, by run and in the order of their commits: when, ranks, bytes, pinned,
    whole, latest. `--json`: one object a line.

    `latest`: committed last of its run, so what the run goes on from, whatever the number of the step.

    `whole`: the manifest is good, and all objects that it names are there. `verify` reads them, too.

    Example: `headrace checkpoint ls file:/data/a.img --run pretrain`
    """
    from headrace.checkpoint.inspect import look
    from headrace.cli.output import print_json, print_table
    from headrace.units import format_bytes

    rows = []
    with open_reading(members, degraded=degraded) as volume:
        for found in look(volume, run):
            if json:
                facts: dict[str, object] = {
                    "checkpoint": str(found.id),
                    "run": found.id.run,
                    "step": found.id.step,
                    "created_unix": found.created_unix,
                    "ranks": found.ranks,
                    "items": found.items,
                    "data_bytes": found.data_bytes,
                    "stored_bytes": found.stored_bytes,
                    "commit": found.sequence,
                    "latest": found.latest,
                    "pinned": found.pinned,
                    "whole": found.problem is None,
                }
                print_json(facts | ({} if found.problem is None else {"error": str(found.problem)}))
                continue
            rows.append(
                [
                    shown(str(found.id)),
                    when(found.created_unix),
                    "-" if found.ranks is None else f"{found.ranks:,}",
                    "-" if found.data_bytes is None else format_bytes(found.data_bytes),
                    "pinned" if found.pinned else "-",
                    "whole" if found.problem is None else shown(f"damaged: {found.problem}"),
                    "latest" if found.latest else "-",
                ]
            )
    if not json:
        print_table(("checkpoint", "when", "ranks", "size", "pinned", "whole", ""), rows, right=(2, 3))
