"""A job over a storage, as plain numbers, and which share of the time trains there.

    goodput = busy * (1 - blocked / interval) * (1 - (interval / 2 + committed + load + other) / mtbf)

`busy` is the accelerator utilisation of MLPerf Storage; the rest is first order, as Young's. Each part is a share of
the whole time: a failure takes its share first, then saves, then waiting for data.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from headrace.checkpoint.interval import best_interval


def chosen_interval_s(blocked_s: float, committed_s: float, mtbf_s: float, given_s: float | None) -> float:
    """The interval that is given, else the best one. A save cannot begin before the one before it is committed."""
    if given_s is not None:
        return max(given_s, committed_s)
    return best_interval(blocked_s=blocked_s, committed_s=committed_s, mtbf_s=mtbf_s).seconds


def ideal_interval_s(blocked_s: float, mtbf_s: float, other_s: float, given_s: float, chosen_s: float) -> float:
    """Of those from the given interval to the chosen one that which trains most over storage that takes no time. Up to
    it `(1 - blocked / interval) * (1 - (interval / 2 + other) / mtbf)` rises, and then it falls."""
    return min(max(given_s, math.sqrt(2 * blocked_s * max(0.0, mtbf_s - other_s))), chosen_s)


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A job over a storage: B, B/s, s, as plain numbers. `interval_s` None: the best one is taken."""

    feed_needed: float
    read: float
    write: float
    size: float
    share: float
    copy: float
    mtbf_s: float
    restart_bytes: float
    other_s: float
    synchronous: bool
    interval_s: float | None = None

    @property
    def blocked_s(self) -> float:
        return self.size / self.write if self.synchronous else self.share / self.copy

    @property
    def committed_s(self) -> float:
        return self.size / self.write

    @property
    def chosen_interval_s(self) -> float:
        return chosen_interval_s(self.blocked_s, self.committed_s, self.mtbf_s, self.interval_s)

    def over_ideal_storage(self) -> Situation:
        """The same job where storage takes no time at all. An asynchronous save still copies. A cadence that is given
        stays; where storage made saves come further apart than that, they may, where that trains more."""
        ideal = replace(self, read=math.inf, write=math.inf)
        if self.interval_s is None:
            return ideal
        return replace(ideal, interval_s=ideal_interval_s(
            ideal.blocked_s, self.mtbf_s, self.other_s, self.interval_s, self.chosen_interval_s
        ))  # fmt: skip

    def shares(self) -> Shares:
        interval = self.chosen_interval_s
        rework = (interval / 2 + self.committed_s) / self.mtbf_s
        restart = (self.restart_bytes / self.read + self.other_s) / self.mtbf_s
        # More than all cannot be lost: then the job gets nowhere, and what is lost is lost to both in proportion.
        failures = min(1.0, rework + restart)
        both = rework + restart or 1.0
        left = 1.0 - failures
        saves = left * (min(1.0, self.blocked_s / interval) if interval else 0.0)
        left -= saves
        waits = left * (1.0 - min(1.0, self.read / self.feed_needed)) if self.feed_needed else 0.0
        return Shares(
            data_wait=waits, saves=saves, rework=failures * rework / both, restarts=failures * restart / both,
            trains=left - waits,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Of the whole time; they add up to 1."""

    data_wait: float
    saves: float
    rework: float
    restarts: float
    trains: float


def goodput(situation: Situation) -> float:
    return situation.shares().trains


def storage_share(situation: Situation) -> float:
    """Share of the time that would train if storage took none: what storage costs. Never below 0, but for rounding."""
    return max(0.0, goodput(situation.over_ideal_storage()) - goodput(situation))
