"""When the next bytes of a save go out that nobody waits for: training's reads first, and at the end in time.

Asked before each piece (`volume.writing.paced`), in this order:

    somebody waits for the save       all that is left, as fast as it goes       `hurry`: `wait`, the next save, `close`
    it is behind its least rate       one piece, whatever else is                so it ends within `within_s`
    a feed of this process runs dry   nothing                                    `headrace.volume.hunger`
    the way has company               a piece now and then                       `headrace.torch.save.window`
    else                              as many as the way takes without a queue

Nothing here touches bytes, and no thread is made: the thread that writes asks, and sleeps.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections import deque
from collections.abc import Callable
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Any, TypeVar

from headrace.torch.save.window import DelayWindow
from headrace.units import MIB
from headrace.volume import hunger

#: Objects that are shorter are not worth it.
SHORT_BYTES = 4 * MIB
#: Where a feed runs dry, seconds until it is asked again.
_LOOK_S = 0.002
_EVERYTHING = 1 << 62
#: Saves by whose distance it is told when the next one may come.
_REMEMBERED = 4
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class PaceReport:
    """How one rank's part of an asynchronous save was written beside training."""

    #: Seconds that nothing was written because a step of this process waited for data, or would have soon.
    feed_seconds: float
    #: ... because the way to the targets, or they, had company.
    target_seconds: float
    #: ... to find out how fast it is without.
    learning_seconds: float
    #: Written all the same, by the least rate.
    pressed_bytes: int
    #: Written as fast as it goes because somebody waited for the save, or its time was over.
    hurried_bytes: int
    #: The save was to be written within so many seconds; and what one piece takes alone, None where none was measured.
    within_seconds: float
    piece_bytes: int
    piece_seconds: float | None

    @property
    def held_seconds(self) -> float:
        return self.feed_seconds + self.target_seconds + self.learning_seconds


class Pacer:
    """A `Pace` of one rank's object.

    Args:
        total_bytes: of the object.
        within_s: seconds by which it is to be written, at an even rate, whatever holds it up.
        hurry: set where somebody waits.
        ranks, rank: those that save together.
        dry: does a step of this process wait?
        clock, sleep: seconds; sleep ends early where `hurry` is set.
    """

    def __init__(
        self,
        total_bytes: int,
        *,
        within_s: float,
        hurry: threading.Event,
        ranks: int = 1,
        rank: int = 0,
        dry: Callable[[], bool] = hunger.dry,
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], object] | None = None,
    ) -> None:
        self._total_bytes = total_bytes
        self._within_s = within_s
        self._hurry = hurry
        self._dry = dry
        self._clock = clock
        self._sleep = sleep or hurry.wait
        self.window = DelayWindow(ranks, seed=rank)
        self._began: float | None = None
        self._sent_bytes = 0
        self._free_at = float("-inf")
        self._held_s = {"feed": 0.0, "target": 0.0, "learning": 0.0}
        self._pressed_bytes = self._hurried_bytes = 0
        self._answered_at: float | None = None
        #: Why nothing is sent just now; empty where it is.
        self._held_by = ""

    # ---- Pace ----

    def take(self, under_way_bytes: int) -> int:
        while True:
            now = self._clock()
            if self._began is None:
                self._began = now
            elapsed = now - self._began
            if self._hurry.is_set() or elapsed >= self._within_s:
                left = max(0, self._total_bytes - self._sent_bytes)
                self._hurried_bytes += left
                self._sent_bytes += left
                return _EVERYTHING
            held_by, wait_s = self._why_not(now)
            if not held_by or self._sent_bytes < self._total_bytes * elapsed / self._within_s:
                room = self.window.room(under_way_bytes)
                if held_by and room and under_way_bytes:
                    # What must go goes alone.
                    return 0
                self._sent_bytes += room
                self._pressed_bytes += room if held_by else 0
                return room
            if under_way_bytes:
                return 0
            self._held_by = held_by
            self._sleep(wait_s)
            self._held_s[held_by] += max(0.0, self._clock() - now)
            self._held_by = ""

    def answered(self, length_bytes: int, seconds: float) -> None:
        now = self._answered_at = self._clock()
        if self._dry():
            # It is known who the company is, and the next piece waits for that anyway.
            return
        self.window.answered(length_bytes, seconds, now)
        self._free_at = now + self.window.pause_s

    def _why_not(self, now: float) -> tuple[str, float]:
        """What holds the next piece back, and seconds until it is worth while to look again."""
        if self._dry():
            return "feed", _LOOK_S
        if now < self._free_at:
            # A save must begin by itself to be pressed: not later than in so long.
            return ("learning" if self.window.learning else "target"), min(self._free_at - now, self._within_s / 16)
        return "", 0.0

    # ---- who looks ----

    @property
    def since_answered_s(self) -> float:
        """Seconds since a piece was answered; 0 where none was."""
        return 0.0 if self._answered_at is None else self._clock() - self._answered_at

    def report(self) -> PaceReport:
        base_s = self.window.base_s
        return PaceReport(
            feed_seconds=self._held_s["feed"],
            target_seconds=self._held_s["target"],
            learning_seconds=self._held_s["learning"],
            pressed_bytes=self._pressed_bytes,
            hurried_bytes=self._hurried_bytes,
            within_seconds=self._within_s,
            piece_bytes=self.window.piece_bytes,
            piece_seconds=base_s if base_s != float("inf") else None,
        )

    def describe(self) -> dict[str, Any]:
        """Of now; any thread may ask. `held_by`: "feed", "target", "learning", or empty."""
        return {
            "sent_bytes": self._sent_bytes,
            "total_bytes": self._total_bytes,
            "held_by": self._held_by,
            "pieces_under_way_at_most": self.window.pieces,
            "hurried": self._hurry.is_set(),
            **vars(self.report()),
        }


def within_seconds(deadline_s: float, left_s: float | None, total_bytes: int, least_rate: float | None) -> float:
    """By when a save that nobody waits for is written: in half of what the other ranks wait for it, before the next one
    is due (in `left_s`, with what comes behind the last piece), and no slower than `least_rate` (bytes a second)."""
    found = deadline_s / 2
    if left_s is not None:
        found = min(found, 0.8 * left_s)
    if least_rate is not None:
        found = min(found, total_bytes / least_rate)
    return max(found, 1e-3)


class Rhythm:
    """When saves begin, so when the next one is due; and what one takes behind its last piece. Of one rank."""

    def __init__(self, clock: Callable[[], float] = time.monotonic) -> None:
        self._clock = clock
        self._begun_at: deque[float] = deque(maxlen=_REMEMBERED)
        self._due_at: float | None = None
        #: Checksum tables and the flush, of the save before.
        self.closing_s = 0.0

    def begin(self, next_s: float | None = None) -> None:
        """A save begins, and the next one comes in `next_s`. None: nobody knows; then as late as the longest time
        between the last ones tells."""
        now = self._clock()
        self._begun_at.append(now)
        if next_s is None:
            next_s = max((after - before for before, after in itertools.pairwise(self._begun_at)), default=None)
        self._due_at = None if next_s is None else now + next_s

    @property
    def left_s(self) -> float | None:
        """Seconds from now until the last piece is to be written; None: nobody knows when the next save comes."""
        return None if self._due_at is None else self._due_at - self._clock() - self.closing_s


class Awaited(Future[T]):
    """A future that says when somebody waits for it."""

    def __init__(self, awaited: Callable[[], object]) -> None:
        super().__init__()
        self._awaited = awaited

    def result(self, timeout: float | None = None) -> T:
        if not self.done():
            self._awaited()
        return super().result(timeout)

    def exception(self, timeout: float | None = None) -> BaseException | None:
        if not self.done():
            self._awaited()
        return super().exception(timeout)
