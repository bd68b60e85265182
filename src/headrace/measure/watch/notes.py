"""What the thread that trains does for a watch: it notes what begins and ends, and no more.

Between the notes training fills the caches, and whatever is done there is done slowly, calls of the kernel above all (5
to 25 microseconds each on a busy machine). So all that notes mean is worked out later, many steps at once
(`replay.py`), and the thread's CPU time is read where waits begin and end, and where a loader works.
"""

from __future__ import annotations

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
from headrace.measure.watch.replay import BEGIN, DELAY, DROP, END, EXCHANGED, Note, Replay, Step

#: The kernel is asked for the run queue delay at most so often: that takes tens of microseconds with cold caches.
ASKED_S = 0.1
#: Of a shorter wait it is of no account what the thread did in it.
SHORT_S = 0.0001
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
        #: Gradients that were ready last, and that were exchanged last: when, and the marks. Set by any thread.
        self.ready: tuple[float, Any] | None = None
        self.exchanged: tuple[float, Any] | None = None
        self._queue: RunQueue | None = None
        self.ask_at = 0.0
        self._start()

    def _start(self) -> None:
        self.notes: list[Note] = []
        self.add = self.notes.append
        #: For other threads, together: how things stood before these notes. Neither is changed but by `add`.
        self.seen = (Replay(self.now(), self.cpu_s(), self.delay_s(), self.device is not None), self.notes)

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
        return 0.0 if self._queue is None else self._queue.read()[1]

    def sleeps(self, source: Source) -> int:
        """How often the thread has let go of its CPU to wait for something, where a loader works in it; -1: not known,
        and not asked for."""
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if source.works else -1

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

    def moment(self) -> tuple[float, Any]:
        return self.now(), self.mark()

    def fold(self, into: deque[Step]) -> None:
        """What was noted is worked out, and forgotten. `into`: gets the steps that have ended in it."""
        if self.mine:
            self.ask()
        before, notes = self.seen
        after, fresh = before.copy(), list[Note]()
        # Who looks meanwhile sees them twice, but never not at all.
        into.extend(after.run(notes))
        self.seen = (after, fresh)
        self.notes, self.add = fresh, fresh.append

    def peek(self) -> tuple[Replay, list[Step]]:
        """For any thread: how things stand, and the steps that have ended since they were worked out."""
        before, notes = self.seen
        after = before.copy()
        return after, after.run(list(notes))

    def glance(self) -> Replay:
        """As `peek`, for who asks often: the step that is open, and those before it not at all."""
        before, notes = self.seen
        notes = list(notes)
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
    """`with watch.compute():`; made once, for all of them are alike."""

    __slots__ = ("_cause", "_device", "_notes", "_works")

    def __init__(self, notes: Notes, cause: str) -> None:
        self._notes, self._cause = notes, cause
        self._device = notes.device if cause in ON_DEVICE else None
        self._works = cause in ("fetch", "preparation")

    def __enter__(self) -> None:
        notes = self._notes
        if notes.owner != get_ident():
            notes.own()
        mark = None if self._device is None else self._device.mark()
        notes.stack.append(self._cause)
        notes.add((self._cause, notes.now(), notes.cpu_s() if self._works else None, mark))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        notes = self._notes
        at = notes.now()
        if notes.exchanged is not None and self._cause == "compute":
            if notes.ready is not None:
                notes.add((EXCHANGED, at, None, (notes.ready, notes.exchanged)))
            notes.ready = notes.exchanged = None
        notes.stack.pop()
        mark = None if self._device is None else self._device.mark()
        notes.add((None, at, notes.cpu_s() if self._works else None, mark))
        if len(notes.notes) > MOST_NOTES:
            notes.full()


class Wait:
    """A wait for a batch of a loader."""

    __slots__ = ("_at", "_cpu_s", "_notes", "_source")

    def __init__(self, notes: Notes, source: Source) -> None:
        self._notes, self._source = notes, source
        self._at = self._cpu_s = 0.0

    def __enter__(self) -> None:
        notes, source = self._notes, self._source
        if notes.owner != get_ident():
            notes.own()
        if notes.now() >= notes.ask_at:
            notes.ask()
        source.waits()
        begun = (None if source.teller is None else source.teller.waited, notes.sleeps(source))
        notes.stack.append(WAIT)
        self._cpu_s, self._at = notes.cpu_s(), notes.now()
        notes.add((WAIT, self._at, self._cpu_s, begun))

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        notes, source, cpu_s = self._notes, self._source, None
        at = notes.now()
        sleeps = notes.sleeps(source)
        if at - self._at > SHORT_S:
            cpu_s = notes.cpu_s()
            source.works = cpu_s - self._cpu_s > WORKS_S
        ended = (None if source.teller is None else source.teller.waited, sleeps, source.waited())
        notes.stack.pop()
        notes.add((None, at, cpu_s, ended))
        if at >= notes.ask_at:
            notes.ask()
        if len(notes.notes) > MOST_NOTES:
            notes.full()
