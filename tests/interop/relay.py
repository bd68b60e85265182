"""A TCP path that can be cut and healed: 127.0.0.1:`port` leads to a port behind it."""

from __future__ import annotations

import contextlib
import select
import socket
import struct
import threading

from headrace.testing.serve import free_port


class Relay:
    """One thread moves the bytes of all connections. `cut` resets them, and each new one at once, until `heal`.

    It listens all the time: a port that is let go may be somebody's else when it is wanted again.
    """

    def __init__(self, behind: int) -> None:
        self.port = free_port()
        self._behind = behind
        self._whole = True
        self._over = False
        self._lock = threading.Lock()
        self._ends: dict[socket.socket, socket.socket] = {}
        self._listener = self._listen()
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    def _listen(self) -> socket.socket:
        listener = socket.socket()
        listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        listener.bind(("127.0.0.1", self.port))
        listener.listen(64)
        return listener

    def cut(self) -> None:
        with self._lock:
            self._whole = False
            for end in self._ends:
                _reset(end)
            self._ends.clear()

    def heal(self) -> None:
        with self._lock:
            self._whole = True

    def close(self) -> None:
        self._over = True
        self._thread.join(10)
        self.cut()
        self._listener.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def _run(self) -> None:
        while not self._over:
            with self._lock:
                sockets = [*self._ends, self._listener]
            try:
                # A short wait: `cut` and `heal` change the set behind its back.
                ready = select.select(sockets, [], [], 0.05)[0]
            except (OSError, ValueError):
                continue
            for each in ready:
                with self._lock:
                    if each is self._listener:
                        self._accept(each)
                    elif each in self._ends:
                        self._move(each)

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            near = listener.accept()[0]
            if not self._whole:
                _reset(near)
                return
            try:
                far = socket.create_connection(("127.0.0.1", self._behind), 2)
            except OSError:
                near.close()
                return
            for end in (near, far):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            self._ends[near], self._ends[far] = far, near

    def _move(self, source: socket.socket) -> None:
        drain = self._ends[source]
        try:
            data = source.recv(1 << 18)
            if data:
                drain.sendall(data)
                return
        except OSError:
            pass
        for end in (source, drain):
            self._ends.pop(end, None)
            end.close()


class HoldingRelay(Relay):
    """Also stops a host in the middle of a write: with `hold`, the next data that a target asked for (H2CData, PDU type
    6 of the TCP transport), and all that its connection sends after them, wait for `release`."""

    def __init__(self, behind: int) -> None:
        self._hold = False
        self.held = threading.Event()
        #: Of ends that hosts send to: bytes that were not passed on yet.
        self._waiting: dict[socket.socket, bytearray] = {}
        self._stopped: set[socket.socket] = set()
        self._hosts: set[socket.socket] = set()
        super().__init__(behind)

    def hold(self) -> None:
        with self._lock:
            self._hold = True

    def release(self) -> None:
        with self._lock:
            self._hold = False
            stopped, self._stopped = self._stopped, set()
            for end in stopped:
                with contextlib.suppress(OSError, KeyError):
                    self._ends[end].sendall(self._waiting.pop(end))

    def _accept(self, listener: socket.socket) -> None:
        before = set(self._ends)
        super()._accept(listener)
        # The host's end was put in first.
        self._hosts.update([end for end in self._ends if end not in before][:1])

    def _move(self, source: socket.socket) -> None:
        if source not in self._hosts:
            super()._move(source)
            return
        try:
            data = source.recv(1 << 18)
        except OSError:
            data = b""
        if not data:
            for end in (source, self._ends.pop(source)):
                self._ends.pop(end, None)
                end.close()
            return
        waiting = self._waiting.setdefault(source, bytearray())
        waiting += data
        while source not in self._stopped and len(waiting) >= 8:
            length = int.from_bytes(waiting[4:8], "little")
            if self._hold and waiting[0] == 6:
                self._stopped.add(source)
                self.held.set()
            elif len(waiting) >= length:
                self._ends[source].sendall(waiting[:length])
                del waiting[:length]
            else:
                return


def _reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
