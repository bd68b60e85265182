"""What reads a slice, and where that goes.

A `Job` reads tasks, in this process or in another one. It is given an `Output`, which takes bytes as they come and
makes parts of them, each one object of the volume: so memory is bounded by one part, whatever is the slice's size.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.dataset.ingestion.corpus import CorpusCounts
from headrace.dataset.ingestion.slices import LARGEST_PART_BYTES, Done, Task
from headrace.units import MIB

U8: TypeAlias = npt.NDArray[np.uint8]

#: Bytes of a part, and of memory that a worker needs for it.
PART_BYTES = 64 * MIB
#: A part's buffer grows to this by doubling: small slices need little.
_FIRST_BYTES = 1 * MIB


class Job(Protocol):
    """How tasks are read. Pickled once for each worker; what it keeps between tasks is its own."""

    def run(self, task: Task, output: Output) -> Done:
        """Read one slice. DatasetError for what cannot be read."""
        ...


class Output:
    """Takes the bytes of one slice."""

    def __init__(
        self,
        store: Callable[[int, U8], None],
        tell: Callable[[CorpusCounts, int], None],
        part_bytes: int,
        most_parts: int = 1 << 30,
    ):
        """`store(part, data)`: the data may change when it returns. `tell(counts, tokens)`: how far the slice is.

        `most_parts`: from the last of them on they are larger, up to `LARGEST_PART_BYTES`.
        """
        self._store = store
        self.tell = tell
        self._part_bytes, self._most_parts = part_bytes, most_parts
        self._buffer = np.empty(min(_FIRST_BYTES, part_bytes), np.uint8)
        self._used = 0
        self.parts: list[int] = []
        self.side: U8 = np.zeros(0, np.uint8)

    def write(self, data: npt.NDArray[Any]) -> None:
        """The next bytes of the slice."""
        view = data.view(np.uint8)
        while len(view):
            if self._used == len(self._buffer):
                self._grow()
            count = min(len(view), len(self._buffer) - self._used)
            self._buffer[self._used : self._used + count] = view[:count]
            self._used += count
            view = view[count:]

    def finish(self, side: U8) -> tuple[int, ...]:
        """The slice ends; `side` is kept beside its bytes. Returns the lengths of the parts."""
        if self._used:
            self._flush()
        self.side = side
        return tuple(self.parts)

    def _grow(self) -> None:
        last = len(self.parts) >= self._most_parts - 1
        part_bytes = max(self._part_bytes, LARGEST_PART_BYTES) if last else self._part_bytes
        if self._used < part_bytes:
            larger = np.empty(min(2 * self._used, part_bytes), np.uint8)
            larger[: self._used] = self._buffer
            self._buffer = larger
        else:
            self._flush()

    def _flush(self) -> None:
        self._store(len(self.parts), self._buffer[: self._used])
        self.parts.append(self._used)
        self._used = 0
