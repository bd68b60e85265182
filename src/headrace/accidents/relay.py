"""A TCP path that can be cut and healed, or falls silent with a write in it: 127.0.0.1:`port` leads to another port.

It knows nothing of NVMe/TCP but where a PDU begins, and which ones carry data of a write.
"""

from __future__ import annotations

import contextlib
import selectors
import socket
import struct
import threading
import time

#: PDU types of the NVMe/TCP transport (3.6.2) that carry data of a write: asked for by the target, or with the command.
_H2C_DATA, _CAPSULE_COMMAND = 6, 4
_HEADER_BYTES = 8
#: Capsules of this length carry data of some size: no heartbeat, no reservation.
_LARGE_CAPSULE_BYTES = 12 << 10
_PIECE_BYTES = 1 << 18
#: With a rate: so much of what was lost by sleeping too long is made up for.
_CREDIT_S = 0.01
_CONNECT_TIMEOUT_S = 2.0


class _End:
    """One side of a connection."""

    def __init__(self, sock: socket.socket, *, host: bool) -> None:
        self.socket = sock
        self.host = host
        self.peer = self
        #: What goes to this side next.
        self.pending = bytearray()
        #: Nothing more comes from this side: the other one is closed when it has all of it.
        self.over = False
        #: Of the PDU that comes from this side: what of its header is here, and how many bytes of it are to come.
        self._header = bytearray()
        self._left = 0

    def brings_data(self, piece: bytes) -> bool:
        """Does the data of a write begin in what comes from this side now?"""
        found, at = False, 0
        while at < len(piece):
            if self._left:
                step = min(self._left, len(piece) - at)
                self._left -= step
                at += step
                continue
            step = min(_HEADER_BYTES - len(self._header), len(piece) - at)
            self._header += piece[at : at + step]
            at += step
            if len(self._header) == _HEADER_BYTES:
                kind, length = self._header[0], int.from_bytes(self._header[4:8], "little")
                found |= kind == _H2C_DATA or (kind == _CAPSULE_COMMAND and length >= _LARGE_CAPSULE_BYTES)
                self._left = max(0, length - _HEADER_BYTES)
                self._header.clear()
        return found


class Relay:
    """One thread moves the bytes of all connections.

    `cut` resets them, and each new one at once, until `heal`. `hold`: the next data of a write, and from that moment
    everything on every connection, both ways, waits for `release`; then all of it goes on, late. `held` says that it
    has happened.

    It listens all the time: a port that is let go may be somebody's else when it is wanted again.
    """

    def __init__(self, behind: int, *, host: str = "127.0.0.1", bytes_per_s: float | None = None) -> None:
        """`bytes_per_s`: of all connections and both ways together."""
        self.held = threading.Event()
        self._behind = (host, behind)
        self._bytes_per_s = bytes_per_s
        self._free_at = 0.0
        self._whole = True
        self._hold = self._over = False
        self._lock = threading.Lock()
        self._ends: dict[socket.socket, _End] = {}
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=64)
        self._listener.setblocking(False)
        self.port: int = self._listener.getsockname()[1]
        self._near, self._wake = socket.socketpair()
        self._near.setblocking(False)
        self._thread = threading.Thread(target=self._run, name="relay")
        self._thread.start()

    def cut(self) -> None:
        with self._lock:
            self._whole = False
            for end in self._ends.values():
                _reset(end.socket)
            self._ends.clear()
        self._wake.send(b".")

    def heal(self) -> None:
        with self._lock:
            self._whole = True

    def limit(self, bytes_per_s: float | None) -> None:
        """From now on, of all connections and both ways together; None: no more."""
        self._bytes_per_s = bytes_per_s

    def hold(self) -> None:
        with self._lock:
            self._hold = True

    def hold_now(self) -> None:
        """Whatever is on its way."""
        self.held.set()
        self._wake.send(b".")

    def release(self) -> None:
        with self._lock:
            self._hold = False
        self.held.clear()
        self._wake.send(b".")

    def close(self) -> None:
        self._over = True
        self._wake.send(b".")
        self._thread.join(10)
        self.cut()
        for each in (self._listener, self._near, self._wake):
            each.close()

    def __enter__(self) -> Relay:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    # ---- its thread ----

    def _run(self) -> None:
        while not self._over:
            with selectors.DefaultSelector() as ready:
                with self._lock:
                    self._register(ready)
                found = ready.select()
                with self._lock:
                    for key, events in found:
                        self._handle(key.fileobj, events)

    def _register(self, ready: selectors.BaseSelector) -> None:
        ready.register(self._near, selectors.EVENT_READ)
        if self.held.is_set():
            return
        ready.register(self._listener, selectors.EVENT_READ)
        for end in self._ends.values():
            if events := _wanted(end):
                ready.register(end.socket, events)

    def _handle(self, which: object, events: int) -> None:
        if which is self._near:
            self._near.recv(4096)
        elif which is self._listener:
            self._accept()
        elif (end := self._ends.get(which)) is not None and not self.held.is_set():  # type: ignore[call-overload]
            # One that was cut meanwhile is not there any more.
            try:
                if events & selectors.EVENT_WRITE:
                    self._send(end)
                if events & selectors.EVENT_READ:
                    self._receive(end)
            except BlockingIOError:
                return
            except OSError:
                self._close(end)

    def _accept(self) -> None:
        with contextlib.suppress(OSError):
            near = self._listener.accept()[0]
            if not self._whole:
                _reset(near)
                return
            try:
                far = socket.create_connection(self._behind, _CONNECT_TIMEOUT_S)
            except OSError:
                near.close()
                return
            ends = _End(near, host=True), _End(far, host=False)
            for end, peer in (ends, ends[::-1]):
                end.peer = peer
                end.socket.setblocking(False)
                end.socket.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._ends[end.socket] = end

    def _receive(self, end: _End) -> None:
        piece = end.socket.recv(_PIECE_BYTES if self._bytes_per_s is None else _PIECE_BYTES >> 4)
        if not piece:
            end.over = True
            if not end.peer.pending:
                self._close(end)
            return
        if self._bytes_per_s is not None:
            # A sleep that was too long is made up for by the next ones.
            now = time.monotonic()
            self._free_at = max(self._free_at, now - _CREDIT_S) + len(piece) / self._bytes_per_s
            time.sleep(max(0.0, self._free_at - now))
        end.peer.pending += piece
        if end.host and end.brings_data(piece) and self._hold:
            self.held.set()
        else:
            with contextlib.suppress(BlockingIOError):
                self._send(end.peer)

    def _send(self, end: _End) -> None:
        del end.pending[: end.socket.send(end.pending)]
        if end.peer.over and not end.pending:
            self._close(end)

    def _close(self, end: _End) -> None:
        for each in (end, end.peer):
            self._ends.pop(each.socket, None)
            each.socket.close()


def _wanted(end: _End) -> int:
    """Nothing is read from a side whose other one takes nothing."""
    read = selectors.EVENT_READ if not end.over and not end.peer.pending else 0
    return read | (selectors.EVENT_WRITE if end.pending else 0)


def _reset(end: socket.socket) -> None:
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()
