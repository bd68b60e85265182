"""What is there, before anything is measured: a folder or file, and the files below it.

    python -m headrace.bench.look place /mnt/data
    python -m headrace.bench.look files:1073741824 /mnt/data

prints one line of JSON, for `headrace.accidents.apart`: where a server may be away it is asked in a process of its own,
since whoever touches such a mount waits with it.
"""

from __future__ import annotations

import json
import math
import os
import stat
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from typing import Any

#: Folders that are made by the bench begin so.
PREFIX = ".headrace-bench-"
#: Files that are looked at below a folder, and those that are read, at most.
_LOOKED_AT = 200_000
_READ = 20_000
#: Seconds between two words of how far it is.
_EVERY_S = 1.0

#: Where it is.
Tell = Callable[[str], None]


def look(kind: str, path: str, tell: Tell = lambda at: None) -> dict[str, Any]:
    """In this process. `{"error": text}` where nothing is there, or what is there cannot be asked."""
    try:
        if kind == "place":
            return _place(path)
        return {"files": _files(path, int(kind.partition(":")[2]), tell)}
    except OSError as error:
        return {"error": error.strerror or str(error)}


def _place(path: str) -> dict[str, Any]:
    real = os.path.realpath(path)
    found = os.stat(real)  # noqa: PTH116
    said: dict[str, Any] = {"path": real, "mode": found.st_mode, "may_write": os.access(real, os.W_OK | os.X_OK)}
    if stat.S_ISDIR(found.st_mode) or stat.S_ISREG(found.st_mode):
        room = os.statvfs(real)
        said["free_bytes"] = room.f_bavail * room.f_frsize
    return said


def _files(path: str, total_bytes: int, tell: Tell) -> list[tuple[str, int, int]]:
    """Path, length and bytes on a medium of files that may be read, until there are `total_bytes` of them."""
    kept: list[tuple[str, int, int]] = []
    total = 0
    for name, found in _found(path, tell):
        kept.append((name, found.st_size, min(found.st_size, found.st_blocks * 512)))
        total += found.st_size
        if total >= total_bytes or len(kept) >= _READ:
            break
    return kept


def _found(path: str, tell: Tell) -> Iterator[tuple[str, os.stat_result]]:
    """Regular files that may be read; links are not followed."""
    found = os.stat(path)  # noqa: PTH116
    if stat.S_ISREG(found.st_mode):
        yield path, found
        return
    looked = 0
    for folder, folders, names in os.walk(path):
        tell(folder)
        folders[:] = sorted(name for name in folders if not name.startswith(PREFIX))
        for name in sorted(names):
            looked += 1
            if looked > _LOOKED_AT:
                return
            tell(folder)
            one = f"{folder}/{name}"
            with suppress(OSError):
                found = os.lstat(one)
                if stat.S_ISREG(found.st_mode) and found.st_size and os.access(one, os.R_OK):
                    yield one, found


def _main() -> None:
    said_s = -math.inf

    def tell(at: str) -> None:
        nonlocal said_s
        if time.monotonic() - said_s >= _EVERY_S:
            said_s = time.monotonic()
            print(json.dumps({"at": at}), flush=True)

    print(json.dumps(look(sys.argv[1], sys.argv[2], tell)))


if __name__ == "__main__":
    _main()
