"""What the thread that trains has noted, worked out afterwards: the seconds of each step by cause.

A note is `(what, at, cpu_s, more)`: what happened, when, the thread's CPU time then (None: not asked for, for asking
takes microseconds), and what else there is to say:

    a cause     such a part begins           the mark in the device's stream, where there is one
    WAIT        a wait for a batch begins    what a loader that tells has counted; how often the thread has slept, -1:
                                             not known
    None        the innermost part ends      a mark; of a wait as at its begin, what the loader's helpers do, and bytes
                                             of the batch of a loader that does not tell
    BEGIN       a step begins, and the one   number, time by the system's clock, whether it was counted, bytes of the
                before ends                  one before that nobody else told, a mark
    END, DROP   a step ends; it was none     bytes, a mark
    DELAY       the kernel was asked         the thread's run queue delay since it began, seconds
    WINDOW      counters were taken          they
    RECAST      what was "other" was not     cause, seconds
    READY, EXCHANGED   gradients, in the      a mark
                part that computes; by any
                thread, and so perhaps late

Every second goes to the innermost part that is open, to "other" where a step is in none, and else to nobody. A thread
waits for a CPU only while it is on none: the delay between two askings is divided by that, and is "starved". Where
several parts lie between two readings of the CPU time, it is divided by their time.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from headrace.measure.watch.causes import WAIT
from headrace.measure.watch.device import ON_DEVICE, DeviceStep
from headrace.measure.watch.record import UnderWay
from headrace.measure.watch.wait import HelperShares, split

BEGIN, END, DROP, DELAY, WINDOW, RECAST = "begin", "end", "drop", "delay", "window", "recast"
READY, EXCHANGED = "ready", "exchanged"

Note = tuple[str | None, float, float | None, Any]
#: Behind a wait in which no batch came.
NO_BATCH = (None, -1, None, 0)
#: Of the time between two readings of the CPU time: shares in which the thread was on its CPU, and waited for it.
_Rates = tuple[float, float]


@dataclass(slots=True)
class _Wait:
    """A wait that is open, without the parts in it."""

    told: tuple[float, float, int] | None
    sleeps: int
    wall_s: float = 0.0
    cpu_s: float = 0.0
    late_s: float = 0.0

    def add(self, wall_s: float, on_cpu: float, late: float) -> None:
        self.wall_s += wall_s
        self.cpu_s += on_cpu * wall_s
        self.late_s += late * wall_s


@dataclass(slots=True)
class Step:
    """`begun`, `ended`: by the watch's clock; `ended` 0: it is open."""

    number: int
    started_s: float
    begun: float
    counted: bool
    marks: DeviceStep | None
    ended: float = 0.0
    spent: dict[str, float] = field(default_factory=dict)
    bytes: int = 0
    window: dict[str, Any] | None = None


def _rates(wall_s: float, used_s: float, share: float) -> _Rates:
    """`share`: of the time off the CPU that was delay."""
    if wall_s <= 0:
        return 0.0, 0.0
    used = min(1.0, max(0.0, used_s / wall_s))
    return used, min(1.0, share) * (1 - used)


class Replay:
    """How things stand behind the notes that were run. `marked`: there is a device, and notes have marks."""

    def __init__(self, at: float, cpu_s: float, delay_s: float, marked: bool) -> None:
        self.at, self.delay_s, self.marked = at, delay_s, marked
        #: The last reading of the CPU time: when, and what.
        self._read = (at, cpu_s)
        #: Since when the innermost part goes on.
        self.since = at
        self.step: Step | None = None
        #: By cause, of the step that is open; of parts between two steps: of the one that follows.
        self.spent: dict[str, float] = {}
        self.stack: list[str] = []
        self._waits: list[_Wait] = []
        #: Of parts that the device carries out: since where the innermost one goes, and those around it.
        self._open: list[tuple[str, Any]] = []
        #: Of the part that computes, when gradients were ready last and were exchanged last, and the marks.
        self._gradients: dict[str, tuple[float, Any]] = {}
        self._ended: list[Step] = []

    def copy(self) -> Replay:
        made = Replay(self.at, self._read[1], self.delay_s, self.marked)
        made._read = self._read
        made.since, step = self.since, self.step
        if step is not None:
            marks = None if step.marks is None else replace(step.marks, parts=list(step.marks.parts))
            made.step = replace(step, marks=marks)
        made.spent, made.stack, made._open = dict(self.spent), list(self.stack), list(self._open)
        made._waits = [replace(wait) for wait in self._waits]
        made._gradients = dict(self._gradients)
        return made

    def run(self, notes: Sequence[Note]) -> list[Step]:
        """The steps that end in them."""
        self._ended = []
        rates = iter(self._rates_of(notes))
        on_cpu, late = next(rates)
        at, stack, marked = self.at, self.stack, self.marked
        for what, now, cpu_s, more in notes:
            kind = _OTHERS.get(what)
            if kind is _gradients:
                # By any thread, and perhaps late: no time passes with it.
                kind(self, (what, now, more))
                continue
            wall_s, at = now - at, now
            cause = stack[-1] if stack else "other" if self.step is not None else None
            if cause == WAIT:
                self._waits[-1].add(wall_s, on_cpu, late)
            elif cause is not None:
                spent = self.spent
                if late:
                    spent["starved"] = spent.get("starved", 0.0) + late * wall_s
                    wall_s -= late * wall_s
                spent[cause] = spent.get(cause, 0.0) + wall_s
            if cpu_s is not None:
                self._read, (on_cpu, late) = (now, cpu_s), next(rates)
            if kind is not None:
                self.at = now
                kind(self, more)
            elif what is not None:
                self.since = now
                stack.append(what)
                if what == "compute" and self._gradients:
                    # Those of before it were in no part that computes, or of one that has ended.
                    self._gradients = {}
                if what == WAIT:
                    self._waits.append(_Wait(*more))
                elif marked and what in ON_DEVICE:
                    self._enter_on_device(what, more)
            elif stack:
                # Else an interrupt came between the part and the note of it.
                self.since = now
                if (ended := stack.pop()) == WAIT:
                    self._waited(self._waits.pop(), *more)
                elif marked or self._gradients:
                    self._leave_on_device(ended, more)
        self.at = at
        return self._ended

    def _rates_of(self, notes: Iterable[Note]) -> list[_Rates]:
        """Between the readings of the CPU time in them. Behind the last one nothing is known, and behind the last
        asking for the delay it is not known how much of the time off the CPU that was."""
        found: list[_Rates] = []
        some: list[tuple[float, float]] = []
        (last, last_s), delay_s = self._read, self.delay_s
        for what, at, cpu_s, more in notes:
            if cpu_s is None:
                continue
            some.append((at - last, cpu_s - last_s))
            last, last_s = at, cpu_s
            if what == DELAY:
                late_s = more - delay_s
                if late_s > 0:
                    off_s = sum([wall_s - used_s for wall_s, used_s in some if wall_s > used_s])
                    late_s = late_s / off_s if off_s > 0 else 0.0
                found += [_rates(wall_s, used_s, late_s) for wall_s, used_s in some]
                delay_s, some = more, []
        return [*found, *(_rates(*each, 0.0) for each in some), (0.0, 0.0)]

    def under_way(self, now: float) -> UnderWay | None:
        """None: no step is open. `now`: by the watch's clock."""
        if self.step is None:
            return None
        cause, spent = self.stack[-1] if self.stack else "other", dict(self.spent)
        if self._waits:
            spent[WAIT] = sum(wait.wall_s for wait in self._waits)
        spent[cause] = spent.get(cause, 0.0) + max(0.0, now - self.at)
        return UnderWay(
            step=self.step.number, begun=self.step.begun, cause=cause, since=self.since, now=now,
            spent={name: seconds for name, seconds in spent.items() if seconds > 0},
        )  # fmt: skip

    def _enter_on_device(self, cause: str, mark: Any) -> None:
        if self._open:
            self._carried_out(*self._open[-1], mark)
        self._open.append((cause, mark))

    def _leave_on_device(self, cause: str, mark: Any) -> None:
        if cause == "compute" and self._gradients:
            self._exchanged()
        if self.marked and cause in ON_DEVICE:
            self._carried_out(*self._open.pop(), mark)
            if self._open:
                # The outer one goes on.
                self._open[-1] = (self._open[-1][0], mark)

    # ---- notes that are no part ------------------------------------------------------------------------------------

    def _begin(self, more: Any) -> None:
        number, wall_s, counted, size, mark = more
        self._end((size, mark))
        self.since, before_s = self.at, sum(self.spent.values())
        marks = DeviceStep(mark) if self.marked else None
        self.step = Step(number, wall_s - before_s, self.at - before_s, counted, marks)

    def _end(self, more: Any) -> None:
        size, mark = more
        step, self.step = self.step, None
        if step is None:
            return
        step.ended, step.spent, self.spent = self.at, self.spent, {}
        step.bytes += size
        if step.marks is not None:
            step.marks.end = mark
        self._ended.append(step)

    def _drop(self, more: Any) -> None:
        self.step, self.spent = None, {}

    def _delay(self, more: Any) -> None:
        self.delay_s = more

    def _window(self, more: Any) -> None:
        step = self.step or (self._ended[-1] if self._ended else None)
        if step is not None:
            step.window = more

    def _recast(self, more: Any) -> None:
        self._move("other", *more)

    # ---- what a part was ---------------------------------------------------------------------------------------------

    def _waited(self, wait: _Wait, told: Any, sleeps: int, shares: HelperShares | None, size: int) -> None:
        counted = None
        if self.step is not None:
            self.step.bytes += size
        if wait.told is not None and told is not None:
            counted = (told[0] - wait.told[0], told[1] - wait.told[1], told[2] - wait.told[2])
            if self.step is not None:
                self.step.bytes += counted[2]
        found = split(
            wait.wall_s, own_cpu_s=wait.cpu_s, own_queue_s=wait.late_s, told=counted, shares=shares,
            slept=sleeps < 0 or sleeps != wait.sleeps,
        )  # fmt: skip
        spent = self.spent
        for cause, seconds in found.items():
            spent[cause] = spent.get(cause, 0.0) + seconds

    def _move(self, source: str, cause: str, seconds: float) -> None:
        """So much of `source` was `cause`, at most what is there."""
        moved = min(max(0.0, seconds), self.spent.get(source, 0.0))
        if moved > 0:
            self.spent[source] -= moved
            self.spent[cause] = self.spent.get(cause, 0.0) + moved

    def _exchanged(self) -> None:
        """What the part that computed, and ends here, has waited for gradients of others."""
        ready, exchanged = self._gradients.get(READY), self._gradients.get(EXCHANGED)
        self._gradients = {}
        if ready is None or exchanged is None or exchanged[0] < ready[0]:
            return
        self._move("compute", "collective", exchanged[0] - ready[0])
        if self._open:
            self._carried_out(*self._open[-1], ready[1])
            self._carried_out("collective", ready[1], exchanged[1])
            self._open[-1] = (self._open[-1][0], exchanged[1])

    def _carried_out(self, cause: str, first: Any, last: Any) -> None:
        if self.step is not None and self.step.marks is not None:
            self.step.marks.parts.append((cause, first, last))


def _gradients(replay: Replay, more: Any) -> None:
    what, at, mark = more
    replay._gradients[what] = (at, mark)


#: What is neither the begin of a part nor the end of one.
_OTHERS: dict[str | None, Callable[[Replay, Any], None]] = {
    BEGIN: Replay._begin, END: Replay._end, DROP: Replay._drop, DELAY: Replay._delay, WINDOW: Replay._window,
    RECAST: Replay._recast, READY: _gradients, EXCHANGED: _gradients,
}  # fmt: skip
