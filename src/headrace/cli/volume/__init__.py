"""`headrace volume`: make a volume, look into it, move data in and out, check it. One file per command.

common.py     how a volume is named and opened, and how names from media are shown
"""

from __future__ import annotations

import typer

from headrace.cli.volume import cat, cp, create, info, ls, rm, salvage, scrub, stat, takeover, verify

app = typer.Typer(
    help="Create a volume, look into it, move data in and out, check it.\n\n"
    "A volume is named by the addresses of all its members, in any order: "
    "`nvme+tcp://HOST:PORT[,HOST:PORT]/NQN?nsid=1`, `file:/PATH`. Where none is given, `HEADRACE_VOLUME` names it.",
    no_args_is_help=True,
    rich_markup_mode="markdown",
)

app.command("create")(create.create)
app.command("info")(info.info)
app.command("ls")(ls.ls)
app.command("stat")(stat.stat)
app.command("cat")(cat.cat)
app.command("cp")(cp.cp)
app.command("rm")(rm.rm)
app.command("verify")(verify.verify)
app.command("scrub")(scrub.scrub)
app.command("salvage")(salvage.salvage)
app.command("takeover")(takeover.takeover)
