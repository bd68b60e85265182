"""Readers that follow a job that writes: when they look, and how they wait.

A thousand readers that look at the same moment are a burst at one target, and those that began together would stay
together. So each waits by chance a little more or less than it means to; and while nothing happens, ever longer.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING

from headrace.errors import DeviceError, ObjectNotFound, UsageError
from headrace.volume.catalog.log import Cursor, LogReader
from headrace.volume.data.objects import ObjectInfo
from headrace.volume.layout import RecordHead
from headrace.volume.writing.heartbeat import HeartbeatBlock

if TYPE_CHECKING:
    from headrace.volume.contents import Contents

#: Seconds between two looks: after something happened, and when nothing has happened for long.
INTERVAL_S = 1.0
LONGEST_S = 10.0
#: Of a wait, so much more or less.
_JITTER = 0.5
#: One of so many polls looks at everything.
_EVERYTHING = 32


def turns(copies: Sequence[int], look: int) -> tuple[int, int]:
    """The copies that this look is at: for the end of the log, and for the heartbeat block."""
    return copies[look % len(copies)], copies[(look + 1) % len(copies)]


class Watch:
    """Tells with two small reads that nothing has happened to the log."""

    def __init__(self) -> None:
        #: Of each copy: a place of the log, and what stood there.
        self._seen: dict[int, tuple[object, bytes]] = {}
        self._polls = 0

    def quiet(self, log: LogReader, cursor: Cursor, session: int) -> bool:
        """Is the log as it was when it was followed to `cursor`? `session`: the last one that it knows by then.

        Who writes the log leaves a record where this reader stands, also when it goes on in another area; but for a
        session that has just begun, and that one claims the heartbeat block before (`docs/volume-format.md`, 4.2, 4.3).
        A block that was written over is another one, too. A session may have gone on without one of the copies, and
        this reader not know it yet: so the record is looked for on one, the block on another one, and the next time
        the other way round. Then one that counts says it by the second look.
        """
        self._polls += 1
        copy, other = turns(log.copies, self._polls)
        before = self._seen.pop(copy, None)
        try:
            tail = log.tail(cursor, copy)
            held = HeartbeatBlock(log.superblock, log.devices, [other]).read()
        except DeviceError:
            # There may be another copy.
            return False
        self._seen[copy] = (cursor.area, cursor.header, cursor.block), tail
        if self._seen[copy] != before or held is None or held.session != session:
            return False
        head = RecordHead.decode(tail, log.superblock.volume_id, cursor.block)
        if head is not None and (head.generation, head.previous) == (cursor.header.generation, cursor.previous):
            # The next record has begun: its other blocks come later, and change nothing here.
            return False
        # What stands there may be wrong in a way that nobody thought of.
        return self._polls % _EVERYTHING != 0


class Pace:
    """How long to wait before the next look."""

    def __init__(self, interval_s: float = INTERVAL_S, longest_s: float = LONGEST_S) -> None:
        if not 0 < interval_s <= longest_s < math.inf:
            raise UsageError(
                "how often a reader looks", expected="0 < interval_s <= longest_s", found=f"{interval_s}, {longest_s}"
            )
        self._first_s, self._longest_s = interval_s, longest_s
        self._next_s = interval_s
        # Readers that were started by one program, with one seed, must not come together either.
        self._chance = random.SystemRandom()

    def found(self) -> None:
        """Something happened: more may follow soon."""
        self._next_s = self._first_s

    def wait_s(self) -> float:
        """Seconds until the next look; the one after that is later."""
        wait_s, self._next_s = self._next_s, min(2 * self._next_s, self._longest_s)
        return wait_s * self._chance.uniform(1 - _JITTER, 1 + _JITTER)


class Deadline:
    """Of a wait; None: there is none."""

    def __init__(self, timeout_s: float | None) -> None:
        if timeout_s is not None and not timeout_s >= 0:
            raise UsageError("timeout_s", expected="seconds, or None for ever", found=str(timeout_s))
        self.timeout_s = math.inf if timeout_s is None else timeout_s
        self.again()

    def again(self) -> None:
        self._end = time.monotonic() + self.timeout_s

    @property
    def over(self) -> bool:
        return time.monotonic() >= self._end

    def sleep(self, seconds: float) -> bool:
        """Sleep so long, or to the end; False where that has come already."""
        left = self._end - time.monotonic()
        if left <= 0:
            return False
        time.sleep(min(seconds, left))
        return True


def follow(volume: Contents, seen: int, pace: Pace, deadline: Deadline) -> Iterator[int]:
    """See `Volume.follow`. `seen`: where the caller is."""
    deadline.again()
    while True:
        volume.poll()
        # Not what `poll` says: other threads follow the same volume, and a session of it needs no looks.
        now = volume.sequence
        if now != seen:
            seen = now
            pace.found()
            yield now
            deadline.again()
        elif not deadline.sleep(pace.wait_s()):
            return


def wait_for(volume: Contents, name: str, pace: Pace, deadline: Deadline) -> ObjectInfo:
    """See `Volume.wait_for`."""
    while True:
        volume.poll()
        try:
            return volume.stat(name)
        except ObjectNotFound:
            if not deadline.sleep(pace.wait_s()):
                raise ObjectNotFound(
                    f"no object {name!r} came", where=repr(volume), expected=f"within {deadline.timeout_s:g} s"
                ) from None
