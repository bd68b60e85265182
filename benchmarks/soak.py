"""Suite `soak`: does anything grow? Many connects, then a long time of verified reads and writes.

Memory is that of the whole process (resident set), ours as the host and the target's, taken all along; its slope is
that of a straight line through the samples after the warm-up. A wrong byte ends the run at once.
"""

from __future__ import annotations

import gc
import sys
import threading
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field

import numpy as np
import psutil

from benchmarks.figures import Figure
from headrace.device import open_device
from headrace.testing.serve import ServeProcess, serving
from headrace.units import KIB, MIB

NQN = "nqn.2024-01.headrace:soak"
MEDIA_BYTES = 64 * MIB
#: Each piece holds the bytes of its number and version, so that a piece of another time or place is seen.
PIECE_BYTES = 256 * KIB
LENGTHS = (4 * KIB, 16 * KIB, 64 * KIB, 256 * KIB)
#: Before this share of the time memory may still grow: allocators and pools fill up.
WARM_UP = 1 / 3


@dataclass(frozen=True, kw_only=True)
class Length:
    cycles: int
    soak_s: float
    sample_s: float


FULL = Length(cycles=10_000, soak_s=1800, sample_s=5)
QUICK = Length(cycles=100, soak_s=3, sample_s=0.2)


@dataclass
class Growth:
    """Resident memory of a process over time."""

    pid: int
    seconds: list[float] = field(default_factory=list)
    resident_bytes: list[int] = field(default_factory=list)

    def sample(self, at_s: float) -> None:
        self.seconds.append(at_s)
        self.resident_bytes.append(psutil.Process(self.pid).memory_info().rss)

    def mib_an_hour(self) -> float:
        first = int(len(self.seconds) * WARM_UP)
        slope, _ = np.polyfit(self.seconds[first:], self.resident_bytes[first:], 1)
        return float(slope * 3600 / MIB)


def _descriptors(pid: int) -> int:
    return int(psutil.Process(pid).num_fds())


def _settled(read: Callable[[], int], goal: int, timeout_s: float = 10) -> int:
    """What `read` gives once it is at `goal`, or at the end: the target learns of a disconnect a little later."""
    deadline = time.monotonic() + timeout_s
    while (found := read()) > goal and time.monotonic() < deadline:
        time.sleep(0.05)
    return found


def _tell(text: str) -> None:
    print(f"soak: {text}", file=sys.stderr, flush=True)


def cycles(target: ServeProcess, length: Length) -> Iterator[Figure]:
    """Connect, read a block, disconnect; digests on every other time."""
    host = psutil.Process().pid
    block = bytearray(4096)

    def cycle(number: int) -> None:
        with open_device(target.uri(hdgst=number % 2, ddgst=number // 2 % 2, queues=1 + number % 3)) as device:
            device.read_into(0, block)

    warm = max(1, length.cycles // 10)
    for number in range(warm):
        cycle(number)
    gc.collect()
    descriptors = {pid: _settled(lambda pid=pid: _descriptors(pid), 0, 1) for pid in (host, target.process.pid)}  # type: ignore[misc]
    threads = threading.active_count()
    grown = {pid: Growth(pid) for pid in (host, target.process.pid)}
    begun = time.perf_counter()
    for number in range(length.cycles):
        cycle(number)
        if number % max(1, length.cycles // 20) == 0:
            for growth in grown.values():
                growth.sample(float(number))
            _tell(f"{number} of {length.cycles} connects")
    seconds = time.perf_counter() - begun
    gc.collect()
    left = 0
    for pid, before in descriptors.items():
        left += max(0, _settled(lambda pid=pid: _descriptors(pid), before) - before)  # type: ignore[misc]
    yield Figure(suite="soak", figure="connects", value=length.cycles / seconds, unit="1/s", samples=[length.cycles])
    yield Figure(suite="soak", figure="connects_descriptors_left", value=left, unit="descriptors", at_most=0)
    yield Figure(
        suite="soak",
        figure="connects_threads_left",
        value=threading.active_count() - threads,
        unit="threads",
        at_most=0,
    )
    for name, pid in (("host", host), ("target", target.process.pid)):
        samples = grown[pid]
        half = len(samples.resident_bytes) // 2
        # The second half: what a connect leaves, not what the first thousand make room for.
        more = samples.resident_bytes[-1] - samples.resident_bytes[half]
        made = samples.seconds[-1] - samples.seconds[half]
        yield Figure(suite="soak", figure=f"connect_memory_{name}", value=more / made, unit="bytes a connect")


class _Writer(threading.Thread):
    """Writes and verifies its own share of the pieces, in random order and lengths, until told to stop."""

    def __init__(self, uri: str, first: int, pieces: int, seed: int) -> None:
        super().__init__(name=f"soak-{seed}")
        self.device = open_device(uri)
        self._places = np.arange(first, first + pieces)
        self._versions = np.zeros(pieces, np.int64)
        self._random = np.random.default_rng(seed)
        self._pattern = self._random.integers(0, 256, PIECE_BYTES + 65536, dtype=np.uint8)
        self._buffer = np.zeros(PIECE_BYTES, np.uint8)
        self.over = threading.Event()
        self.verified_bytes = 0
        self.error: BaseException | None = None

    def _expected(self, piece: int) -> np.ndarray[tuple[int], np.dtype[np.uint8]]:
        start = (int(self._places[piece]) * 31 + int(self._versions[piece]) * 257) % 65536
        return self._pattern[start : start + PIECE_BYTES]

    def run(self) -> None:
        try:
            for piece in range(len(self._places)):
                self._write(piece)
            while not self.over.is_set():
                self._write(int(self._random.integers(len(self._places))))
                self._verify(int(self._random.integers(len(self._places))))
        except BaseException as error:
            self.error = error
        finally:
            self.device.close()

    def _write(self, piece: int) -> None:
        self._versions[piece] += 1
        length = int(self._random.choice(LENGTHS))
        data, place = self._expected(piece), int(self._places[piece]) * PIECE_BYTES
        for offset in range(0, PIECE_BYTES, length):
            self.device.write(place + offset, data[offset : offset + length], fua=length == 4 * KIB)
        if piece % 16 == 0:
            self.device.flush()

    def _verify(self, piece: int) -> None:
        self.device.read_into(int(self._places[piece]) * PIECE_BYTES, self._buffer)
        if not np.array_equal(self._buffer, self._expected(piece)):
            raise AssertionError(f"piece {self._places[piece]} does not hold what was written last")
        self.verified_bytes += PIECE_BYTES


def soak(target: ServeProcess, length: Length) -> Iterator[Figure]:
    """Four writers that verify, each on a device of its own, with every combination of digests."""
    host = psutil.Process().pid
    before = {pid: _descriptors(pid) for pid in (host, target.process.pid)}
    share = MEDIA_BYTES // PIECE_BYTES // 4
    writers = [
        _Writer(target.uri(hdgst=number % 2, ddgst=number // 2, depth=16), number * share, share, number)
        for number in range(4)
    ]
    grown = {"host": Growth(host), "target": Growth(target.process.pid)}
    begun = time.monotonic()
    for writer in writers:
        writer.start()
    try:
        told = 0.0
        while (passed := time.monotonic() - begun) < length.soak_s and all(writer.is_alive() for writer in writers):
            for growth in grown.values():
                growth.sample(passed)
            if passed - told >= 60:
                told = passed
                verified = sum(writer.verified_bytes for writer in writers) / 2**30
                _tell(f"{passed / 60:.0f} minutes, {verified:.1f} GiB verified")
            time.sleep(length.sample_s)
    finally:
        for writer in writers:
            writer.over.set()
        for writer in writers:
            writer.join(60)
    for writer in writers:
        if writer.error is not None:
            raise writer.error
    gc.collect()
    left = sum(max(0, _settled(lambda pid=pid: _descriptors(pid), was) - was) for pid, was in before.items())  # type: ignore[misc]
    verified_bytes = sum(writer.verified_bytes for writer in writers)
    yield Figure(suite="soak", figure="verified", value=verified_bytes / 2**30, unit="GiB", samples=[length.soak_s])
    yield Figure(suite="soak", figure="descriptors_left", value=left, unit="descriptors", at_most=0)
    for name, growth in grown.items():
        # Over some seconds a page more or less is an enormous slope: only the full length is judged.
        bound = 1.0 if length is FULL else None
        yield Figure(
            suite="soak",
            figure=f"memory_slope_{name}",
            value=growth.mib_an_hour(),
            unit="MiB/h",
            at_most=bound,
            samples=[bytes_ / MIB for bytes_ in growth.resident_bytes[:: max(1, len(growth.resident_bytes) // 60)]],
        )


FIGURES = {"connects": cycles, "soak": soak}


def run(quick: bool, only: list[str] | None = None) -> Iterator[Figure]:
    length = QUICK if quick else FULL
    with serving(NQN, f"mem:{MEDIA_BYTES // MIB}MiB") as target:
        for name in only or FIGURES:
            yield from FIGURES[name](target, length)
