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

import math
import os
import socket
import sys
import time
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from threading import get_ident
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headrace.device import BlockDevice
from headrace.errors import UsageError
from headrace.measure.watch.activity import SmActivity
from headrace.measure.watch.causes import CAUSES, WAIT, compute_marked, rest_computes
from headrace.measure.watch.device import DeviceClock
from headrace.measure.watch.failures import Telling
from headrace.measure.watch.host import HostCounters, IoThread
from headrace.measure.watch.lines import Lines
from headrace.measure.watch.loader import WatchedLoader
from headrace.measure.watch.notes import Notes, Part, Wait
from headrace.measure.watch.paths import PathWindows
from headrace.measure.watch.record import UnderWay, WatchHeader, WatchStep
from headrace.measure.watch.replay import BEGIN, DROP, END, EXCHANGED, READY, RECAST, WINDOW, Step
from headrace.measure.watch.source import Source

if TYPE_CHECKING:
    from typing_extensions import Self

#: Steps are worked out, told and written together, so often. Of a device those that it has not come by yet wait for the
#: next time; the oldest of too many is waited for.
FLUSH_S = 1.0
MOST_PENDING = 1024
#: Steps that stay in memory.
KEPT = 10_000


@dataclass(frozen=True, kw_only=True)
class WatchMetrics:
    """Counters since the watch was made, for `headrace.metrics`; they are a second old."""

    steps: int
    #: Of the last step, seconds.
    last_step_s: float
    #: Since the step began that is under way, as of now; 0 between steps. Of one that hangs nothing else is told.
    under_way_s: float
    #: By cause, seconds of all steps. Until one says what computes, all that is in no other part does.
    spent: Mapping[str, float]
    compute_marked: bool
    bytes: int
    #: Of the last window; None: not measured.
    sm_activity: float | None


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
        self._notes = Notes(monotonic, self._device, self._settle)
        self._listeners = list(listeners)
        self._volumes = list(volumes)
        self._sources: list[Source] = []
        self._activity = SmActivity(self._device.gpu if self._device is not None else None)
        self._activity_at, self._last_activity = self._now(), None if self._activity.why_not else 0.0
        self._host = HostCounters(monotonic)
        self._paths, self._io = PathWindows(), IoThread()
        self._look_at_io()
        self._queue_at = 0.0
        #: Of the step that is open.
        self._number: int | None = None
        self._next_number = 0
        #: There is a step before the next one; who trains has said which one of the job it is.
        self._begun = self._numbered = False
        self._bytes_open = 0
        #: Ended, and the device has not come by.
        self._pending: deque[Step] = deque()
        self._totals = dict.fromkeys(CAUSES, 0.0)
        self._compute_marked = False
        self._count = self._bytes = 0
        self._last_s = 0.0
        #: `_ends`: it is to be closed when what is settled now is.
        self._closed = self._settling = self._ends = False
        self._contexts = {cause: Part(self._notes, cause) for cause in CAUSES}
        self._due = self._now() + FLUSH_S
        self._lines: Lines | None = None
        if folder is not None:
            self._lines = Lines(Path(folder) / f"rank-{self.rank:05d}.jsonl")
            self._lines.add(self.header.to_line())
            self._lines.flush()
            # Where nobody closes it, and it is there until the end.
            weakref.finalize(self, _leave, weakref.ref(self))

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
        if source.devices:
            self._look_at_io()
        return source

    def waiting(self, source: Source) -> Any:
        """`with watch.waiting(source): batch = next(batches)`, where `loader` does not fit."""
        return Wait(self._notes, source)

    def resume(self, step: int) -> None:
        """The next step is this one of the job: where a job that starts again goes on. Else they are counted from 0,
        and nobody can tell which ones were done again."""
        self._own()
        if self._number is not None or step < self._next_number:
            raise UsageError("resume", expected=f"{self.next_step} or more, before the first step", found=str(step))
        self._next_number, self._numbered = step, True

    def begin_step(self, number: int | None = None) -> int:
        """The next step begins here, and the one before ends. By itself where `loader` is iterated over. `number`: of
        the step; else one more than that of the last. Returns it."""
        notes = self._notes
        now = self._now()
        if now >= notes.slow_at or number is not None or notes.entered != notes.left or notes.owner != get_ident():
            return self._begin_slowly(number)
        # One more, right behind another one.
        self._number = self._next_number = number = self._next_number + 1
        size, self._bytes_open = self._bytes_open, 0
        mark = None if self._device is None else self._device.mark()
        notes.add((BEGIN, now, None, (number, self._wall(), False, size, mark)))
        return number

    def _begin_slowly(self, number: int | None) -> int:
        notes, open_one = self._notes, self._number
        self._own()
        self._no_part()
        least = self._next_number if open_one is None else open_one + 1
        if number is None:
            number = least
        elif number < least:
            raise UsageError("steps count up", expected=f"{least} or more", found=str(number))
        else:
            self._numbered = True
        if open_one is not None:
            self._begun = True
        now = self._now()
        if now >= notes.ask_at:
            notes.ask()
        # Counters of the time between two steps are told with the second one.
        due = open_one is not None and now >= self._due
        if due:
            self._take_window()
        counted = not (self._begun or self._numbered)
        size, self._bytes_open = self._bytes_open, 0
        self._number = self._next_number = number
        notes.add((BEGIN, self._now(), None, (number, self._wall(), counted, size, notes.mark())))
        if due:
            self._settle()
        if open_one is not None:
            notes.slow_at = min(notes.ask_at, self._due)
        return number

    def end_step(self, *, drop: bool = False) -> None:
        """The step ends without another one. `drop`: it was none."""
        self._own()
        self._no_part()
        if self._number is None:
            return
        self._notes.note(DROP if drop else END, (self._bytes_open, self._notes.mark()))
        self._begun |= not drop
        self._notes.slow_at = -math.inf
        self._next_number, self._number, self._bytes_open = self.next_step - drop, None, 0
        if self._now() >= self._due:
            self._take_window()
            self._settle()

    def drop_step(self) -> None:
        """Training was left in the middle of a step, and begins again: whatever part is open ends, and the step was
        none. Nothing happens between steps."""
        self._own()
        self._notes.leave_all()
        self.end_step(drop=True)

    def leave_loop(self, number: int | None, *, drop: bool) -> None:
        """As `end_step`, by a loop that may have been left long ago, or in the middle of anything. `number`: of the
        step that it began last; another one is not its."""
        its = self._number is not None and self._number == number
        if self._closed or not its or not self._notes.mine:
            return
        if self._notes.parts() == [WAIT]:
            # An interrupt has left it open: who left the loop waits for no batch of it.
            self._notes.leave_all()
        if not self._notes.parts():
            self.end_step(drop=drop)

    def add_bytes(self, count: int) -> None:
        if self._number is not None:
            self._bytes_open += count

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

    def tell_failures(self, listener: Callable[[str, BaseException], None]) -> None:
        """`listener("collective", error)` from now on, when an exception leaves `collective`; in the thread that
        trains, which waits for it."""
        telling: Any = Telling(self._contexts["collective"], "collective", listener)
        self._contexts["collective"] = telling

    # ---- for those who watch a loop from outside -------------------------------------------------------------------

    @property
    def next_step(self) -> int:
        """The least number that the next step can have."""
        return self._next_number + (self._number is not None)

    @property
    def in_step(self) -> bool:
        return self._number is not None

    def now(self) -> float:
        """By the clock of this watch, seconds."""
        return self._now()

    def recast(self, cause: str, seconds: float) -> None:
        """So much of what was "other" in this step was `cause`, as is known by now."""
        if not self._closed:
            self._notes.note(RECAST, (cause, seconds))

    def gradients_ready(self) -> None:
        """Called by any thread while the one that trains computes: from here on it may have nothing left to compute."""
        if not self._closed:
            self._notes.note(READY, self._notes.mark())

    def gradients_exchanged(self) -> None:
        """Called by any thread: what was ready has been exchanged."""
        if not self._closed:
            self._notes.note(EXCHANGED, self._notes.mark())

    # ---- what others ask -------------------------------------------------------------------------------------------

    @property
    def devices(self) -> list[BlockDevice]:
        found = [device for volume in self._volumes for device in volume.devices]
        found += [device for source in self._sources for device in source.devices]
        return list({id(device): device for device in found}.values())

    def metrics(self) -> WatchMetrics:
        here = self.under_way()
        return WatchMetrics(
            steps=self._count, last_step_s=self._last_s, under_way_s=0.0 if here is None else here.now - here.begun,
            spent=dict(self._totals), compute_marked=self._compute_marked, bytes=self._bytes,
            sm_activity=self._last_activity,
        )  # fmt: skip

    def under_way(self) -> UnderWay | None:
        """The step in which training is, for any thread; None between steps. Waits for nothing."""
        return self._notes.glance().under_way(self._now())

    def recent(self, count: int) -> list[WatchStep]:
        """The last steps that have ended, oldest first, for any thread. Those that were not finished yet, of the last
        second, are by the host's clock, and without the delay of its CPU."""
        # In this order, for they go from one to the next meanwhile.
        _, ended = self._notes.peek()
        pending = [*self._pending, *ended]
        done = list(self.steps)
        last = done[-1].step if done else -1
        found = {step.number: _told(step, sum(step.spent.values()), step.spent) for step in pending}
        return [*done, *(found[number] for number in sorted(found) if number > last)][-count:]

    def close(self) -> None:
        """Ends the step that is open, and waits for the device to come by the last mark. Safe to call again."""
        if self._closed:
            return
        if self._settling:
            # A listener, or the handler of a signal, in the middle of it.
            self._ends = True
            return
        if self._notes.mine:
            self._notes.leave_all()
            if self._number is None and self._notes.peek()[0].spent:
                # A last save, say, behind the last step.
                self.begin_step()
            self._take_window()
            self.end_step()
        self._settle(all_of_them=True)
        self._closed = True
        self._activity.close()
        self._io.close()
        for source in self._sources:
            source.helpers.close()
        self._notes.close()
        if self._lines is not None:
            self._lines.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def __del__(self) -> None:
        _leave(lambda: self)

    # ---- the end of a step -----------------------------------------------------------------------------------------

    def _own(self) -> None:
        self._notes.own()
        if self._closed:
            raise UsageError("the watch is closed", where=self.name)

    def _no_part(self) -> None:
        if parts := self._notes.parts():
            raise UsageError(
                "a step ends inside one of its parts", expected="no part open", found=parts[-1],
                next_step="end it before; what an interrupt has left open, `drop_step()` ends",
            )  # fmt: skip

    def _take_window(self) -> None:
        self._due = self._now() + FLUSH_S
        self._notes.note(WINDOW, self._window())
        # A job may have one more in every epoch: those that nobody else holds are of loops that have ended.
        held = [weakref.ref(source) for source in self._sources]
        self._sources.clear()
        self._sources += [source for one in held if (source := one()) is not None]

    def _window(self) -> dict[str, Any]:
        window = self._host.since()
        for source in self._sources:
            for key, value in source.counters().items():
                window[key] = value if isinstance(value, bool) else window.get(key, 0) + value
        last, self._queue_at = self._queue_at, self._notes.delay_s()
        window["run_queue_s"] = round(self._queue_at - last, 6)
        now = self._now()
        if now - self._activity_at >= 1.0 and (busy := self._activity.since()) is not None:
            window["sm_activity"] = round(busy, 4)
            self._last_activity, self._activity_at = busy, now
        return window | self._look_at_io()

    def _look_at_io(self) -> dict[str, Any]:
        """Of headrace's devices, since it was looked before."""
        found: dict[str, Any] = {}
        if not (devices := self.devices):
            return found
        if (waited := self._io.since(len(devices))) is not None:
            found["io_run_queue_s"] = round(waited, 6)
        if paths := self._paths.since(devices):
            found["paths"] = paths
        return found

    def _settle(self, *, all_of_them: bool = False) -> None:
        """What was noted is worked out, and steps are finished, in order, as far as the device has come by."""
        if self._settling:
            # By a listener, or the handler of a signal: nothing may be worked out twice.
            return
        self._settling = True
        try:
            self._notes.fold(self._pending)
            if self._closed:
                self._pending.clear()
            while self._pending:
                step = self._pending[0]
                if (
                    step.marks is not None
                    and self._device is not None
                    and not (all_of_them or len(self._pending) >= MOST_PENDING or step.marks.passed(self._device))
                ):
                    break
                self._finish(step)
        finally:
            self._settling = False
            if self._lines is not None:
                self._lines.flush()
        if self._ends:
            self._ends = False
            self.close()

    def _finish(self, step: Step) -> None:
        """The first of those that are pending."""
        wall, spent = sum(step.spent.values()), step.spent
        if step.marks is not None and self._device is not None:
            wall, spent = step.marks.spent(self._device, step.spent)
        found = _told(step, wall, spent)
        # In this order, for who asks for the recent ones; and it is gone from here before anybody else's code runs.
        # Where an interrupt came between, it is there already.
        if not self.steps or self.steps[-1].step < found.step:
            self.steps.append(found)
        self._pending.popleft()
        # What has been told as computing stays so: counters never go back.
        self._compute_marked = self._compute_marked or compute_marked((found.spent,))
        for cause, seconds in (found.spent if self._compute_marked else rest_computes(found.spent)).items():
            self._totals[cause] += seconds
        self._count, self._bytes, self._last_s = self._count + 1, self._bytes + step.bytes, wall
        if self._lines is not None:
            self._lines.add(found.to_line())
        for listener in self._listeners:
            listener(found)


def _leave(watch: Callable[[], Watch | None]) -> None:
    """Nobody has closed it: what has ended is written, and nothing is waited for."""
    left = watch()
    # None: it was closed meanwhile, or was never made whole.
    lines: Lines | None = getattr(left, "_lines", None)
    if left is None or lines is None or lines.closed:
        return
    if lines.own:
        left._settle()
    lines.close()


def _told(step: Step, wall_s: float, spent: Mapping[str, float]) -> WatchStep:
    # What the arithmetic of clocks leaves is nothing.
    spent = {cause: seconds for cause, seconds in spent.items() if seconds > 1e-9}
    return WatchStep(
        step=step.number, started_s=step.started_s, wall_s=wall_s, spent=spent, bytes=step.bytes, window=step.window,
        counted=step.counted, begun=step.begun, ended=step.ended,
    )  # fmt: skip


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
