"""What watching costs a training loop, and how good its predictions are.

Overhead: PyTorch trains on one core, in steps of some 10 ms. What stands in that loop because it is watched is timed
where it stands (a loader's `next`, begin and end of three parts, and what comes once a second), in turns with a loop
that has none of it, whose clocks are subtracted. Whole steps are not compared: on a machine whose speed swings by
several percent one percent is not seen. The same beside it where steps sleep: then the caches are colder than in any
training.

Ring: `watch_ring.py`, what it costs that every device keeps what it did.

Prediction: `watch_prediction.py`. What was told, and when, stays in `build/watch-prediction.jsonl`.
"""

from __future__ import annotations

import statistics
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

from benchmarks.figures import Figure
from benchmarks.watch_prediction import grid
from benchmarks.watch_ring import ring
from headrace.measure import Watch

STEP_S = 0.010
BATCH_BYTES = 1_000_000
WRITTEN = Path("build") / "watch-prediction.jsonl"
#: Steps at the begin of a loop that are not counted: what is set up is no step's.
WARM = 20

#: A step: its batch is copied, gradients are computed, are averaged, and applied (which is in no part).
_Step = tuple[Callable[[], Any], Callable[[], Any], Callable[[], Any], Callable[[], Any]]


def _trains() -> _Step:
    """A perceptron of a million parameters, on one thread, with a batch that makes its step one of 10 ms."""
    rows, step_s = 32, 0.0
    while step_s < STEP_S and rows < 4096:
        rows += rows // 2
        step = _perceptron(rows)
        begun = time.perf_counter()
        for _ in range(WARM):
            for part in step:
                part()
        step_s = (time.perf_counter() - begun) / WARM
    return step


def _perceptron(rows: int) -> _Step:
    import torch

    torch.set_num_threads(1)
    width = 512
    model = torch.nn.Sequential(*[part for _ in range(4) for part in (torch.nn.Linear(width, width), torch.nn.GELU())])
    optimizer = torch.optim.SGD(model.parameters(), lr=1e-4)
    given, here = torch.randn(rows, width), torch.empty(rows, width)

    def compute() -> None:
        optimizer.zero_grad()
        model(here).square().mean().backward()

    def average() -> None:
        for gradient in [parameter.grad for parameter in model.parameters() if parameter.grad is not None]:
            gradient.div_(1.0)

    return lambda: here.copy_(given), compute, average, optimizer.step


def _sleeps() -> _Step:
    return lambda: time.sleep(STEP_S / 2), lambda: time.sleep(STEP_S / 4), lambda: time.sleep(STEP_S / 4), lambda: None


class _Batches:
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


def _watched_s(watch: Watch, batches: Iterator[Any], steps: int, step: _Step) -> float:
    """Of a step, what is there because it is watched; and clocks."""
    copy, compute, average, apply = step
    now, spent = time.perf_counter, 0.0
    for _ in range(steps):
        begun = now()
        next(batches)
        spent += now() - begun
        begun = now()
        with watch.copy():
            spent += now() - begun
            copy()
            begun = now()
        spent += now() - begun
        begun = now()
        with watch.compute():
            spent += now() - begun
            compute()
            begun = now()
        spent += now() - begun
        begun = now()
        with watch.collective():
            spent += now() - begun
            average()
            begun = now()
        spent += now() - begun
        apply()
    return spent / steps


def _bare_s(batches: Iterator[Any], steps: int, step: _Step) -> float:
    """The same clocks, and what is there anyway."""
    copy, compute, average, apply = step
    now, spent = time.perf_counter, 0.0
    for _ in range(steps):
        begun = now()
        next(batches)
        spent += now() - begun
        for part in (copy, compute, average):
            begun = now()
            spent += now() - begun
            part()
            begun = now()
            spent += now() - begun
        apply()
    return spent / steps


def overhead(quick: bool) -> Iterator[Figure]:
    # A round takes more than a second, so that what comes once a second is in it.
    rounds, steps = (3, 150) if quick else (15, 220)
    step_s = STEP_S
    for name, step, does in (("overhead", _trains(), "trains"), ("overhead_asleep", _sleeps(), "sleeps")):
        found: list[float] = []
        with tempfile.TemporaryDirectory(prefix="headrace-watch-") as folder, Watch(folder, device=None) as watch:
            watched, bare = iter(watch.loader(_Batches(), batch_bytes=BATCH_BYTES)), iter(_Batches())
            _watched_s(watch, watched, WARM, step)
            for _ in range(rounds):
                clocks_s = _bare_s(bare, steps // 4, step)
                begun = time.perf_counter()
                spent_s = _watched_s(watch, watched, steps, step) - clocks_s
                step_s = (time.perf_counter() - begun) / steps
                found.append(spent_s / step_s)
        yield Figure(
            suite="watch", figure=name, value=statistics.median(found), samples=found,
            at_most=0.01 if name == "overhead" else None,
            unit=f"of a step of {1000 * step_s:.1f} ms, in which a loop {does}",
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
