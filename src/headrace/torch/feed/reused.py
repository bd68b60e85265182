"""Memory of tensors that is used again once nobody has the tensor any more.

A batch of tokens is half a megabyte and more. A new one from the system for every step is a page fault for every 4 KiB
of it, which costs more than filling it, and whether the allocator keeps what was freed is a matter of luck. Here it
is kept.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import numpy as np
import numpy.typing as npt
import torch

from headrace.dataset.records.memory import KeptMemory, rounded

I64 = npt.NDArray[np.int64]


class Reused:
    """int64 tensors of one shape. Each is the caller's own: its memory comes back when the last tensor, view or array
    that shares it is gone, in whatever thread that happens. At most `kept` are kept for the next ones: the batch that a
    training loop has in hand, and the one that it is about to get."""

    def __init__(self, shape: tuple[int, ...], kept: int = 2) -> None:
        self._shape = shape
        self._bytes = 8 * math.prod(shape)
        self.memory = KeptMemory(kept * rounded(self._bytes), short_bytes=1)

    def tensor(self, values: npt.NDArray[np.integer]) -> torch.Tensor:
        """`values`, widened."""
        return self.filled(lambda memory: np.copyto(memory, values))

    def filled(self, fill: Callable[[I64], object]) -> torch.Tensor:
        """What `fill` writes to the memory that it is called with, and does not keep."""
        memory = self.memory.take(self._bytes).view(np.int64).reshape(self._shape)
        fill(memory)
        # Its storage holds the array, and that what was taken.
        return torch.from_numpy(memory)
