"""`headrace volume cat`: an object's bytes on standard output."""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING, Annotated

import typer

from headrace.cli.volume.common import Degraded, VolumeOption, open_reading

if TYPE_CHECKING:
    from headrace.volume import Volume

#: Read at a time; the next piece is on its way while one is written.
PIECE_BYTES = 8 << 20


def cat(
    name: Annotated[str, typer.Argument(metavar="NAME", help="The object.", show_default=False)],
    members: VolumeOption = None,
    offset: Annotated[int, typer.Option(metavar="BYTES", help="Begin here.")] = 0,
    length: Annotated[
        int | None, typer.Option(metavar="BYTES", help="So many bytes. [default: to the end]", show_default=False)
    ] = None,
    degraded: Degraded = False,
    json: Annotated[bool, typer.Option("--json", help="Print JSON: the name, the range, the bytes in base64.")] = False,
) -> None:
    """Write an object to standard output; every block is verified before it is written.

    Example: `headrace volume cat models/demo.safetensors --volume file:/data/a.img > demo.safetensors`
    """
    from headrace.errors import UsageError

    if sys.stdout.isatty() and not json:
        raise UsageError("an object is bytes and standard output a terminal", next_step="redirect it: ... > FILE")
    with open_reading(members, degraded=degraded) as volume:
        size = volume.stat(name).length_bytes
        end = size if length is None else offset + length
        if not 0 <= offset <= end <= size:
            raise UsageError(
                "the range leaves the object", where=f"object {name!r}", expected=f"within {size} bytes",
                found=f"{end - offset} bytes from {offset}",
            )  # fmt: skip
        if json:
            import base64

            from headrace.cli.output import print_json

            data = base64.b64encode(volume.read(name, offset, end - offset)).decode()
            print_json({"name": name, "offset": offset, "length_bytes": end - offset, "base64": data})
            return
        _stream(volume, name, offset, end)
        sys.stdout.buffer.flush()


def _stream(volume: Volume, name: str, offset: int, end: int) -> None:
    from itertools import cycle

    buffers = cycle([memoryview(bytearray(min(PIECE_BYTES, end - offset))) for _ in range(2)])
    before = None
    info = volume.stat(name)
    for start in range(offset, end, PIECE_BYTES):
        piece = next(buffers)[: min(PIECE_BYTES, end - start)]
        now = volume.submit_read(info, [start], [len(piece)], [piece], [0]), piece
        if before is not None:
            before[0].wait()
            sys.stdout.buffer.write(before[1])
        before = now
    if before is not None:
        before[0].wait()
        sys.stdout.buffer.write(before[1])
