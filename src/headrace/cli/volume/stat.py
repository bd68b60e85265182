"""`headrace volume stat`: everything about one object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.volume.common import AsJson, Degraded, VolumeOption, open_reading, shown

if TYPE_CHECKING:
    from headrace.volume.inspect import BlobDetails, ObjectDetails

#: Slices, blobs, extents shown to people; all of them with --json.
_SHOWN = 16


def stat(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The objects.", show_default=False)],
    members: VolumeOption = None,
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """Everything about an object: size, commit, birth, checksums, and where it lies on each member.

    `--json`: one JSON object a line, with every extent.

    Example: `headrace volume stat models/demo.safetensors --volume file:/data/a.img`
    """
    from headrace.cli.output import print_facts, print_json
    from headrace.volume.inspect import details_of

    with open_reading(members, degraded=degraded) as volume:
        for number, name in enumerate(names):
            found = details_of(volume, name)
            if json:
                print_json(_as_dict(found))
                continue
            if number:
                print()
            print_facts(_facts(found))


def _as_dict(found: ObjectDetails) -> dict[str, Any]:
    from dataclasses import asdict

    return asdict(found)


def _facts(found: ObjectDetails) -> dict[str, str]:
    from datetime import datetime, timezone

    from headrace.units import format_bytes

    facts = {
        "name": shown(found.name),
        "length": f"{format_bytes(found.length_bytes)} ({found.length_bytes:,} bytes)",
        "created": datetime.fromtimestamp(found.created_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "commit": str(found.sequence),
        "made of": "a blob of its own" if found.own else f"{len(found.slices):,} slices of blobs that others may share",
    }
    if not found.own:
        for number, piece in enumerate(found.slices[:_SHOWN]):
            facts[f"slice {number}"] = f"{piece.length_bytes:,} bytes from {piece.start:,} of blob {piece.birth:#x}"
        if len(found.slices) > _SHOWN:
            facts["..."] = f"{len(found.slices) - _SHOWN:,} more slices; --json has all of them"
    for blob in found.blobs[:_SHOWN]:
        facts |= _blob_facts(blob)
    if len(found.blobs) > _SHOWN:
        facts[" ..."] = f"{len(found.blobs) - _SHOWN:,} more blobs; --json has all of them"
    return facts


def _blob_facts(blob: BlobDetails) -> dict[str, str]:
    from headrace.units import format_bytes

    name = f"blob {blob.birth:#x}"
    checksums = f"{blob.checksum_count:,} of CRC32C, one for each {format_bytes(blob.checksum_block_bytes)}"
    if blob.table_page_bytes:
        checksums += f", in a table of {format_bytes(blob.table_page_bytes)} pages with {len(blob.roots):,} roots"
    facts = {
        name: f"number {blob.birth & 0xFFFFFFFF} of session {blob.birth >> 32}: {format_bytes(blob.length_bytes)}, "
        f"{format_bytes(blob.stored_bytes)} on the members",
        f"{name} checksums": checksums,
        f"{name} roots": " ".join(f"{root:08x}" for root in blob.roots[:8]) + (" ..." if len(blob.roots) > 8 else ""),
    }
    for number, extent in enumerate(blob.extents[:_SHOWN]):
        facts[f"{name} extent {number}"] = (
            f"member {extent.member} offset {extent.offset}, {format_bytes(extent.length_bytes)}: {extent.holds}"
        )
    if len(blob.extents) > _SHOWN:
        facts[f"{name} ..."] = f"{len(blob.extents) - _SHOWN:,} more extents; --json has all of them"
    return facts
