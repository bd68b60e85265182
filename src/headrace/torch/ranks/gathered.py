"""A file that is written piece by piece, and goes to the volume in one, from where its pieces lie."""

from __future__ import annotations

import bisect
import io
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import numpy as np
import torch

from headrace.device.reference import U8, as_bytes
from headrace.volume import Parts

#: What is written in shorter pieces is copied.
_OWN_BYTES = 64 << 10


class GatheredStream(io.IOBase):
    """A file in the making: `put` gets all of it when it is closed, and nothing where its `with` block fails or it is
    dropped. What lies in the memory of `data`'s tensors stays there until then; all else that is written is copied."""

    def __init__(self, put: Callable[[Parts], None], data: object = None) -> None:
        self._put = put
        memory = {start: (end, owner) for start, end, owner in _memory_of(data)}
        self._starts = sorted(memory)
        self._memory = [memory[start] for start in self._starts]
        self._parts: list[U8] = []
        self._small = bytearray()
        self._length = 0
        self._given_up = False

    def writable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._length

    def write(self, data: Any) -> int:
        view = as_bytes(data) if memoryview(data).nbytes else np.zeros(0, np.uint8)
        if len(view) >= _OWN_BYTES and self._is_held(view):
            self._end_small()
            self._parts.append(view)
        else:
            self._small += view.data
        self._length += len(view)
        return len(view)

    def _is_held(self, view: U8) -> bool:
        address = view.ctypes.data
        at = bisect.bisect_right(self._starts, address) - 1
        return at >= 0 and address + len(view) <= self._memory[at][0]

    def _end_small(self) -> None:
        if self._small:
            self._parts.append(np.frombuffer(self._small, np.uint8))
            self._small = bytearray()

    def close(self) -> None:
        if self.closed:
            return
        try:
            if not self._given_up:
                self._end_small()
                offsets = np.cumsum([0, *map(len, self._parts)])[:-1].tolist()
                self._put(Parts(self._parts, offsets, self._length))
        finally:
            self._parts, self._memory, self._starts = [], [], []
            super().close()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        # An exception in the block: half a file must not become one.
        self._given_up = kind is not None
        self.close()

    def __del__(self) -> None:
        # Dropped without `close`: nobody said that it is whole.
        self._given_up = True
        super().__del__()


def _memory_of(data: object) -> Iterator[tuple[int, int, torch.UntypedStorage]]:
    """Where the host tensors of a nested state lie: start, end, and what keeps it there."""
    if isinstance(data, torch.Tensor):
        local = data.to_local() if hasattr(data, "to_local") else data
        if local.device.type == "cpu" and local.layout is torch.strided and local.numel():
            storage = local.untyped_storage()
            yield storage.data_ptr(), storage.data_ptr() + storage.nbytes(), storage
    elif isinstance(data, Mapping):
        for value in data.values():
            yield from _memory_of(value)
    elif isinstance(data, (list, tuple)):
        for value in data:
            yield from _memory_of(value)
