"""How much staging takes: at most so many bytes a second, and reads under way at most a share of the time.

What is under way half of the time has at most half of the link, whatever the link is; so nobody has to say, or measure,
how fast it is.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable

#: Seconds: what was not used is kept for at most so long, and what was used too much is made up for.
_WINDOW_S = 0.25


class Throttle:
    """`if throttle.begin(count): read; throttle.end()`, from several threads."""

    def __init__(
        self, limit_bytes_s: float | None, share: float, *, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._limit = limit_bytes_s
        self._share = share
        self._clock = clock
        self._changed = threading.Condition()
        self._last = clock()
        #: Bytes, and seconds of reading, that may be taken now; less than 0: that were taken in advance.
        self._bytes = 0.0
        self._seconds = 0.0
        self._under_way = 0
        self._stopped = False

    def begin(self, count: int) -> bool:
        """Wait until `count` bytes may be asked for. False: `stop` was called."""
        with self._changed:
            while not self._stopped and (wait_s := self._wait_s()) > 0:
                self._changed.wait(wait_s)
            if self._stopped:
                return False
            if self._limit is not None:
                self._bytes -= count
            self._under_way += 1
            return True

    def end(self) -> None:
        """They have come."""
        with self._changed:
            self._pass()
            self._under_way -= 1
            if not self._under_way:
                self._changed.notify_all()

    def stop(self) -> None:
        """Whoever waits, waits no longer."""
        with self._changed:
            self._stopped = True
            self._changed.notify_all()

    def _pass(self) -> None:
        now = self._clock()
        passed, self._last = now - self._last, now
        if self._limit is not None:
            self._bytes = min(self._bytes + passed * self._limit, _WINDOW_S * self._limit)
        used = passed if self._under_way else 0.0
        self._seconds = min(self._seconds + passed * self._share - used, _WINDOW_S * self._share)

    def _wait_s(self) -> float:
        """How long to wait before looking again; 0: no longer."""
        self._pass()
        wait_s = 0.0
        if self._limit is not None and self._bytes < 0:
            wait_s = -self._bytes / self._limit
        if self._share < 1 and self._seconds < 0:
            # While others read it grows no less; they say when they end.
            wait_s = max(wait_s, -self._seconds / self._share)
        return wait_s
