"""Threads that do one thing, and the wait for their end.

`Thread.join` does not tell it: Ctrl-C in it makes Python (up to 3.12) take a thread that lives for one that has ended,
for ever. What the thread still writes to would be closed, or said to be whole.
"""

from __future__ import annotations

import threading
from collections.abc import Callable


class Workers:
    """`count` threads, each of which calls `work` once."""

    def __init__(self, work: Callable[[], None], name: str, count: int = 1) -> None:
        self._work = work
        self._lock = threading.Lock()
        self._idle = threading.Event()
        self._idle.set()
        self._threads = [threading.Thread(target=self._run, name=name) for _ in range(count)]
        self._working: set[threading.Thread] = set()

    def start(self) -> None:
        """All of them; where that is interrupted, some."""
        for thread in self._threads:
            with self._lock:
                self._working.add(thread)
                self._idle.clear()
            thread.start()

    def wait(self, timeout_s: float | None = None) -> bool:
        """All that were started have ended. After `start`; where that did not come to its end, tell them to stop first:
        one that is only now about to begin is not waited for."""
        for thread in self._threads:
            if thread.ident is None:
                self._left(thread)
        return self._idle.wait(timeout_s)

    def _run(self) -> None:
        try:
            self._work()
        finally:
            self._left(threading.current_thread())

    def _left(self, thread: threading.Thread) -> None:
        with self._lock:
            self._working.discard(thread)
            if not self._working:
                self._idle.set()
