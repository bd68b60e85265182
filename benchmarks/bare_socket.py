"""The ceiling: the same bytes over the same loopback with nothing but a socket.

A server process holds memory. A client process asks with 72-byte requests (the length of an NVMe command capsule) and
gets a 24-byte header (the length of a C2HData header) and the data, a fixed number of requests under way. One system
call a message on both sides, out of and into memory that was touched before. No protocol, no checks: what a host needs
beyond it is what the host costs.
"""

from __future__ import annotations

import socket
import struct
import subprocess
import sys

import numpy as np

REQUEST = struct.Struct("<QQ56x")
HEADER_BYTES = 24
assert REQUEST.size == 72


def _receive_exactly(connection: socket.socket, view: memoryview) -> bool:
    while view.nbytes:
        got = connection.recv_into(view, 0, socket.MSG_WAITALL)
        if not got:
            return False
        view = view[got:]
    return True


def serve(size_bytes: int) -> None:
    """Print the port, then answer one client after the other until killed."""
    memory = np.random.default_rng(1).integers(0, 256, size_bytes, dtype=np.uint8).data
    header = bytes(HEADER_BYTES)
    listener = socket.create_server(("127.0.0.1", 0))
    print(listener.getsockname()[1], flush=True)
    request = memoryview(bytearray(REQUEST.size))
    while True:
        connection, _ = listener.accept()
        with connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            while _receive_exactly(connection, request):
                offset, length = REQUEST.unpack(request)
                data = memory[offset : offset + length]
                sent = connection.sendmsg([header, data])
                while sent < HEADER_BYTES + length:  # A blocking sendmsg seldom sends less; then the rest follows.
                    if sent < HEADER_BYTES:
                        sent += connection.sendmsg([header[sent:], data])
                    else:
                        sent += connection.send(data[sent - HEADER_BYTES :])


class BareSocket:
    """The server process and one connection to it."""

    def __init__(self, size_bytes: int) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-m", "benchmarks.bare_socket", str(size_bytes)],
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            text=True,
        )
        assert self.process.stdout is not None
        self._connection = socket.create_connection(("127.0.0.1", int(self.process.stdout.readline())))
        self._connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        # A real time-out of the kernel: `settimeout` would make every receive a poll and a non-blocking call.
        self._connection.setsockopt(socket.SOL_SOCKET, socket.SO_RCVTIMEO, struct.pack("@ll", 30, 0))
        self._header = bytearray(HEADER_BYTES)

    def read(self, destination: memoryview, block_bytes: int, depth: int) -> None:
        """Fill `destination` from offset 0 on, in order, `depth` requests under way."""
        connection = self._connection
        offsets = range(0, destination.nbytes, block_bytes)
        asked = min(depth, len(offsets))
        connection.sendall(b"".join(REQUEST.pack(offset, block_bytes) for offset in offsets[:asked]))
        for offset in offsets:
            part = destination[offset : offset + block_bytes]
            got = connection.recvmsg_into([self._header, part], 0, socket.MSG_WAITALL)[0]
            if got < HEADER_BYTES or not _receive_exactly(connection, part[got - HEADER_BYTES :]):
                raise ConnectionError("the bare server went away")
            if asked < len(offsets):
                connection.sendall(REQUEST.pack(offsets[asked], block_bytes))
                asked += 1

    def close(self) -> None:
        self._connection.close()
        self.process.kill()
        self.process.wait()
        assert self.process.stdout is not None
        self.process.stdout.close()


if __name__ == "__main__":
    serve(int(sys.argv[1]))
