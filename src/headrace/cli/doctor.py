"""`headrace doctor`."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

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
    fail_on: Annotated[
        str, typer.Option(metavar="SEVERITY", help="Exit with 1 from findings of this kind on: error, warning, never.")
    ] = "warning",
    json: Annotated[bool, typer.Option("--json", help="Print all of it as one object of JSON.")] = False,
) -> None:
    """What is wrong with this machine and its storage? Looks at both, measures, and says what to do.

    Nothing is changed: targets are connected to and read, nothing is written or reserved. Works without root, and says
    what root would add.

    Exit status 0: nothing wrong; 1: findings of the severity of --fail-on or worse; 2: it was asked for something that
    cannot be meant.

    Example: `headrace doctor nvme+tcp://10.0.0.1:4420/NQN?nsid=1 /mnt/data`
    """
    from headrace.cli.output import print_json
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
    others = read_reports(nodes or [])
    recorder = Recorder.into(record) if record is not None else None
    looked_at = recorder or Machine(machine or "/")
    with Progress("doctor", quiet=json) as progress:
        found = examine(looked_at, names or [], measure=measure, tell=lambda text: progress.show(0.0, text))
    found = check_nodes(found, others)
    if recorder is not None:
        recorder.write()
    if html is not None:
        html.write_text(build(found).html(), encoding="utf-8")
    if json:
        print_json(found.to_json())
    else:
        print_report(found)
    failing = SEVERITIES[: SEVERITIES.index(fail_on) + 1] if fail_on != "never" else ()
    if any(one.severity in failing for one in found.findings):
        raise typer.Exit(1)
