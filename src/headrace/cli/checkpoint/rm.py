"""`headrace checkpoint rm`: checkpoints end, all in one commit."""

from __future__ import annotations

from typing import Annotated

import typer

from headrace.cli.checkpoint.common import Checkpoints, parsed
from headrace.cli.volume.common import (
    AsJson,
    TakeOver,
    Unfenced,
    VolumeOption,
    holding,
    open_reading,
    open_writing,
    shown,
)


def rm(
    checkpoints: Checkpoints,
    members: VolumeOption = None,
    dry_run: Annotated[bool, typer.Option("--dry-run", "-n", help="Say what would be deleted, and stop.")] = False,
    takeover: TakeOver = False,
    unfenced: Unfenced = False,
    json: AsJson = False,
) -> None:
    """Delete checkpoints: all of them in one commit, or none. Pinned ones are refused.

    Model files in the volume that were made of them keep what they share.

    Example: `headrace checkpoint rm pretrain/step-1000 pretrain/step-2000 --volume file:/data/a.img`
    """
    from headrace.checkpoint import delete_checkpoints
    from headrace.checkpoint.retention import check_deletable
    from headrace.cli.output import print_json
    from headrace.units import format_bytes

    ids = parsed(checkpoints)
    with open_reading(members) if dry_run else open_writing(members) as volume:
        # What can be refused is refused before the volume is held for writing.
        gone = [entry for id in ids for entry in check_deletable(volume, id)]
        if not dry_run:
            with holding(volume, "rm", takeover, unfenced) as session:
                delete_checkpoints(session, ids)
    size = sum(entry.length_bytes for entry in gone)
    if json:
        names = [str(id) for id in ids]
        print_json({"deleted": not dry_run, "checkpoints": names, "objects": len(gone), "bytes": size})
        return
    for id in ids:
        print(f"{'would delete' if dry_run else 'deleted'} {shown(str(id))}")
    print(f"{len(ids):,} checkpoint{'' if len(ids) == 1 else 's'}, {format_bytes(size)}")
