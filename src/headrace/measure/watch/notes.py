"""What the thread that trains does for a watch: it notes what begins and ends, and no more.

Between the notes training fills the caches, and whatever is done there is done slowly: a function that is called costs
microseconds, not its instructions do, and a call of the kernel up to 25. So all that notes mean is worked out later,
many steps at once (`replay.py`); which parts are open, too: here they are only counted. The thread's CPU time is read
where waits begin and end, and where a loader works. What is needed now and then (`slow_at`) stands in functions of its
own, behind one comparison.
"""

from __future__ import annotations

import math
import time
from collections import deque
from collections.abc import Callable
from threading import get_ident
from types import TracebackType
from typing import Any

from headrace.errors import UsageError
from headrace.measure.watch.causes import WAIT
from headrace.measure.watch.device import ON_DEVICE, DeviceClock
from headrace.measure.watch.host import RunQueue, own_queue
from headrace.measure.watch.replay import BEGIN, DELAY, DROP, END, NO_BATCH, Note, Replay, Step
from headrace.measure.watch.source import NOTHING_TOLD, Source

#: The kernel is asked for the run queue delay at most so often: that takes tens of microseconds with cold caches.
ASKED_S = 0.1
#: A wait is short below this, and below this share of the time from wait to wait: of no account what the thread did.
SHORT_S = 0.0001
SHORT_SHARE = 0.01
#: Who uses so much CPU time in a wait prepares in the thread that trains.
WORKS_S = 0.0005
#: A step of more parts than this is worked out in the middle of it.
MOST_NOTES = 10_000


class Notes:
    """Of one thread. `full`: called when they are too many."""

    __slots__ = (
        "_before", "_behind", "_delay_s", "_queue", "add", "ask_at", "by_hand", "cpu_s", "device", "entered", "full",
        "full_at", "left", "notes", "now", "owner", "slow_at",
    )  # fmt: skip

    def __init__(self, monotonic: Callable[[], float], device: DeviceClock | None, full: Callable[[], None]) -> None:
        self.now = monotonic
        # What the kernel says of a thread has nothing to do with a clock that is moved by hand.
        self.by_hand = monotonic is not time.perf_counter
        self.cpu_s: Callable[[], float] = _nothing if self.by_hand else time.thread_time
        self.device = device
        self.full = full
        self.owner: int | None = None
        #: Parts that were begun, and that were ended.
        self.entered = self.left = 0
        self.full_at = MOST_NOTES // 2
        self._queue: RunQueue | None = None
        self._delay_s = self.ask_at = 0.0
        #: A step that begins from then on has more to do than to be noted.
        self.slow_at = -math.inf
        #: The same list all the time: parts hold its `append`.
        self.notes: list[Note] = []
        self.add = self.notes.append
        self._start()

    def _start(self) -> None:
        #: How things stood before the notes that are there; while those are taken away, how they stand behind them,
        #: which they were, and the steps that ended in them.
        self._before = Replay(self.now(), self.cpu_s(), self.delay_s(), self.device is not None)
        self._behind: tuple[Replay, list[Note], list[Step]] | None = None

    # ---- the thread ------------------------------------------------------------------------------------------------

    @property
    def mine(self) -> bool:
        """Of the thread that calls, or of none yet."""
        return self.owner in (None, get_ident())

    def own(self) -> None:
        """Of the thread that calls first. `UsageError` for another one."""
        if self.owner is None:
            self._queue = None if self.by_hand else own_queue()
            self._start()
            self.owner = get_ident()
        elif self.owner != get_ident():
            raise UsageError(
                "a Watch belongs to the thread that trains", expected="one thread", found="a call by another one",
                next_step="time what other threads do by a loader that tells (`waited`)",
            )  # fmt: skip

    def delay_s(self) -> float:
        """For how long the thread could have run and did not, since it began."""
        if self._queue is not None:
            try:
                self._delay_s = self._queue.read()[1]
            except OSError:
                # It has ended, and a new thread has its identifier.
                return self._delay_s
        return self._delay_s

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None

    # ---- notes -----------------------------------------------------------------------------------------------------

    def note(self, what: str | None, more: Any) -> None:
        self.add((what, self.now(), None, more))

    def mark(self) -> Any:
        return None if self.device is None else self.device.mark()

    def parts(self) -> list[str]:
        """Those that are open, innermost last; for the thread itself."""
        if self.entered == self.left:
            return []
        found = self.peek()[0].stack
        # An interrupt may have come between a part and the note of it.
        self.left = self.entered - len(found)
        return found

    def ask(self) -> None:
        """For the run queue delay."""
        if self._queue is not None:
            self.add((DELAY, self.now(), self.cpu_s(), self.delay_s()))
        self.ask_at = self.now() + ASKED_S

    def leave_all(self) -> None:
        """Whatever is open: training ended in the middle of it."""
        for cause in reversed(self.parts()):
            self.note(None, NO_BATCH if cause == WAIT else self.mark() if cause in ON_DEVICE else None)
        self.left = self.entered

    def fold(self, into: deque[Step]) -> None:
        """What was noted is worked out, and forgotten. `into`: gets the steps that have ended in it. Where an interrupt
        ends it, the next one goes on from there."""
        if self._behind is None:
            if self.mine:
                self.ask()
            after, notes = self._before.copy(), self.notes.copy()
            self._behind = after, notes, after.run(notes)
        after, notes, ended = self._behind
        # Who looks meanwhile sees them twice, but never not at all.
        into.extend([step for step in ended if not into or step.number > into[-1].number])
        if notes and self.notes and self.notes[0] is notes[0]:
            del self.notes[: len(notes)]
        self._before, self._behind = after, None
        self.full_at = self.entered + MOST_NOTES // 2

    def _seen(self) -> tuple[Replay, list[Note]]:
        """For any thread, and for what interrupts this one: they belong together, and are not changed."""
        while (behind := self._behind) is None:
            before, notes = self._before, self.notes.copy()
            if self._behind is None and self._before is before:
                return before, notes
        return behind[0], []

    def peek(self) -> tuple[Replay, list[Step]]:
        """For any thread: how things stand, and the steps that have ended since they were worked out."""
        before, notes = self._seen()
        after = before.copy()
        return after, after.run(notes)

    def glance(self) -> Replay:
        """As `peek`, for who asks often: the step that is open, and those before it not at all."""
        before, notes = self._seen()
        whats = [note[0] for note in notes]
        begin = first = len(whats) - 1 - whats[::-1].index(BEGIN) if BEGIN in whats else 0
        while first and whats[first] not in (END, DROP) and whats[first - 1] != BEGIN:
            first -= 1
        if begin and whats[first] not in (END, DROP) and (first or before.step is not None):
            # The step before went on until here: what comes before this one is that one's.
            first = begin
        # Of what was before no reading is known: infinite ones make no share of the time up to the next.
        after = Replay(notes[first][1], math.inf, math.inf, self.device is not None) if first else before.copy()
        after.run(notes[first:])
        return after


def _nothing() -> float:
    return 0.0


class Part:
    """`with watch.compute():`; made once, for all of them are alike. What it needs it holds: each thing that has to be
    looked for costs as much as the rest."""

    __slots__ = ("_add", "_cause", "_cpu_s", "_device", "_notes", "_now")

    def __init__(self, notes: Notes, cause: str) -> None:
        self._notes, self._cause = notes, cause
        self._add, self._now = notes.add, notes.now
        self._device = notes.device if cause in ON_DEVICE else None
        self._cpu_s = notes.cpu_s if cause in ("fetch", "preparation") else None

    def __enter__(self) -> None:
        notes = self._notes
        if notes.owner != get_ident():
            notes.own()
        notes.entered = entered = notes.entered + 1
        if entered > notes.full_at:
            notes.full()
        mark = None if self._device is None else self._device.mark()
        self._add((self._cause, self._now(), None if self._cpu_s is None else self._cpu_s(), mark))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at = self._now()
        mark = None if self._device is None else self._device.mark()
        self._add((None, at, None if self._cpu_s is None else self._cpu_s(), mark))
        self._notes.left += 1


class Wait:
    """A wait for a batch of a loader: `begin` and `end`, or `with`."""

    __slots__ = ("_add", "_at", "_cpu_s", "_last", "_notes", "_now", "_open", "_source")

    def __init__(self, notes: Notes, source: Source) -> None:
        self._notes, self._source = notes, source
        self._add, self._now = notes.add, notes.now
        self._at = self._last = self._cpu_s = 0.0
        self._open = 0

    def begin(self) -> None:
        notes, source = self._notes, self._source
        at = self._now()
        if at >= notes.ask_at or at >= source.look_at or notes.owner != get_ident():
            self._first(at)
        notes.entered += 1
        self._open = notes.entered - notes.left
        begun = NOTHING_TOLD if source.quiet else source.told()
        self._last, self._cpu_s = self._at, notes.cpu_s()
        self._at = at = self._now()
        self._add((WAIT, at, self._cpu_s, begun))

    def _first(self, at: float) -> None:
        notes = self._notes
        if notes.owner != get_ident():
            notes.own()
        if at >= notes.ask_at:
            notes.ask()
        if notes.entered > notes.full_at:
            notes.full()
        if at >= self._source.look_at:
            self._source.look()

    def end(self, size: int = 0) -> None:
        """`size`: bytes of the batch, where they are known, and no loader tells."""
        notes, source = self._notes, self._source
        at, open_ones = self._now(), notes.entered - notes.left
        waited_s = at - self._at
        if (
            waited_s > SHORT_S or waited_s > SHORT_SHARE * (self._at - self._last)
            or not source.quiet or source.before is not None or open_ones != self._open
        ):  # fmt: skip
            self._end(at, size, open_ones)
        else:
            self._add((None, at, None, (None, -1, source.shares, size)))
            notes.left += 1

    def _end(self, at: float, size: int, open_ones: int) -> None:
        notes, source, cpu_s = self._notes, self._source, None
        waited_s = at - self._at
        try:
            told, sleeps = source.told()
            if waited_s > min(SHORT_S, SHORT_SHARE * (self._at - self._last)):
                cpu_s = notes.cpu_s()
                source.see(works=cpu_s - self._cpu_s > WORKS_S)
            shares = source.looked() if source.before is not None else source.shares_in(waited_s)
        except BaseException:
            # An interrupt, most of all while it is asked what helpers do: the wait is over all the same.
            if open_ones == self._open:
                self._add((None, at, None, NO_BATCH))
                notes.left += 1
            raise
        if open_ones < self._open:
            # The watch was closed meanwhile.
            return
        if open_ones > self._open:
            raise UsageError(
                "a loader hands out a batch inside a part of its own", expected="the part ends before `yield`",
                found=notes.parts()[-1],
            )  # fmt: skip
        self._add((None, at, cpu_s, (told, sleeps, shares, size)))
        notes.left += 1
        if at >= notes.ask_at:
            notes.ask()

    def __enter__(self) -> None:
        self.begin()

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.end()
