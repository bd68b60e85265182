"""A path that is cut, and one that falls silent with a write in it."""

from __future__ import annotations

import socket
import struct
import threading
from collections.abc import Iterator
from contextlib import ExitStack

import pytest

from headrace.accidents.relay import Relay
from tests.waiting import PATIENCE_S


def pdu(kind: int, data: bytes) -> bytes:
    """Of the transport, as far as a relay looks."""
    return struct.pack("<BBBBI", kind, 0, 8, 8, 8 + len(data)) + data


class Path:
    def __init__(self, stack: ExitStack) -> None:
        self.listener = stack.enter_context(socket.create_server(("127.0.0.1", 0)))
        self.listener.settimeout(PATIENCE_S)
        self.relay = stack.enter_context(Relay(self.listener.getsockname()[1]))
        self.host = stack.enter_context(socket.create_connection(("127.0.0.1", self.relay.port), PATIENCE_S))
        self.target = stack.enter_context(self.listener.accept()[0])
        for end in (self.host, self.target):
            end.settimeout(PATIENCE_S)

    @staticmethod
    def comes(end: socket.socket, length: int) -> bytes:
        got = b""
        while len(got) < length:
            got += (piece := end.recv(length - len(got)))
            assert piece, "it ended"
        return got


@pytest.fixture
def path() -> Iterator[Path]:
    with ExitStack() as stack:
        yield Path(stack)


def test_data_of_a_write_make_it_silent_and_come_late(path: Path) -> None:
    path.relay.hold()
    command, data = pdu(4, b"c" * 64), pdu(6, b"d" * 100_000)
    # In pieces that end within a header.
    for piece in (command[:3], command[3:] + data[:5]):
        path.host.sendall(piece)
    assert path.comes(path.target, len(command)) == command
    assert not path.relay.held.is_set()
    path.host.sendall(data[5:])
    assert path.relay.held.wait(PATIENCE_S)
    path.target.sendall(b"answer")
    path.target.settimeout(0.05)
    with pytest.raises(TimeoutError):
        # What came before, at most: not the data.
        while True:
            assert len(path.target.recv(1 << 20)) <= 5
    path.target.settimeout(PATIENCE_S)
    path.relay.release()
    rest = path.comes(path.target, len(data) - 5)
    assert rest.endswith(b"d" * 90_000)
    assert path.comes(path.host, 6) == b"answer"


def test_a_large_command_capsule_carries_data_and_a_small_one_does_not(path: Path) -> None:
    path.relay.hold()
    small = pdu(4, bytes(64 + 4096))
    path.host.sendall(small)
    assert path.comes(path.target, len(small)) == small and not path.relay.held.is_set()
    path.host.sendall(pdu(4, bytes(64 + 16384)))
    assert path.relay.held.wait(PATIENCE_S)


def test_what_was_cut_is_reset_and_a_new_connection_too_until_it_heals(path: Path) -> None:
    path.relay.cut()
    with pytest.raises(ConnectionResetError):
        path.host.recv(1)
    with pytest.raises(ConnectionResetError), socket.create_connection(("127.0.0.1", path.relay.port)) as again:
        again.settimeout(PATIENCE_S)
        again.recv(1)
    path.relay.heal()
    with socket.create_connection(("127.0.0.1", path.relay.port), PATIENCE_S) as again:
        again.sendall(b"x")
        with path.listener.accept()[0] as target:
            target.settimeout(PATIENCE_S)
            assert target.recv(1) == b"x"


def test_a_side_that_takes_nothing_holds_up_nobody_else(path: Path) -> None:
    """More than fits into the buffers between, both ways at once."""
    data = pdu(7, b"x" * (16 << 20))
    sending = threading.Thread(target=path.target.sendall, args=(data,))
    sending.start()
    try:
        path.host.sendall(b"\x04\x00\x08\x08" + struct.pack("<I", 12) + b"ping")
        assert path.comes(path.target, 12)[-4:] == b"ping"
    finally:
        assert path.comes(path.host, len(data)) == data
        sending.join(PATIENCE_S)
