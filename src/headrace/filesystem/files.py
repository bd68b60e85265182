"""Open files: reading anywhere, writing from the beginning to the end."""

from __future__ import annotations

import queue
import threading
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any

import numpy as np
from fsspec.spec import AbstractBufferedFile

from headrace.device.protocol import Buffer
from headrace.filesystem.paths import as_os_errors
from headrace.filesystem.writing import replace
from headrace.volume import ObjectInfo, Transaction, Volume

if TYPE_CHECKING:
    from headrace.filesystem.filesystem import HeadraceFileSystem

#: Read ahead, and gathered before it is written.
BLOCK_BYTES = 4 << 20
#: Blocks that may wait for the device while a file is written.
_WAITING_BLOCKS = 4


class ReadFile(AbstractBufferedFile):  # type: ignore[misc]  # fsspec has no types
    """An object that is read. It stays that very object: where it is replaced meanwhile, reading says so."""

    def __init__(self, fs: HeadraceFileSystem, path: str, volume: Volume, info: ObjectInfo, **kwargs: Any) -> None:
        self._volume, self._info = volume, info
        super().__init__(fs, path, "rb", size=info.length_bytes, **kwargs)

    def _fetch_range(self, start: int, end: int) -> bytes:
        end = min(end, self._info.length_bytes)
        if end <= start:
            return b""
        data = np.empty(end - start, np.uint8)
        with as_os_errors():
            self._volume.submit_read(self._info, [start], [len(data)], [data], [0], verify=self.fs.verify).wait()
        return data.tobytes()


class _GivenUp(Exception):
    """Ends `write_stream` from within; nobody sees it."""


class _Stream:
    """Blocks on their way from `write` to the volume, on a thread of their own; so few that memory stays bounded."""

    def __init__(self, transaction: Transaction, name: str) -> None:
        # One that a finaliser may put into, whatever its thread is doing.
        self._blocks: queue.SimpleQueue[bytes | None] = queue.SimpleQueue()
        self._room = threading.Semaphore(_WAITING_BLOCKS)
        self._error: BaseException | None = None
        self._given_up = False
        #: The last block was taken out of the queue.
        self._ended = False
        self._thread = threading.Thread(target=self._run, args=(transaction, name), name="headrace-file", daemon=True)
        self._thread.start()

    def _run(self, transaction: Transaction, name: str) -> None:
        try:
            transaction.write_stream(name, self._iterate())
        except BaseException as error:
            self._error = error
            # Whoever waits to put a block finds room, and then the error.
            while not self._ended:
                self._next()

    def _next(self) -> bytes | None:
        block = self._blocks.get()
        self._ended = block is None
        self._room.release()
        return block

    def _iterate(self) -> Iterator[Buffer]:
        while (block := self._next()) is not None and not self._given_up:
            yield block
        if self._given_up:
            raise _GivenUp

    def put(self, block: bytes) -> None:
        self._room.acquire()
        if self._error is not None:
            self._room.release()
            raise self._error
        self._blocks.put(block)

    def end(self) -> None:
        """Wait for everything to be durable."""
        self._blocks.put(None)
        self._thread.join()
        if self._error is not None:
            raise self._error

    def give_up(self) -> None:
        """Nothing of it is wanted any more. Waits for nothing: a finaliser may call it."""
        self._given_up = True
        self._blocks.put(None)

    def discard(self) -> None:
        """Wait for nothing to be under way."""
        self.give_up()
        self._thread.join()


class WriteFile(AbstractBufferedFile):  # type: ignore[misc]
    """A new object: there, whole, when `close` (or the transaction around it) returns. Before that nobody sees it."""

    def __init__(self, fs: HeadraceFileSystem, path: str, mode: str, *, autocommit: bool, **kwargs: Any) -> None:
        self._stream: _Stream | None = None
        self._exclusive = mode == "xb"
        with as_os_errors():
            self._transaction, self._own = fs.writing.begin()
        super().__init__(fs, path, mode, autocommit=autocommit, **kwargs)

    def _initiate_upload(self) -> None:
        if not self._exclusive:
            replace(self._transaction, self.path)

    def _upload_chunk(self, final: bool = False) -> bool:
        data = self.buffer.getvalue()
        with as_os_errors():
            try:
                if self._stream is None and final:
                    self._transaction.put(self.path, data)
                else:
                    if self._stream is None:
                        self._stream = _Stream(self._transaction, self.path)
                    if data:
                        self._stream.put(data)
                    if final:
                        self._stream.end()
                if final and self.autocommit:
                    self.commit()
            except BaseException:
                self.discard()
                raise
        return True

    def commit(self) -> None:
        """Visible and durable; a file within `fs.transaction` becomes so when that ends."""
        if self._own:
            with as_os_errors():
                self._transaction.commit()

    def discard(self) -> None:
        """Nothing of it is ever seen."""
        stream, self._stream = self._stream, None
        if stream is not None:
            stream.discard()
        if self._own:
            self._transaction.abort()

    def __exit__(self, kind: type[BaseException] | None, *exc: object) -> None:
        if kind is None:
            self.close()
        else:
            # An exception in the block: half a file must not become an object.
            self.closed = True
            self.discard()

    def __del__(self) -> None:
        # Dropped without `close`: nobody said that it is whole. Nor may anything be waited for here: whose thread this
        # is, and what it holds, nobody knows.
        if not self.closed:
            self.closed = True
            if self._stream is not None:
                self._stream.give_up()
            if self._own:
                self._transaction.abandon()
