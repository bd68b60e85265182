"""One flow of a folder: threads that read files, each one read at a time, as the workers of a data loader do."""

from __future__ import annotations

import os
import queue
import threading
import time
from collections.abc import Sequence

from headrace.bench.cache import DIRECT
from headrace.bench.places.errors import said
from headrace.bench.places.memory import ALIGN, Pool
from headrace.bench.places.protocol import U8, Item, Ranges
from headrace.bench.threads import all_ended
from headrace.errors import DeviceError, DeviceTimeout

#: A file system that gives nothing for so long hangs.
PATIENCE_S = 60.0
_END_S = 5.0
#: A flow keeps the files of a place open where there are no more than these; else each read opens its own.
_KEPT_OPEN = 64


class FilesPending:
    """Reads of files under way."""

    def __init__(self, pool: Pool, buffer: U8, count: int, total_bytes: int) -> None:
        self._pool = pool
        self._buffer = buffer
        self._left = count
        self._lock = threading.Lock()
        self._done = threading.Event()
        self._error: BaseException | None = None
        self.bytes = total_bytes
        if not count:
            self._done.set()

    def ended(self, error: BaseException | None) -> None:
        """One of them. On a thread of the flow."""
        with self._lock:
            self._left -= 1
            self._error = self._error or error
            if not self._left:
                self._done.set()

    def done(self) -> bool:
        return self._done.is_set()

    def wait(self, timeout_s: float | None = None) -> None:
        begun = time.monotonic()
        if not self._done.wait(PATIENCE_S if timeout_s is None else timeout_s):
            raise DeviceTimeout(
                "the file system gives nothing", found=f"a read that has taken {time.monotonic() - begun:.0f} s",
                next_step="see what it waits for: dmesg, and `headrace doctor` on its folder",
            )  # fmt: skip
        self._pool.give(self._buffer)
        if self._error is not None:
            raise self._error


class FilesReader:
    """`paths` and `items`: the same files. `whole`: each read opens its file and closes it, however few there are."""

    def __init__(
        self, paths: Sequence[str], items: Sequence[Item], *, depth: int, cache: str, whole: bool = False
    ) -> None:
        self._paths = paths
        self._items = items
        self._depth = depth
        self._direct = cache == DIRECT
        self._keep = not whole and len(paths) <= _KEPT_OPEN
        self._open: dict[int, int] = {}
        self._lock = threading.Lock()
        self._pool = Pool()
        self._alone = Pool()
        self._work: queue.SimpleQueue[tuple[FilesPending, int, int, int, U8] | None] = queue.SimpleQueue()
        self._threads: list[threading.Thread] = []

    def start(self, ranges: Ranges) -> FilesPending:
        rows = list(zip(ranges.item.tolist(), ranges.offset.tolist(), ranges.length.tolist(), strict=True))
        needed = [self._span(*row)[1] for row in rows]
        buffer = self._pool.take(sum(needed))
        pending = FilesPending(self._pool, buffer, len(rows), ranges.total_bytes)
        # Of all pendings together `depth` are read at once.
        for _ in range(min(self._depth - len(self._threads), len(rows))):
            # A daemon: one that the kernel holds in a read must not keep the process.
            thread = threading.Thread(target=self._serve, name="bench-read", daemon=True)
            self._threads.append(thread)
            thread.start()
        at = 0
        for row, room in zip(rows, needed, strict=True):
            self._work.put((pending, *row, buffer[at : at + room]))
            at += room
        return pending

    def read(self, item: int, offset: int, length: int) -> None:
        buffer = self._alone.take(self._span(item, offset, length)[1])
        self._fill(item, offset, length, buffer)
        self._alone.give(buffer)

    def close(self) -> None:
        for _ in self._threads:
            self._work.put(None)
        # Of one that the kernel holds in a read its wait has told already.
        hangs = not all_ended(self._threads, _END_S)
        self._threads.clear()
        with self._lock:
            # A number that is closed may be another file's when that read goes on.
            for file in () if hangs else self._open.values():
                os.close(file)
            self._open.clear()

    # ---- on the threads of the flow ----

    def _serve(self) -> None:
        while (work := self._work.get()) is not None:
            pending, item, offset, length, buffer = work
            error: BaseException | None = None
            try:
                self._fill(item, offset, length, buffer)
            except BaseException as found:
                error = found
            pending.ended(error)

    def _span(self, item: int, offset: int, length: int) -> tuple[int, int]:
        """From where, and how much room it takes in the buffer: whole pages, so that the next one is aligned, too."""
        start = offset // ALIGN * ALIGN if self._direct else offset
        return start, -(-(offset + length - start) // ALIGN) * ALIGN

    def _fill(self, item: int, offset: int, length: int, buffer: U8) -> None:
        start, room = self._span(item, offset, length)
        end = min(start + room, self._items[item].length_bytes) if self._direct else offset + length
        view = buffer.data[: room if self._direct else length]
        try:
            file = self._file(item)
            try:
                got = 0
                while start + got < end:
                    count = os.preadv(file, [view[got:]], start + got)
                    if not count:
                        raise DeviceError(
                            "a file has become shorter while it was read", where=self._paths[item],
                            expected=f"{self._items[item].length_bytes} bytes", found=str(start + got),
                        )  # fmt: skip
                    got += count
            finally:
                if not self._keep:
                    os.close(file)
        except OSError as error:
            raise said(error, self._paths[item], direct=self._direct) from None

    def _file(self, item: int) -> int:
        if not self._keep:
            return self._opened(item)
        with self._lock:
            file = self._open.get(item)
            if file is None:
                file = self._open[item] = self._opened(item)
            return file

    def _opened(self, item: int) -> int:
        flags = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | (os.O_DIRECT if self._direct else 0)
        return os.open(self._paths[item], flags)
