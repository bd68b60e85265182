"""A thread whose start waits for nothing.

`threading.Thread.start` waits until the new thread has said that it lives. Where memory is so short that it dies before
(its stack was to be had, its first object was not), that is for ever, and whoever commits hangs with all locks that it
holds. Here nobody waits for a beginning but who asks for it, and then not for ever; and whoever joins does so for what
has begun.
"""

from __future__ import annotations

import _thread
import threading
import time
from collections.abc import Callable

from headrace.errors import HeadraceError

#: A thread that has not begun after this time was never to live. Long: on shared cores a runnable thread has been seen
#: to be left alone for more than five seconds.
BIRTH_S = 30.0
_LOOKS = 50


class Worker:
    """As a daemon `threading.Thread`, for few and long-lived ones."""

    def __init__(self, target: Callable[[], None], *, name: str) -> None:
        self._target: Callable[[], None] | None = target
        self._name = name
        self._begun = threading.Event()
        self._ended = threading.Event()
        self._lock = threading.Lock()
        self._given_up = False
        self._well = False
        self._started_s = 0.0
        self._ident: int | None = None

    def start(self) -> None:
        """HeadraceError where there is no room for one more."""
        self._started_s = time.monotonic()
        try:
            _thread.start_new_thread(self._run, ())
        except RuntimeError as error:
            raise self._not_to_be_had(str(error)) from error

    def start_living(self) -> None:
        """`start`, and wait until it lives. HeadraceError where it does not, after `BIRTH_S`."""
        self.start()
        # Looks are counted, not time: while somebody else holds the GIL no thread can come to life.
        if not any(self._begun.wait(BIRTH_S / _LOOKS) for _ in range(_LOOKS)) and self._give_up():
            raise self._not_to_be_had("it did not come to life")

    def _not_to_be_had(self, found: str) -> HeadraceError:
        error = HeadraceError(
            "no thread could be started",
            where=self._name,
            found=found,
            next_step="raise what this process may have: memory (ulimit -v), threads (ulimit -u)",
        )
        error.fault = "host"
        return error

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
            self._well = True
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
        return self._give_up()

    def _give_up(self) -> bool:
        with self._lock:
            self._given_up = not self._begun.is_set()
            return self._given_up

    @property
    def died(self) -> bool:
        """It was never born, or ended by an error that it did not expect."""
        return self.stillborn() or (self._ended.is_set() and not self._well)

    def join(self) -> None:
        """Until it has ended, however long that takes."""
        left = self._started_s + BIRTH_S - time.monotonic()
        if self._begun.wait(max(0.0, left)) or not self.stillborn():
            self._ended.wait()
