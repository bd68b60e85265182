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
from headrace.measure.watch.delay import LONG_S, LONG_SHARE
from headrace.measure.watch.device import DeviceClock, DeviceStep
from headrace.measure.watch.host import HostCounters
from headrace.measure.watch.lines import Lines
from headrace.measure.watch.loader import Source, WatchedLoader
from headrace.measure.watch.parts import WAIT, Parts
from headrace.measure.watch.paths import PathWindows
from headrace.measure.watch.record import UnderWay, WatchHeader, WatchStep
from headrace.measure.watch.wait import split

if TYPE_CHECKING:
    from typing_extensions import Self

#: Steps are finished, told and written together, so often or when there are so many: one by one each would find the
#: caches full of training. Of a device those that it has not come by yet wait for the next time; the oldest of too many
#: is waited for.
FLUSH_S = 1.0
MOST_PENDING = 128
#: What waits for batches are taken apart into, a lack of CPUs among it.
_OF_WAITS = ("fetch", "blocked", "preparation", "starved")
#: Steps that stay in memory.
KEPT = 10_000


@dataclass(frozen=True, kw_only=True)
class WatchMetrics:
    """Counters since the watch was made, for `headrace.metrics`; they are a second old."""

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
    begun: float
    ended: float = 0.0
    #: Of `Delayed`; and what short waits were blocked, the kernel unasked.
    off_s: float = 0.0
    queued_s: float = 0.0
    loose_s: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    window: dict[str, Any] | None = None


class _Part:
    """`with watch.compute():`; made once, for all of them are alike."""

    __slots__ = ("_cause", "_watch")

    def __init__(self, watch: Watch, cause: str) -> None:
        self._watch, self._cause = watch, cause

    def __enter__(self) -> None:
        self._watch._parts.enter(self._cause)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._watch._parts.leave()


class _Waiting:
    """A wait for a batch."""

    def __init__(self, watch: Watch, source: Source) -> None:
        self._watch, self._parts, self._source = watch, watch._parts, source

    def __enter__(self) -> None:
        self._parts.enter(WAIT)
        teller = self._source.teller
        self._told = teller.waited if teller is not None else None
        self._source.waits()
        delay = self._parts.delay
        assert delay is not None
        delay.look(self._watch._step, self._parts.since)
        self._sleeps = delay.sleeps()
        self._cpu = self._parts.cpu_s()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        parts, source, step = self._parts, self._source, self._watch._step
        cpu = max(0.0, parts.cpu_s() - self._cpu)
        told = None
        if source.teller is not None and self._told is not None:
            now = source.teller.waited
            told = (now[0] - self._told[0], now[1] - self._told[1], now[2] - self._told[2])
            self._watch.add_bytes(told[2])
        wall = parts.leave()
        queue, slept = 0.0, True
        long = parts.by_hand or wall >= min(LONG_S, LONG_SHARE * self._watch._last_wall_s)
        if long and parts.delay is not None:
            slept = parts.by_hand or parts.delay.sleeps() > self._sleeps
            queue = parts.delay.waited(step, wall - cpu)
        source.waited(wall)
        found = split(
            wall, own_cpu_s=cpu, own_queue_s=queue, told=told,
            shares=source.shares if len(source.helpers) else None, slept=slept,
        )  # fmt: skip
        if step is not None and not long:
            step.loose_s += found.get("blocked", 0.0)
        parts.add(found)


class Watch:
    """Of one rank. Belongs to the thread that trains; `metrics()` may be asked by others.

    Args:
        folder: a file `rank-NNNNN.jsonl` is written there, a line a step, at least once a second. None: no file. A
            restart appends to it.
        name: in metrics.
        rank, world: as torchrun says (`RANK`, `WORLD_SIZE`), else 0 of 1.
        device: a `DeviceClock`; "auto": that of the CUDA device that is current now where PyTorch has been imported and
            there is one: `torch.cuda.set_device` comes first; None: everything by the host's clock.
        volumes: volumes of headrace (or anything with `devices`) whose paths are watched besides those of loaders.
        listeners: called with each finished `WatchStep`, in the thread that trains, about once a second for all.
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
        self._device = _clock(device)
        self._parts = Parts(monotonic, self._device)
        self._listeners = list(listeners)
        self._watched = list(volumes)
        self._sources: list[Source] = []
        self._activity = SmActivity(self._device.gpu if self._device is not None else None)
        self._activity_at, self._last_activity = self._now(), None if self._activity.why_not else 0.0
        self._host = HostCounters(monotonic)
        self._paths = PathWindows()
        self._paths.since(self.devices)
        self._queue_at = 0.0
        self._step: _Step | None = None
        self._next_number = 0
        #: Who trains has said which step of the job it is.
        self._numbered = False
        self._pending: deque[_Step] = deque()
        self._totals = dict.fromkeys(CAUSES, 0.0)
        self._count = self._bytes = 0
        self._last_s = self._last_wall_s = 0.0
        self._closed = False
        self._contexts = {cause: _Part(self, cause) for cause in CAUSES}
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

    def resume(self, step: int) -> None:
        """The next step is this one of the job: where a job that starts again goes on. Else they are counted from 0,
        and nobody can tell which ones were done again."""
        self._own()
        if self._step is not None or step < self._next_number:
            raise UsageError("resume", expected=f"{self.next_step} or more, before the first step", found=str(step))
        self._next_number, self._numbered = step, True

    def begin_step(self, number: int | None = None) -> None:
        """The next step begins here, and the one before ends. By itself where `loader` is iterated over. `number`: of
        the step; else one more than that of the last."""
        self._own()
        if self._step is None and self._parts.delay is not None:
            self._parts.delay.skip()
        self._end()
        if number is not None and number < self._next_number:
            raise UsageError("steps count up", expected=f"{self._next_number} or more", found=str(number))
        if number is not None:
            self._next_number, self._numbered = number, True
        marks = None if self._device is None else DeviceStep(self._device.mark())
        # What was timed between two steps is of the one that follows.
        before_s = sum(self._parts.spent.values())
        started = self._wall() - before_s
        self._step = _Step(self._next_number, started, marks, self._parts.since - before_s)
        self._parts.in_step, self._parts.marks = True, marks

    def end_step(self, *, drop: bool = False) -> None:
        """The step ends without another one. `drop`: it was none."""
        self._own()
        if drop:
            self._step = None
            self._parts.charge()
            self._parts.in_step = False
            self._parts.take()
        self._end()

    def leave_loop(self, number: int | None, *, drop: bool) -> None:
        """As `end_step`, by a loop that may have been left long ago, or in the middle of anything. `number`: of the
        step that it began last; another one is not its."""
        its = self._step is not None and self._step.number == number
        if not self._closed and self._parts.mine and self._parts.innermost is None and its:
            self.end_step(drop=drop)

    def add_bytes(self, count: int) -> None:
        if self._step is not None:
            self._step.bytes += count

    def copy(self) -> Any:
        """Batches go to the device."""
        return self._contexts["copy"]

    def compute(self) -> Any:
        """Forward, backward, optimizer."""
        return self._contexts["compute"]

    def collective(self) -> Any:
        """Ranks exchange, where that can be told from computing: for what `backward` of DDP hides in itself,
        `headrace.torch.watching.see_collectives`."""
        return self._contexts["collective"]

    def checkpoint(self) -> Any:
        """Training stands still for a save: all of a synchronous one; of an asynchronous one the staging, and the wait
        for the one before."""
        return self._contexts["checkpoint"]

    def restart(self) -> Any:
        """State is restored, before the first step."""
        return self._contexts["restart"]

    def fetch(self) -> Any:
        """In a loader of one's own, in the thread that trains: it reads."""
        return self._contexts["fetch"]

    def preparation(self) -> Any:
        """In a loader of one's own, in the thread that trains: it decodes."""
        return self._contexts["preparation"]

    # ---- for those who watch a loop from outside -------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The least number that the next step can have."""
        return self._next_number + (self._step is not None)

    @property
    def in_step(self) -> bool:
        return self._step is not None

    @property
    def step_number(self) -> int | None:
        """Of the step that is open."""
        return None if self._step is None else self._step.number

    def now(self) -> float:
        """By the clock of this watch, seconds."""
        return self._now()

    def recast(self, cause: str, seconds: float) -> None:
        """So much of what was "other" in this step was `cause`, as is known by now."""
        self._parts.charge()
        self._parts.move("other", cause, seconds)

    def gradients_ready(self) -> None:
        """Called by any thread while the one that trains computes: from here on it may have nothing left to compute."""
        self._parts.gradients_ready()

    def gradients_exchanged(self) -> None:
        """Called by any thread: what was ready has been exchanged."""
        self._parts.gradients_exchanged()

    # ---- what others ask -------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[BlockDevice]:
        return list({id(device): device for each in self._watched for device in each.devices}.values())

    def metrics(self) -> WatchMetrics:
        return WatchMetrics(
            steps=self._count, last_step_s=self._last_s, spent=dict(self._totals), bytes=self._bytes,
            sm_activity=self._last_activity,
        )  # fmt: skip

    def under_way(self) -> UnderWay | None:
        """The step in which training is, for any thread; None between steps. Waits for nothing."""
        step, parts = self._step, self._parts
        if step is None:
            return None
        cause, since, spent = parts.innermost or "other", parts.since, dict(parts.spent)
        now = self._now()
        spent[cause] = spent.get(cause, 0.0) + max(0.0, now - since)
        spent = {cause: seconds for cause, seconds in spent.items() if seconds > 0}
        return UnderWay(step=step.number, begun=step.begun, cause=cause, since=since, now=now, spent=spent)

    def recent(self, count: int) -> list[WatchStep]:
        """The last steps that have ended, oldest first, for any thread. Those of the last second, which are not taken
        apart yet, by the host's clock and with delays of its CPU in what they delayed."""
        pending = [
            WatchStep(
                step=step.number, started_s=step.started_s, wall_s=sum(step.spent.values()), bytes=step.bytes,
                spent={cause: seconds for cause, seconds in step.spent.items() if seconds > 0},
                begun=step.begun, ended=step.ended,
            )
            for step in list(self._pending)
        ]  # fmt: skip
        done = list(self.steps)
        return [*done, *(step for step in pending if not done or step.step > done[-1].step)][-count:]

    def close(self) -> None:
        """Ends the step that is open, and waits for the device to come by the last mark. Safe to call again."""
        if self._closed:
            return
        if self._parts.mine:
            self._parts.leave_all()
            if self._step is None and self._parts.spent:
                # A last save, say, behind the last step.
                self.begin_step()
            self._end()
        self._settle(all_of_them=True)
        self._closed = True
        self._activity.close()
        for source in self._sources:
            source.helpers.close()
        self._parts.close()
        if self._lines is not None:
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    # ---- the end of a step -----------------------------------------------------------------------------------------

    def _own(self) -> None:
        self._parts.own()
        if self._closed:
            raise UsageError("the watch is closed", where=self.name)

    def _end(self) -> None:
        parts = self._parts
        parts.charge()
        if parts.innermost is not None:
            raise UsageError("a step ends inside one of its parts", expected="no part open", found=parts.innermost)
        step, self._step = self._step, None
        parts.in_step, parts.marks = False, None
        if step is None:
            return
        if parts.delay is not None:
            parts.delay.passed(step)
        step.spent = parts.take()
        step.ended = parts.since
        self._last_wall_s = sum(step.spent.values())
        if self._host.due(self._now()):
            started = time.thread_time()
            step.window = self._window()
            self._host.cost(0.0 if parts.by_hand else time.thread_time() - started)
        self._next_number = step.number + 1
        if step.marks is not None and self._device is not None:
            step.marks.end = self._device.mark()
        self._pending.append(step)
        now = self._now()
        if now - self._flushed >= FLUSH_S or len(self._pending) >= MOST_PENDING:
            self._flushed = now
            self._settle()

    @staticmethod
    def _starved(step: _Step) -> None:
        """What the thread waited for a CPU elsewhere than in long waits for data is no computing, nor anything else
        that was timed. The kernel was not asked at each part: it is taken from all of them alike."""
        timed = {cause: seconds for cause, seconds in step.spent.items() if cause not in _OF_WAITS and seconds > 0}
        if step.loose_s > 0:
            timed["blocked"] = min(step.loose_s, step.spent.get("blocked", 0.0))
        whole = sum(timed.values())
        if step.queued_s > 0 and whole > 0:
            share = min(1.0, step.queued_s / whole)
            for cause, seconds in timed.items():
                step.spent[cause] -= share * seconds
            step.spent["starved"] = step.spent.get("starved", 0.0) + share * whole

    def _window(self) -> dict[str, Any]:
        window = self._host.since()
        for source in self._sources:
            for key, value in source.counters().items():
                window[key] = value if isinstance(value, bool) else window.get(key, 0) + value
        delay = self._parts.delay
        last, self._queue_at = self._queue_at, delay.total_s() if delay is not None else 0.0
        window["run_queue_s"] = round(self._queue_at - last, 6)
        now = self._now()
        if now - self._activity_at >= 1.0 and (busy := self._activity.since()) is not None:
            window["sm_activity"] = round(busy, 4)
            self._last_activity, self._activity_at = busy, now
        if self._watched and (paths := self._paths.since(self.devices)):
            window["paths"] = paths
        return window

    def _settle(self, *, all_of_them: bool = False) -> None:
        """Steps are finished, in order, as far as the device has come by."""
        if self._pending and self._parts.mine and self._parts.delay is not None:
            self._parts.delay.settle()
        while self._pending:
            step = self._pending[0]
            if (
                step.marks is not None
                and self._device is not None
                and not (all_of_them or len(self._pending) >= MOST_PENDING or step.marks.passed(self._device))
            ):
                break
            self._pending.popleft()
            self._finish(step)
        if self._lines is not None:
            self._lines.flush()

    def _finish(self, step: _Step) -> None:
        self._starved(step)
        wall, spent = sum(step.spent.values()), step.spent
        if step.marks is not None and self._device is not None:
            wall, spent = step.marks.spent(self._device, step.spent)
        # What the arithmetic of clocks leaves is nothing.
        spent = {cause: seconds for cause, seconds in spent.items() if seconds > 1e-9}
        found = WatchStep(
            step=step.number, started_s=step.started_s, wall_s=wall, spent=spent, bytes=step.bytes, window=step.window,
            counted=not self._count and not self._numbered, begun=step.begun, ended=step.ended,
        )  # fmt: skip
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
