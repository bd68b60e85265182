"""Storage that has reservations, reports them, and does not refuse whoever lost one: a proxy before our target.

It takes every host for the same one, and lets the last key that was registered stand for it, as an array would that
knows hosts by their NQN. Each host sees itself hold the namespace under its own key, and whoever held it before goes on
writing.
"""

from __future__ import annotations

import contextlib
import secrets
import socket
import threading
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial

_CAPSULE = 4
_FABRICS, _CONNECT, _REGISTER = 0x7F, 1, 0x0D
#: Offsets in a command capsule: the command begins at 8.
_OPCODE, _FCTYPE, _NSID, _CDW10 = 8, 12, 12, 48
#: Reservation Register: RREGA (bits 2:0) 0 registers and 2 replaces; IEKEY (bit 3), whatever the key was.
_REPLACE_ANY = 2 | 8
_HOSTNQN = b"nqn.2026-01.io.headrace:every-host"


class Careless:
    """127.0.0.1:`port` leads to the target's port."""

    def __init__(self, behind: int, stack: ExitStack) -> None:
        self._behind = behind
        self._stack = stack
        self._only_host = secrets.token_bytes(16)
        self._registered: set[int] = set()
        self._lock = threading.Lock()
        self._listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=64))
        self.port: int = self._listener.getsockname()[1]
        self._start(self._accept)

    def _start(self, work: Callable[[], None]) -> None:
        def run() -> None:
            # Whoever closes either side ends it.
            with contextlib.suppress(OSError):
                work()

        thread = threading.Thread(target=run, name="careless")
        thread.start()
        self._stack.callback(thread.join, 30)

    def _accept(self) -> None:
        while True:
            near = self._listener.accept()[0]
            far = socket.create_connection(("127.0.0.1", self._behind))
            host = bytearray()
            for source, drain, change in ((near, far, self._to_target), (far, near, self._to_host)):
                self._start(partial(_move, source, drain, change, host))
                self._stack.callback(_close, source)

    def _to_target(self, pdu: bytearray, host: bytearray) -> None:
        if pdu[0] != _CAPSULE:
            return
        if pdu[_OPCODE] == _FABRICS and pdu[_FCTYPE] == _CONNECT:
            at = pdu[3]
            host[:] = pdu[at : at + 16]
            pdu[at : at + 16] = self._only_host
            pdu[at + 512 : at + 768] = _HOSTNQN.ljust(256, b"\0")
        elif pdu[_OPCODE] == _REGISTER and pdu[_CDW10] & 7 == 0:
            nsid = int.from_bytes(pdu[_NSID : _NSID + 4], "little")
            with self._lock:
                if nsid in self._registered:
                    pdu[_CDW10] |= _REPLACE_ANY
                self._registered.add(nsid)

    def _to_host(self, pdu: bytearray, host: bytearray) -> None:
        if host:
            pdu[:] = pdu.replace(self._only_host, bytes(host))


def _move(
    source: socket.socket, drain: socket.socket, change: Callable[[bytearray, bytearray], None], host: bytearray
) -> None:
    with source.makefile("rb") as stream:
        while len(header := stream.read(8)) == 8:
            pdu = bytearray(header + stream.read(int.from_bytes(header[4:8], "little") - 8))
            change(pdu, host)
            drain.sendall(pdu)
    with contextlib.suppress(OSError):
        drain.shutdown(socket.SHUT_WR)


def _close(end: socket.socket) -> None:
    with contextlib.suppress(OSError):
        end.shutdown(socket.SHUT_RDWR)
    end.close()


@contextmanager
def careless(behind: int) -> Iterator[Careless]:
    with ExitStack() as stack:
        storage = Careless(behind, stack)
        try:
            yield storage
        finally:
            # Its thread waits there.
            _close(storage._listener)
