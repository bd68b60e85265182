"""`headrace volume stat`: everything about one object."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.volume.common import AsJson, VolumeOption, open_reading, shown

if TYPE_CHECKING:
    from headrace.volume.inspect import ObjectDetails

#: Extents shown to people; all of them with --json.
_SHOWN_EXTENTS = 16


def stat(
    names: Annotated[list[str], typer.Argument(metavar="NAME...", help="The objects.", show_default=False)],
    members: VolumeOption = None,
    json: AsJson = False,
) -> None:
    """Everything about an object: size, commit, birth, checksums, and where it lies on each member.

    `--json`: one JSON object a line, with every extent.

    Example: `headrace volume stat models/demo.safetensors --volume file:/data/a.img`
    """
    from headrace.cli.output import print_facts, print_json
    from headrace.volume.inspect import details_of

    with open_reading(members) as volume:
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

    checksums = f"{found.checksum_count:,} of CRC32C, one for each {format_bytes(found.checksum_block_bytes)}"
    if found.table_page_bytes:
        checksums += f", in a table of {format_bytes(found.table_page_bytes)} pages with {len(found.roots):,} roots"
    facts = {
        "name": shown(found.name),
        "length": f"{format_bytes(found.length_bytes)} ({found.length_bytes:,} bytes)",
        "space taken": format_bytes(found.stored_bytes),
        "created": datetime.fromtimestamp(found.created_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        "commit": str(found.sequence),
        "birth": f"{found.birth:#x}: number {found.birth & 0xFFFFFFFF} of session {found.birth >> 32}",
        "checksums": checksums,
        "roots": " ".join(f"{root:08x}" for root in found.roots[:8]) + (" ..." if len(found.roots) > 8 else ""),
    }
    for number, extent in enumerate(found.extents[:_SHOWN_EXTENTS]):
        facts[f"extent {number}"] = (
            f"member {extent.member} offset {extent.offset}, {format_bytes(extent.length_bytes)}: {extent.holds}"
        )
    if len(found.extents) > _SHOWN_EXTENTS:
        facts["..."] = f"{len(found.extents) - _SHOWN_EXTENTS:,} more; --json has all of them"
    return facts
