"""Which commands there are. Each file brings one command and imports what it needs when it runs."""

from __future__ import annotations

from collections.abc import Sequence
from importlib import import_module
from typing import Annotated

import typer

#: As `--help` shows them; each is a module here.
COMMANDS = (
    *("demo", "serve", "target", "discover", "volume", "ingest", "dataset", "checkpoint"),
    *("drill", "doctor", "bench", "watch", "plan", "providers"),
)


def make(names: Sequence[str] = COMMANDS) -> typer.Typer:
    """`headrace` with these commands: to look at the parameters of all takes longer than many a command does."""
    app = typer.Typer(
        name="headrace",
        help="Storage over NVMe-oF under LLM training: datasets, checkpoints and models on shared namespaces, "
        "from user space.",
        epilog="Start with: headrace demo",
        no_args_is_help=True,
        add_completion=False,
        pretty_exceptions_enable=False,
        rich_markup_mode="markdown",
        context_settings={"help_option_names": ["-h", "--help"]},
    )
    app.callback()(headrace)
    for name in names:
        module = import_module(f"headrace.cli.{name}")
        if hasattr(module, "app"):
            app.add_typer(module.app, name=name)
        else:
            app.command(name)(getattr(module, name))
    return app


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


def headrace(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass
