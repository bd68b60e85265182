"""`headrace doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

if TYPE_CHECKING:
    from headrace.cli.expectation import Expectation

FAIL_ON = ("error", "warning", "never")


def doctor(
    names: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[PATH|DEVICE|URI]...", help="Look at these only. [default: all that there is]", show_default=False
        ),
    ] = None,
    measure: Annotated[
        bool,
        typer.Option("--measure/--no-measure", help="Connect to the targets named, read from disks, ask file systems."),
    ] = True,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML page, too.", show_default=False)
    ] = None,
    record: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR",
            help="Keep what was read, for a bug report: serial numbers, addresses and names of hosts replaced.",
            show_default=False,
        ),
    ] = None,
    machine: Annotated[
        Path | None,
        typer.Option(
            metavar="DIR", help="Look at a machine that was recorded so, not at this one.", show_default=False
        ),
    ] = None,
    nodes: Annotated[
        list[Path] | None,
        typer.Option(
            metavar="FILE",
            help="What `--json` said on another node, to compare with this one; may be given again.",
            show_default=False,
        ),
    ] = None,
    expect: Annotated[
        str | None,
        typer.Option(
            metavar="NAME",
            help="Read from the storage for some seconds, and hold that against what this provider claims, as "
            "coreweave/dfs: see `headrace providers`.",
            show_default=False,
        ),
    ] = None,
    catalogue: Annotated[
        list[Path] | None,
        typer.Option(metavar="FILE", help="Claims of your own, as TOML; may be given again.", show_default=False),
    ] = None,
    measured: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Figures measured elsewhere, for --expect, as JSON.", show_default=False),
    ] = None,
    fail_on: Annotated[
        str, typer.Option(metavar="SEVERITY", help="Exit with 1 from findings of this kind on: error, warning, never.")
    ] = "warning",
    json: Annotated[bool, typer.Option("--json", help="Print all of it as one object of JSON.")] = False,
) -> None:
    """What is wrong with this machine and its storage? Looks at both, measures, and says what to do.

    Nothing is changed: targets are connected to and read, nothing is written or reserved. Works without root, and says
    what root would add.

    Exit status 0: nothing wrong; 1: findings of the severity of --fail-on or worse, among them (as warnings) measured
    figures below what --expect claims; 2: it was asked for something that cannot be meant.

    Example: `headrace doctor 'nvme+tcp://10.0.0.1:4420/NQN?nsid=1' /mnt/data`
    """
    from headrace.cli.output import check_page, print_result
    from headrace.cli.progress import Progress
    from headrace.doctor.compare import check_nodes, read_reports
    from headrace.doctor.examine import examine
    from headrace.doctor.finding import SEVERITIES
    from headrace.doctor.machine import Machine
    from headrace.doctor.page import build
    from headrace.doctor.record import Recorder
    from headrace.doctor.report import print_report
    from headrace.errors import UsageError

    if fail_on not in FAIL_ON:
        raise UsageError("--fail-on", expected=", ".join(FAIL_ON), found=repr(fail_on))
    if machine is not None and record is not None:
        raise UsageError("what is recorded is a machine that runs", expected="--record or --machine")
    if machine is not None and not machine.is_dir():
        raise UsageError("no recorded machine", where=str(machine), expected="a folder that --record made")
    check_page(html)
    claims = _claims(expect, catalogue, measured, machine)
    others = read_reports(nodes or [])
    recorder = Recorder.into(record) if record is not None else None
    looked_at = recorder or Machine(machine or "/")
    with Progress("doctor", quiet=json) as progress:
        found = examine(
            looked_at, names or [], measure=measure, tell=lambda text: progress.show(0.0, text),
            load=None if claims is None else claims.choose,
        )  # fmt: skip
    held = None if claims is None else claims.held_against(found)
    found = check_nodes(found if held is None else held.told(found), others)
    if recorder is not None:
        recorder.write()
        if record is not None and held is not None:
            held.record(record)
    more = [] if held is None else [held.section()]

    def text() -> None:
        print_report(found, more=more)
        if held is not None:
            print(held.sentence)

    expected = None if held is None else held.to_json()
    print_result(
        json=(lambda: found.to_json() | {"expected": expected}) if json else None, text=text, html=html,
        page=lambda: build(found, more=more).html(),
    )  # fmt: skip
    failing = SEVERITIES[: SEVERITIES.index(fail_on) + 1] if fail_on != "never" else ()
    if any(one.severity in failing for one in found.findings):
        raise typer.Exit(1)


def _claims(
    expect: str | None, catalogue: list[Path] | None, measured: Path | None, machine: Path | None
) -> Expectation | None:
    from headrace.errors import UsageError

    if expect is None:
        if catalogue or measured is not None:
            raise UsageError("--catalogue and --measured", expected="--expect NAME beside them", found="none")
        return None
    from headrace.cli.expectation import Expectation

    return Expectation.of(expect, catalogue or [], measured, machine)
