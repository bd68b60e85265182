"""`headrace volume ls`: the objects of a volume, one a line, as they are found."""

from __future__ import annotations

import sys
from enum import Enum
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.volume.common import AsJson, Members, open_reading, shown

if TYPE_CHECKING:
    from headrace.volume import ObjectInfo


class Sort(str, Enum):
    name = "name"
    size = "size"
    time = "time"


def ls(
    members: Members = None,
    prefix: Annotated[str, typer.Option(help="Only names that begin so.")] = "",
    long: Annotated[
        bool, typer.Option("--long", "-l", help="Also space taken, time, commit, checksum block, birth.")
    ] = False,
    sort: Annotated[Sort, typer.Option(help="Order: by name, by size or time the largest first.")] = Sort.name,
    reverse: Annotated[bool, typer.Option("--reverse", "-r", help="The other way round.")] = False,
    json: AsJson = False,
) -> None:
    """The objects of a volume, one a line: length and name, in order of names. `--json`: one JSON object a line.

    Where no terminal is, columns are separated by tabs, and lengths are bytes, too.

    Example: `headrace volume ls file:/data/a.img --prefix run/`
    """
    from headrace.units import format_bytes

    write = sys.stdout.write
    count = total = 0
    terminal = sys.stdout.isatty()
    with open_reading(members) as volume:
        entries = iter(volume.list(prefix))
        if sort is Sort.size:
            entries = iter(sorted(entries, key=lambda entry: entry.length_bytes, reverse=not reverse))
        elif sort is Sort.time:
            entries = iter(sorted(entries, key=lambda entry: entry.created_s, reverse=not reverse))
        elif reverse:
            entries = iter(sorted(entries, key=lambda entry: entry.name, reverse=True))
        for entry in entries:
            count += 1
            total += entry.length_bytes
            if json:
                write(_as_json(entry))
            elif terminal:
                extra = "  ".join(_details(entry)) + "  " if long else ""
                write(f"{format_bytes(entry.length_bytes):>10}  {extra}{shown(entry.name)}\n")
            else:
                columns = [format_bytes(entry.length_bytes), str(entry.length_bytes)]
                write("\t".join([*columns, *(_details(entry) if long else []), shown(entry.name)]) + "\n")
    if terminal and not json:
        write(f"{count:,} object{'' if count == 1 else 's'}, {format_bytes(total)}\n")


def _details(entry: ObjectInfo) -> list[str]:
    from datetime import datetime, timezone

    from headrace.units import format_bytes

    return [
        f"{format_bytes(entry.stored_bytes) if entry.birth else 'shared':>10}",
        datetime.fromtimestamp(entry.created_s, timezone.utc).strftime("%Y-%m-%d %H:%M:%S UTC"),
        f"{entry.sequence:>6}",
        f"{format_bytes(entry.checksum_block_bytes) if entry.birth else '-':>9}",
        f"{f'{entry.birth:x}' if entry.birth else '-':>16}",
    ]


def _as_json(entry: ObjectInfo) -> str:
    import json

    return (
        json.dumps(
            {
                "name": entry.name,
                "length_bytes": entry.length_bytes,
                "stored_bytes": entry.stored_bytes,
                "sequence": entry.sequence,
                "created_s": entry.created_s,
                "checksum_block_bytes": entry.checksum_block_bytes,
                "birth": entry.birth,
            }
        )
        + "\n"
    )
