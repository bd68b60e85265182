"""Deleted bytes are given back to the target, so that a thin volume shrinks and a drive knows what it need not keep.

Three things must be true of a range before a device is told that its bytes are not needed: the commit that deleted them
is durable; readers have had time to notice (they find out by checksum, but a model that is being loaded should not be
disturbed); and the range is in a window of the log, because a deallocation whose answer is lost may land later, and
would then destroy what a successor wrote there. So: some time after a deletion, what is still unused of it becomes a
window, is deallocated by a thread of its own, and only then can be handed out again. A deallocation that fails leaves
its range in quarantine, and is the last until the session has become another host.

Where a device cannot deallocate, its call does nothing.
"""

from __future__ import annotations

import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress

from headrace.device import BlockDevice
from headrace.errors import DeviceTimeout, HeadraceError
from headrace.volume.data.objects import Range
from headrace.volume.space.worker import Worker

#: How long a renewal waits for a device that is being told.
_PATIENCE_S = 60.0
#: Seconds between a durable deletion and the deallocation of its space.
AFTER_S = 30.0


class Deallocator:
    """Owned by a session; its thread runs only while something waits, and ends with `stop`."""

    def __init__(
        self,
        devices: Sequence[BlockDevice],
        begin: Callable[[list[Range]], list[Range]],
        end: Callable[[list[Range], bool], None],
    ) -> None:
        """Methods of the session. `begin`: take what is still unused of these ranges, and log that commands go there;
        `end`: they have been answered, all well or not.
        """
        self._devices = devices
        # A session that nobody holds any more must not live on in the thread.
        self._begin, self._end = weakref.WeakMethod(begin), weakref.WeakMethod(end)
        self._condition = threading.Condition()
        self._due: deque[tuple[float, list[Range]]] = deque()
        self._thread: Worker | None = None
        self._stopped = self._closed = False
        #: Held while a device is told: the session becomes another host between two commands, not during one.
        self._telling = threading.Lock()
        self.deallocated_bytes = 0
        #: Why nothing is deallocated any more in this session; None: nothing went wrong.
        self.failed: str | None = None

    def freed(self, ranges: list[Range]) -> None:
        """The deletion of these is durable from now on."""
        with self._condition:
            if self._stopped or not ranges:
                return
            self._due.append((time.monotonic() + AFTER_S, ranges))
            if self._thread is None or self._thread.stillborn():
                self._start()
            self._condition.notify()

    def _start(self) -> None:
        thread = Worker(self._run, name="headrace-deallocate")
        # The next deletion tries again, where memory is too short for one now: the commit is a fact all the same.
        with suppress(HeadraceError, MemoryError):
            thread.start()
            self._thread = thread

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Meanwhile no device is told anything. DeviceTimeout where one does not answer."""
        if not self._telling.acquire(timeout=_PATIENCE_S):
            raise DeviceTimeout(
                "a deallocation is not answered", expected=f"an answer within {_PATIENCE_S:g} s", next_step="try again"
            )
        try:
            yield
        finally:
            self._telling.release()

    def go_on(self) -> None:
        """What failed cannot land any more: deallocate again from here on."""
        with self._condition:
            if self.failed is not None and not self._closed:
                self._stopped, self.failed = False, None
                if self._due and (self._thread is None or self._thread.stillborn()):
                    self._start()

    def stop(self) -> None:
        """What is not due is left as it is; a deallocation under way ends first. Holds no lock of the session."""
        with self._condition:
            self._stopped = self._closed = True
            self._condition.notify()
            thread, self._thread = self._thread, None
        if thread is not None:
            thread.join()

    def _run(self) -> None:
        while True:
            with self._condition:
                while not self._stopped and self._due and self._due[0][0] > time.monotonic():
                    self._condition.wait(self._due[0][0] - time.monotonic())
                if self._stopped or not self._due:
                    self._thread = None
                    return
                now = time.monotonic()
                ranges: list[Range] = []
                while self._due and self._due[0][0] <= now:
                    ranges += self._due.popleft()[1]
            if not self._deallocate(ranges):
                with self._condition:
                    self._stopped, self._thread = True, None
                return

    def _deallocate(self, ranges: list[Range]) -> bool:
        begin, end = self._begin(), self._end()
        if begin is None or end is None:
            return False
        taken: list[Range] = []
        try:
            taken = begin(ranges)
            for member, offset, length in taken:
                with self._telling:
                    self._devices[member].deallocate(offset, length)
                self.deallocated_bytes += length
        except (HeadraceError, MemoryError) as error:
            self.failed = str(error) or "out of memory"
        end(taken, self.failed is None)
        return self.failed is None
