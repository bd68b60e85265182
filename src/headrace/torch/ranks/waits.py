"""Waits that somebody else can end.

Nothing ends a wait of gloo from outside but a time-out that another one meets, which closes the connections of the
group; and a wait has been seen to sleep through that. So a thread of its own waits, and who needs the result looks at
both: at that thread, and at whether there is still something to wait for.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import timedelta
from queue import SimpleQueue
from typing import Any

#: Between two looks.
LOOK_S = 0.2
#: What was given up ends by itself within this time, or is left behind.
GRACE_S = 3.0


class _Wait:
    def __init__(self, work: Any, timeout_s: float) -> None:
        self.ended = threading.Event()
        self.error: BaseException | None = None
        self._work = work
        self._timeout_s = timeout_s

    def run(self) -> None:
        try:
            self._work.wait(timedelta(seconds=self._timeout_s))
        except BaseException as error:  # whoever asked raises it
            self.error = error
        finally:
            self.ended.set()


class Waits:
    """One thread, as long as it lives: begun by the first wait, left behind where one does not end."""

    def __init__(self) -> None:
        self._asked: SimpleQueue[_Wait | None] | None = None

    def wait(self, work: Any, timeout_s: float, given_up: Callable[[], object]) -> None:
        """As `work.wait`, and what that raises. RuntimeError, too, where it goes on though it was given up.

        What the work moves stays in memory until it ends, whatever the caller does.
        """
        if self._asked is None:
            self._asked = SimpleQueue()
            thread = threading.Thread(target=_run, args=(self._asked,), name="headrace-waits", daemon=True)
            thread.start()
        wait = _Wait(work, timeout_s)
        self._asked.put(wait)
        while not wait.ended.wait(LOOK_S):
            if given_up() and not wait.ended.wait(GRACE_S):
                self.close()
                raise RuntimeError("it was given up, and did not end")
        if wait.error is not None:
            raise wait.error

    def close(self) -> None:
        """The thread ends behind what it waits for."""
        if self._asked is not None:
            self._asked.put(None)
            self._asked = None


def _run(asked: SimpleQueue[_Wait | None]) -> None:
    while (wait := asked.get()) is not None:
        wait.run()
        # Nothing of it stays in here until the next one comes.
        del wait
