"""`headrace dataset`: look into the datasets of a volume, check, pack, stage them. One file per command."""

from __future__ import annotations

import typer

from headrace.cli.dataset import info, ls, pack, peek, stage, verify

app = typer.Typer(
    help="Look into the datasets of a volume, check them, pack their documents into samples, stage them on a node.\n\n"
    "`headrace ingest` makes them. Where no `--volume` is given, `HEADRACE_VOLUME` names it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

app.command("ls")(ls.ls)
app.command("info")(info.info)
app.command("peek")(peek.peek)
app.command("verify")(verify.verify)
app.command("pack")(pack.pack)
app.command("stage")(stage.stage)
