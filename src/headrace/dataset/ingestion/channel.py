"""Messages between an ingest and its workers, over stream sockets.

    8 bytes   length of what follows, big-endian
    ...       the message, pickled

The ingest's end (`Channel`) never waits for the other one: a worker that was stopped in the middle of a message, or
that takes none, holds nobody up but itself. The worker's end (`Line`) waits.
"""

from __future__ import annotations

import pickle
import socket
import struct
import threading
from collections import deque
from typing import Any

from headrace.errors import DatasetError
from headrace.units import MIB, format_bytes

_LENGTH = struct.Struct(">Q")
#: A part of a slice has at most 1 GiB; beside it there are some numbers.
MOST_BYTES = 1280 * MIB
_READ_BYTES = 1 * MIB


class Gone(Exception):
    """The other end is closed."""


def encode(message: Any) -> bytes:
    """A message as it travels."""
    data = pickle.dumps(message, pickle.HIGHEST_PROTOCOL)
    return _LENGTH.pack(len(data)) + data


class Inbox:
    """Bytes as they come to messages."""

    def __init__(self) -> None:
        self._data = bytearray()

    def add(self, data: bytes) -> list[Any]:
        """The messages that these bytes complete. DatasetError where they are none."""
        self._data += data
        found = []
        while len(self._data) >= _LENGTH.size:
            (length,) = _LENGTH.unpack_from(self._data)
            if length > MOST_BYTES:
                raise DatasetError("not a message of a worker", found=format_bytes(length))
            end = _LENGTH.size + length
            if len(self._data) < end:
                break
            with memoryview(self._data) as data_here:
                found.append(pickle.loads(data_here[_LENGTH.size : end]))
            del self._data[:end]
        return found


class Channel:
    """The ingest's end: nothing here blocks. What is sent waits here until the other end takes it."""

    def __init__(self, end: socket.socket) -> None:
        end.setblocking(False)
        self._socket = end
        self._inbox = Inbox()
        self._out: deque[memoryview] = deque()

    def fileno(self) -> int:
        return self._socket.fileno()

    @property
    def waiting(self) -> bool:
        """Something is still to be sent: `flush` when the socket can be written to."""
        return bool(self._out)

    def send(self, message: Any) -> None:
        """An end that is closed is found so when it is listened to."""
        self._out.append(memoryview(encode(message)))
        self.flush()

    def flush(self) -> None:
        try:
            while self._out:
                sent = self._socket.send(self._out[0], socket.MSG_NOSIGNAL)
                if sent < len(self._out[0]):
                    self._out[0] = self._out[0][sent:]
                else:
                    self._out.popleft()
        except BlockingIOError:
            pass
        except OSError:
            self._out.clear()

    def receive(self) -> list[Any]:
        """The messages that are complete, perhaps none. Gone where the other end is closed, and nothing is left."""
        try:
            data = self._socket.recv(_READ_BYTES)
        except BlockingIOError:
            return []
        except OSError as error:
            raise Gone from error
        if not data:
            raise Gone
        return self._inbox.add(data)

    def close(self) -> None:
        self._socket.close()


class Line:
    """The worker's end: it waits. Several threads may send."""

    def __init__(self, end: socket.socket) -> None:
        self._socket = end
        self._inbox = Inbox()
        self._found: deque[Any] = deque()
        self._lock = threading.Lock()

    def send(self, message: Any) -> None:
        data = encode(message)
        try:
            with self._lock:
                self._socket.sendall(data)
        except OSError as error:
            raise Gone from error

    def receive(self) -> Any:
        while not self._found:
            try:
                data = self._socket.recv(_READ_BYTES)
            except OSError as error:
                raise Gone from error
            if not data:
                raise Gone
            self._found.extend(self._inbox.add(data))
        return self._found.popleft()
