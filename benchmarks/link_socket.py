"""What a link carries: bytes over one TCP connection between two plain sockets, as fast as they go.

`python -m benchmarks.link_socket ADDRESS` prints its port, and sends to whoever connects, one after another.
"""

from __future__ import annotations

import socket
import sys
import time

from headrace.units import MIB

#: Before the time counts, as long as TCP needs to find its rate.
WARM_S = 0.3


def send(address: str) -> None:
    data = bytes(MIB)
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        while True:
            connection, _ = server.accept()
            try:
                with connection:
                    while True:
                        connection.sendall(data)
            except OSError:
                continue  # The other end has seen enough.


def receive(address: str, port: int, seconds: float) -> tuple[float, float]:
    """(bytes a second, CPU seconds of this process a GB)."""
    buffer = bytearray(MIB)
    count, cpu = 0, 0.0
    with socket.create_connection((address, port), timeout=20) as connection:
        start = began = now = time.perf_counter() + WARM_S
        while now < began + seconds:
            got = connection.recv_into(buffer)
            now = time.perf_counter()
            if not got:
                raise RuntimeError("the sender went away")
            if now < start:
                began, cpu = now, time.process_time()
            else:
                count += got
    return count / (now - began), (time.process_time() - cpu) / count * 1e9


if __name__ == "__main__":
    send(sys.argv[1])
