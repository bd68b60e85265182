"""`headrace checkpoint show`: what is in one checkpoint."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.checkpoint.common import Checkpoint, chosen, when
from headrace.cli.volume.common import AsJson, Degraded, VolumeOption, open_reading, shown

if TYPE_CHECKING:
    from headrace.checkpoint import Manifest
    from headrace.checkpoint.retention import Pin


def show(
    checkpoint: Checkpoint,
    members: VolumeOption = None,
    prefix: Annotated[str, typer.Option(help="Only names that begin so.")] = "",
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """The tensors of a checkpoint (name, dtype, shape of all of it, shards, bytes), and what else is in it. Reads the
    manifest only.

    Example: `headrace checkpoint show pretrain/step-1000 --volume file:/data/a.img`
    """
    from headrace.checkpoint import read_manifest
    from headrace.checkpoint.inspect import rows_of
    from headrace.checkpoint.retention import read_pin
    from headrace.cli.output import print_facts, print_json, print_table
    from headrace.units import format_bytes

    with open_reading(members, degraded=degraded) as volume:
        id = chosen(volume, checkpoint)
        manifest, pin = read_manifest(volume, id), read_pin(volume, id)
    tensors, blobs = rows_of(manifest)
    tensors = [row for row in tensors if row.name.startswith(prefix)]
    blobs = [row for row in blobs if row.name.startswith(prefix)]
    if json:
        print_json(
            {
                **vars(manifest.summary),
                "checkpoint": str(id),
                "pin": None if pin is None else vars(pin),
                "objects": {entry.name: entry.length_bytes for entry in manifest.objects},
                "tensors": [{**vars(row), "shape": list(row.shape)} for row in tensors],
                "others": [vars(row) for row in blobs],
            }
        )
        return
    print_facts(_facts(manifest, pin))
    print()
    rows = [
        [shown(r.name), r.dtype, "x".join(map(str, r.shape)) or "scalar", f"{r.shards:,}", format_bytes(r.length_bytes)]
        for r in tensors
    ]
    rows += [[shown(row.name), "bytes", "-", "-", format_bytes(row.length_bytes)] for row in blobs]
    print_table(("name", "dtype", "shape", "shards", "size"), rows, right=(3, 4), page=True)


def _facts(manifest: Manifest, pin: Pin | None) -> dict[str, str]:
    from headrace.units import format_bytes

    summary = manifest.summary
    facts = {
        "checkpoint": shown(str(summary.id)),
        "saved": f"{when(summary.created_unix)}, by {summary.ranks:,} rank{'' if summary.ranks == 1 else 's'}",
        "size": f"{format_bytes(summary.data_bytes)} in {len(manifest.objects):,} objects",
        "tensors": f"{len(manifest.tensors):,}, in {summary.item_count - len(manifest.blobs):,} shards",
        "others": f"{len(manifest.blobs):,}",
    }
    if pin is not None:
        since = "" if pin.pinned_unix is None else f"since {when(pin.pinned_unix)}"
        facts["pinned"] = ": ".join(shown(text) for text in (since, pin.note) if text) or "yes"
    return facts
