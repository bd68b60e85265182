"""`headrace volume ls`: the objects of a volume, one a line, as they are found."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from enum import Enum
from typing import TYPE_CHECKING, Annotated, Any

import typer

from headrace.cli.volume.common import AsJson, Degraded, Members, open_reading, shown

if TYPE_CHECKING:
    from headrace.volume import Listing, ObjectInfo, Volume


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
    degraded: Degraded = False,
    json: AsJson = False,
) -> None:
    """The objects of a volume, one a line: length and name, in order of names. `--json`: one JSON object a line.

    Where no terminal is, columns are separated by tabs, and lengths are bytes, too.

    Example: `headrace volume ls file:/data/a.img --prefix run/`
    """
    from headrace.units import format_bytes

    terminal = sys.stdout.isatty()
    count = total = 0
    with open_reading(members, degraded=degraded) as volume:
        for piece, order in _pieces(volume, prefix, sort, reverse):
            lines = []
            for index in order:
                name, length = piece.name(index), int(piece.length_bytes[index])
                if json:
                    head = {"name": name, "length_bytes": length, "sequence": int(piece.sequence[index]),
                            "created_s": float(piece.created_ns[index]) / 1e9}  # fmt: skip
                    lines.append(_as_json(head, volume.stat(name) if long else None))
                    continue
                details = _details(volume.stat(name)) if long else []
                if terminal:
                    lines.append("  ".join([f"{format_bytes(length):>10}", *details, shown(name)]))
                else:
                    lines.append("\t".join([format_bytes(length), str(length), *details, shown(name)]))
            count += len(piece)
            total += int(piece.length_bytes.sum())
            sys.stdout.write("".join(line + "\n" for line in lines))
    if terminal and not json:
        print(f"{count:,} object{'' if count == 1 else 's'}, {format_bytes(total)}")


def _pieces(volume: Volume, prefix: str, sort: Sort, reverse: bool) -> Iterator[tuple[Listing, Iterable[int]]]:
    """Arrays, not an object each: a volume may have a million. In the order of names they come as they are found; for
    any other all of them are needed first.
    """
    import numpy as np

    if sort is Sort.name and not reverse:
        for piece in volume.listings(prefix):
            yield piece, range(len(piece))
        return
    found = volume.listing(prefix)
    order = np.arange(len(found))
    if sort is not Sort.name:
        order = np.argsort(found.length_bytes if sort is Sort.size else found.created_ns, kind="stable")[::-1]
    yield found, (order[::-1] if reverse else order).tolist()


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
    return json.dumps(head)
