"""`headrace bench`: what a storage path gives to training."""

from __future__ import annotations

import typer
from typer.core import TyperGroup

from headrace.cli.bench import accelerators, compare, run, sustained


class _Bench(TyperGroup):
    """`headrace bench PATH` is `headrace bench run PATH`. A folder that has a command's name is `./NAME`."""

    def parse_args(self, ctx: typer.Context, args: list[str]) -> list[str]:  # type: ignore[override]
        if args and args[0] not in self.commands and args[0] not in ("-h", "--help"):
            args = ["run", *args]
        return super().parse_args(ctx, args)  # type: ignore[no-any-return,unused-ignore]


app = typer.Typer(
    cls=_Bench,
    help="Measure a storage path as training would use it: a folder on any file system, a block device, a namespace, "
    "a volume.\n\n`headrace bench PATH` is `headrace bench run PATH`.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

app.command("run")(run.run)
app.command("compare")(compare.compare)
app.command("accelerators")(accelerators.accelerators)
app.command("sustained")(sustained.sustained)
