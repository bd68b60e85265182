"""What a namespace keeps its bytes in, as a command line says it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.cli.sizes import parse_size

if TYPE_CHECKING:
    from headrace.fabric import FileMedia, MemoryMedia


def parse_media(text: str, direct: str = "auto") -> FileMedia | MemoryMedia:
    """`mem:SIZE`, `PATH:SIZE` (a file that is made where there is none) or `PATH` (one that is there). `direct`: of
    files, as `FileMedia` has it."""
    from pathlib import Path

    from headrace.errors import UsageError
    from headrace.fabric import FileMedia, MemoryMedia
    from headrace.units import parse_bytes

    path, colon, size = text.rpartition(":")
    if colon and path == "mem":
        return MemoryMedia(size_bytes=parse_size("mem:SIZE", size))
    if colon and path:
        try:
            return FileMedia(path=path, size_bytes=parse_bytes(size), create=True, direct=direct)
        except ValueError:
            # What follows the last colon is no size: then the colon belongs to the name of the file.
            pass
    if not Path(text).exists():
        raise UsageError(
            "no such file or block device", where=text, next_step=f"to make a file, give its size: {text}:1GiB"
        )
    return FileMedia(path=text, direct=direct)
