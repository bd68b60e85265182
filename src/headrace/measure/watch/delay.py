"""Run queue delay of the thread that trains, read seldom: what came between two readings is shared out.

Reading costs tens of microseconds where training has filled the caches. So it is read behind waits that were long, and
before others and when steps are finished now and then. A thread waits for a CPU only while it is on none, and that is
known of each step and wait from two clocks, which cost little: by it the delay between two readings is divided.
"""

from __future__ import annotations

import resource
import time
from typing import Protocol

from headrace.measure.watch.host import RunQueue, own_queue

#: A wait is long from here on, or from this share of a step.
LONG_S = 0.001
LONG_SHARE = 0.1
#: Before waits it is read again after this time.
LOOK_S = 0.1


class Delayed(Protocol):
    """A step: seconds off the CPU whose delay has not been read yet, and the delay that has."""

    off_s: float
    queued_s: float


class Delay:
    """Belongs to the thread that makes it. `asked` false: a clock that is moved by hand; nothing is read."""

    def __init__(self, asked: bool) -> None:
        self._asked = asked
        self._queue: RunQueue | None = own_queue() if asked else None
        #: At the last reading; CPU time of that.
        self._queue_s = self.total_s()
        self._due = 0.0
        #: Since when time off the CPU is not accounted yet, by both clocks.
        self._at, self._cpu_at = time.perf_counter(), time.thread_time()
        self._open: list[Delayed] = []

    def total_s(self) -> float:
        """For how long the thread could have run and did not, since it began."""
        return self._queue.read()[1] if self._queue is not None else 0.0

    def sleeps(self) -> int:
        """How often the thread has let go of its CPU to wait for something."""
        return resource.getrusage(resource.RUSAGE_THREAD).ru_nvcsw if self._asked else 0

    def skip(self) -> None:
        """What has passed is of no step."""
        if self._queue is not None:
            self._share(self._off())

    def passed(self, step: Delayed) -> None:
        """What has passed is of this one."""
        if self._queue is None:
            return
        if not self._open or self._open[-1] is not step:
            self._open.append(step)
        step.off_s += self._off()

    def look(self, step: Delayed | None, now: float) -> None:
        """Before a wait: a reading, if it is time for one."""
        if self._queue is None or now < self._due:
            return
        if step is not None:
            self.passed(step)
        self.settle()

    def settle(self) -> None:
        """A reading. All steps that have been passed know their delay."""
        if self._queue is not None:
            self._share(0.0)

    def waited(self, step: Delayed | None, off_s: float) -> float:
        """Behind a long wait, in which the thread was so long off its CPU: the delay in it. The rest is the step's."""
        if self._queue is None:
            return 0.0
        off_s = max(0.0, off_s)
        others = max(0.0, self._off() - off_s)
        if step is None:
            return self._share(others + off_s) * off_s
        if not self._open or self._open[-1] is not step:
            self._open.append(step)
        step.off_s += others
        return self._share(off_s) * off_s

    def _off(self) -> float:
        now, cpu = time.perf_counter(), time.thread_time()
        off_s = now - self._at - (cpu - self._cpu_at)
        self._at, self._cpu_at = now, cpu
        return max(0.0, off_s)

    def _share(self, besides_s: float) -> float:
        """By steps, and `besides_s` seconds off the CPU: the share of it that was delay."""
        now = self.total_s()
        self._due = self._at + LOOK_S
        delay, self._queue_s = max(0.0, now - self._queue_s), now
        whole = sum(step.off_s for step in self._open) + besides_s
        share = min(1.0, delay / whole) if whole > 0 else 0.0
        for step in self._open:
            step.queued_s += share * step.off_s
            step.off_s = 0.0
        self._open.clear()
        return share

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
            self._queue = None
