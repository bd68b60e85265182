"""How good the watch's predictions are: told before, measured afterwards.

For each kind of loader and each time that a step computes, the three runs of the differential mode at one rate of
storage. From them the utilisation at other rates is told and written down, with the time, before the first of those is
measured, by a loop without a watch. Utilisation is the share of a step that computes: of the 72 points more than half
lie between 30 and 90 %.

    asks        reads when it is asked, and nothing else meanwhile
    ahead       a thread reads two batches ahead
    flows       four threads read, each a quarter of the rate, and batches come in order
    feed        headrace: records over NVMe/TCP from a target behind a relay of that rate, two batches ahead

All compute by sleeping: what the machine does besides is of little account, as long as a step is longer than that.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import queue
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.accidents.relay import Relay
from headrace.dataset import RecordFeed, RecordFeedOptions, Records
from headrace.dataset.ingestion.records import ingest_records, open_records
from headrace.measure import Prediction, Stalls, Watch, differential, synthetic
from headrace.testing.serve import serving
from headrace.volume import Volume

BATCH_BYTES = 256 << 10
#: Error of the means of steps, as a share of them, that is small enough to tell something; tries for that.
SURE, MOST_RUNS = 0.02, 6
#: Steps at the begin of a run that are not counted.
WARM = 10
FLOWS = 4
#: Rates of storage, as a multiple of what a step of that computing time takes: where reads are hidden utilisation is
#: that, where they are not it is less.
FACTORS = {"hidden": (0.35, 0.5, 0.65, 0.8, 1.0, 1.5), "asks": (0.5, 1.0, 1.5, 2.5, 4.0, 8.0)}

#: So many batches from storage of this rate, bytes a second; None: as quick as it is.
Batches = Callable[[int, float | None], contextlib.AbstractContextManager[Any]]


class _Link:
    """Storage of a rate: who reads waits for its turn."""

    def __init__(self, rate: float | None) -> None:
        self._rate, self._free_at = rate, time.perf_counter()

    def read(self) -> None:
        if self._rate is not None:
            self._free_at = max(self._free_at, time.perf_counter()) + BATCH_BYTES / self._rate
            time.sleep(max(0.0, self._free_at - time.perf_counter()))


@contextlib.contextmanager
def _asks(count: int, rate: float | None) -> Iterator[Any]:
    link = _Link(rate)

    def run() -> Iterator[int]:
        for number in range(count):
            link.read()
            yield number

    yield run()


class _Ahead:
    """Its thread begins with it, as a loader's does."""

    def __init__(self, count: int, rate: float | None) -> None:
        self._count, self._link = count, _Link(rate)

    def __iter__(self) -> Iterator[int]:
        made: queue.Queue[int] = queue.Queue(2)

        def run() -> None:
            for number in range(self._count):
                self._link.read()
                made.put(number)

        thread = threading.Thread(target=run)
        thread.start()
        for _ in range(self._count):
            yield made.get()
        thread.join()


@contextlib.contextmanager
def _ahead(count: int, rate: float | None) -> Iterator[Any]:
    yield _Ahead(count, rate)


class _Flows:
    def __init__(self, count: int, rate: float | None) -> None:
        self._count = count
        self._links = [_Link(None if rate is None else rate / FLOWS) for _ in range(FLOWS)]

    def __iter__(self) -> Iterator[int]:
        with contextlib.ExitStack() as stack:
            # A thread for each flow: its reads are one after the other.
            pools = [stack.enter_context(ThreadPoolExecutor(1)) for _ in range(FLOWS)]
            turns = itertools.cycle(zip(pools, self._links, strict=True))
            ahead: queue.Queue[Future[None]] = queue.Queue()
            for number in range(self._count + 2 * FLOWS):
                if number < self._count:
                    pool, link = next(turns)
                    ahead.put(pool.submit(link.read))
                if number >= 2 * FLOWS:
                    ahead.get().result()
                    yield number


@contextlib.contextmanager
def _flows(count: int, rate: float | None) -> Iterator[Any]:
    yield _Flows(count, rate)


class _Feed:
    """A record feed of headrace, as `RecordLoader` is without PyTorch."""

    def __init__(self, volume: Volume, count: int) -> None:
        self._count = count
        options = RecordFeedOptions(global_batch=4, prefetch=2, seed=1)
        self._feed: RecordFeed[Any] = RecordFeed({"a": Records.open(volume, "a")}, options)
        self.devices = self._feed.devices

    @property
    def waited(self) -> tuple[float, float, int]:
        return self._feed.waited

    def __iter__(self) -> Iterator[Any]:
        for _ in range(self._count):
            batch = self._feed.acquire()
            assert batch is not None
            yield batch.items
        self._feed.close()


@contextlib.contextmanager
def _target() -> Iterator[Batches]:
    with tempfile.TemporaryDirectory(prefix="headrace-watch-") as name:
        folder = Path(name)
        for number in range(64):
            (folder / f"{number:03}.bin").write_bytes(number.to_bytes(4, "little") * (BATCH_BYTES // 16))
        with serving("nqn.2026-01.io.headrace:watch", "mem:24MiB") as target:
            with Volume.create([target.uri()]) as volume, volume.session(run_id="watch") as session:
                ingest_records(open_records(folder), session, "a")

            @contextlib.contextmanager
            def batches(count: int, rate: float | None) -> Iterator[Any]:
                with contextlib.ExitStack() as stack:
                    port = target.port
                    if rate is not None:
                        port = stack.enter_context(Relay(target.port, bytes_per_s=rate)).port
                    uri = target.uri().replace(f":{target.port}/", f":{port}/")
                    yield _Feed(stack.enter_context(Volume.open(uri)), count)

            yield batches


@dataclass(frozen=True)
class Point:
    """One place of the grid. `measured`: utilisation, as `told` has it."""

    loader: str
    compute_s: float
    told: Prediction
    measured: float

    @property
    def error_points(self) -> float:
        return abs(self.told.utilisation - self.measured) * 100

    @property
    def inside(self) -> bool:
        return self.told.low - 0.005 <= self.measured <= self.told.high + 0.005


def grid(quick: bool, written: Path) -> Iterator[Point]:
    """`written`: gets a JSON line for each prediction, before it is measured, and one for each measurement."""
    steps = 40 if quick else 90
    computes = (0.02,) if quick else (0.01, 0.02, 0.04)
    with _target() as feed:
        loaders: dict[str, Batches] = {"asks": _asks, "ahead": _ahead, "flows": _flows, "feed": feed}
        for (name, batches), compute_s in itertools.product(loaders.items(), computes):
            rate = BATCH_BYTES / compute_s
            rates = [rate * factor for factor in FACTORS.get(name, FACTORS["hidden"])]
            stalls = _sure(lambda run=batches, c=compute_s, r=rate: _three_runs(run, c, steps, r * 0.6))  # type: ignore[misc]
            told = {each: stalls.predict(each) for each in rates[:: 2 if quick else 1]}
            for each, prediction in told.items():
                _write(written, what="told", loader=name, compute_s=compute_s, rate=each, **vars(prediction))
            for each, prediction in told.items():
                with batches(steps, each) as some:
                    point = Point(name, compute_s, prediction, _utilisation(some, compute_s))
                _write(written, what="measured", loader=name, compute_s=compute_s, rate=each, measured=point.measured)
                yield point


def _sure(runs: Callable[[], Stalls]) -> Stalls:
    """As one would: where the error that is told is too large, the three runs are made again."""
    tried: list[tuple[float, Stalls]] = []
    while len(tried) < MOST_RUNS:
        stalls = runs()
        error = max(mean.error_s / mean.mean_s for mean in (stalls.synthetic, stalls.cached))
        tried.append((error, stalls))
        if error <= SURE:
            break
    return min(tried, key=lambda each: each[0])[1]


def _three_runs(batches: Batches, compute_s: float, steps: int, rate: float) -> Stalls:
    with batches(steps, None) as cached, batches(steps, rate) as storage:
        return differential(
            lambda watch, some: _loop(watch, some, compute_s),
            {"synthetic": synthetic(None, steps), "cached": cached, "storage": storage}, device=None, warm=WARM,
        )  # fmt: skip


def _utilisation(batches: Any, compute_s: float) -> float:
    """Without a watch, by the loop's own clock: the share of the time that it computes. Of the first steps what was
    read ahead while nobody computed is a part: they do not count."""
    computed_s = 0.0
    for number, _ in enumerate(batches):
        if number == WARM:
            started, computed_s = time.perf_counter(), 0.0
        begun = time.perf_counter()
        time.sleep(compute_s)
        ended = time.perf_counter()
        computed_s += ended - begun
    return computed_s / (ended - started)


def _loop(watch: Watch, batches: Any, compute_s: float) -> None:
    for _ in watch.loader(batches, batch_bytes=BATCH_BYTES):
        with watch.compute():
            time.sleep(compute_s)


def _write(path: Path, **said: Any) -> None:
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps({"at": time.strftime("%Y-%m-%dT%H:%M:%S%z"), **said}) + "\n")
