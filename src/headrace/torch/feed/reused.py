"""Memory of tensors that is used again once nobody has the tensor any more.

A batch of tokens is half a megabyte and more. A new one from the system for every step is a page fault for every 4 KiB
of it, which costs more than filling it, and whether the allocator keeps what was freed is a matter of luck. Here it
is kept.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable
from functools import partial

import numpy as np
import numpy.typing as npt
import torch

I64 = npt.NDArray[np.int64]


class Reused:
    """int64 tensors of one shape. Each is the caller's own: its memory comes back when the last tensor, view or array
    that shares it is gone, in whatever thread that happens. At most `kept` are kept for the next ones: the batch that a
    training loop has in hand, and the one that it is about to get."""

    def __init__(self, shape: tuple[int, ...], kept: int = 2) -> None:
        self._shape = shape
        self._kept = kept
        self._free: list[I64] = []
        #: Of what is out, by the memory's id: a callback goes with its reference.
        self._out: dict[int, weakref.ref[I64]] = {}

    def tensor(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        """`values`, widened."""
        return self.filled(lambda memory: np.copyto(memory, values))

    def filled(self, fill: Callable[[I64], object]) -> torch.Tensor:
        """What `fill` writes to the memory that it is called with, and does not keep."""
        try:
            memory = self._free.pop()
        except IndexError:
            memory = np.empty(self._shape, np.int64)
        fill(memory)
        # A tensor's storage holds the very array that it was made from, and nothing else does.
        lease = memory.view()
        self._out[id(memory)] = weakref.ref(lease, partial(self._back, memory))
        return torch.from_numpy(lease)

    def _back(self, memory: I64, _: weakref.ref[I64]) -> None:
        self._out.pop(id(memory), None)
        if len(self._free) < self._kept:
            self._free.append(memory)
