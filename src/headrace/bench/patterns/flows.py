"""Flows that read, each in a thread: what all patterns of reading have in common.

A flow keeps `depth` requests under way as a few batches, and starts the next when one has come. It ends when its work
has, or the time is up; what is under way then is waited for and not counted, unless nothing else came.
"""

from __future__ import annotations

import resource
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass

import numpy as np

from headrace.bench.figures import Latencies, Series
from headrace.bench.meter import Meter, latencies_of_all, series_of
from headrace.bench.patterns.options import Options
from headrace.bench.patterns.samples import split
from headrace.bench.places.protocol import Pending, Place, Ranges, Reader, Tell
from headrace.bench.threads import all_ended
from headrace.errors import DeviceTimeout, HeadraceError
from headrace.units import format_rate

#: A path that gives nothing for so long hangs.
PATIENCE_S = 90.0
#: What is left behind after an error or Ctrl-C is waited for no longer than this.
_END_S = 10.0
#: How often a paced flow looks whether its oldest batch has come.
_LOOK_S = 0.0005
#: Batches that never came of which a latency is taken, at most.
_LATE_MOST = 1 << 16


@dataclass(frozen=True, kw_only=True)
class Measured:
    """By all flows together. `exhausted`: all of the data were read before the time was up."""

    bytes: int
    requests: int
    seconds: float
    series: Series
    latencies: Latencies | None
    exhausted: bool


class Flows:
    """`work(flow)` gives the batches of a flow. `pace_s`: one is due every so many seconds, and they have no end; what
    each takes is counted from then.

    flows = Flows(place, options, work)
    flows.start()                      # when all have connected
    flows.wait(tell, "random samples") # until they end, or for `seconds`
    measured = flows.end()
    """

    def __init__(
        self, place: Place, options: Options, work: Callable[[int], Iterator[Ranges]], *, pace_s: float = 0.0,
        alone: bool = False,
    ) -> None:  # fmt: skip
        """`alone`: one request at a time, and what each takes."""
        self._place, self._options, self._work = place, options, work
        self._pace_s, self._alone = pace_s, alone
        self._stop = threading.Event()
        self._go = threading.Event()
        self._ready = threading.Semaphore(0)
        self._errors: list[BaseException] = []
        self._begun = 0.0
        self._started_s = 0.0
        self._meters: list[Meter] = []
        self._late: list[Meter] = []
        self._left = options.flows
        self._lock = threading.Lock()
        _raise_limit_of_files()
        # Daemons: one that the kernel holds in a read must not keep the process.
        self._threads = [
            threading.Thread(target=self._run, args=(flow,), name=f"bench-flow-{flow}", daemon=True)
            for flow in range(options.flows)
        ]

    def start(self) -> None:
        """Connect all of them, then let them go together. Raises what connecting raised."""
        for thread in self._threads:
            thread.start()
        for _ in self._threads:
            if not self._ready.acquire(timeout=PATIENCE_S):
                self._stop.set()
                self._go.set()
                raise DeviceTimeout("a flow does not come to its first read", where=self._place.name)
        self._begun, self._started_s = time.perf_counter(), time.time()
        self._meters = [Meter(self._begun) for _ in self._threads]
        self._late = [Meter(self._begun) for _ in self._threads]
        if self._errors:
            self._stop.set()
        self._go.set()
        if self._errors:
            self._join()
            raise self._errors[0]

    def wait(self, tell: Tell, text: str) -> None:
        """Until all have ended, or the time is up."""
        end = self._begun + self._options.seconds
        budget = self._options.budget_bytes
        while any(thread.is_alive() for thread in self._threads) and not self._errors:
            now = time.perf_counter()
            moved = sum(meter.bytes for meter in self._meters)
            # Of storage that is slower than the time given, one answer is waited for.
            if (now >= end and moved) or moved >= budget or now >= end + PATIENCE_S:
                return
            fraction = max((now - self._begun) / self._options.seconds, moved / budget)
            rate = f": {format_rate(moved / max(now - self._begun, 1e-3))}" if moved else ""
            tell(min(1.0, fraction), text + rate)
            time.sleep(min(0.05, max(0.001, end - now)))

    def end(self) -> Measured:
        """Stop them, wait for what is under way, and add up. Raises the first error of a flow."""
        self._stop.set()
        self._go.set()
        self._join()
        if self._errors:
            raise self._errors[0]
        some = any(meter.bytes for meter in self._meters) or not any(meter.bytes for meter in self._late)
        meters = self._meters if some else self._late
        return Measured(
            bytes=sum(meter.bytes for meter in meters),
            requests=sum(meter.requests for meter in meters),
            seconds=max((meter.last for meter in meters), default=self._begun) - self._begun,
            series=series_of(meters, self._started_s),
            latencies=latencies_of_all(meters),
            exhausted=self._left == 0,
        )

    def abandon(self) -> None:
        """On the way out of an error: stop them, and raise nothing."""
        self._stop.set()
        self._go.set()
        with suppress(HeadraceError):
            self._join(_END_S)

    def _join(self, patience_s: float = PATIENCE_S) -> None:
        if not all_ended(self._threads, patience_s):
            raise DeviceTimeout(
                "the path gives nothing", where=self._place.name, found=f"a read that takes {PATIENCE_S:.0f} s",
                next_step="see what it waits for: `headrace doctor` looks at the path",
            )  # fmt: skip

    # ---- on the thread of a flow ----

    def _run(self, flow: int) -> None:
        released = False
        try:
            reader = self._place.reader(depth=self._options.depth, cache=self._options.cache)
            try:
                work = self._work(flow)
                released = True
                self._ready.release()
                self._go.wait()
                if self._stop.is_set():
                    return
                if self._alone:
                    self._read_alone(reader, work, self._meters[flow])
                elif self._pace_s:
                    self._read_paced(reader, work, self._meters[flow])
                else:
                    self._read(reader, work, self._meters[flow], self._late[flow])
            finally:
                reader.close()
        except BaseException as error:
            self._errors.append(error)
        finally:
            if not released:
                self._ready.release()

    def _read(self, reader: Reader, work: Iterator[Ranges], meter: Meter, late: Meter) -> None:
        batches, _ = split(self._options.depth)
        under_way: list[tuple[Pending, int, float]] = []
        try:
            while True:
                while len(under_way) < batches and not self._stop.is_set() and (ranges := next(work, None)) is not None:
                    begun = time.perf_counter()
                    under_way.append((reader.start(ranges), len(ranges.item), begun))
                if not under_way:
                    break
                pending, requests, begun = under_way.pop(0)
                pending.wait()
                counted = late if self._stop.is_set() else meter
                counted.count(pending.bytes, time.perf_counter() - begun, requests)
        finally:
            _drain([pending for pending, _, _ in under_way])
        if not self._stop.is_set():
            self._ended()

    def _read_paced(self, reader: Reader, work: Iterator[Ranges], meter: Meter) -> None:
        batches, _ = split(self._options.depth)
        under_way: list[tuple[Pending, int, float]] = []
        turn = self._begun
        try:
            while not self._stop.is_set():
                now = time.perf_counter()
                if len(under_way) < batches and now >= turn:
                    ranges = next(work)
                    # From when it was due: that is what a training loop waits for.
                    under_way.append((reader.start(ranges), len(ranges.item), turn))
                    turn += self._pace_s
                elif under_way and under_way[0][0].done():
                    pending, requests, due = under_way.pop(0)
                    pending.wait()
                    meter.count(pending.bytes, time.perf_counter() - due, requests)
                else:
                    left = turn - now if len(under_way) < batches else _LOOK_S
                    self._stop.wait(min(left, _LOOK_S) if under_way else left)
            self._late_ones([due for _, _, due in under_way], turn, meter)
        finally:
            _drain([pending for pending, _, _ in under_way])

    def _late_ones(self, under_way: Sequence[float], turn: float, meter: Meter) -> None:
        """What was due and has not come when the time is up: it takes so long at least. Else a feed that gets nothing
        at all would be one that was never late."""
        now = time.perf_counter()
        count = min(_LATE_MOST, max(0, int((now - turn) / self._pace_s)))
        for due in [*under_way, *np.linspace(turn, now, count, endpoint=False).tolist()]:
            if now - due > self._pace_s:
                meter.count(0, now - due, 0)

    def _read_alone(self, reader: Reader, work: Iterator[Ranges], meter: Meter) -> None:
        for ranges in work:
            for item, offset, length in zip(*(column.tolist() for column in ranges), strict=True):
                begun = time.perf_counter()
                reader.read(item, offset, length)
                meter.count(length, time.perf_counter() - begun)
                if self._stop.is_set():
                    return
        self._ended()

    def _ended(self) -> None:
        with self._lock:
            self._left -= 1


def _drain(under_way: Sequence[Pending]) -> None:
    """What is under way ends before its buffers and connections do."""
    for pending in under_way:
        with suppress(HeadraceError):
            pending.wait()


def measure(
    place: Place, options: Options, work: Callable[[int], Iterator[Ranges]], tell: Tell, text: str, *,
    alone: bool = False,
) -> Measured:  # fmt: skip
    """Flows from their start to their end. Ctrl-C stops them first."""
    flows = Flows(place, options, work, alone=alone)
    try:
        flows.start()
        flows.wait(tell, text)
        return flows.end()
    except BaseException:
        flows.abandon()
        raise


def noted(measured: Measured, options: Options) -> Sequence[str]:
    """What the length of a round says of its figures."""
    if measured.exhausted and measured.seconds < options.seconds / 2:
        return (
            "all of the data were read long before the time was up, and reading them twice would be reading from "
            "memory: more of them (--size) say more",
        )
    return ()


def _raise_limit_of_files() -> None:
    """Each flow has files or connections of its own; a shell's soft limit is often 1024."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if soft != hard:
        with suppress(OSError, ValueError):
            resource.setrlimit(resource.RLIMIT_NOFILE, (hard, hard))
