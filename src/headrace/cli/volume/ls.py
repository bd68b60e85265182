"""`headrace volume ls`: the objects of a volume, one a line, as they are found."""

from __future__ import annotations

import sys
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

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
    import numpy as np

    from headrace.units import format_bytes

    write = sys.stdout.write
    terminal = sys.stdout.isatty()
    with open_reading(members) as volume:
        # Arrays, not an object each: a volume may have a million.
        found = volume.listing(prefix)
        order = np.arange(len(found))
        if sort is not Sort.name:
            order = np.argsort(found.length_bytes if sort is Sort.size else found.created_ns, kind="stable")[::-1]
        for index in order[::-1] if reverse else order:
            name, length = found.name(int(index)), int(found.length_bytes[index])
            if json:
                head = {"name": name, "length_bytes": length, "sequence": int(found.sequence[index]),
                        "created_s": float(found.created_ns[index]) / 1e9}  # fmt: skip
                write(_as_json(head, volume.stat(name) if long else None))
                continue
            details = _details(volume.stat(name)) if long else []
            if terminal:
                write("  ".join([f"{format_bytes(length):>10}", *details, shown(name)]) + "\n")
            else:
                write("\t".join([format_bytes(length), str(length), *details, shown(name)]) + "\n")
    if terminal and not json:
        total = int(found.length_bytes.sum())
        write(f"{len(found):,} object{'' if len(found) == 1 else 's'}, {format_bytes(total)}\n")


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


def _as_json(head: dict[str, Any], entry: ObjectInfo | None) -> str:
    import json

    if entry is not None:
        # 0 where the object is slices of blobs that others may share.
        head |= {
            "birth": entry.birth,
            "checksum_block_bytes": entry.checksum_block_bytes,
            "stored_bytes": entry.stored_bytes,
        }
    return json.dumps(head) + "\n"
