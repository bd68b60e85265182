"""I/O from Python: `python -m benchmarks.python_load URI SIZE [DEVICES]`, jobs as `benchmarks.programs` says.

Also the receive loop that a program without a native engine would have, for scale.
"""

from __future__ import annotations

import json
import socket
import struct
import sys
import time

import numpy as np

from headrace.device import Batch, NativeDevice, open_device, submit_read
from headrace.device.protocol import U64

#: As `native/bench` has them.
REQUEST = struct.Struct("<Q QQ 48x")
HEADER_BYTES = 24
assert REQUEST.size == 72
#: An odd factor, so each block comes once where their number is a power of two.
SCATTER = np.uint64(2_654_435_761)


def pattern(count: int, seed: int) -> U64:
    """The first `count` words of native/bench's memory of `seed`."""
    with np.errstate(over="ignore"):
        z: U64 = np.arange(count, dtype=np.uint64) * np.uint64(0x9E37_79B9_7F4A_7C15) + np.uint64(seed)
        z = (z ^ (z >> np.uint64(30))) * np.uint64(0xBF58_476D_1CE4_E5B9)
    z ^= z >> np.uint64(31)
    return z


class Load:
    def __init__(self, devices: list[NativeDevice], size_bytes: int) -> None:
        self.devices = devices
        self.memory = np.zeros(size_bytes, np.uint8)

    def _batch(self, numbers: U64, block_bytes: int, scatter: bool) -> Batch:
        blocks = np.uint64(self.memory.nbytes // block_bytes)
        places = (numbers * SCATTER if scatter else numbers) % blocks
        return Batch(
            member=np.zeros(len(numbers), np.uint32),
            offset=places * np.uint64(block_bytes),
            length=np.full(len(numbers), block_bytes, np.uint64),
            buffer_offset=numbers % blocks * np.uint64(block_bytes),
        )

    def batches(self, block_bytes: int, count: int, batch: int) -> None:
        """Scattered reads in batches, the next one submitted before the last is waited for."""
        under_way = None
        for first in range(0, count, batch):
            numbers = np.arange(first, min(first + batch, count), dtype=np.uint64)
            following = submit_read(self.devices[:1], self._batch(numbers, block_bytes, True), [self.memory])
            if under_way is not None:
                under_way.wait()
            under_way = following
        if under_way is not None:
            under_way.wait()

    def read(self, block_bytes: int, count: int, compute: bool) -> None:
        """One batch of reads in a row; meanwhile this thread sleeps, or computes without ever letting go by itself."""
        transfer = submit_read(
            self.devices[:1], self._batch(np.arange(count, dtype=np.uint64), block_bytes, False), [self.memory]
        )
        total = 0
        while compute and not transfer.done():
            for number in range(20_000):
                total += number * number
        transfer.wait()

    def idle(self, seconds: float) -> None:
        time.sleep(seconds)

    def check(self, block_bytes: int, seed: int, scatter: bool) -> bool:
        """Is the memory what reading all of a memory of `seed` leaves?"""
        expected = pattern(self.memory.nbytes // 8, seed).view(np.uint8).reshape(-1, block_bytes)
        numbers = np.arange(len(expected), dtype=np.uint64)
        order = numbers * SCATTER % np.uint64(len(expected)) if scatter else numbers
        return bool(np.array_equal(self.memory.reshape(-1, block_bytes), expected[order]))

    def socket_loop(self, port: int, block_bytes: int, depth: int, count: int) -> None:
        """Against the bare server: one request, one receive, one message at a time, as plain Python does it."""
        memory = self.memory.data
        blocks = self.memory.nbytes // block_bytes
        header = bytearray(HEADER_BYTES)
        with socket.create_connection(("127.0.0.1", port), 30) as connection:
            connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            connection.settimeout(None)
            asked = 0
            for taken in range(count):
                while asked < min(taken + depth, count):
                    place = asked * int(SCATTER) % blocks * block_bytes
                    connection.sendall(REQUEST.pack(0, place, block_bytes))
                    asked += 1
                at = taken % blocks * block_bytes
                target = memory[at : at + block_bytes]
                got = connection.recvmsg_into([header, target], 0, socket.MSG_WAITALL)[0]
                while got < HEADER_BYTES + block_bytes:
                    more = connection.recv_into(target[got - HEADER_BYTES :], 0, socket.MSG_WAITALL)
                    if not more:
                        raise ConnectionError("the bare server went away")
                    got += more


def main() -> None:
    uri, size_bytes, devices = sys.argv[1], int(sys.argv[2]), int((*sys.argv[3:], "1")[0])
    load = Load([open_device(uri) for _ in range(devices)], size_bytes)
    print("ready", flush=True)
    for line in sys.stdin:
        job = json.loads(line)
        begun, cpu = time.perf_counter(), time.process_time()
        same = getattr(load, job.pop("job"))(**job)
        answer = {"seconds": time.perf_counter() - begun, "cpu_s": time.process_time() - cpu, "same": same}
        print(json.dumps(answer), flush=True)
    for device in load.devices:
        device.close()


if __name__ == "__main__":
    main()
