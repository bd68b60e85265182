"""`headrace volume verify`: objects, read as a job reads them, against their checksums."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.volume.common import AsJson, Degraded, Members, open_reading, shown


def verify(
    members: Members = None,
    name: Annotated[
        list[str] | None,
        typer.Option("--name", metavar="NAME", help="This object only; more than once.", show_default=False),
    ] = None,
    prefix: Annotated[str, typer.Option(help="Only names that begin so.")] = "",
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """Read every object and check every block against its checksum. Exit status 1 if anything is damaged.

    It reads as a job does, as fast as the devices go.

    Example: `headrace volume verify file:/data/a.img`
    """
    import time

    from headrace.cli.output import print_json
    from headrace.cli.progress import Progress, speed
    from headrace.errors import VolumeDamaged
    from headrace.units import format_bytes
    from headrace.volume.repair.check import verify_objects

    started = time.monotonic()
    with open_reading(members, degraded=degraded) as volume, Progress("verifying") as progress:
        entries = [volume.stat(one) for one in name] if name else list(volume.list(prefix))
        total = sum(entry.length_bytes for entry in entries)
        damaged = []
        done = 0
        for entry, length, problem in verify_objects(volume, entries):
            done += length
            if problem is not None:
                damaged.append((entry.name, problem))
                if not json:
                    progress.say(f"DAMAGED {shown(entry.name)}: {problem}")
            progress.show(done / max(total, 1), speed(done, total, time.monotonic() - started))
    if json:
        print_json(
            {
                "objects": len(entries),
                "bytes": total,
                "seconds": time.monotonic() - started,
                "damaged": [{"name": object_name, "error": str(problem)} for object_name, problem in damaged],
            }
        )
    elif not damaged:
        print(f"{len(entries):,} object{'' if len(entries) == 1 else 's'}, {format_bytes(total)}: every block is good")
    if damaged:
        raise VolumeDamaged(
            f"{len(damaged)} of {len(entries)} objects are damaged, the first: {shown(damaged[0][0])}",
            next_step="restore them from another copy",
        )
