"""`headrace volume takeover`: end the session of a job that cannot do it itself."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.volume.common import AsJson, Members, Yes, addresses_of, confirm, shown
from headrace.cli.volume.info import when

if TYPE_CHECKING:
    from headrace.volume import WriterInfo


def takeover(
    members: Members = None,
    now: Annotated[
        bool,
        typer.Option("--now", help="Also from a job whose heart still beats: it is shut out."),
    ] = False,
    yes: Yes = False,
    json: AsJson = False,
) -> None:
    """Take a volume over from the job that holds it for writing, and let it go: the next job opens it at once.

    It shows who holds the volume and asks first. Where the heart of that job still beats, only `--now` takes it away.

    Example: `headrace volume takeover file:/data/a.img file:/data/b.img`
    """
    from headrace.cli.output import print_json
    from headrace.volume import Volume

    with Volume.open(addresses_of(members), write=True) as volume:
        writer = volume.info().writer
        held = writer is not None and writer.state == "active"
        if held and writer is not None:
            confirm(f"{_who(writer)} Take the volume over?", yes)
            with volume.session(run_id="headrace volume takeover", takeover="now" if now else "if-dead") as session:
                number = session.number
        if json:
            was = {"run_id": writer.run_id, "host": writer.host, "pid": writer.pid} if held and writer else None
            print_json({"taken": held, "from": was, "session": number if held else None})
        elif held:
            print(f"taken over, as session {number}; the next one opens at once")
        else:
            print("nobody holds the volume: the next session opens at once")


def _who(writer: WriterInfo) -> str:
    return (
        f"Run {shown(writer.run_id)!r}, process {writer.pid} on {shown(writer.host)}, holds it since "
        f"{when(writer.started_s)} (session {writer.session})."
    )
