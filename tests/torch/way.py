"""A TCP way to a port of 127.0.0.1 that can be made slow, frozen, or cut, by seed."""

from __future__ import annotations

import contextlib
import random
import socket
import struct
import threading

from headrace.testing.serve import free_port


class Way:
    """127.0.0.1:`port` leads to `behind`. What comes back is late by `late_s` (from, to), by chance of the seed, a
    piece of at most 64 KiB at a time; `freeze` lets nothing through in either direction, and keeps the connections."""

    def __init__(self, behind: int, seed: int) -> None:
        self.port = free_port()
        self.late_s = (0.0, 0.0)
        self._behind = behind
        self._chance = random.Random(seed)
        self._open = threading.Event()
        self._open.set()
        self._whole = True
        self._over = threading.Event()
        self._lock = threading.Lock()
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._listener = socket.socket()
        self._listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        self._listener.bind(("127.0.0.1", self.port))
        self._listener.listen(64)
        self._start(self._accept)

    def freeze(self) -> None:
        self._open.clear()

    def thaw(self) -> None:
        self._open.set()

    def cut(self) -> None:
        """Reset every connection, and each new one, until `heal`."""
        with self._lock:
            self._whole = False
            ends, self._ends = self._ends, []
        for end in ends:
            _reset(end)

    def heal(self) -> None:
        with self._lock:
            self._whole = True

    def close(self) -> None:
        self._over.set()
        self.thaw()
        # What `accept` waits for: the only way to wake it that every kernel has.
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", self.port), 2):
            pass
        self._listener.close()
        self.cut()
        for thread in self._threads:
            thread.join(10)

    def __enter__(self) -> Way:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _start(self, run: object, *arguments: object) -> None:
        thread = threading.Thread(target=run, args=arguments, name="way")  # type: ignore[arg-type]
        self._threads.append(thread)
        thread.start()

    def _accept(self) -> None:
        while not self._over.is_set():
            near = self._listener.accept()[0]
            try:
                if not self._whole or self._over.is_set():
                    raise OSError
                far = socket.create_connection(("127.0.0.1", self._behind), 2)
            except OSError:
                _reset(near)
                continue
            # That was for the connecting: a way that is frozen stays so, and does not end by itself.
            far.settimeout(None)
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            with self._lock:
                self._ends += [near, far]
            self._start(self._move, near, far, False)
            self._start(self._move, far, near, True)

    def _move(self, source: socket.socket, drain: socket.socket, back: bool) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(1 << 16):
                low, high = self.late_s
                if back and high > 0:
                    self._over.wait(self._chance.uniform(low, high))
                while not self._open.wait(0.2) and source.fileno() >= 0:
                    pass
                drain.sendall(data)
        for end in (source, drain):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)


def _reset(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        # Another thread may be in `recv`: that ends by this, and not by `close`.
        end.shutdown(socket.SHUT_RDWR)
    end.close()
