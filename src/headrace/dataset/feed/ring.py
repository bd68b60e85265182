"""The memory that batches are read into.

What is read is whole checksum blocks, of which the first and the last belong to a row in part only. Where rows have
room around them, the rest of those blocks stands there, and the engine reads into place, without a copy:

    | room | row 0 | room | room | row 1 | room | ...

No two rooms meet: a block is verified where it lies.
"""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataset.tokens.stream import CHECKSUM_BLOCK_BYTES
from headrace.errors import UsageError
from headrace.units import format_bytes

I64 = npt.NDArray[np.int64]

#: Of this machine.
MEMORY_BYTES = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
#: Rows that are shorter than so much room are copied instead: room would be most of the memory, and the copy is short.
_ROOM_PART = 4
#: Rows begin at multiples of this beyond their room.
_LINE_BYTES = 64


class Ring:
    """Slots of some rows of `width` tokens each, one behind the other: one memory, so that a request reads into as many
    of them as it likes."""

    def __init__(
        self, memory: npt.NDArray[Any], rows: int, width: int, *, pitch: int, lead: int = 0, room_bytes: int = 0
    ) -> None:
        """`memory`: dtype[slots * rows * pitch], for the engine to read into. A row begins `lead` tokens behind its
        part of it, and `room_bytes` before and behind it are nobody's."""
        self.memory = memory
        #: Of each slot dtype[rows, width].
        self.tokens = list(memory.reshape(-1, rows, pitch)[:, :, lead : lead + width])
        self.room_bytes = room_bytes
        self._rows = rows
        self._pitch = pitch
        self._lead = lead

    @classmethod
    def make(cls, count: int, rows: int, width: int, dtype: np.dtype[Any]) -> Ring:
        """`count` slots, with room where that is worth its memory. `UsageError`: more than there is."""
        row_bytes = width * dtype.itemsize
        room = CHECKSUM_BLOCK_BYTES if row_bytes >= _ROOM_PART * CHECKSUM_BLOCK_BYTES else 0
        pitch = (-(-row_bytes // _LINE_BYTES) * _LINE_BYTES + 2 * room) // dtype.itemsize if room else width
        check_memory(count, rows, pitch * dtype.itemsize)
        memory = np.empty(count * rows * pitch, dtype)
        return cls(memory, rows, width, pitch=pitch, lead=room // dtype.itemsize, room_bytes=room)

    @classmethod
    def of(cls, memory: npt.NDArray[Any], rows: int, width: int) -> Ring:
        """Of memory that is there, perhaps none: dtype[slots, rows, width], C-contiguous, without room."""
        return cls(memory.reshape(-1), rows, width, pitch=width)

    def __len__(self) -> int:
        return len(self.tokens)

    @property
    def nbytes(self) -> int:
        return self.memory.nbytes

    def places(self, slots: I64, rows: I64, places: I64) -> I64:
        """Where in the memory these places of rows of slots are, in tokens."""
        return (slots * self._rows + rows) * self._pitch + (places + self._lead)


def no_memory() -> npt.NDArray[Any]:
    """For a ring without slots."""
    return np.empty(0, np.uint8)


def check_memory(count: int, rows: int, row_bytes: int) -> None:
    """`UsageError`: so many buffers of so many rows are more than the memory of this machine."""
    need = count * rows * row_bytes
    if need > MEMORY_BYTES:
        raise UsageError(
            "the batches that are read ahead have no room in memory",
            expected=f"at most the {format_bytes(MEMORY_BYTES)} of this machine",
            found=f"{need} bytes ({format_bytes(need)}): {count} batches of {rows} rows",
            next_step="give a smaller global_batch or prefetch, or more accumulation",
        )
