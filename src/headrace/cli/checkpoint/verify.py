"""`headrace checkpoint verify`: is every byte of a checkpoint good."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.cli.checkpoint.common import Checkpoint, chosen
from headrace.cli.volume.common import AsJson, Degraded, VolumeOption, open_reading, shown

if TYPE_CHECKING:
    from headrace.checkpoint.inspect import Damage


def verify(
    checkpoint: Checkpoint, members: VolumeOption = None, degraded: Degraded = False, json: AsJson = False
) -> None:
    """Read every byte of a checkpoint against its checksums. Exit status 1 if anything is damaged; each tensor that is
    damaged is named.

    Example: `headrace checkpoint verify pretrain --volume file:/data/a.img`
    """
    import time

    from headrace.checkpoint import inspect, read_manifest
    from headrace.cli.output import print_json
    from headrace.cli.progress import Progress, speed
    from headrace.errors import VolumeDamaged
    from headrace.units import format_bytes

    started = time.monotonic()
    damages = []
    done = 0
    with open_reading(members, degraded=degraded) as volume, Progress("verifying") as progress:
        id = chosen(volume, checkpoint)
        manifest = read_manifest(volume, id)
        total = sum(entry.length_bytes for entry in manifest.objects)
        for checked in inspect.verify(volume, manifest):
            done += checked.length_bytes
            for damage in checked.damages:
                damages.append(damage)
                if not json:
                    progress.say(f"DAMAGED {_named(damage)}: {shown(str(damage.problem))}")
            progress.show(done / max(total, 1), speed(done, total, time.monotonic() - started))
    if json:
        print_json(
            {
                "checkpoint": str(id),
                "bytes": done,
                "seconds": time.monotonic() - started,
                "damaged": [{"name": damage.name, "error": str(damage.problem)} for damage in damages],
            }
        )
    elif not damages:
        print(f"{shown(str(id))}, {format_bytes(done)}: every byte is good")
    if damages:
        count = len(damages)
        raise VolumeDamaged(
            f"{count:,} {'is' if count == 1 else 'are'} damaged of checkpoint {shown(str(id))}, the first: "
            f"{_named(damages[0])}",
            next_step="go back to the step before it, or restore it from another copy",
        )


def _named(damage: Damage) -> str:
    return "no tensor, bytes between them or on their way" if damage.name is None else shown(damage.name)
