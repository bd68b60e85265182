"""The clock of one thread's parts: every second goes to the innermost part that is open, and to no other.

Where a device carries the work out, marks go into its stream wherever such a part begins, ends, or is interrupted by
one inside it, so that the device's time is divided in the same way.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from headrace.errors import UsageError
from headrace.measure.watch.delay import Delay
from headrace.measure.watch.device import ON_DEVICE, DeviceClock, DeviceStep

#: A part in which a batch is waited for; `headrace.measure.watch.wait` says what it was.
WAIT = "wait"


class Parts:
    """`in_step`, `marks`: of the step that is open; set by who begins and ends steps."""

    def __init__(self, monotonic: Callable[[], float], device: DeviceClock | None) -> None:
        self.now = monotonic
        self.device = device
        self.in_step = False
        self.marks: DeviceStep | None = None
        #: By cause, since it was taken.
        self.spent: dict[str, float] = {}
        # What the kernel says of a thread has nothing to do with a clock that is moved by hand.
        self.by_hand = monotonic is not time.perf_counter
        self._owner: int | None = None
        #: Of the thread; None: there is none yet.
        self.delay: Delay | None = None
        #: What is being timed, innermost last, and since when (also for others); seconds of waits that are open.
        self._stack: list[str] = []
        self.since = self.now()
        self._waits: list[float] = []
        #: Of parts that lie in a wait: CPU time that is not the wait's.
        self._aside_s = self._aside_from = 0.0
        #: Of parts that the device carries out: since where the innermost one goes, and those around it.
        self._open: list[tuple[str, Any]] = []
        #: Gradients that were ready last, and that were exchanged last: when, and the marks.
        self._ready: tuple[float, Any] | None = None
        self._exchanged: tuple[float, Any] | None = None

    # ---- the thread ------------------------------------------------------------------------------------------------

    @property
    def mine(self) -> bool:
        """Of the thread that calls, or of none yet."""
        return self._owner in (None, threading.get_ident())

    def own(self) -> None:
        """Of the thread that calls first. `UsageError` for another one."""
        if self._owner is None:
            self._owner, self.delay = threading.get_ident(), Delay(not self.by_hand)
            self.since = self.now()
        elif self._owner != threading.get_ident():
            raise UsageError(
                "a Watch belongs to the thread that trains", expected="one thread", found="a call by another one",
                next_step="time what other threads do by a loader that tells (`waited`)",
            )  # fmt: skip

    def cpu_s(self) -> float:
        """CPU time of the thread, without that of parts that lie in waits."""
        return 0.0 if self.by_hand else time.thread_time() - self._aside_s

    def close(self) -> None:
        if self.delay is not None:
            self.delay.close()

    # ---- parts -----------------------------------------------------------------------------------------------------

    @property
    def innermost(self) -> str | None:
        return self._stack[-1] if self._stack else None

    def enter(self, cause: str) -> None:
        if self._owner != threading.get_ident():
            self.own()
        self.charge()
        stack = self._stack
        if cause == WAIT:
            self._waits.append(0.0)
        elif stack and stack[-1] == WAIT:
            self._aside_from = self.cpu_s()
        stack.append(cause)
        if self.device is not None and cause in ON_DEVICE:
            mark = self.device.mark()
            if self._open:
                self._carried_out(*self._open[-1], mark)
            self._open.append((cause, mark))

    def leave(self) -> float:
        """Of a wait: its seconds, without those of other parts in it."""
        self.charge()
        stack = self._stack
        cause = stack.pop()
        if cause == WAIT:
            return self._waits.pop()
        if stack and stack[-1] == WAIT:
            self._aside_s += self.cpu_s() - self._aside_from
        if cause == "compute":
            self._exchange()
        if self.device is not None and cause in ON_DEVICE:
            mark = self.device.mark()
            self._carried_out(*self._open.pop(), mark)
            if self._open:
                # The outer one goes on.
                self._open[-1] = (self._open[-1][0], mark)
        return 0.0

    def leave_all(self) -> None:
        """Whatever is open: training ended in the middle of it."""
        while self._stack:
            self.leave()

    def charge(self) -> None:
        """What has passed goes to the innermost part, in a step else to "other", and else to nothing."""
        now = self.now()
        spent, self.since = now - self.since, now
        cause = self._stack[-1] if self._stack else None
        if cause == WAIT:
            self._waits[-1] += spent
        elif cause is not None or self.in_step:
            cause = cause or "other"
            self.spent[cause] = self.spent.get(cause, 0.0) + spent

    def add(self, spent: Mapping[str, float]) -> None:
        for cause, seconds in spent.items():
            self.spent[cause] = self.spent.get(cause, 0.0) + seconds

    def move(self, source: str, cause: str, seconds: float) -> float:
        """So much of `source` was `cause`, at most what is there: how much it was."""
        moved = min(max(0.0, seconds), self.spent.get(source, 0.0))
        if moved > 0:
            self.add({source: -moved, cause: moved})
        return moved

    def take(self) -> dict[str, float]:
        """What was spent since it was taken before."""
        spent, self.spent = self.spent, {}
        return spent

    # ---- exchanges that lie in computing ---------------------------------------------------------------------------

    def gradients_ready(self) -> None:
        self._ready, self._exchanged = self._moment(), None

    def gradients_exchanged(self) -> None:
        self._exchanged = self._moment()

    def _moment(self) -> tuple[float, Any]:
        return self.now(), None if self.device is None else self.device.mark()

    def _exchange(self) -> None:
        """What the part that computed, and ends here, has waited for gradients of others."""
        ready, exchanged, self._ready, self._exchanged = self._ready, self._exchanged, None, None
        if ready is None or exchanged is None:
            return
        self.move("compute", "collective", exchanged[0] - ready[0])
        if self._open:
            self._carried_out(*self._open[-1], ready[1])
            self._carried_out("collective", ready[1], exchanged[1])
            self._open[-1] = (self._open[-1][0], exchanged[1])

    def _carried_out(self, cause: str, first: Any, last: Any) -> None:
        if self.marks is not None:
            self.marks.parts.append((cause, first, last))
