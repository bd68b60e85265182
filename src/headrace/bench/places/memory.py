"""Memory that reads go into: aligned, so that O_DIRECT takes it, and used again."""

from __future__ import annotations

import mmap

import numpy as np

from headrace.bench.places.protocol import U8

ALIGN = 4096


def aligned(length_bytes: int) -> U8:
    """uint8[length], at the start of a page. It lives as long as the array or a view of it."""
    return np.frombuffer(mmap.mmap(-1, max(1, length_bytes)), np.uint8, length_bytes)


class Pool:
    """Buffers of one flow. `take` and `give` are of one thread."""

    def __init__(self) -> None:
        self._free: list[U8] = []

    def take(self, length_bytes: int) -> U8:
        """At least so many bytes; what they hold is of no matter."""
        for index, buffer in enumerate(self._free):
            if len(buffer) >= length_bytes:
                return self._free.pop(index)
        # Too small for what is read now, they will be later on, too.
        self._free.clear()
        return aligned(-(-length_bytes // ALIGN) * ALIGN)

    def give(self, buffer: U8) -> None:
        self._free.append(buffer)
