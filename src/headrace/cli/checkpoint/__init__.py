"""`headrace checkpoint`: look into the checkpoints of a volume, check, compare, pin, delete, move them. A file each.

common.py     how a checkpoint is named
"""

from __future__ import annotations

import typer

from headrace.cli.checkpoint import diff, export, import_, ls, pin, rm, show, verify

app = typer.Typer(
    help="Look into the checkpoints of a volume: check, compare, pin and delete them, take them out and in.\n\n"
    "A checkpoint is `RUN/step-N`; where one is only read, `RUN` is the latest of that run. "
    "Where no `--volume` is given, `HEADRACE_VOLUME` names it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

app.command("ls")(ls.ls)
app.command("show")(show.show)
app.command("verify")(verify.verify)
app.command("diff")(diff.diff)
app.command("pin")(pin.pin)
app.command("unpin")(pin.unpin)
app.command("rm")(rm.rm)
app.command("export")(export.export)
app.command("import")(import_.import_)
