"""`headrace drill`."""

from __future__ import annotations

import contextlib
import sys
from pathlib import Path
from typing import Annotated

import typer

from headrace.cli.sizes import parse_size

#: Exit status where it does not come to a verdict.
NOTHING_SAID = 3


def drill(
    members: Annotated[
        list[str] | None,
        typer.Argument(metavar="URI...", help="Address of each member of a scratch volume.", show_default=False),
    ] = None,
    embedded: Annotated[
        bool, typer.Option("--embedded", help="On a target of its own, on this machine, which it kills and restarts.")
    ] = False,
    scenario: Annotated[
        list[str] | None,
        typer.Option(
            metavar="NAME",
            help="freeze, cut, takeover, restart or kill; may be given again. [default: all]",
            show_default=False,
        ),
    ] = None,
    rounds: Annotated[int, typer.Option(metavar="N", help="All of it so many times.")] = 1,
    size: Annotated[str, typer.Option(metavar="SIZE", help="What each of two processes saves in a step.")] = "8MiB",
    writer: Annotated[
        list[str] | None,
        typer.Option(
            metavar="URI",
            help="Another address of a member, by which the job that has the accidents reaches it: through another "
            "portal or controller. Once for each member, in their order.",
            show_default=False,
        ),
    ] = None,
    restart_command: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="For the shell: restarts the target, better without taking leave. Without it a terminal is asked.",
            show_default=False,
        ),
    ] = None,
    cut_command: Annotated[
        str | None,
        typer.Option(
            metavar="COMMAND",
            help="For the shell: cuts the path of the writer (not ours). Without it a relay on this machine stands in "
            "that path.",
            show_default=False,
        ),
    ] = None,
    heal_command: Annotated[
        str | None, typer.Option(metavar="COMMAND", help="For the shell: undoes --cut-command.", show_default=False)
    ] = None,
    heartbeat: Annotated[
        float, typer.Option(metavar="SECONDS", help="Of every session; five missed ones mean death.")
    ] = 1.0,
    yes: Annotated[
        bool, typer.Option("--yes", "-y", help="Destroy what the members hold. What is there is lost.")
    ] = False,
    html: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Write the report as one HTML page, too.", show_default=False)
    ] = None,
    json: Annotated[bool, typer.Option("--json", help="Print the report as JSON; all else goes to stderr.")] = False,
) -> None:
    """Can this storage be trusted? Stops a writer, cuts it off, shuts it out, kills it and restarts the target.

    On a scratch volume, which it makes: a job of two processes saves, has an accident in the middle of a save, and
    another session takes over. Then the late writes come. Says which of them the target refused, looks at the bytes on
    the media whether one moved, and reads every step that was acknowledged, bit for bit.

    Exit status 0: trusted with all that was tried; 1: not trusted; 2: it was asked for something that cannot be meant;
    3: nothing can be said of it: it cannot be reached, or nothing could be tried.

    Example: `headrace drill --embedded`
    """
    from headrace.cli.output import check_page, print_result
    from headrace.cli.progress import Progress
    from headrace.drill.page import build
    from headrace.drill.report import FENCES, NOT_TRUSTED
    from headrace.drill.run import SCENARIOS, DrillOptions, run_drill
    from headrace.errors import HeadraceError, UsageError
    from headrace.volume.media.members import addresses

    check_page(html)
    if embedded == bool(members):
        raise UsageError(
            "on which storage?", expected="the address of each member, or --embedded",
            found="both" if embedded else "neither",
        )  # fmt: skip
    if embedded and (writer or restart_command or cut_command):
        raise UsageError("--embedded has a target and a path of its own", expected="no commands, no --writer")
    names = list(dict.fromkeys(scenario or ["all"]))
    options = DrillOptions(
        uris=addresses(members) if members else [],
        writer_uris=addresses(writer) if writer else [],
        scenarios=list(SCENARIOS) if "all" in names else names,
        rounds=rounds,
        shard_bytes=parse_size("--size", size),
        heartbeat_s=heartbeat,
        destroy=yes,
        restart_command=restart_command,
        cut_command=cut_command,
        heal_command=heal_command,
    )
    ask = _ask if sys.stdin.isatty() and sys.stderr.isatty() and not json else None
    try:
        with Progress("drill", quiet=json) as progress:
            report = run_drill(
                options,
                tell=lambda text: progress.show(0.0, text),
                say=(lambda line: None) if json else progress.say,
                ask=ask,
            )
    except UsageError:
        raise
    except HeadraceError as error:
        error.exit_status = NOTHING_SAID
        raise

    def text() -> None:
        if report.fence:
            print(f"fenced: {report.fence}, {FENCES.get(report.fence, '')}")
        print(report.sentence)

    print_result(json=report.to_json if json else None, text=text, html=html, page=lambda: build(report).html())
    if not report.trusted:
        raise typer.Exit(1 if NOT_TRUSTED in report.verdicts else NOTHING_SAID)


def _ask(what: str, patience_s: float) -> bool:
    """A person at the terminal does it, and says so."""
    import select
    import termios

    # An Enter that was pressed before is no answer to this.
    with contextlib.suppress(termios.error):
        termios.tcflush(sys.stdin, termios.TCIFLUSH)
    print(f"\nnow {what}, then press Enter (within {patience_s:g} s)", file=sys.stderr, flush=True)
    if not select.select([sys.stdin], [], [], patience_s)[0]:
        return False
    return bool(sys.stdin.readline())
