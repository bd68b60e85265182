"""`headrace watch`: what a training job's accelerators were lost to, from what `headrace.measure.Watch` wrote."""

from __future__ import annotations

import typer

from headrace.cli.watch import compare, explain, show

app = typer.Typer(
    help="What a training job waits for: is it storage, what does it cost, and what would help.\n\n"
    "Reads what `headrace.measure.Watch` writes while a job trains: a file for each rank, or their folder.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

app.command("show")(show.show)
app.command("explain")(explain.explain)
app.command("compare")(compare.compare)
