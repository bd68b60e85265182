"""Accelerators that are not there: threads that wait for batches, sleep as long as computing takes, and meet.

Each has a loader in a thread beside it, which keeps `workload.ahead` batches ready and no more. After each step all
accelerators wait for each other, as an all-reduce makes them (in DLIO: an MPI barrier). Loaders read on until the trial
ends: a job in the middle of its epoch does, too. Batches are counted, not kept: memory holds what is under way.
"""

from __future__ import annotations

import contextlib
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

from headrace.bench.accelerators.arithmetic import EXCLUDED_STEPS, utilisation
from headrace.bench.accelerators.workloads import Workload
from headrace.errors import DeviceTimeout, UsageError

#: Steps of the shortest trial, those that do not count included.
FEWEST_STEPS = 5
#: A trial in which nothing comes is given up after this many times its length.
_PATIENCE = 4.0
_LEAST_PATIENCE_S = 20.0
#: Computing that lasts longer is a wait that can be ended; a sleep is the more exact one.
_LONG_S = 1.0
#: How long a loader may take to end what it has under way, once the trial is over.
_END_S = 60.0


class Loader(Protocol):
    """What reads for one accelerator, in one thread."""

    def batch(self) -> int:
        """Read the next batch, until it is there; bytes read."""

    def stop(self) -> None:
        """From another thread: the batch that is read is not wanted any more, and may be cut short."""

    def close(self) -> None: ...


@dataclass(frozen=True, kw_only=True)
class Trial:
    """What so many accelerators came to. `au`: the mean, 0 to 1; `each`: of every accelerator, where the time that it
    waited for the others counts as theirs. `rate`: bytes a second of all loaders. `steps`: that counted.

    `cut`: it was given up before the fewest steps were done: `au` is of all its time, the first step's, too.
    """

    accelerators: int
    au: float
    each: tuple[float, ...]
    steps: int
    seconds: float
    bytes: int
    rate: float
    workload: Workload
    cut: bool = False

    @property
    def feeds(self) -> float | None:
        """How many accelerators this rate feeds without a wait."""
        return self.rate / self.workload.demand_bytes_per_s if self.accelerators else None


@dataclass
class _Accelerator:
    loader: Loader
    ready: threading.Semaphore
    room: threading.Semaphore
    #: Seconds of waiting for batches, of steps that count.
    waited_s: float = 0.0
    loaded_bytes: int = 0


@dataclass
class _Shared:
    workload: Workload
    steps: int
    seconds: float
    begun_s: float
    give_up_s: float
    over_s: float = 0.0
    ends_s: list[float] = field(default_factory=list)
    over: threading.Event = field(default_factory=threading.Event)
    error: BaseException | None = None
    lock: threading.Lock = field(default_factory=threading.Lock)
    #: Bytes loaded when the steps that count began.
    bytes_before: int = 0
    bytes_after: int = 0

    def fail(self, error: BaseException) -> None:
        with self.lock:
            self.error = self.error or error
        self.over.set()


def emulate(
    workload: Workload,
    loader_of: Callable[[int], Loader],
    accelerators: int,
    *,
    seconds: float,
    steps: int | None = None,
) -> Trial:
    """One trial: `accelerators` at once, each with `loader_of(i)`, for about `seconds`, or `steps` counted steps.

    It ends with the first step that ends after that, and not before `FEWEST_STEPS`; where not even those are done after
    a few times as long, with what there was (`cut`). The first error of a loader is raised. All threads have ended, and
    all loaders are closed, when it returns.
    """
    if accelerators < 1:
        raise UsageError("accelerators", expected="1 and more", found=str(accelerators))
    wanted = max(FEWEST_STEPS, (1 << 40) if steps is None else steps + EXCLUDED_STEPS)
    own: list[_Accelerator] = []
    with contextlib.ExitStack() as opened:
        for i in range(accelerators):
            loader = loader_of(i)
            opened.callback(loader.close)
            own.append(_Accelerator(loader, threading.Semaphore(0), threading.Semaphore(workload.ahead)))
        opened.pop_all()
    begun_s = time.perf_counter()
    shared = _Shared(workload, wanted, seconds, begun_s, begun_s + patience_s(workload, seconds))
    barrier = threading.Barrier(accelerators, action=lambda: _step_ended(shared, own))
    # Daemons: one that the kernel holds in a read must not keep the process.
    threads = [threading.Thread(target=_load, args=(one, shared), name="bench-loader", daemon=True) for one in own]
    threads += [
        threading.Thread(target=_compute, args=(one, shared, barrier), name="bench-accelerator", daemon=True)
        for one in own
    ]
    started: list[threading.Thread] = []
    try:
        for thread in threads:
            thread.start()
            started.append(thread)
        # Only Ctrl-C comes here by itself; everything else sets it.
        while not shared.over.wait(0.5):
            if time.perf_counter() > shared.give_up_s:
                shared.over.set()
    finally:
        shared.over.set()
        shared.over_s = time.perf_counter()
        loaded = sum(one.loaded_bytes for one in own)
        barrier.abort()
        for one in own:
            one.loader.stop()
            one.room.release()
            one.ready.release()
        ends_s = time.perf_counter() + _END_S
        for thread in started:
            thread.join(max(0.0, ends_s - time.perf_counter()))
        hanging = sum(thread.is_alive() for thread in started)
        if not hanging:
            for one in own:
                one.loader.close()
    if shared.error is not None:
        raise shared.error
    if hanging:
        raise DeviceTimeout(f"{hanging} reads did not end", expected=f"an end within {_END_S:.0f} s")
    return _trial(shared, own, loaded)


def patience_s(workload: Workload, seconds: float) -> float:
    """After how long a trial of `seconds` is given up."""
    return max(_LEAST_PATIENCE_S, _PATIENCE * max(seconds, FEWEST_STEPS * workload.compute_s))


def longest_s(workload: Workload, seconds: float) -> float:
    """How long `emulate` takes at most."""
    return patience_s(workload, seconds) + _END_S


def _load(own: _Accelerator, shared: _Shared) -> None:
    try:
        while True:
            own.room.acquire()
            if shared.over.is_set():
                return
            own.loaded_bytes += own.loader.batch()
            own.ready.release()
    except BaseException as error:
        shared.fail(error)


def _compute(own: _Accelerator, shared: _Shared, barrier: threading.Barrier) -> None:
    compute_s = shared.workload.compute_s
    try:
        while not shared.over.is_set():
            asked_s = time.perf_counter()
            if not own.ready.acquire(timeout=max(0.0, shared.give_up_s - asked_s)) or shared.over.is_set():
                break
            came_s = time.perf_counter()
            own.room.release()
            if compute_s < _LONG_S:
                time.sleep(compute_s)
            elif shared.over.wait(compute_s):
                break
            if len(shared.ends_s) >= EXCLUDED_STEPS:
                own.waited_s += came_s - asked_s
            barrier.wait()
    except threading.BrokenBarrierError:
        pass
    except BaseException as error:
        shared.fail(error)
    shared.over.set()


def _step_ended(shared: _Shared, own: list[_Accelerator]) -> None:
    """Runs in one of the threads while all others wait."""
    now_s = time.perf_counter()
    shared.ends_s.append(now_s)
    loaded = sum(one.loaded_bytes for one in own)
    if len(shared.ends_s) == EXCLUDED_STEPS:
        shared.bytes_before = loaded
    shared.bytes_after = loaded
    done = len(shared.ends_s)
    if done >= shared.steps or (done >= FEWEST_STEPS and now_s - shared.begun_s >= shared.seconds):
        shared.over.set()


def _trial(shared: _Shared, own: list[_Accelerator], loaded: int) -> Trial:
    workload, ends_s = shared.workload, shared.ends_s
    counted = max(0, len(ends_s) - EXCLUDED_STEPS)
    cut = len(ends_s) < FEWEST_STEPS
    if cut:
        # Of all of its time: were the first step left out, two quick ones after a slow one would look like enough.
        seconds, moved = shared.over_s - shared.begun_s, loaded
        au = min(1.0, len(ends_s) * workload.compute_s / seconds)
        each = tuple(au for _ in own)
    else:
        au = utilisation(ends_s, workload.compute_s)
        seconds = ends_s[-1] - ends_s[EXCLUDED_STEPS - 1]
        moved = shared.bytes_after - shared.bytes_before
        # An accelerator by itself would have computed and waited, and not stood at the barrier.
        computed_s = counted * workload.compute_s
        each = tuple(min(1.0, computed_s / (computed_s + one.waited_s)) for one in own)
    return Trial(
        accelerators=len(own), au=au, each=each, steps=counted, seconds=seconds, bytes=moved,
        rate=moved / seconds, workload=workload, cut=cut,
    )  # fmt: skip
