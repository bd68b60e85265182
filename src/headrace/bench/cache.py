"""Caches between the reader and the medium: what is done about them, and what is left, in words.

dropped   files are written out, then their pages are given back (`posix_fadvise(POSIX_FADV_DONTNEED)`), and the kernel
          is asked how many are left (`mincore`)
direct    reads pass the page cache by (`O_DIRECT`)
warm      everything is read once before

The page cache is this machine's alone. What a server, a target or a drive has in memory of its own cannot be seen from
here, nor dropped; what was written a moment ago may well be there. That is always said.
"""

from __future__ import annotations

import ctypes
import mmap
import os
from collections.abc import Sequence
from contextlib import suppress

import numpy as np

#: How caches are brought before a round.
DROPPED, DIRECT, WARM = "dropped", "direct", "warm"
CACHES = (DROPPED, DIRECT, WARM)
#: File systems that are page cache themselves.
MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
#: Bytes of which residency is asked, at most, of all files together: each 4 KiB is one byte of an answer.
_ASKED_BYTES = 64 << 30
#: A larger share of the pages than this still in memory is told as a failure to drop them.
LITTLE = 0.01
_PAGE = mmap.PAGESIZE


def drop(paths: Sequence[str]) -> None:
    """Write out and give back the pages of these files; what cannot be opened is left to whoever reads it."""
    for path in paths:
        with suppress(OSError):
            file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
            try:
                # Pages that are not on the medium yet cannot be given back.
                with suppress(OSError):
                    os.fsync(file)
                os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)
            finally:
                os.close(file)


def resident(paths: Sequence[str]) -> float | None:
    """The share of these files' bytes that is in the page cache; None where the kernel does not tell.

    From Linux 5.2 on it tells who may write the file only, and says "all of it" to others: those are not asked.
    """
    held = total = 0
    for path in paths:
        if total >= _ASKED_BYTES:
            break
        try:
            if not os.access(path, os.W_OK):
                return None
            found = _pages(path, _ASKED_BYTES - total)
        except OSError:
            return None
        held += found[0]
        total += found[1]
    return held / total if total else None


def _pages(path: str, most: int) -> tuple[int, int]:
    """Bytes in memory, and in all, of the first `most`."""
    file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK)
    try:
        length = min(os.fstat(file).st_size, most)
        if not length:
            return 0, 0
        with mmap.mmap(file, length, flags=mmap.MAP_SHARED, prot=mmap.PROT_READ) as mapped:
            answer = np.zeros(-(-length // _PAGE), np.uint8)
            anchor = np.frombuffer(mapped, np.uint8)
            try:
                libc = ctypes.CDLL(None, use_errno=True)
                failed = libc.mincore(
                    ctypes.c_void_p(anchor.ctypes.data), ctypes.c_size_t(length), ctypes.c_void_p(answer.ctypes.data)
                )
            finally:
                del anchor
            if failed:
                raise OSError(ctypes.get_errno(), "mincore")
            return int(np.count_nonzero(answer & 1)) * _PAGE, len(answer) * _PAGE
    finally:
        os.close(file)


#: Of what is said, where what was read may have come out of this machine's memory.
READ_BEFORE, THROUGH = "read once before", "through the page cache of this machine"
_MEMORY, _LEFT = "files are in memory", "page cache of this machine NOT dropped"


def in_memory(said: str) -> bool:
    """Of an outcome's `cache`: files were in this machine's memory, whether read or written."""
    return said.startswith(_MEMORY)


def may_be_cached(said: str) -> bool:
    """Of an outcome's `cache`: what was read may have come out of this machine's memory, and says little of storage."""
    return any(each in said for each in (READ_BEFORE, THROUGH, _MEMORY, _LEFT))


def state(cache: str, *, left: float | None, memory: bool, remote: str) -> str:
    """In words, for files. `left`: the share that is in the page cache; `memory`: the file system is page cache;
    `remote`: whose memory lies behind it, "" where nobody's does."""
    if memory:
        said = f"{_MEMORY}: there is nothing to drop"
    elif cache == DIRECT:
        said = "past the page cache (O_DIRECT)"
    elif cache == WARM:
        said = f"{READ_BEFORE}: " + ("" if left is None else f"{left:.0%} in ") + "the page cache of this machine"
    elif left is None:
        said = "page cache of this machine dropped, as far as the kernel did it: it does not tell"
    elif left <= LITTLE:
        said = f"page cache of this machine dropped ({left:.1%} was left)"
    else:
        said = f"{_LEFT}: {left:.0%} is still in it, held by others or not written out"
    return said + (f"; what {remote} has in its memory cannot be controlled from here" if remote else "")
