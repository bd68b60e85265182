"""Devices without a medium: for tests of everything that sees a `BlockDevice`."""

from __future__ import annotations

import itertools
import threading
from typing import Any

import numpy as np

from headrace.device.events import Events, no_events
from headrace.device.protocol import BlockDevice, Buffer
from headrace.device.reference import as_bytes
from headrace.errors import DeviceClosed, DeviceError, UsageError

_numbers = itertools.count()


def check_range(device: BlockDevice, offset: int, length: int) -> None:
    """UsageError where it is not whole blocks of the device."""
    block, size = device.block_bytes, device.size_bytes
    if offset < 0 or offset % block or length % block or offset + length > size:
        raise UsageError(
            "a range that the device cannot take",
            where=device.uri,
            expected=f"multiples of {block} within {size}",
            found=f"offset {offset}, length {length}",
        )


class MemoryDevice:
    """A `BlockDevice` over a bytearray; it lives and dies with this object.

    With `volatile_cache`, writes lie in a cache until `flush` (or `fua`), and `lose_cache` does what the loss of a
    controller does: unflushed writes are gone, `loss_count` moved, and every later command succeeds.
    """

    def __init__(
        self,
        size_bytes: int,
        *,
        block_bytes: int = 4096,
        volatile_cache: bool = False,
        read_only: bool = False,
        uri: str = "",
    ) -> None:
        if block_bytes not in (512, 4096):
            raise UsageError("MemoryDevice.block_bytes", expected="512 or 4096", found=str(block_bytes))
        if size_bytes <= 0 or size_bytes % block_bytes:
            raise UsageError("MemoryDevice.size_bytes", expected=f"a multiple of {block_bytes}", found=str(size_bytes))
        self.uri = uri or f"memory-device:{next(_numbers)}"
        self.size_bytes = size_bytes
        self.block_bytes = block_bytes
        self.volatile_cache = volatile_cache
        self.read_only = read_only
        #: What a read gives: the cache over the medium.
        self.data = bytearray(size_bytes)
        self._bytes = np.frombuffer(self.data, np.uint8)
        #: Block offset -> the durable bytes under a block that the cache holds.
        self._undo: dict[int, bytes] = {}
        self._losses = 0
        self._closed = False
        self._lock = threading.RLock()
        self.reads = self.writes = self.flushes = 0

    def _check(self, offset: int, length: int) -> None:
        if self._closed:
            raise DeviceClosed("the device was closed", where=self.uri)
        check_range(self, offset, length)

    def loss_count(self) -> int:
        return self._losses

    def events(self) -> Events:
        raise no_events(self.uri)

    def read_into(self, offset: int, buffer: Buffer) -> None:
        view = as_bytes(buffer)
        with self._lock:
            self._check(offset, len(view))
            self.reads += 1
            view[:] = self._bytes[offset : offset + len(view)]

    def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
        view = as_bytes(data)
        with self._lock:
            self._check(offset, len(view))
            if self.read_only:
                raise DeviceError("the device is read-only", where=self.uri)
            self.writes += 1
            block = self.block_bytes
            if self.volatile_cache:
                for start in range(offset, offset + len(view), block):
                    if fua:
                        self._undo.pop(start, None)
                    elif start not in self._undo:
                        self._undo[start] = bytes(self.data[start : start + block])
            self._bytes[offset : offset + len(view)] = view

    def flush(self) -> None:
        with self._lock:
            self._check(0, 0)
            self.flushes += 1
            self._undo.clear()

    def deallocate(self, offset: int, length: int) -> None:
        self.write(offset, bytes(length))

    def lose_cache(self) -> None:
        """Another controller answers: every unflushed write is lost, and nothing says so but `loss_count`."""
        with self._lock:
            for start, durable in self._undo.items():
                self.data[start : start + self.block_bytes] = durable
            self._undo.clear()
            self._losses += 1

    def close(self) -> None:
        self._closed = True

    def reopen(self) -> MemoryDevice:
        """The same device, usable again after `close`."""
        self._closed = False
        return self

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError("a memory device cannot leave its process", where=self.uri)

    def describe(self) -> dict[str, Any]:
        return {
            "transport": "memory",
            "uri": self.uri,
            "block_bytes": self.block_bytes,
            "associations_lost": self._losses,
        }
