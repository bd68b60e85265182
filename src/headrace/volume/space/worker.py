"""A thread whose start waits for nothing.

`threading.Thread.start` waits until the new thread has said that it lives. Where memory is so short that it dies before
(its stack was to be had, its first object was not), that is for ever, and whoever commits hangs with all locks that it
holds. Here nobody waits for a beginning, and whoever joins does so for what has begun.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable

from headrace.errors import HeadraceError

#: A thread that has not begun after this time was never to live.
BIRTH_S = 5.0


class Worker:
    """As a daemon `threading.Thread`, for few and long-lived ones."""

    def __init__(self, target: Callable[[], None], *, name: str) -> None:
        self._target: Callable[[], None] | None = target
        self._name = name
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._given_up = False
        self._started_s = 0.0
        self._ident: int | None = None

    def start(self) -> None:
        """HeadraceError where there is no room for one more."""
        self._started_s = time.monotonic()
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:
            failed = HeadraceError(
                "no thread could be started",
                where=self._name,
                found=str(error),
                next_step="raise what this process may have: memory (ulimit -v), threads (ulimit -u)",
            )
            failed.fault = "host"
            raise failed from error

    def _run(self) -> None:
        try:
            with self._lock:
                if self._given_up:
                    return
                self._begun.set()
            self._ident = threading.get_ident()
            # Whose method it is must not live on in here.
            target, self._target = self._target, None
            if target is not None:
                target()
        finally:
            self._ended.set()

    @property
    def current(self) -> bool:
        """Is it the thread that asks?"""
        return self._ident == threading.get_ident()

    def stillborn(self) -> bool:
        """It did not come to life, and will not any more."""
        if self._begun.is_set() or time.monotonic() < self._started_s + BIRTH_S:
            return False
        with self._lock:
            self._given_up = not self._begun.is_set()
            return self._given_up

    def join(self) -> None:
        """Until it has ended, however long that takes."""
        left = self._started_s + BIRTH_S - time.monotonic()
        if self._begun.wait(max(0.0, left)) or not self.stillborn():
            self._ended.wait()
