"""Flows and writers of a device: connections of their own, batches of the native engine."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from headrace.bench.places.content import CHUNK, Content, number_of
from headrace.bench.places.mark import check_mark
from headrace.bench.places.memory import Pool
from headrace.bench.places.protocol import U8, Item, Ranges, Shard
from headrace.device import Batch, NativeDevice, Transfer, open_device, submit_read, submit_write
from headrace.errors import ChecksumMismatch, DeviceError, HeadraceError

#: Who did not write for longer looks: a mark that is not renewed for twice as long may be another one's (`LOOK_S`).
_STILL_S = 3.0


class DevicePending:
    def __init__(self, transfer: Transfer, pool: Pool, buffer: U8, total_bytes: int) -> None:
        self._transfer, self._pool, self._buffer = transfer, pool, buffer
        self.bytes = total_bytes

    def done(self) -> bool:
        return self._transfer.done()

    def wait(self, timeout_s: float | None = None) -> None:
        self._transfer.wait(timeout_s)
        self._pool.give(self._buffer)


class DeviceReader:
    """One flow: a connection of its own. Items lie one after another from `base` on."""

    def __init__(self, device: NativeDevice, base: int, items: Sequence[Item]) -> None:
        self._device = device
        starts = np.cumsum([0, *(item.length_bytes for item in items)])[:-1]
        self._starts = starts.astype(np.int64) + base
        self._block = device.block_bytes
        self._pool = Pool()
        self._alone = Pool()

    def start(self, ranges: Ranges) -> DevicePending:
        at = self._starts[ranges.item] + ranges.offset
        first = at // self._block * self._block
        skip = at - first
        length = skip + ranges.length
        buffer = self._pool.take(ranges.total_bytes)
        places = np.cumsum(ranges.length) - ranges.length
        batch = Batch(
            member=np.zeros(len(at), np.uint32), offset=first.astype(np.uint64), length=length.astype(np.uint64),
            skip=skip.astype(np.uint64), take=ranges.length.astype(np.uint64), buffer_offset=places.astype(np.uint64),
        )  # fmt: skip
        return DevicePending(submit_read([self._device], batch, [buffer]), self._pool, buffer, ranges.total_bytes)

    def read(self, item: int, offset: int, length: int) -> None:
        at = int(self._starts[item]) + offset
        first = at // self._block * self._block
        end = -(-(at + length) // self._block) * self._block
        buffer = self._alone.take(end - first)
        self._device.read_into(first, buffer[: end - first])
        self._alone.give(buffer)

    def close(self) -> None:
        self._device.close()


class DeviceRoom:
    """Shards at places of a device."""

    def __init__(
        self, uri: str, shards: Sequence[Shard], offsets: Sequence[int], mark: tuple[int, str],
        forget: Callable[[], str],
    ) -> None:  # fmt: skip
        self.shards = shards
        self._uri, self._offsets, self._mark, self._forget = uri, offsets, mark, forget
        self._state = ""

    def for_writer(self) -> dict[str, Any]:
        return {
            "kind": "device", "uri": self._uri, "shards": [*self.shards], "offsets": [*self._offsets],
            "mark": [*self._mark],
        }  # fmt: skip

    def commit(self, proofs: Iterable[str]) -> None:
        """Nobody but this run knows of it."""

    def forget(self) -> None:
        """A file has a page cache here; all others have none."""
        self._state = self._forget()

    def state(self) -> str:
        return self._state


class DeviceWriter:
    """From `DeviceRoom.for_writer`. What is saved is durable when nothing was lost between its writes and its flush.

    Who stood still, as after Ctrl-Z, looks whether the device is still its run's before it writes: another one takes
    what nobody renews.
    """

    #: Chunks under way at once.
    _WINDOW = 3

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._shards = [Shard(str(name), int(length)) for name, length in spec["shards"]]
        self._offsets = [int(offset) for offset in spec["offsets"]]
        self._mark = int(spec["mark"][0]), str(spec["mark"][1])
        self._wrote_s = -math.inf
        self._device = open_device(str(spec["uri"]))
        self._content = Content()
        self._memory = [self._content.chunk() for _ in range(self._WINDOW)]

    def save(self, shards: Sequence[int], seen: Callable[[int], None]) -> list[str]:
        losses = self._device.loss_count()
        under_way: list[tuple[Transfer, int]] = []
        count = 0
        try:
            for index in shards:
                shard, base = self._shards[index], self._offsets[index]
                for offset in range(0, shard.length_bytes, CHUNK):
                    if len(under_way) == self._WINDOW:
                        self._end(under_way.pop(0), seen)
                    length = min(CHUNK, shard.length_bytes - offset)
                    memory = self._memory[count % self._WINDOW]
                    count += 1
                    self._look()
                    self._content.stamp(memory, number_of(shard.name), offset)
                    under_way.append((submit_write([self._device], _one(base + offset, length), [memory]), length))
            while under_way:
                self._end(under_way.pop(0), seen)
        finally:
            for transfer, _ in under_way:
                with suppress(HeadraceError):
                    transfer.wait()
        self._device.flush()
        if self._device.loss_count() != losses:
            raise DeviceError(
                "an association was lost while it was written: what was acknowledged may be gone",
                where=self._device.uri, next_step="run it again; `headrace doctor` looks at the path",
            )  # fmt: skip
        return []

    def _look(self) -> None:
        now = time.monotonic()
        if now - self._wrote_s > _STILL_S:
            check_mark(self._device, self._mark)
        self._wrote_s = time.monotonic()

    def _end(self, move: tuple[Transfer, int], seen: Callable[[int], None]) -> None:
        move[0].wait()
        seen(move[1])

    def restore(self, shards: Sequence[int], seen: Callable[[int], None]) -> int:
        total = 0
        for index in shards:
            shard, base = self._shards[index], self._offsets[index]
            moves: list[tuple[Transfer, U8, int, int]] = []
            offsets = iter(range(0, shard.length_bytes, CHUNK))
            free = [*self._memory]
            while True:
                while free and (offset := next(offsets, None)) is not None:
                    memory, length = free.pop(), min(CHUNK, shard.length_bytes - offset)
                    transfer = submit_read([self._device], _one(base + offset, length), [memory])
                    moves.append((transfer, memory, offset, length))
                if not moves:
                    break
                transfer, memory, offset, length = moves.pop(0)
                transfer.wait()
                where = f"{self._device.uri}, {shard.name}"
                try:
                    self._content.check(memory[:length], number_of(shard.name), offset, where)
                except ChecksumMismatch:
                    # Of another run's bytes the storage is not to be blamed.
                    check_mark(self._device, self._mark)
                    raise
                free.insert(0, memory)
                total += length
                seen(length)
        return total

    def close(self) -> None:
        self._device.close()


def _one(offset: int, length: int) -> Batch:
    return Batch(
        member=np.zeros(1, np.uint32), offset=np.array([offset], np.uint64), length=np.array([length], np.uint64),
        buffer_offset=np.zeros(1, np.uint64),
    )  # fmt: skip
