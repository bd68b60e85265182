"""`headrace volume create`: an empty volume over some devices."""

from __future__ import annotations

from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.sizes import parse_size
from headrace.cli.volume.common import AsJson, Members, addresses_of

if TYPE_CHECKING:
    from headrace.volume.layout import Superblock


def create(
    members: Members = None,
    name: Annotated[str, typer.Option(help="A name for people.")] = "",
    stripe: Annotated[
        str, typer.Option(metavar="SIZE", help="Bytes on one member before the next one's turn.")
    ] = "1MiB",
    log: Annotated[
        str | None,
        typer.Option(
            metavar="SIZE",
            help="Bytes of a log area. [default: a 64th of a member, 128 KiB to 1 MiB]",
            show_default=False,
        ),
    ] = None,
    force: Annotated[
        bool, typer.Option("--force", help="Overwrite what the devices hold: a volume, a file system. It is lost.")
    ] = False,
    dry_run: Annotated[
        bool, typer.Option("--dry-run", "-n", help="Check the devices, show the plan, write nothing.")
    ] = False,
    json: AsJson = False,
) -> None:
    """Make an empty volume over these devices.

    Everything is checked before a byte is written: sizes, logical blocks, whether a device may be written to, was given
    twice, or holds something.

    Example: `headrace volume create 'nvme+tcp://10.0.0.1:4420/nqn.2026-01.org.example:a?nsid=1' --name training`
    """
    from headrace.cli.volume.info import show_info
    from headrace.volume import Volume
    from headrace.volume.create import plan_volume
    from headrace.volume.media.members import close_all, open_all

    stripe_bytes = parse_size("--stripe", stripe)
    log_bytes = None if log is None else parse_size("--log", log)
    devices = open_all(addresses_of(members), read_only=dry_run)
    try:
        if dry_run:
            plan = plan_volume(devices, name=name, stripe_bytes=stripe_bytes, log_bytes=log_bytes, force=force)
            _show_plan(plan, [device.uri for device in devices], json)
            return
        made = Volume.create(devices=devices, name=name, stripe_bytes=stripe_bytes, log_bytes=log_bytes, force=force)
        with made as volume:
            show_info(volume, json)
    finally:
        close_all(devices)


def _show_plan(plan: list[Superblock], uris: list[str], json: bool) -> None:
    from headrace.cli.output import print_facts, print_json
    from headrace.units import format_bytes

    first = plan[0]
    rows = [
        {
            "index": index,
            "uri": uri,
            "size_bytes": row.size_bytes,
            "data_bytes": row.data_end - row.data_offset,
            "log_copies": first.log_member.count(index),
        }
        for index, (uri, row) in enumerate(zip(uris, first.members, strict=True))
    ]
    capacity = sum(int(row.data_end - row.data_offset) for row in first.members)
    if json:
        print_json({"dry_run": True, "name": first.name, "stripe_bytes": first.stripe_bytes,
                    "log_bytes": first.area_bytes, "capacity_bytes": capacity, "members": rows})  # fmt: skip
        return
    facts = {"plan": "nothing was written", "name": first.name}
    for row in rows:
        copies = row["log_copies"]
        facts[f"member {row['index']}"] = f"{row['uri']} ({format_bytes(float(str(row['size_bytes'])))}" + (
            ", log copy)" if copies == 1 else ", both log copies)" if copies else ")"
        )
    facts["stripe"] = format_bytes(first.stripe_bytes)
    facts["log"] = f"{format_bytes(first.area_bytes)} an area"
    facts["capacity"] = format_bytes(capacity)
    print_facts(facts)
