"""The same loop with synthetic data, from a warm cache, from storage: what storage costs it, by subtraction.

    def loop(watch, batches):
        for batch in watch.loader(batches, batch_bytes=20_000_000):
            with watch.compute():
                train(batch)

    stalls = differential(loop, {"synthetic": synthetic(batch, 200), "cached": cached, "storage": loader})
    print(stalls.sentence)
    print(stalls.predict(2e9).sentence)

The loader from storage must find nothing in a cache, and the cached one everything: that is the caller's to see to. A
loader is given as such, or as a function that makes it when its turn comes.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple, Protocol

from headrace.errors import UsageError
from headrace.measure.watch.join import JobStep, attribute
from headrace.measure.watch.predict import Mean, Stalls
from headrace.measure.watch.record import files_of
from headrace.measure.watch.watch import Watch

RUNS = ("synthetic", "cached", "storage")
#: Steps at the begin of each run that are not counted: a first step waits for all that begins with it.
WARM = 3


def synthetic(batch: Any, count: int) -> Iterator[Any]:
    """The same batch so many times: nothing is read, nothing prepared."""
    for _ in range(count):
        yield batch


def differential(
    loop: Callable[[Watch, Any], Any],
    loaders: Mapping[str, Any],
    *,
    folder: str | os.PathLike[str] | None = None,
    warm: int = WARM,
    **options: Any,
) -> Stalls:
    """Run `loop(watch, loader)` with each of `loaders`: "synthetic", "cached" and "storage".

    `folder`: each run's files go to a folder of its name there, for `headrace watch compare`. `warm`: steps at the
    begin of each that do not count. `options`: of `Watch`. `UsageError`: a run is missing, or has too few steps.
    """
    if set(loaders) != set(RUNS):
        raise UsageError("differential", expected=f"loaders {', '.join(RUNS)}", found=", ".join(loaders) or "none")
    steps = {}
    for name in RUNS:
        batches = loaders[name]
        with Watch(None if folder is None else Path(folder) / name, name=name, **options) as watch:
            loop(watch, batches() if callable(batches) else batches)
        steps[name] = list(watch.steps)
    return stalls(steps, warm=warm)


class _Measured(Protocol):
    """A `WatchStep`, or a `JobStep`."""

    @property
    def wall_s(self) -> float: ...

    @property
    def bytes(self) -> int: ...

    @property
    def window(self) -> dict[str, Any] | None: ...


def stalls(
    runs: Mapping[str, Sequence[_Measured]],
    *,
    warm: int = WARM,
    step_bytes: float | None = None,
    overlap: float | None = None,
) -> Stalls:
    """Of the steps of three runs. `step_bytes`: where loaders did not say. `overlap`: how far reads are hidden
    (`Stalls`), where it is known better than from what was seen of the loader."""
    counted = {name: list(runs[name])[warm:] for name in RUNS}
    for name, steps in counted.items():
        if len(steps) < 2:
            raise UsageError(
                f"run {name!r} is too short", expected=f"{warm + 2} steps or more", found=str(len(runs[name]))
            )
    synthetic, cached, storage = (Mean.of([step.wall_s for step in counted[name]]) for name in RUNS)
    read = counted["storage"]
    if step_bytes is None:
        step_bytes = sum(step.bytes for step in read) / len(read)
    found = Stalls(synthetic=synthetic, cached=cached, storage=storage, step_bytes=step_bytes)
    if overlap is None:
        # Who reads ahead has reads under way all the time, where it reads apart from preparing, or does not prepare.
        ahead, apart = (
            {step.window[key] for step in runs["storage"] if step.window and key in step.window} for key in _READS
        )
        prepares = found.preparation_s > max(found.preparation_error_s, 0.05 * found.cached.mean_s)
        if ahead == {False}:
            overlap = 0.0
        elif ahead == {True} and (apart == {True} or not prepares):
            overlap = 1.0
    return replace(found, overlap=overlap)


def stalls_of_files(paths: Mapping[str, Path], **options: Any) -> Stalls:
    """Of what was recorded, by run: a file or a folder each. Of several ranks the slowest one of each step counts."""
    runs: dict[str, list[_Seen]] = {name: [] for name in RUNS}
    for name in RUNS:
        seen = runs[name]
        attribute(files_of([paths[name]]), each=lambda step, seen=seen: seen.append(_Seen.of(step)))  # type: ignore[misc]
    return stalls(runs, **options)


class _Seen(NamedTuple):
    """What counts of a step: a run may have millions."""

    wall_s: float
    bytes: int
    window: dict[str, Any] | None

    @classmethod
    def of(cls, step: JobStep) -> _Seen:
        window = step.window or {}
        return cls(step.wall_s, step.bytes, {key: window[key] for key in _READS if key in window} or None)


_READS = ("reads_ahead", "reads_apart")
