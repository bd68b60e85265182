"""What watching costs a training loop, and how good its predictions are.

Overhead: steps of 10 ms (a clock that is waited for), with a watch that writes its file, three parts a step and a
loader with a thread, and without; interleaved pairs. What a watched step takes longer is the watch. CPU time of the
thread that trains is told beside it, which a busy machine changes less.

Ring: `watch_ring.py`, what it costs that every device keeps what it did.

Prediction: `watch_prediction.py`. What was told, and when, stays in `build/watch-prediction.jsonl`.
"""

from __future__ import annotations

import queue
import statistics
import tempfile
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import nullcontext
from pathlib import Path
from typing import Any, NamedTuple

from benchmarks.figures import Figure
from benchmarks.pairs import interleaved
from benchmarks.watch_prediction import grid
from benchmarks.watch_ring import ring
from headrace.measure import Watch

STEP_S = 0.010
BATCH_BYTES = 1_000_000
WRITTEN = Path("build") / "watch-prediction.jsonl"


def _until(moment: float) -> None:
    """Sleeps for the most of it, and spins for the rest: to some microseconds."""
    left = moment - time.perf_counter()
    if left > 0.0005:
        time.sleep(left - 0.0004)
    while time.perf_counter() < moment:
        pass


class _Ahead:
    """Batches by a thread that is two ahead, at once."""

    def __init__(self, count: int) -> None:
        self.count = count

    def __iter__(self) -> Iterator[int]:
        made: queue.Queue[int] = queue.Queue(2)

        def run() -> None:
            for number in range(self.count):
                made.put(number)

        thread = threading.Thread(target=run)
        thread.start()
        for _ in range(self.count):
            yield made.get()
        thread.join()


def _work(step_s: float) -> None:
    """As much as a step has to do, whenever it begins."""
    _until(time.perf_counter() + step_s)


#: Steps at the begin of a loop that are not counted: what is set up is no step's.
WARM = 20

Part = Callable[[], Any]


def _loop(batches: Iterable[Any], steps: int, copy: Part, compute: Part, collective: Part, work: Any) -> _Cost:
    for number, _ in enumerate(batches):
        if number == WARM:
            started, cpu = time.perf_counter(), time.thread_time()
        with copy():
            work(STEP_S / 2)
        with compute():
            work(STEP_S / 4)
        with collective():
            work(STEP_S / 4)
    return _Cost((time.perf_counter() - started) / (steps - WARM), (time.thread_time() - cpu) / (steps - WARM))


class _Cost(NamedTuple):
    """Of a step, seconds: of the wall, and of the CPU of the thread that trains."""

    wall_s: float
    cpu_s: float


def _bare(steps: int, work: Any) -> _Cost:
    return _loop(_Ahead(steps), steps, nullcontext, nullcontext, nullcontext, work)


def _watched(steps: int, work: Any, folder: Path) -> _Cost:
    with Watch(folder, device=None) as watch:
        batches = watch.loader(_Ahead(steps), batch_bytes=BATCH_BYTES)
        return _loop(batches, steps, watch.copy, watch.compute, watch.collective, work)


def overhead(quick: bool) -> Iterator[Figure]:
    rounds, steps = (5, 120) if quick else (15, 220)
    with tempfile.TemporaryDirectory(prefix="headrace-watch-") as name:
        folder = Path(name)
        pairs = interleaved(
            lambda: 1 / _watched(steps, _work, folder).wall_s, lambda: 1 / _bare(steps, _work).wall_s, rounds
        )  # fmt: skip
        # Loops that do nothing but sleep: their CPU time is that of the loop.
        cpu = [_watched(steps, time.sleep, folder).cpu_s - _bare(steps, time.sleep).cpu_s for _ in range(rounds)]
    shares = [1 / ratio - 1 for ratio in pairs.ratios]
    yield Figure(
        suite="watch", figure="overhead", value=statistics.median(shares), unit="of a step of 10 ms", at_most=0.01,
        samples=shares, noise=pairs.noise, ours=statistics.median(pairs.ours), peer=statistics.median(pairs.peer),
        measured_in="steps/s",
    )  # fmt: skip
    used = [seconds / STEP_S for seconds in cpu]
    yield Figure(
        suite="watch", figure="overhead_cpu", value=statistics.median(used), at_most=0.01, samples=used,
        unit="of a step of 10 ms, CPU time of the thread",
    )  # fmt: skip


def prediction(quick: bool) -> Iterator[Figure]:
    """The largest difference of predicted and measured utilisation, in points, over the grid."""
    WRITTEN.parent.mkdir(parents=True, exist_ok=True)
    WRITTEN.unlink(missing_ok=True)
    points = list(grid(quick, WRITTEN))
    for name in dict.fromkeys(point.loader for point in points):
        errors = [point.error_points for point in points if point.loader == name]
        yield Figure(
            suite="watch", figure=f"prediction_{name}", value=max(errors), at_most=5.0, samples=errors,
            unit=f"points of utilisation, the worst of {len(errors)}",
        )  # fmt: skip
    share = len([point for point in points if 0.3 <= point.measured <= 0.9]) / len(points)
    yield Figure(
        suite="watch", figure="prediction_grid", value=share, at_least=0.5,
        unit="of the grid between 30 and 90 % of utilisation",
    )  # fmt: skip
    yield Figure(
        suite="watch", figure="prediction_inside", value=statistics.fmean(point.inside for point in points),
        unit="of them inside what was told",
    )  # fmt: skip


FIGURES = {"overhead": overhead, "ring": ring, "prediction": prediction}


def run(quick: bool = False, only: Sequence[str] = ()) -> Iterator[Figure]:
    for name, figure in FIGURES.items():
        if not only or name in only:
            yield from figure(quick)
