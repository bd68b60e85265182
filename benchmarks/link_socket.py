"""What a link carries: bytes over one TCP connection between two plain sockets, as fast as they go.

python -m benchmarks.link_socket send ADDRESS                      prints its port, serves one connection
python -m benchmarks.link_socket receive ADDRESS PORT SECONDS      prints one JSON object
"""

from __future__ import annotations

import json
import socket
import sys
import time

from headrace.units import MIB

#: Before the time counts, as long as TCP needs to find its rate.
WARM_S = 0.5


def send(address: str) -> None:
    with socket.create_server((address, 0)) as server:
        print(server.getsockname()[1], flush=True)
        connection, _ = server.accept()
    data = bytes(MIB)
    with connection:
        try:
            while True:
                connection.sendall(data)
        except OSError:
            return  # The other end has seen enough.


def receive(address: str, port: int, seconds: float) -> None:
    buffer = bytearray(MIB)
    with socket.create_connection((address, port), timeout=20) as connection:
        start = time.perf_counter() + WARM_S
        count, began, now = 0, start, 0.0
        while now < began + seconds:
            got = connection.recv_into(buffer)
            now = time.perf_counter()
            if not got:
                raise SystemExit("the sender went away")
            if now < start:
                began = now
            else:
                count += got
    print(json.dumps({"bytes_per_s": count / (now - began)}))


if __name__ == "__main__":
    if sys.argv[1] == "send":
        send(sys.argv[2])
    else:
        receive(sys.argv[2], int(sys.argv[3]), float(sys.argv[4]))
