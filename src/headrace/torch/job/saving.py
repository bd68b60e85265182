"""What saves of a `Checkpointer` cost, and when the next one is due."""

from __future__ import annotations

import logging
import statistics
import time
from concurrent.futures import Future
from dataclasses import dataclass
from typing import Literal, TypeAlias

from headrace.checkpoint.interval import Interval, best_interval
from headrace.errors import HeadraceError, UsageError
from headrace.torch.save.writer import SaveReport
from headrace.units import format_bytes, format_seconds

#: Steps between two saves; "auto": Young's and Daly's interval; None: only when `save` is called.
Every: TypeAlias = "int | Literal['auto'] | None"

_log = logging.getLogger("headrace")
#: Saves that the cost is the median of.
_REMEMBERED = 5


@dataclass
class SaveUnderWay:
    """A save that has begun, until somebody has heard what became of it."""

    step: int
    future: Future[SaveReport]
    began: float
    blocked_s: float = 0.0

    def result(self, timeout_s: float | None = None) -> SaveReport:
        return self.future.result(timeout_s)


class Costs:
    """Measured by this rank: seconds for which a save held training up, and until it was committed."""

    def __init__(self) -> None:
        self._saves: list[tuple[float, float]] = []
        self._count = 0

    def note(self, blocked_s: float, committed_s: float) -> None:
        self._count += 1
        if self._count == 2:
            # The first one makes buffers and begins the session: none that comes later does.
            self._saves.clear()
        self._saves = [*self._saves, (blocked_s, committed_s)][-_REMEMBERED:]

    @property
    def measured(self) -> tuple[float, float] | None:
        if not self._saves:
            return None
        blocked, committed = zip(*self._saves, strict=True)
        return statistics.median(blocked), statistics.median(committed)


class Schedule:
    """When a save is due, as rank 0 sees it.

    With "auto" the first one is due at once: it shows that saving works, and what it costs.
    """

    def __init__(self, every: Every, mtbf_s: float | None, costs: Costs) -> None:
        if every is not None and every != "auto" and (not isinstance(every, int) or every < 1):
            raise UsageError("interval", expected='a number of steps, "auto" or None', found=repr(every))
        if every == "auto" and mtbf_s is None:
            raise UsageError(
                "mtbf_s",
                expected='with interval="auto", the seconds between two failures of the whole job',
                found="None",
                next_step="take that of one node, divided by the number of nodes",
            )
        if mtbf_s is not None and not mtbf_s > 0:
            raise UsageError("mtbf_s", expected="above 0", found=str(mtbf_s))
        self._every = every
        self._mtbf_s = mtbf_s
        self._costs = costs
        self._began: float | None = None
        self._told: Interval | None = None
        #: Seconds from a failure to the first step after it, where a restart was measured.
        self.restart_s = 0.0

    @property
    def by_time(self) -> bool:
        """It must be agreed on: clocks differ."""
        return self._every == "auto"

    def begun(self) -> None:
        self._began = time.monotonic()

    def due(self, step: int) -> bool:
        if self._every is None:
            return False
        if isinstance(self._every, int):
            return step % self._every == 0
        if self._began is None:
            return True
        interval = self.interval()
        return interval is not None and time.monotonic() - self._began >= interval.seconds

    def interval(self) -> Interval | None:
        """None where none is to be found out, or no save was measured yet."""
        measured = self._costs.measured
        if measured is None or self._mtbf_s is None:
            return None
        interval = best_interval(
            blocked_s=measured[0], committed_s=measured[1], mtbf_s=self._mtbf_s, restart_s=self.restart_s
        )
        told_s = 0.0 if self._told is None else self._told.seconds
        if self.by_time and not 0.8 * told_s < interval.seconds < 1.25 * told_s:
            self._told = interval
            _log.info("headrace: %s", interval)
        return interval


def say_what_became(save: SaveUnderWay, run: str) -> None:
    """On rank 0, when the save has ended."""
    seconds = time.perf_counter() - save.began
    error = save.future.exception()
    if error is not None:
        what = error if isinstance(error, HeadraceError) else repr(error)
        _log.error(
            "headrace: the save of step %d of %s FAILED after %s: %s", save.step, run, format_seconds(seconds), what
        )
        return
    report = save.future.result()
    _log.info(
        "headrace: %s committed: %s, training blocked for %s, committed after %s",
        report.checkpoint_id,
        format_bytes(report.total_bytes or 0),
        format_seconds(save.blocked_s),
        format_seconds(seconds),
    )
