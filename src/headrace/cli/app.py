"""Which commands there are. Each file brings one command and imports what it needs when it runs."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli import checkpoint, dataset, demo, discover, doctor, drill, ingest, serve, target, volume, watch

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


def _version(asked: bool) -> None:
    if asked:
        from importlib.metadata import version

        typer.echo(f"headrace {version('headrace')}")
        raise typer.Exit


def _plans() -> None:
    from headrace.cli import plan, providers

    app.command("plan")(plan.plan)
    app.command("providers")(providers.providers)


@app.callback()
def headrace(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version and stop.")
    ] = False,
) -> None:
    pass


app.command("demo")(demo.demo)
_plans()
app.command("serve")(serve.serve)
app.add_typer(target.app, name="target")
app.command("discover")(discover.discover)
app.add_typer(volume.app, name="volume")
app.command("ingest")(ingest.ingest)
app.add_typer(dataset.app, name="dataset")
app.add_typer(checkpoint.app, name="checkpoint")
app.command("drill")(drill.drill)
app.command("doctor")(doctor.doctor)
app.add_typer(watch.app, name="watch")
