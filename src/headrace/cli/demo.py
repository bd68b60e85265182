"""`headrace demo`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def demo(
    keep: Annotated[
        Path | None, typer.Option(metavar="DIR", help="Work in this new directory and leave everything there.")
    ] = None,
    corpus: Annotated[
        Path | None,
        typer.Option(
            metavar="PATH", help="Text to train on: a folder, .jsonl or .parquet. Default: Python's standard library."
        ),
    ] = None,
    tokenizer: Annotated[
        Path | None, typer.Option(metavar="FILE", help="A tokenizer.json. Default: one is trained on the corpus.")
    ] = None,
    steps: Annotated[int | None, typer.Option(metavar="N", help="Training steps. Default: 36, or 20 if small.")] = None,
    ranks: Annotated[int, typer.Option(metavar="N", help="Processes that train, until one of them is killed.")] = 2,
    resume_ranks: Annotated[int, typer.Option(metavar="N", help="Processes that go on from the checkpoint.")] = 1,
    gpu_hour_price: Annotated[
        float | None,
        typer.Option(metavar="DOLLARS", help="Price of an accelerator hour; without it no dollars are shown."),
    ] = None,
    small: Annotated[bool, typer.Option("--small", help="The same job with a tiny model and corpus.")] = False,
    report: Annotated[Path, typer.Option(metavar="FILE", help="Where the HTML report goes.")] = Path(
        "demo-report.html"
    ),
    json: Annotated[bool, typer.Option("--json", help="Print the summary as JSON; all else goes to stderr.")] = False,
) -> None:
    """The whole job on this machine, over real NVMe/TCP: feed, checkpoint, kill, resume, publish, prove.

    Starts a target, makes a volume on it, ingests text, trains a small GPT on two processes, kills the target and then
    a process while checkpoints are being written, resumes with another number of processes, and shows that the run is
    the one that nobody disturbed. Leaves an HTML report. Ctrl-C at any point ends everything.

    Example: `headrace demo --keep /tmp/demo --gpu-hour-price 3`
    """
    from headrace.demo.options import DemoOptions
    from headrace.demo.run import run_demo

    run_demo(
        DemoOptions(
            keep=keep,
            corpus=corpus,
            tokenizer=tokenizer,
            steps=steps,
            ranks=ranks,
            resume_ranks=resume_ranks,
            gpu_hour_price=gpu_hour_price,
            small=small,
            report=report,
            json=json,
        )
    )
