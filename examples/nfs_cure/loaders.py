"""Who reads. Files as users read them, by many threads, some batches ahead; and headrace's own feeds."""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from examples.nfs_cure.world import SEQUENCE, TOKEN_BYTES, World
from headrace.dataset import FeedOptions, RecordFeed, RecordFeedOptions, Records, TokenStream, WindowFeed
from headrace.volume import Volume


class FileBatches:
    """Batches of what `read` gives for each number, in this order, read by threads, two batches more than they have in
    their hands ahead. What it waits for is reads: nothing is decoded."""

    def __init__(
        self, read: Callable[[int], Sequence[bytes]], numbers: Sequence[int], batch: int, readers: int
    ) -> None:
        self._read, self._numbers, self._batch, self._readers = read, numbers, batch, readers
        self._waited_s, self._bytes = 0.0, 0

    @property
    def waited(self) -> tuple[float, float, int]:
        return self._waited_s, self._waited_s, self._bytes

    def __iter__(self) -> Iterator[list[Sequence[bytes]]]:
        coming = iter(self._numbers)
        ahead: deque[Future[Sequence[bytes]]] = deque()
        pool = ThreadPoolExecutor(self._readers)
        try:
            for _ in range(len(self._numbers) // self._batch):
                while len(ahead) < self._readers + 2 * self._batch and (number := next(coming, None)) is not None:
                    ahead.append(pool.submit(self._read, number))
                started = time.perf_counter()
                batch = [ahead.popleft().result() for _ in range(self._batch)]
                self._waited_s += time.perf_counter() - started
                self._bytes += sum(len(part) for sample in batch for part in sample)
                yield batch
        finally:
            pool.shutdown(wait=True, cancel_futures=True)


class FeedBatches:
    """Batches of a feed of headrace."""

    def __init__(self, feed: Any, count: int) -> None:
        self.feed, self.devices, self._count = feed, feed.devices, count

    @property
    def waited(self) -> tuple[float, float, int]:
        told: tuple[float, float, int] = self.feed.waited
        return told

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            batch = self.feed.acquire()
            assert batch is not None, "the dataset is too short"
            yield batch
            if hasattr(self.feed, "release"):
                self.feed.release(batch)
            del batch

    def close(self) -> None:
        self.feed.close()


def whole_file(path: Path) -> bytes:
    """Opened, read with one call, closed."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        size = os.fstat(descriptor).st_size
        data = os.read(descriptor, size)
    finally:
        os.close(descriptor)
    assert len(data) == size
    return data


def image_files(folder: Path, world: World, batches: int) -> FileBatches:
    """An image and its caption, two files a sample."""

    def read(number: int) -> Sequence[bytes]:
        return [whole_file(folder / f"images/{number:06}.{kind}") for kind in ("jpg", "txt")]

    order = np.random.default_rng(1).permutation(world.samples)[: batches * world.batch].tolist()
    return FileBatches(read, order, world.batch, world.readers)


def image_records(volume: Volume, world: World, batches: int) -> FeedBatches:
    options = RecordFeedOptions(global_batch=world.batch, seed=1, epochs=1)
    return FeedBatches(RecordFeed({"images": Records.open(volume, "images")}, options), batches)


def text_files(folder: Path, world: World, batches: int) -> FileBatches:
    """Windows of one large file of tokens."""
    descriptor = os.open(folder / "text.bin", os.O_RDONLY)
    os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_RANDOM)

    def read(number: int) -> Sequence[bytes]:
        return [os.pread(descriptor, world.window_bytes, number * SEQUENCE * TOKEN_BYTES)]

    order = np.random.default_rng(1).permutation(world.text_samples)[: batches * world.text_batch].tolist()
    return FileBatches(read, order, world.text_batch, world.readers)


def text_records(volume: Volume, world: World, batches: int) -> FeedBatches:
    options = FeedOptions(sequence_length=SEQUENCE, global_batch=world.text_batch, seed=1, epochs=1)
    return FeedBatches(WindowFeed(TokenStream.open(volume, "text"), options), batches)
