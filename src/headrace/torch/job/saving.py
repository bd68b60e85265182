"""What saves of a `Checkpointer` cost, and when the next one is due."""

from __future__ import annotations

import logging
import statistics
import time
from concurrent.futures import Future
from dataclasses import dataclass, fields
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


@dataclass(frozen=True, kw_only=True)
class Cost:
    """Of one save, as one rank saw it. Seconds."""

    #: For which training was held up.
    blocked_s: float
    #: Until it was committed.
    committed_s: float
    #: Of that, what this rank copied and wrote, without what it gave away to reads (`WriterOptions.pacing`).
    writing_s: float
    #: Of that, all else but the wait for what other ranks write.
    around_s: float

    @classmethod
    def of(cls, report: SaveReport, blocked_s: float, committed_s: float) -> Cost:
        writing_s = report.stage_seconds + report.write_seconds
        given_away_s = 0.0 if report.pacing is None else report.pacing.held_seconds
        return cls(
            blocked_s=blocked_s,
            committed_s=committed_s,
            writing_s=max(0.0, writing_s - given_away_s),
            around_s=max(0.0, committed_s - writing_s - report.wait_seconds),
        )


class Costs:
    """Of the last saves, measured by this rank."""

    def __init__(self) -> None:
        self._saves: list[Cost] = []
        self._count = 0

    def note(self, cost: Cost) -> None:
        self._count += 1
        if self._count == 2:
            # The first one makes buffers and begins the session: none that comes later does.
            self._saves.clear()
        self._saves = [*self._saves, cost][-_REMEMBERED:]

    @property
    def measured(self) -> Cost | None:
        """The median of each."""
        saves = list(self._saves)
        if not saves:
            return None
        return Cost(
            **{field.name: statistics.median(getattr(one, field.name) for one in saves) for field in fields(Cost)}
        )


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
        #: What the slowest rank takes to write, `Cost.writing_s`, as far as the ranks have agreed.
        self.slowest_s = 0.0
        self._interval_s = 0.0

    @property
    def by_time(self) -> bool:
        """It must be agreed on: clocks differ."""
        return self._every == "auto"

    def begun(self) -> None:
        self._began = time.monotonic()

    @property
    def measures(self) -> bool:
        """The next save is to show what the storage takes: the interval follows from that, and nothing is known yet."""
        return self.by_time and self._costs.measured is None

    def mine(self, rank: int) -> tuple[float, float]:
        """What this rank tells the others: what it takes to write; and rank 0 the interval, 0 where there is none."""
        measured = self._costs.measured if self.by_time else None
        interval = self.interval() if self.by_time and rank == 0 else None
        return 0.0 if measured is None else measured.writing_s, 0.0 if interval is None else interval.seconds

    def agreed(self, slowest_s: float, interval_s: float) -> None:
        """The highest of that of all ranks."""
        self.slowest_s, self._interval_s = slowest_s, interval_s

    @property
    def left_s(self) -> float | None:
        """Seconds until the save behind the one that has just begun is due, on all ranks; None: it is not by time."""
        if not self._interval_s or self._began is None:
            return None
        return self._began + self._interval_s - time.monotonic()

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
            blocked_s=measured.blocked_s,
            committed_s=measured.committed_s,
            storage_s=min(measured.committed_s, measured.around_s + max(measured.writing_s, self.slowest_s)),
            mtbf_s=self._mtbf_s,
            restart_s=self.restart_s,
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
