"""What is written: bytes that no storage makes smaller, and that say where they belong.

Each 4 KiB block begins with 16 bytes: the number of its file and its own number in it. The rest is the same random
8 MiB again and again, so writing it costs no computing. Storage that looks for blocks of equal contents finds none: no
two are equal, whichever file, run or rank they are of. What compares less than whole blocks might find some.
"""

from __future__ import annotations

import functools
import hashlib

import numpy as np

from headrace.bench.places.memory import aligned
from headrace.bench.places.protocol import U8
from headrace.errors import ChecksumMismatch

BLOCK = 4096
#: Bytes that are written, or read, at a time.
CHUNK = 8 << 20


def number_of(name: str) -> int:
    """Of a file, as its blocks have it. Its name is to be one that no other run has: else both have the same bytes."""
    return int.from_bytes(hashlib.blake2b(name.encode(errors="surrogateescape"), digest_size=8).digest(), "little")


@functools.cache
def _random() -> U8:
    """The same in every process, and in every run; of all writers of a process."""
    return np.random.default_rng(7).integers(0, 256, CHUNK, np.uint8)


class Content:
    """Chunks of files. Each has memory of its own, so one is used by one thread."""

    def __init__(self) -> None:
        self._stamps = np.arange(CHUNK // BLOCK, dtype=np.uint64)

    def chunk(self) -> U8:
        """Memory that `stamp` makes a chunk of; aligned for O_DIRECT."""
        memory = aligned(CHUNK)
        memory[:] = _random()
        return memory

    def stamp(self, memory: U8, file: int, offset: int) -> None:
        """Make it the bytes from `offset` (a multiple of `BLOCK`) on."""
        words = memory.view(np.uint64).reshape(-1, BLOCK // 8)
        words[:, 0] = file
        words[:, 1] = self._stamps[: len(words)] + np.uint64(offset // BLOCK)

    def check(self, memory: U8, file: int, offset: int, where: str) -> None:
        """Whole blocks of what was read from `offset` on: are they those that were written? ChecksumMismatch."""
        words = memory[: len(memory) // BLOCK * BLOCK].view(np.uint64).reshape(-1, BLOCK // 8)
        wrong = np.flatnonzero(
            (words[:, 0] != file) | (words[:, 1] != self._stamps[: len(words)] + np.uint64(offset // BLOCK))
        )
        if len(wrong):
            at = offset + int(wrong[0]) * BLOCK
            raise ChecksumMismatch("what was read is not what was written", where=f"{where}, offset {at}")
