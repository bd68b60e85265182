"""Memory of batches that is used again once nobody has a view of it any more.

A batch of records is tens of MB, and the next one of another length. Memory that is new from the system is cleared
page by page while it is received into, and goes back to the system a moment later. Here some of it is kept, and a batch
gets the shortest that it fits into.
"""

from __future__ import annotations

import weakref
from functools import partial

import numpy as np
import numpy.typing as npt

from headrace.units import MIB

U8 = npt.NDArray[np.uint8]

#: Shorter ones are the allocator's own business: it keeps what is so short.
SHORT_BYTES = 1 * MIB
#: Lengths of what is made: this many between one power of two and the next.
_STEPS = 8


class KeptMemory:
    """Gives out memory; its parts come back by themselves, in whatever thread their last view ends. One thread at a
    time takes."""

    def __init__(self, most_bytes: int, *, short_bytes: int = SHORT_BYTES) -> None:
        """`most_bytes`: that lie here unused; what has lain longest is given up first. Of less than `short_bytes`
        nothing is kept."""
        self._most_bytes = most_bytes
        self._short_bytes = short_bytes
        #: By id, the longest here first. Others than the one that takes only put in and take out single ones.
        self._free: dict[int, U8] = {}
        #: Of what is out, by the memory's id: a callback goes with its reference.
        self._out: dict[int, weakref.ref[U8]] = {}
        #: Bytes that were asked of the system, all together.
        self.made_bytes = 0

    def take(self, length_bytes: int) -> U8:
        """uint8[length_bytes], of any content. It and all views of it are the caller's own."""
        if length_bytes < self._short_bytes:
            return np.empty(length_bytes, np.uint8)
        memory = self._fitting(length_bytes)
        if memory is None:
            memory = np.empty(rounded(length_bytes), np.uint8)
            self.made_bytes += memory.nbytes
        # Over a memoryview: a view of an array's view would hold the first array, and not this one.
        lease = np.frombuffer(memory.data, np.uint8, length_bytes)
        self._out[id(memory)] = weakref.ref(lease, partial(self._back, memory))
        return lease

    def free_bytes(self) -> int:
        """That lie here unused."""
        return sum(memory.nbytes for memory in list(self._free.values()))

    def close(self) -> None:
        """Keep nothing, and nothing that comes back later."""
        self._most_bytes = 0
        self._free.clear()

    def _fitting(self, length_bytes: int) -> U8 | None:
        """The shortest that is long enough, and not by more than half: who keeps one record keeps all of it."""
        fitting = [m for m in list(self._free.values()) if length_bytes <= m.nbytes <= length_bytes * 3 // 2]
        memory = min(fitting, key=len, default=None)
        # Another thread may just have given it up.
        return None if memory is None else self._free.pop(id(memory), None)

    def _back(self, memory: U8, _: weakref.ref[U8]) -> None:
        self._out.pop(id(memory), None)
        self._free[id(memory)] = memory
        for oldest in list(self._free):
            if self.free_bytes() <= self._most_bytes:
                break
            self._free.pop(oldest, None)


def rounded(length_bytes: int) -> int:
    """Up, to one of few lengths."""
    step = max(1, (1 << max(0, (length_bytes - 1).bit_length() - 1)) // _STEPS)
    return -(-length_bytes // step) * step
