"""What the thread that trains does for a watch: it notes what begins and ends, and no more.

Between the notes training fills the caches, and whatever is done there is done slowly, calls of the kernel above all (5
to 25 microseconds each on a busy machine). So all that notes mean is worked out later, many steps at once
(`replay.py`), and the thread's CPU time is read where waits begin and end, and where a loader works.
"""

from __future__ import annotations

import contextlib
import math
import resource
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
from headrace.measure.watch.loader import Source
from headrace.measure.watch.replay import BEGIN, DELAY, DROP, END, Note, Replay, Step

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

    def __init__(self, monotonic: Callable[[], float], device: DeviceClock | None, full: Callable[[], None]) -> None:
        self.now = monotonic
        # What the kernel says of a thread has nothing to do with a clock that is moved by hand.
        self.by_hand = monotonic is not time.perf_counter
        self.cpu_s: Callable[[], float] = _nothing if self.by_hand else time.thread_time
        self.device = device
        self.full = full
        self.owner: int | None = None
        #: Parts that are open, innermost last.
        self.stack: list[str] = []
        self._queue: RunQueue | None = None
        self._delay_s = self.ask_at = 0.0
        #: The same list all the time: parts hold its `append`.
        self.notes: list[Note] = []
        self.add = self.notes.append
        self._start()

    def _start(self) -> None:
        #: How things stood before the notes that are there; while those are taken away, how they stand behind them.
        self._before = Replay(self.now(), self.cpu_s(), self.delay_s(), self.device is not None)
        self._behind: Replay | None = None

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
            # It has ended, and a new thread has its identifier.
            with contextlib.suppress(OSError):
                self._delay_s = self._queue.read()[1]
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

    def ask(self) -> None:
        """For the run queue delay."""
        if self._queue is not None:
            self.add((DELAY, self.now(), self.cpu_s(), self.delay_s()))
        self.ask_at = self.now() + ASKED_S

    def leave_all(self) -> None:
        """Whatever is open: training ended in the middle of it."""
        while self.stack:
            cause = self.stack.pop()
            self.note(None, (None, -1, None) if cause == WAIT else self.mark() if cause in ON_DEVICE else None)

    def fold(self, into: deque[Step]) -> None:
        """What was noted is worked out, and forgotten. `into`: gets the steps that have ended in it."""
        if self.mine:
            self.ask()
        after, count = self._before.copy(), len(self.notes)
        # Who looks meanwhile sees them twice, but never not at all.
        into.extend(after.run(self.notes[:count]))
        self._behind = after
        del self.notes[:count]
        self._before, self._behind = after, None

    def _seen(self) -> tuple[Replay, list[Note]]:
        """For any thread, and for what interrupts this one: they belong together, and are not changed."""
        while (behind := self._behind) is None:
            before, notes = self._before, self.notes.copy()
            if self._behind is None and self._before is before:
                return before, notes
        return behind, []

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

    __slots__ = ("_add", "_cause", "_cpu_s", "_device", "_list", "_notes", "_now", "_stack")

    def __init__(self, notes: Notes, cause: str) -> None:
        self._notes, self._cause = notes, cause
        self._list, self._add, self._now = notes.notes, notes.add, notes.now
        self._stack = notes.stack
        self._device = notes.device if cause in ON_DEVICE else None
        self._cpu_s = notes.cpu_s if cause in ("fetch", "preparation") else None

    def __enter__(self) -> None:
        if self._notes.owner != get_ident():
            self._notes.own()
        mark = None if self._device is None else self._device.mark()
        self._stack.append(self._cause)
        self._add((self._cause, self._now(), None if self._cpu_s is None else self._cpu_s(), mark))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        at, stack = self._now(), self._stack
        if not stack or stack[-1] != self._cause:
            # Of a generator that was left in it: it has been ended meanwhile.
            return
        stack.pop()
        mark = None if self._device is None else self._device.mark()
        self._add((None, at, None if self._cpu_s is None else self._cpu_s(), mark))
        if len(self._list) > MOST_NOTES:
            self._notes.full()


class Wait:
    """A wait for a batch of a loader."""

    __slots__ = ("_at", "_cpu_s", "_notes", "_short_s", "_source")

    def __init__(self, notes: Notes, source: Source) -> None:
        self._notes, self._source = notes, source
        self._at = self._cpu_s = self._short_s = 0.0

    def __enter__(self) -> None:
        notes, source = self._notes, self._source
        if notes.owner != get_ident():
            notes.own()
        at = notes.now()
        if at >= notes.ask_at:
            notes.ask()
        if at >= source.look_at:
            source.look()
        teller = source.teller
        begun = (None if teller is None else teller.waited, _sleeps() if source.works else -1)
        notes.stack.append(WAIT)
        self._short_s = min(SHORT_S, SHORT_SHARE * (at - self._at))
        self._cpu_s, self._at = notes.cpu_s(), notes.now()
        notes.add((WAIT, self._at, self._cpu_s, begun))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        notes, source, cpu_s = self._notes, self._source, None
        at, teller = notes.now(), source.teller
        sleeps = _sleeps() if source.works else -1
        if at - self._at > self._short_s:
            cpu_s = notes.cpu_s()
            source.works = cpu_s - self._cpu_s > WORKS_S
        shares = source.looked() if source.before is not None else source.shares_in(at - self._at)
        stack = notes.stack
        if not stack:
            # The watch was closed meanwhile.
            return
        if stack[-1] != WAIT:
            raise UsageError(
                "a loader hands out a batch inside a part of its own", expected="the part ends before `yield`",
                found=stack[-1],
            )  # fmt: skip
        stack.pop()
        notes.add((None, at, cpu_s, (None if teller is None else teller.waited, sleeps, shares)))
        if at >= notes.ask_at:
            notes.ask()
        if len(notes.notes) > MOST_NOTES:
            notes.full()


def _sleeps() -> int:
    """How often the thread has let go of its CPU to wait for something: asked for where a loader works in it."""
    return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw
