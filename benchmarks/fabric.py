"""Suite `fabric`: the native NVMe/TCP host and target, beside a bare socket that moves the same bytes the same way."""

from __future__ import annotations

import resource
import statistics
import time
from collections.abc import Callable, Iterator

import numpy as np
import psutil

from benchmarks.bare_socket import BareSocket
from benchmarks.figures import Figure
from benchmarks.pairs import interleaved, quartile_spread
from headrace.device import Batch, open_device, read_batch
from headrace.testing.serve import serving
from headrace.units import MIB

NQN = "nqn.2024-01.headrace:benchmark"
BLOCK_BYTES = MIB
DEPTH = 16


def _cpu_s(server_pid: int) -> float:
    """CPU seconds spent so far by this process, all its threads, and by the server process."""
    own = resource.getrusage(resource.RUSAGE_SELF)
    server = psutil.Process(server_pid).cpu_times()
    return float(own.ru_utime + own.ru_stime + server.user + server.system)


class _Metered:
    """Times one transfer of `size_bytes`; keeps GB/s (returned) and CPU seconds a GB of both processes."""

    def __init__(self, transfer: Callable[[], None], server_pid: int, size_bytes: int) -> None:
        self._transfer = transfer
        self._server_pid = server_pid
        self._gigabytes = size_bytes / 1e9
        self.cpu_s_per_gb: list[float] = []

    def __call__(self) -> float:
        cpu = _cpu_s(self._server_pid)
        begun = time.perf_counter()
        self._transfer()
        elapsed = time.perf_counter() - begun
        self.cpu_s_per_gb.append((_cpu_s(self._server_pid) - cpu) / self._gigabytes)
        return self._gigabytes / elapsed


def _sequential(size_bytes: int) -> Batch:
    count = size_bytes // BLOCK_BYTES
    offsets = np.arange(count, dtype=np.uint64) * np.uint64(BLOCK_BYTES)
    return Batch(
        member=np.zeros(count, np.uint32),
        offset=offsets,
        length=np.full(count, BLOCK_BYTES, np.uint64),
        buffer_offset=offsets,
    )


def read_1mib(quick: bool) -> Iterator[Figure]:
    """Sequential 1 MiB reads, 16 under way, one connection, memory to memory, a server process and a client process."""
    size_bytes = (128 if quick else 256) * MIB
    rounds = 7 if quick else 21
    destination = np.zeros(size_bytes, np.uint8)
    batch = _sequential(size_bytes)
    with serving(NQN, f"mem:{size_bytes // MIB}MiB") as target:
        device = open_device(target.uri(queues=1, depth=DEPTH))
        bare = BareSocket(size_bytes)
        try:
            # The target's memory gets real bytes, so that both sides read memory that exists.
            source = np.random.default_rng(1).integers(0, 256, size_bytes, dtype=np.uint8)
            for offset in range(0, size_bytes, 8 * MIB):
                device.write(offset, source[offset : offset + 8 * MIB])

            def ours() -> None:
                read_batch([device], batch, [destination])

            def peer() -> None:
                bare.read(destination.data, BLOCK_BYTES, DEPTH)

            for transfer, name in ((ours, "headrace"), (peer, "the bare socket")):
                destination[:] = 0
                transfer()
                if not np.array_equal(destination, source):
                    raise AssertionError(f"{name} did not move the bytes")
            ours_metered = _Metered(ours, target.process.pid, size_bytes)
            peer_metered = _Metered(peer, bare.process.pid, size_bytes)
            pairs = interleaved(ours_metered, peer_metered, rounds)
        finally:
            bare.close()
            device.close()

    def figure(name: str, samples: list[float], unit: str, **more: float | None) -> Figure:
        return Figure(suite="fabric", figure=name, value=statistics.median(samples), unit=unit, samples=samples, **more)

    yield figure("read_1mib_vs_bare_socket", pairs.ratios, "ratio", at_least=0.7, noise=pairs.noise)
    yield figure("read_1mib", pairs.ours, "GB/s", noise=quartile_spread(pairs.ours))
    yield figure("read_1mib_bare_socket", pairs.peer, "GB/s", noise=quartile_spread(pairs.peer))
    yield figure("read_1mib_cpu", ours_metered.cpu_s_per_gb, "CPU s/GB")
    yield figure("read_1mib_cpu_bare_socket", peer_metered.cpu_s_per_gb, "CPU s/GB")


def run(quick: bool) -> Iterator[Figure]:
    yield from read_1mib(quick)
