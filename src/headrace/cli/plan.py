"""`headrace plan`."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.plan import Plan

_Text = str | None


def _option(metavar: str, help: str, *names: str) -> typer.models.OptionInfo:
    return typer.Option(*names, metavar=metavar, help=help, show_default=False)  # type: ignore[no-any-return]


def plan(
    job: Annotated[Path | None, _option("FILE", "A job as TOML; options go before it.")] = None,
    example: Annotated[
        bool, typer.Option("--example", help="Print a job file with every key, and what is assumed without it.")
    ] = False,
    gpus: Annotated[_Text, _option("N", "Accelerators of the job.")] = None,
    gpus_per_node: Annotated[_Text, _option("N", "Accelerators of a node. [default: 8]")] = None,
    parameters: Annotated[_Text, _option("N", "Parameters of the model, as 8.03B.")] = None,
    config: Annotated[_Text, _option("FILE", "Or the config.json that is published with it.")] = None,
    tp: Annotated[_Text, _option("N", "Tensor parallel ranks.")] = None,
    pp: Annotated[_Text, _option("N", "Pipeline stages.")] = None,
    sharding: Annotated[_Text, _option("HOW", "zero3 (FSDP), zero1 or none. [default: zero3]")] = None,
    tokens_per_s: Annotated[_Text, _option("N", "Tokens a second, of one GPU; else computed.")] = None,
    samples_per_s: Annotated[_Text, _option("N", "Samples a second, of one GPU.")] = None,
    sample_bytes: Annotated[_Text, _option("SIZE", "Of a sample as it is stored.")] = None,
    interval: Annotated[_Text, _option("TIME", "Between saves, as 30min; else the best one.")] = None,
    synchronous: Annotated[bool, typer.Option("--sync", help="Training stands until a save is written.")] = False,
    mtbf: Annotated[_Text, _option("TIME", "Between failures of the whole job, as 12h.")] = None,
    restart: Annotated[_Text, _option("TIME", "A restart is to load in this time.")] = None,
    read: Annotated[_Text, _option("RATE", "What storage delivers to all nodes, as 10GB/s.")] = None,
    write: Annotated[_Text, _option("RATE", "What it takes from all nodes.")] = None,
    nic: Annotated[_Text, _option("GBIT", "Speed of the storage NIC of a node, Gbit/s.")] = None,
    gpu_price: Annotated[_Text, _option("PRICE", "Without it no money is shown.", "--gpu-hour-price")] = None,
    provider: Annotated[
        _Text, _option("NAME", "Storage as this provider claims it, as aws/fsx-lustre: see `headrace providers`.")
    ] = None,
    capacity: Annotated[_Text, _option("SIZE", "What is rented of it, where its rate goes by TiB.")] = None,
    catalogue: Annotated[list[Path] | None, _option("FILE", "Claims of your own, as TOML; may be given again.")] = None,
    set: Annotated[
        list[str] | None, _option("KEY=VALUE", "Any key of the job file, as feed.token_bytes=2; may be given again.")
    ] = None,
    html: Annotated[Path | None, _option("FILE", "Write it as a page, with pictures, too.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print all of it as JSON.")] = False,
) -> None:
    """How much storage does this job need, which, and is storage its problem at all?

    Needed rates of reads and writes, per node and in all, the best interval of saves, the cost of restarts, NICs and
    targets, the share of the time that trains, and money where prices are given: each with its formula, the numbers put
    in, a range, and its source. What is not said is assumed, and told. It may well find that nothing needs to change.

    Example: `headrace plan --gpus 64 --parameters 8.03B`
    """
    if example:
        from headrace.plan.example import example as job_file

        print(job_file(), end="")
        return
    from headrace.cli.output import check_page, print_result
    from headrace.errors import UsageError
    from headrace.plan import load_catalogue, make_plan, read_job
    from headrace.plan.page import build

    check_page(html)
    options = {
        "gpus": gpus, "gpus_per_node": gpus_per_node, "model.parameters": parameters, "model.config": config,
        "parallel.tp": tp, "parallel.pp": pp, "parallel.sharding": sharding, "feed.tokens_per_s": tokens_per_s,
        "feed.samples_per_s": samples_per_s, "feed.sample_bytes": sample_bytes, "checkpoint.interval": interval,
        "checkpoint.synchronous": synchronous or None, "failures.mtbf": mtbf, "failures.restart": restart,
        "storage.read": read, "storage.write": write, "network.nic_gbit": nic, "price.gpu_hour": gpu_price,
        "storage.capacity": capacity,
    }  # fmt: skip
    given = {key: value for key, value in options.items() if value is not None}
    for text in set or []:
        key, equals, value = text.partition("=")
        if not equals:
            raise UsageError("--set", expected="KEY=VALUE", found=repr(text)[:80])
        if key in given:
            raise UsageError("--set", expected="each key once", found=f"{key}, and an option for it")
        given[key] = value
    if (provider or catalogue) and job is None and not given:
        raise UsageError(
            "which job?", expected="--gpus and --parameters, or --job", next_step="see headrace plan --help"
        )
    offering = None
    if provider is not None or catalogue:
        claims = load_catalogue(catalogue or [])
        offering = None if provider is None else claims.find(provider)
    made = make_plan(read_job(job, given), offering)
    print_result(
        json=made.to_json if json else None, text=lambda: _print(made), html=html, page=lambda: build(made).html()
    )


def _print(made: Plan) -> None:
    from headrace.cli.output import print_sentence, print_table
    from headrace.plan.page import table
    from headrace.plan.quantities import Range

    print_sentence(made.verdict.sentence)
    for question in made.questions:
        print(f"\n{question.title}" + (f"  ({question.note})" if question.note else ""))
        _, rows = table(question.answers)
        cells = [[what, result, f"{formula}\n{put}\n[{source}]"] for what, result, formula, put, source in rows]
        print_table(["", "result", "formula, what was put in, source"], cells, page=True)
    rows = [
        [key, ", ".join(value) if isinstance(value, tuple) else str(value), source]
        for key, value, source in made.assumed
        if isinstance(value, Range | tuple | str)
    ]
    print("\nWhat was assumed, since nothing was said of it")
    print_table(["key", "value", "why"], rows, page=True)
    if sys.stdout.isatty():
        # What was said first has left the screen.
        print()
        print_sentence(made.verdict.sentence)
