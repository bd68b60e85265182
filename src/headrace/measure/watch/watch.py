"""`Watch`: each step of a training loop taken apart while it runs, in any loop, with any loader.

    with Watch("runs/a/watch") as watch:                 # on every rank; a file for each
        for batch in watch.loader(loader):               # any iterable; a step begins with the wait for its batch
            with watch.copy():
                batch = batch.to("cuda", non_blocking=True)
            with watch.compute():
                loss = model(batch); loss.backward()
            with watch.collective():
                average(model)
            with watch.compute():
                optimizer.step()
            if due:
                with watch.checkpoint():
                    save()

The parts are exclusive: one in another stops the outer one. What is in none is "other". By the host's clock, or, where
work is carried out by a device behind its back, by that of the device (`device`).
"""

from __future__ import annotations

import os
import socket
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headrace.device import BlockDevice
from headrace.errors import UsageError
from headrace.measure.watch.activity import SmActivity
from headrace.measure.watch.causes import CAUSES
from headrace.measure.watch.device import ON_DEVICE, DeviceClock, DeviceStep
from headrace.measure.watch.host import HostCounters, RunQueue, own_queue
from headrace.measure.watch.lines import Lines
from headrace.measure.watch.loader import Source, WatchedLoader
from headrace.measure.watch.paths import PathWindows
from headrace.measure.watch.record import WatchHeader, WatchStep
from headrace.measure.watch.wait import split

if TYPE_CHECKING:
    from typing_extensions import Self

#: Steps whose marks the device has not come by yet, before the oldest is waited for.
MOST_PENDING = 64
#: Lines are written at least as often.
FLUSH_S = 1.0
#: Steps that stay in memory.
KEPT = 10_000


@dataclass(frozen=True, kw_only=True)
class WatchMetrics:
    """Counters since the watch was made, for `headrace.metrics`."""

    steps: int
    #: Of the last step, seconds.
    last_step_s: float
    #: By cause, seconds of all steps.
    spent: Mapping[str, float]
    bytes: int
    #: Of the last window; None: not measured.
    sm_activity: float | None


@dataclass
class _Step:
    number: int
    started_s: float
    marks: DeviceStep | None
    queue: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    window: dict[str, Any] | None = None


class _Part:
    """`with watch.compute():`; made once, for all of them are alike."""

    __slots__ = ("_cause", "_watch")

    def __init__(self, watch: Watch, cause: str) -> None:
        self._watch, self._cause = watch, cause

    def __enter__(self) -> None:
        self._watch._enter(self._cause)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch._leave()


class _Waiting:
    """A wait for a batch."""

    def __init__(self, watch: Watch, source: Source) -> None:
        self._watch, self._source = watch, source

    def __enter__(self) -> None:
        watch = self._watch
        watch._enter("wait")
        teller = self._source.teller
        self._told = teller.waited if teller is not None else None
        self._cpu, self._queue = watch._used()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        watch, source = self._watch, self._source
        cpu, queue = watch._used()
        told = None
        if source.teller is not None and self._told is not None:
            now = source.teller.waited
            told = (now[0] - self._told[0], now[1] - self._told[1], now[2] - self._told[2])
            watch.add_bytes(told[2])
        queue = max(0.0, queue - self._queue)
        wall = watch._leave()
        found = split(
            wall, own_cpu_s=max(0.0, cpu - self._cpu), own_queue_s=queue, told=told,
            shares=source.shares if len(source.helpers) else None,
        )  # fmt: skip
        watch._waited_queue += queue
        watch._add(found)
        source.wait_s += wall
        source.waits += wall > 1e-4


class Watch:
    """Of one rank. Belongs to the thread that trains; `metrics()` may be asked by others.

    Args:
        folder: a file `rank-NNNNN.jsonl` is written there, a line a step, at least once a second. None: no file. A
            restart appends to it.
        name: in metrics.
        rank, world: as torchrun says (`RANK`, `WORLD_SIZE`), else 0 of 1.
        device: a `DeviceClock`; "auto": that of the current CUDA device where PyTorch has been imported and there is
            one; None: everything by the host's clock.
        volumes: volumes of headrace (or anything with `devices`) whose paths are watched besides those of loaders.
        listeners: called with each finished `WatchStep`, in the thread that trains.
        monotonic, wall: the two clocks, in seconds; tests put their own.
    """

    #: Where `headrace.metrics` shows it.
    section = "watches"

    def __init__(
        self,
        folder: str | os.PathLike[str] | None = None,
        *,
        name: str = "watch",
        rank: int | None = None,
        world: int | None = None,
        device: DeviceClock | str | None = "auto",
        volumes: Sequence[Any] = (),
        listeners: Sequence[Callable[[WatchStep], None]] = (),
        monotonic: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.name = name
        self.rank = _number("rank", rank, "RANK", 0)
        self.world = _number("world", world, "WORLD_SIZE", 1)
        self.steps: deque[WatchStep] = deque(maxlen=KEPT)
        self._now, self._wall = monotonic, wall
        self._virtual = monotonic is not time.perf_counter
        self._device = _clock(device)
        self._listeners = list(listeners)
        self._watched = list(volumes)
        self._sources: list[Source] = []
        self._activity = SmActivity(self._device.gpu if self._device is not None else None)
        self._activity_at, self._last_activity = self._now(), None if self._activity.why_not else 0.0
        self._host = HostCounters(monotonic)
        self._paths = PathWindows()
        self._paths.since(self.devices)
        self._owner: int | None = None
        self._queue: RunQueue | None = None
        #: What is being timed, innermost last, and since when.
        self._stack: list[str] = []
        self._since = self._now()
        #: Of parts that the device carries out: since where the innermost one goes, and those around it.
        self._marks: list[tuple[str, Any]] = []
        self._spent: dict[str, float] = {}
        self._in_wait: list[float] = []
        #: Of parts that lie in a wait: CPU time and run queue delay that are not the wait's.
        self._aside = self._aside_from = (0.0, 0.0)
        self._waited_queue = self._queue_at = 0.0
        self._step: _Step | None = None
        self._next_number = 0
        self._pending: deque[_Step] = deque()
        self._totals = dict.fromkeys(CAUSES, 0.0)
        self._count = self._bytes = 0
        self._last_s = 0.0
        self._closed = False
        self._parts = {cause: _Part(self, cause) for cause in (*CAUSES, "wait")}
        self._flushed = self._now()
        self._lines: Lines | None = None
        if folder is not None:
            self._lines = Lines(Path(folder) / f"rank-{self.rank:05d}.jsonl")
            self._lines.add(self.header.to_line())
            self._lines.flush()
            # Where nobody closes it.
            weakref.finalize(self, self._lines.close)

    @property
    def header(self) -> WatchHeader:
        return WatchHeader(
            rank=self.rank, world=self.world, node=socket.gethostname(), pid=os.getpid(), started_s=self._wall(),
            clock=self._device.kind if self._device is not None else "host", sm_activity=self._activity.why_not,
        )  # fmt: skip

    # ---- steps -----------------------------------------------------------------------------------------------------

    def loader(
        self, batches: Any, *, batches_per_step: int = 1, batch_bytes: int | Callable[[Any], int] | None = None
    ) -> Any:
        """`batches`, watched: a step begins with the wait for its first batch. Any iterable, headrace's or not.

        `batches_per_step`: those of accumulated gradients. `batch_bytes`: what a batch was on storage, a number or a
        function of the batch; loaders of headrace say so by themselves. Predictions need it.
        """
        return WatchedLoader(self, batches, self.source(batches, batch_bytes), batches_per_step)

    def source(self, batches: Any, batch_bytes: int | Callable[[Any], int] | None = None) -> Source:
        """What `waiting` wants to know of a loader."""
        source = Source(batches, batch_bytes)
        self._sources.append(source)
        told = source.teller
        if told is not None and getattr(told, "devices", None):
            self._watched.append(told)
            self._paths.since(self.devices)
        return source

    def waiting(self, source: Source) -> Any:
        """`with watch.waiting(source): batch = next(batches)`, where `loader` does not fit."""
        return _Waiting(self, source)

    def begin_step(self, number: int | None = None) -> None:
        """The next step begins here, and the one before ends. By itself where `loader` is iterated over. `number`: of
        the step; else one more than that of the last."""
        self._own()
        self._end()
        if number is not None and number < self._next_number:
            raise UsageError("steps count up", expected=f"{self._next_number} or more", found=str(number))
        self._next_number = self._next_number if number is None else number
        marks = None if self._device is None else DeviceStep(self._device.mark())
        # What was timed between two steps is of the one that follows.
        started = self._wall() - sum(self._spent.values())
        self._step = _Step(self._next_number, started, marks, self._queue_s())

    def end_step(self, *, drop: bool = False) -> None:
        """The step ends without another one. `drop`: it was none."""
        self._own()
        if drop:
            self._step, self._spent, self._since = None, {}, self._now()
        self._end()

    def leave_loop(self, *, drop: bool) -> None:
        """As `end_step`, by a loop that may have been left long ago, or in the middle of anything."""
        if not self._closed and self._owner == threading.get_ident() and not self._stack:
            self.end_step(drop=drop)

    def add_bytes(self, count: int) -> None:
        if self._step is not None:
            self._step.bytes += count

    def copy(self) -> Any:
        """Batches go to the device."""
        return self._parts["copy"]

    def compute(self) -> Any:
        """Forward, backward, optimizer."""
        return self._parts["compute"]

    def collective(self) -> Any:
        """Ranks exchange, where that can be told from computing: for what `backward` of DDP hides in itself,
        `headrace.torch.watching.see_collectives`."""
        return self._parts["collective"]

    def checkpoint(self) -> Any:
        """Training stands still for a save: all of a synchronous one; of an asynchronous one the staging, and the wait
        for the one before."""
        return self._parts["checkpoint"]

    def restart(self) -> Any:
        """State is restored, before the first step."""
        return self._parts["restart"]

    def fetch(self) -> Any:
        """In a loader of one's own, in the thread that trains: it reads."""
        return self._parts["fetch"]

    def preparation(self) -> Any:
        """In a loader of one's own, in the thread that trains: it decodes."""
        return self._parts["preparation"]

    # ---- what others ask -------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[BlockDevice]:
        return list({id(device): device for each in self._watched for device in each.devices}.values())

    def metrics(self) -> WatchMetrics:
        return WatchMetrics(
            steps=self._count, last_step_s=self._last_s, spent=dict(self._totals), bytes=self._bytes,
            sm_activity=self._last_activity,
        )  # fmt: skip

    def close(self) -> None:
        """Ends the step that is open, and waits for the device to come by the last mark. Safe to call again."""
        if self._closed:
            return
        if self._owner in (None, threading.get_ident()):
            if self._step is None and self._spent:
                # A last save, say, behind the last step.
                self.begin_step()
            del self._stack[:]
            self._end()
        self._settle(all_of_them=True)
        self._closed = True
        self._activity.close()
        for source in self._sources:
            source.helpers.close()
        if self._queue is not None:
            self._queue.close()
            self._queue = None
        if self._lines is not None:
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the clock -------------------------------------------------------------------------------------------------

    def _enter(self, cause: str) -> None:
        if self._owner != threading.get_ident():
            self._own()
        self._charge(self._now())
        self._stack.append(cause)
        if cause == "wait":
            self._in_wait.append(0.0)
        elif self._in_wait and self._stack[-2] == "wait":
            self._aside_from = self._used()
        if self._device is not None and cause in ON_DEVICE:
            mark = self._device.mark()
            if self._marks:
                self._part(*self._marks[-1], mark)
            self._marks.append((cause, mark))

    def _leave(self) -> float:
        """Of a wait: its seconds, without those of other parts in it."""
        self._charge(self._now())
        cause = self._stack.pop()
        if cause == "wait":
            return self._in_wait.pop()
        if self._in_wait and self._stack[-1] == "wait":
            cpu, queue = self._used()
            self._aside = (
                self._aside[0] + cpu - self._aside_from[0], self._aside[1] + queue - self._aside_from[1]
            )  # fmt: skip
        if self._device is not None and cause in ON_DEVICE:
            mark = self._device.mark()
            self._part(*self._marks.pop(), mark)
            if self._marks:
                # The outer one goes on.
                self._marks[-1] = (self._marks[-1][0], mark)
        return 0.0

    def _part(self, cause: str, first: Any, last: Any) -> None:
        if self._step is not None and self._step.marks is not None:
            self._step.marks.parts.append((cause, first, last))

    def _charge(self, now: float) -> None:
        spent, self._since = now - self._since, now
        if not self._stack:
            if self._step is not None:
                self._spent["other"] = self._spent.get("other", 0.0) + spent
            return
        cause = self._stack[-1]
        if cause == "wait":
            self._in_wait[-1] += spent
            return
        self._spent[cause] = self._spent.get(cause, 0.0) + spent

    def _add(self, spent: Mapping[str, float]) -> None:
        for cause, seconds in spent.items():
            self._spent[cause] = self._spent.get(cause, 0.0) + seconds

    def _own(self) -> None:
        """Of the thread that calls first."""
        here = threading.get_ident()
        if self._owner is None:
            self._owner, self._queue = here, None if self._virtual else own_queue()
            self._queue_at = self._queue_s()
            self._since = self._now()
        elif self._owner != here:
            raise UsageError(
                "a Watch belongs to the thread that trains", expected="one thread", found="a call by another one",
                next_step="time what other threads do by a loader that tells (`waited`)",
            )  # fmt: skip
        if self._closed:
            raise UsageError("the watch is closed", where=self.name)

    def _used(self) -> tuple[float, float]:
        """CPU time and run queue delay of this thread, without those of parts that lie in waits."""
        if self._virtual:
            return 0.0, 0.0
        return time.thread_time() - self._aside[0], self._queue_s() - self._aside[1]

    def _queue_s(self) -> float:
        return self._queue.read()[1] if self._queue is not None else 0.0

    # ---- the end of a step -----------------------------------------------------------------------------------------

    def _end(self) -> None:
        now = self._now()
        self._charge(now)
        if self._stack:
            raise UsageError("a step ends inside one of its parts", expected="no part open", found=self._stack[-1])
        step, self._step = self._step, None
        if step is None:
            return
        step.spent, self._spent = self._spent, {}
        self._starved(step)
        for source in self._sources:
            source.steps += 1
        if self._host.due(now):
            step.window = self._window()
            self._host.cost(self._now() - now)
        self._next_number = step.number + 1
        if step.marks is not None and self._device is not None:
            step.marks.end = self._device.mark()
        self._pending.append(step)
        self._settle()

    def _starved(self, step: _Step) -> None:
        """What the thread waited for a CPU elsewhere than in waits for data is no computing."""
        queued = self._queue_s() - step.queue - self._waited_queue
        self._waited_queue = 0.0
        causes = ("other",) if self._device is not None else ("other", "compute", "collective")
        for cause in causes:
            taken = min(max(0.0, queued), step.spent.get(cause, 0.0))
            if taken > 0:
                step.spent[cause] -= taken
                step.spent["starved"] = step.spent.get("starved", 0.0) + taken
                queued -= taken

    def _window(self) -> dict[str, Any]:
        window = self._host.since()
        for source in self._sources:
            for key, value in source.look(window["window_s"]).items():
                window[key] = value if isinstance(value, bool) else window.get(key, 0) + value
        if self._queue is not None:
            last, self._queue_at = self._queue_at, self._queue_s()
            window["run_queue_s"] = round(self._queue_at - last, 6)
        now = self._now()
        if now - self._activity_at >= 1.0 and (busy := self._activity.since()) is not None:
            window["sm_activity"] = round(busy, 4)
            self._last_activity, self._activity_at = busy, now
        if self._watched and (paths := self._paths.since(self.devices)):
            window["paths"] = paths
        return window

    def _settle(self, *, all_of_them: bool = False) -> None:
        """Steps that the device has come by are finished, in order."""
        while self._pending:
            step = self._pending[0]
            if (
                step.marks is not None
                and self._device is not None
                and not (all_of_them or len(self._pending) > MOST_PENDING or step.marks.passed(self._device))
            ):
                break
            self._pending.popleft()
            self._finish(step)
        if self._lines is not None and self._now() - self._flushed >= FLUSH_S:
            self._lines.flush()
            self._flushed = self._now()

    def _finish(self, step: _Step) -> None:
        wall, spent = sum(step.spent.values()), step.spent
        if step.marks is not None and self._device is not None:
            wall, spent = step.marks.spent(self._device, step.spent)
        # What the arithmetic of clocks leaves is nothing.
        spent = {cause: seconds for cause, seconds in spent.items() if seconds > 1e-9}
        found = WatchStep(
            step=step.number, started_s=step.started_s, wall_s=wall, spent=spent, bytes=step.bytes, window=step.window
        )
        self.steps.append(found)
        for cause, seconds in spent.items():
            self._totals[cause] += seconds
        self._count, self._bytes, self._last_s = self._count + 1, self._bytes + step.bytes, wall
        if self._lines is not None:
            self._lines.add(found.to_line())
        for listener in self._listeners:
            listener(found)


def _clock(device: DeviceClock | str | None) -> DeviceClock | None:
    if device is None or not isinstance(device, str):
        return device
    if device != "auto":
        raise UsageError("device", expected='"auto", None or a clock', found=repr(device))
    if "torch" not in sys.modules:
        return None
    from headrace.torch.device_clock import current_clock

    return current_clock()


def _number(name: str, given: int | None, variable: str, default: int) -> int:
    if given is not None:
        if given < 0:
            raise UsageError(f"{name} is out of range", expected="0 or more", found=str(given))
        return given
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise UsageError(f"{name} is no whole number", where=variable, found=repr(text))
    return int(text)
