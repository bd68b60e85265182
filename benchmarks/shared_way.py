"""A way to a port that carries so many bytes a second, of both directions together, and shares them evenly.

`python -m benchmarks.shared_way PORT BYTES_PER_S` prints the port that leads to 127.0.0.1:PORT,
and ends with its input. Connections take turns, a
quantum each, as at a drive or a switch that serves its queues in turn; what waits for its turn waits in buffers that
are small against a batch, so that nobody's bytes stand in front of another's.
"""

from __future__ import annotations

import select
import socket
import sys
import time
from typing import Any

from headrace.units import KIB

QUANTUM = 32 * KIB
BUFFER = 64 * KIB
#: Of time that nobody used, so much may be made up for.
SLACK_S = 0.001


def carry(behind: int, rate: float) -> None:
    listener = socket.socket()
    # Connections that are accepted have it, too.
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
    listener.bind(("127.0.0.1", 0))
    listener.listen(64)
    print(listener.getsockname()[1], flush=True)
    ends: dict[socket.socket, socket.socket] = {}
    free_at = time.perf_counter()
    source: Any = sys.stdin
    quantum = memoryview(bytearray(QUANTUM))
    while True:
        # Whose turn it is: all that have something to send, and a place to send it to.
        ready: list[socket.socket] = select.select([listener, source, *ends], [], [])[0]
        if source in ready:
            return
        able = set(select.select([], [ends[end] for end in ready if end is not listener], [], 0)[1])
        if listener not in ready and not able:
            time.sleep(0.0002)
        for end in ready:
            if end is listener:
                near, far = listener.accept()[0], socket.socket()
                far.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, BUFFER)
                far.connect(("127.0.0.1", behind))
                for one, other in ((near, far), (far, near)):
                    one.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, BUFFER)
                    one.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                    ends[one] = other
            elif end in ends and ends[end] in able:
                other = ends[end]
                try:
                    count = end.recv_into(quantum)
                    if not count:
                        raise OSError
                    other.sendall(quantum[:count])
                except OSError:
                    for each in (end, other):
                        ends.pop(each, None)
                        each.close()
                    continue
                now = time.perf_counter()
                free_at = max(free_at, now - SLACK_S) + count / rate
                if free_at > now:
                    time.sleep(free_at - now)


if __name__ == "__main__":
    carry(int(sys.argv[1]), float(sys.argv[2]))
