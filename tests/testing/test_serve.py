"""What tests of a real target rest on."""

from __future__ import annotations

import socket

import pytest

from headrace.testing.serve import free_port


def test_a_port_is_the_callers_until_it_listens_and_after() -> None:
    port = free_port()

    def refused() -> None:
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(("127.0.0.1", port), 30)

    def taken() -> None:
        with socket.socket() as other, pytest.raises(OSError, match="in use"):
            other.bind(("127.0.0.1", port))

    for _ in range(2):
        refused()
        taken()
        # As servers are made, ours among them: SO_REUSEADDR is set.
        with socket.create_server(("127.0.0.1", port)):
            socket.create_connection(("127.0.0.1", port), 30).close()
            taken()
