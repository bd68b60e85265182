"""`headrace volume takeover`: end the session of a job that cannot do it itself."""

from __future__ import annotations

import time
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.volume.common import AsJson, Degraded, Members, Unfenced, Yes, addresses_of, confirm, shown
from headrace.cli.volume.info import last_beat, when

if TYPE_CHECKING:
    from headrace.volume import Volume, WriterInfo

#: Longest look at a heart, in seconds.
_LOOK_S = 10.0


def takeover(
    members: Members = None,
    now: Annotated[
        bool, typer.Option("--now", help="Also from a job whose heart still beats: it is shut out.")
    ] = False,
    keep: Annotated[
        int | None,
        typer.Option(
            "--keep",
            metavar="MEMBER",
            help="Where members went on without each other: the number of one whose history goes on. The other side's "
            "commits are given up.",
            show_default=False,
        ),
    ] = None,
    yes: Yes = False,
    unfenced: Unfenced = False,
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """Take a volume over from the job that holds it for writing, and let it go: the next job opens it at once.

    It shows who holds the volume and since when, when its last beat was due, and whether its heart beats, and asks
    first. While it beats, only `--now` takes the volume away: what that job has not committed by then is lost to it.

    Example: `headrace volume takeover file:/data/a.img file:/data/b.img`
    """
    from headrace.cli.output import print_json
    from headrace.errors import WriterActive
    from headrace.volume import Volume

    number, beats, looked_s = None, False, 0.0
    with Volume.open(addresses_of(members), write=True, keep=keep, degraded=degraded) as volume:
        writer = volume.info().writer
        held = writer is not None and writer.state == "active"
        if held and writer is not None:
            beats, looked_s = _beats(volume)
            heart = f"{'its heart beats' if beats else 'no beat'} in {looked_s:.1f} s; {last_beat(writer)}"
            who = f"{_who(writer)}; {heart}"
            if beats and not now:
                raise WriterActive(
                    "the volume is held by a job that lives", where=", ".join(volume.uris), found=who,
                    next_step="end that job, or give --now to shut it out",
                )  # fmt: skip
            if yes and not json:
                print(who)
            confirm(f"{who}. Take the volume over?", yes)
            how = "now" if now else "if-dead"
            number = _session(volume, how, unfenced)
        elif keep is not None:
            confirm(f"Keep the history of member {keep}, and give up what others committed without it?", yes)
            number = _session(volume, "if-dead", unfenced)
        if json:
            was = {"run_id": writer.run_id, "host": writer.host, "pid": writer.pid, "session": writer.session,
                   "started_s": writer.started_s, "last_beat_s": writer.last_beat_s, "beats": beats,
                   "watched_s": looked_s} if held and writer else None  # fmt: skip
            print_json({"taken": held, "from": was, "session": number})
        elif held:
            print(f"taken over, as session {number}; the next one opens at once")
        elif keep is not None:
            print(f"the history of member {keep} goes on, since session {number}")
        else:
            print("nobody holds the volume: the next session opens at once")


def _session(volume: Volume, how: str, unfenced: bool) -> int:
    """Its number; it has ended."""
    with volume.session(run_id="headrace volume takeover", takeover=how, unfenced=unfenced) as session:
        return session.number


def _who(writer: WriterInfo) -> str:
    return (
        f"run {shown(writer.run_id)!r}, process {writer.pid} on {shown(writer.host)}, holds it since "
        f"{when(writer.started_s)} as session {writer.session}"
    )


def _beats(volume: Volume) -> tuple[bool, float]:
    """Did the heart of the holder beat while we looked, and how long that was in seconds."""
    from headrace.volume.writing.heartbeat import HeartbeatBlock

    block = HeartbeatBlock(volume.superblock, volume.devices)
    first = block.read()
    started = time.monotonic()
    if first is None:
        return False, 0.0
    most = min(2.5 * first.interval_ns / 1e9, _LOOK_S)
    while (looked := time.monotonic() - started) < most:
        time.sleep(min(0.1, most))
        found = block.read()
        if found is not None and (found.session, found.beat) != (first.session, first.beat):
            return True, looked
    return False, looked
