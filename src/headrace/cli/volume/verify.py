"""`headrace volume verify`: objects, read as a job reads them, against their checksums."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import chain
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.volume.common import AsJson, Degraded, Members, open_reading, shown

if TYPE_CHECKING:
    from headrace.volume import ObjectInfo


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
        chosen = [volume.stat(one) for one in name or ()]
        # A volume may have a million objects: arrays for the sum, and then a piece of the listing at a time.
        listed = 0 if name else sum(int(piece.length_bytes.sum()) for piece in volume.listings(prefix))
        total = listed + sum(entry.length_bytes for entry in chosen)
        count = 0

        def entries() -> Iterator[ObjectInfo]:
            nonlocal count
            pieces = (piece.infos() for piece in volume.listings(prefix))
            for entry in chosen if name else chain.from_iterable(pieces):
                count += 1
                yield entry

        damaged = []
        done = 0
        for entry, length, problem in verify_objects(volume, entries()):
            done += length
            if problem is not None:
                damaged.append((entry.name, problem))
                if not json:
                    progress.say(f"DAMAGED {shown(entry.name)}: {problem}")
            progress.show(done / max(total, 1), speed(done, total, time.monotonic() - started))
    if json:
        print_json(
            {
                "objects": count,
                "bytes": done,
                "seconds": time.monotonic() - started,
                "damaged": [{"name": object_name, "error": str(problem)} for object_name, problem in damaged],
            }
        )
    elif not damaged:
        print(f"{count:,} object{'' if count == 1 else 's'}, {format_bytes(done)}: every block is good")
    if damaged:
        raise VolumeDamaged(
            f"{len(damaged)} of {count} objects are damaged, the first: {shown(damaged[0][0])}",
            next_step="restore them from another copy",
        )
