"""Where items lie in an object, and which bytes of a saved chunk a slice of it needs. Pure arithmetic."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.errors import UsageError

U64 = npt.NDArray[np.uint64]

#: Items start at multiples of this: every dtype is aligned in the staging buffer, and so is a cache line.
ITEM_ALIGNMENT = 64


def pack(lengths: Sequence[int], alignment: int = ITEM_ALIGNMENT) -> tuple[list[int], int]:
    """Offsets of items of these lengths laid one after another, each at a multiple of `alignment`, and the total.

    The gaps are below `alignment` bytes and there is none behind the last item.
    """
    if alignment < 1 or alignment & (alignment - 1):
        raise UsageError("alignment", expected="a power of two", found=str(alignment))
    offsets: list[int] = []
    end = 0
    for length in lengths:
        if length < 0:
            raise UsageError("an item has a negative length", found=str(length))
        start = -(-end // alignment) * alignment
        offsets.append(start)
        end = start + length
    return offsets, end


@dataclass(frozen=True, kw_only=True)
class Runs:
    """Equal-length byte ranges of a row-major chunk that together are one box of it, in the box's row-major order."""

    #: uint64[n], bytes from the start of the chunk, ascending.
    offsets: U64
    #: Bytes of each run.
    length: int

    @property
    def total(self) -> int:
        return len(self.offsets) * self.length

    @property
    def span(self) -> tuple[int, int]:
        """The one range that covers all runs: offset and length in bytes."""
        if not len(self.offsets):
            return 0, 0
        first, last = int(self.offsets[0]), int(self.offsets[-1])
        return first, last + self.length - first


def box_runs(shape: Sequence[int], offsets: Sequence[int], lengths: Sequence[int], element_bytes: int) -> Runs:
    """The bytes of box `offsets`, `lengths` (elements) of a row-major chunk of `shape`.

    The trailing dimensions that the box spans whole melt into one run, so a slice along dimension 0 is a single range.
    UsageError where the box leaves the chunk.
    """
    if not len(shape) == len(offsets) == len(lengths):
        raise UsageError(
            "box and chunk differ in dimensions", expected=str(len(shape)), found=f"{len(offsets)}, {len(lengths)}"
        )
    for extent, start, count in zip(shape, offsets, lengths, strict=True):
        if start < 0 or count < 0 or start + count > extent:
            raise UsageError(
                "the box leaves the chunk", expected=f"within {list(shape)}", found=f"{list(offsets)} + {list(lengths)}"
            )
    if math.prod(lengths) == 0:
        return Runs(offsets=np.zeros(0, np.uint64), length=0)
    # `whole` dimensions from the back are covered whole; the one before them may be a part and is still contiguous.
    inner = len(shape)
    while inner > 0 and lengths[inner - 1] == shape[inner - 1]:
        inner -= 1
    outer = max(inner - 1, 0)
    strides = [element_bytes] * (len(shape) + 1)
    for dimension in range(len(shape) - 1, -1, -1):
        strides[dimension] = strides[dimension + 1] * shape[dimension]
    run = math.prod(lengths[outer:]) * element_bytes
    base = sum(start * strides[dimension + 1] for dimension, start in enumerate(offsets))
    starts = np.array([base], np.uint64)
    for dimension in range(outer):
        steps = np.arange(lengths[dimension], dtype=np.uint64) * np.uint64(strides[dimension + 1])
        starts = (starts[:, None] + steps[None, :]).reshape(-1)
    return Runs(offsets=starts, length=run)
