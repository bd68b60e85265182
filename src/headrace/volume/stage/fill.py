"""Filling a stage: chunks that are missing are read from the volume, verified, written, flushed, and then marked.

Each thread takes the next chunk, a piece of it at a time, into its own buffer. One more flushes what was written and
marks it, while the others go on; so a process that is killed has lost what came since the last flush, and nothing that
is marked. The thread that called waits; Ctrl-C reaches it there.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.volume.data.objects import StoredObject
from headrace.volume.layout import align_up
from headrace.volume.read import submit
from headrace.volume.stage.plan import Chunk, Plan
from headrace.volume.stage.store import Held
from headrace.volume.stage.throttle import Throttle
from headrace.volume.workers import Workers

if TYPE_CHECKING:
    from headrace.volume.volume import Volume

U8 = npt.NDArray[np.uint8]
Bools = npt.NDArray[np.bool_]

#: Read and written at a time.
PIECE_BYTES = 4 << 20
#: Numbers of a checksum table that are read at a time.
_TABLE_NUMBERS = 1 << 20
#: Blobs whose places are kept decoded.
_VIEWS = 64
#: A flush begins when so much was written since the last one, or so much time has passed.
_FLUSH_BYTES = 256 << 20
_FLUSH_S = 1.0
#: Seconds between two looks at how far it is.
_TICK_S = 0.1
_PAGE = 4096

#: Bytes that are there, of those that are wanted, and those that this run has copied.
Shown = Callable[[int, int, int], None]


@dataclass
class Filled:
    """What was done."""

    copied_bytes: int = 0
    seconds: float = 0.0


def fill(
    volume: Volume,
    plan: Plan,
    held: Held,
    throttle: Throttle,
    *,
    workers: int = 4,
    progress: Shown | None = None,
    stop: threading.Event | None = None,
    bad: Sequence[int] = (),
) -> Filled:
    """Copy what is wanted and missing. Returns when all is there, or `stop` is set. What was copied by then is marked,
    also where an error is raised: ChecksumMismatch, ObjectNotFound (the volume), DeviceError (either).

    `bad`: chunks that did not verify. That may be the fault of their blobs' checksum tables, which are copied, too."""
    started = time.monotonic()
    filling = _Filling(volume, plan, held, throttle, bad)
    before = plan.bytes_of(held.there)
    if before < plan.facts.wanted_bytes:
        _run(filling, before, workers, progress, stop)
    if filling.error is not None:
        raise filling.error
    if progress is not None:
        progress(plan.bytes_of(held.there), plan.facts.wanted_bytes, filling.copied)
    return Filled(copied_bytes=filling.copied, seconds=time.monotonic() - started)


def _run(filling: _Filling, before: int, workers: int, progress: Shown | None, stop: threading.Event | None) -> None:
    total = filling.plan.facts.wanted_bytes
    count = max(1, min(workers, -(-(total - before) // PIECE_BYTES)))
    copiers = Workers(filling.work, "headrace-stage", count)
    flusher = Workers(filling.flush, "headrace-stage-flush")
    begun = False
    try:
        copiers.start()
        flusher.start()
        begun = True
        while not copiers.wait(_TICK_S) and not filling.stopping.is_set():
            if stop is not None and stop.is_set():
                filling.stop(None)
            if progress is not None:
                progress(min(total, before + filling.copied), total, filling.copied)
    finally:
        # Ctrl-C as well: what is under way ends, and what is whole is marked.
        if not begun or not copiers.wait(0):
            filling.stop(None)
        try:
            copiers.wait()
        finally:
            # Also where somebody has no patience (Ctrl-C again): it would wait for this for ever.
            filling.end()
            flusher.wait()


class _Filling:
    def __init__(self, volume: Volume, plan: Plan, held: Held, throttle: Throttle, bad: Sequence[int]) -> None:
        self.plan = plan
        self._volume, self._held, self._throttle = volume, held, throttle
        self._lock = threading.Lock()
        self._tasks = self._in_order()
        self.stopping = threading.Event()
        #: All threads that write have ended.
        self.ended = threading.Event()
        #: There is something to flush.
        self._much = threading.Event()
        self.error: BaseException | None = None
        self.copied = 0
        self._unflushed_bytes = 0
        #: Written, and to be marked; a chunk of a blob whose table is not there yet waits for that.
        self._written: list[Chunk] = []
        rows = plan.facts.blobs
        self._tables = set(np.flatnonzero(rows["table_bytes"] == 0).tolist())
        chunks = -(-rows["length"] // plan.facts.chunk_bytes)
        # A chunk that is marked says that its table is there.
        counts = np.concatenate([np.zeros(1, np.int64), np.cumsum(held.there, dtype=np.int64)])
        some = counts[rows["first_chunk"] + chunks] - counts[rows["first_chunk"]]
        self._tables |= set(np.flatnonzero(some).tolist())
        blobs = np.searchsorted(rows["first_chunk"], np.array(bad, np.int64), side="right") - 1
        self._tables -= {blob for blob in blobs.tolist() if rows["table_bytes"][blob]}
        #: Of the blobs that are being read now, and some before them.
        self._views: dict[int, StoredObject] = {}

    def _in_order(self) -> Iterator[tuple[int, Chunk | None]]:
        """A blob, and a chunk of it; None: its checksum table, which comes first."""
        last = -1
        for chunk in self.plan.chunks(~self._held.there):
            if chunk.blob != last and chunk.blob not in self._tables:
                yield chunk.blob, None
            last = chunk.blob
            yield last, chunk

    def stop(self, error: BaseException | None) -> None:
        with self._lock:
            self.error = self.error or error
        self.stopping.set()
        self._throttle.stop()
        self._much.set()

    def end(self) -> None:
        """Nothing is written any more."""
        self.ended.set()
        self._much.set()

    def work(self) -> None:
        """The life of one thread that copies."""
        raw = np.empty(PIECE_BYTES + _PAGE, np.uint8)
        start = -raw.ctypes.data % _PAGE
        buffer = raw[start : start + PIECE_BYTES]
        try:
            while not self.stopping.is_set():
                with self._lock:
                    task = next(self._tasks, None)
                if task is None:
                    return
                blob, chunk = task
                if chunk is None:
                    self._table(blob)
                elif self._chunk(chunk, buffer):
                    with self._lock:
                        self._written.append(chunk)
        except BaseException as error:
            self.stop(error)

    def _chunk(self, chunk: Chunk, buffer: U8) -> bool:
        """False: it was stopped in between."""
        view = self._view(chunk.blob)
        place = int(self.plan.facts.blobs["data_at"][chunk.blob]) + chunk.start
        for at in range(0, chunk.length, PIECE_BYTES):
            count = min(PIECE_BYTES, chunk.length - at)
            if not self._throttle.begin(count):
                return False
            try:
                submit(self._volume, view, [chunk.start + at], [count], [buffer], [0], None, True).wait()
            finally:
                self._throttle.end()
            self._write(place + at, buffer, count)
            with self._lock:
                self.copied += count
        return True

    def _view(self, blob: int) -> StoredObject:
        with self._lock:
            view = self._views.get(blob)
            if view is None:
                if len(self._views) >= _VIEWS:
                    self._views.clear()
                view = self._views[blob] = self.plan.view(blob, self._volume.stripe_bytes)
            return view

    def _table(self, blob: int) -> None:
        """As it stands in the volume: its pages are verified by the catalogue's roots, here as there."""
        stored = self.plan.parts[blob][2]
        place = int(self.plan.facts.blobs["table_at"][blob])
        for first in range(0, stored.block_count, _TABLE_NUMBERS):
            count = min(_TABLE_NUMBERS, stored.block_count - first)
            if not self._throttle.begin(4 * count):
                return
            try:
                sums = self._volume.checksums_of(stored, np.arange(first, first + count, dtype=np.int64))
            finally:
                self._throttle.end()
            data = np.zeros(align_up(4 * count), np.uint8)
            data[: 4 * count] = sums.astype("<u4").view(np.uint8)
            self._write(place + 4 * first, data, 4 * count)
        with self._lock:
            self._tables.add(blob)

    def _write(self, place: int, buffer: U8, count: int) -> None:
        size = align_up(count)
        buffer[count:size] = 0
        self._held.write(place, buffer[:size])
        with self._lock:
            self._unflushed_bytes += size
            if self._unflushed_bytes >= _FLUSH_BYTES:
                self._much.set()

    def flush(self) -> None:
        """The life of the thread that flushes and marks."""
        try:
            while not self.ended.is_set():
                self._much.wait(_FLUSH_S)
                self._much.clear()
                if self.stopping.is_set():
                    self.ended.wait()
                self._mark()
            self._mark()
        except BaseException as error:
            self.stop(error)

    def _mark(self) -> None:
        with self._lock:
            ready = [chunk for chunk in self._written if chunk.blob in self._tables]
            self._unflushed_bytes = 0
        if not ready:
            return
        self._held.flush()
        self._held.mark([chunk.number for chunk in ready])
        done = {chunk.number for chunk in ready}
        with self._lock:
            self._written = [chunk for chunk in self._written if chunk.number not in done]
