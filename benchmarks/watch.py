"""What watching costs a training loop, and how good its predictions are.

Overhead: what stands in a loop of steps of 10 ms because it is watched is timed where it stands (a loader's `next`,
begin and end of three parts, and what comes once a second), in turns with a loop that has none of it, whose clocks are
subtracted. Between them the loop computes, and fills the caches, or sleeps, and others fill them. Whole steps are not
compared: on a machine whose speed swings by several percent one percent is not seen.

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

import numpy as np

from benchmarks.figures import Figure
from benchmarks.watch_prediction import grid
from benchmarks.watch_ring import ring
from headrace.measure import Watch
from headrace.units import MIB

STEP_S = 0.010
BATCH_BYTES = 1_000_000
WRITTEN = Path("build") / "watch-prediction.jsonl"
#: Steps at the begin of a loop that are not counted: what is set up is no step's.
WARM = 20

Work = Callable[[float], None]


class _Computes:
    """Goes through more memory than any cache of a core has."""

    def __init__(self) -> None:
        self._memory = np.ones((64, MIB), np.uint8)
        self._turn = 0

    def __call__(self, seconds: float) -> None:
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            self._turn += 1
            np.copyto(self._memory[self._turn % 32], self._memory[32 + self._turn % 32])


class _Batches:
    def __iter__(self) -> Iterator[int]:
        while True:
            yield 0


def _watched_s(watch: Watch, batches: Iterator[Any], steps: int, work: Work) -> float:
    """Of a step, what is there because it is watched; and clocks."""
    now, spent = time.perf_counter, 0.0
    for _ in range(steps):
        begun = now()
        next(batches)
        spent += now() - begun
        for part, share in ((watch.copy, 0.5), (watch.compute, 0.25), (watch.collective, 0.25)):
            begun = now()
            with part():
                spent += now() - begun
                work(share * STEP_S)
                begun = now()
            spent += now() - begun
    return spent / steps


def _bare_s(batches: Iterator[Any], steps: int, work: Work) -> float:
    """The same clocks, and what is there anyway."""
    now, spent = time.perf_counter, 0.0
    for _ in range(steps):
        begun = now()
        next(batches)
        spent += now() - begun
        for share in (0.5, 0.25, 0.25):
            begun = now()
            spent += now() - begun
            work(share * STEP_S)
            begun = now()
            spent += now() - begun
    return spent / steps


def overhead(quick: bool) -> Iterator[Figure]:
    # A round takes more than a second, so that what comes once a second is in it.
    rounds, steps = (3, 120) if quick else (15, 220)
    for name, work in (("overhead", _Computes()), ("overhead_asleep", time.sleep)):
        found: list[float] = []
        with tempfile.TemporaryDirectory(prefix="headrace-watch-") as folder, Watch(folder, device=None) as watch:
            watched, bare = iter(watch.loader(_Batches(), batch_bytes=BATCH_BYTES)), iter(_Batches())
            _watched_s(watch, watched, WARM, work)
            for _ in range(rounds):
                clocks_s = _bare_s(bare, steps // 4, work)
                found.append((_watched_s(watch, watched, steps, work) - clocks_s) / STEP_S)
        yield Figure(
            suite="watch", figure=name, value=statistics.median(found), samples=found,
            at_most=0.01 if name == "overhead" else None,
            unit="of a step of 10 ms that " + ("computes" if name == "overhead" else "sleeps"),
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
