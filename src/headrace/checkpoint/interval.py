"""How often to save: Young's and Daly's interval, from what a save costs and how often the job fails.

A save that comes too seldom loses much work at a failure; one that comes too often costs more than failures do. With a
cost C of a save and a mean time M between failures of the whole job, the work between two saves that loses least is

    W = sqrt(2 C M)                                                     Young
    W = sqrt(2 C M) (1 + sqrt(C / 2M) / 3 + (C / 2M) / 9) - C           Daly, where C < 2M
    W = M                                                               Daly, else

J. W. Young, "A first order approximation to the optimum checkpoint interval", Communications of the ACM 17(9), 1974.
J. T. Daly, "A higher order estimate of the optimum checkpoint interval for restart dumps", Future Generation Computer
Systems 22(3), 2006. Daly's is taken.

Both are for a save that stops the work while it lasts. An asynchronous one stops it only while it copies, so C is the
time that training is *blocked*. The rest, until it is committed, costs nothing while all goes well; a failure meanwhile
loses the interval before it, too. That loss is the same whatever W is, so it does not move the best W; but a save
cannot begin before the one before it is committed, so from one beginning to the next it is at least as long as the
storage takes for one. A save that gives way to reads takes longer than that, as long as the interval lets it: so what
it gave away bounds nothing.
"""

from __future__ import annotations

import math
from dataclasses import dataclass

from headrace.errors import UsageError
from headrace.units import format_seconds


@dataclass(frozen=True, kw_only=True)
class Interval:
    """The best time from the beginning of one save to that of the next, and what it follows from."""

    seconds: float
    blocked_s: float
    committed_s: float
    mtbf_s: float
    #: Share of the time that is lost: to saves, and to what failures throw away. An estimate of first order.
    lost: float
    #: "failures", or "storage" where the best interval is shorter than the storage takes for one save.
    bound: str
    #: As `committed_s`, where the save had given way to nobody.
    storage_s: float

    def __str__(self) -> str:
        text = (
            f"a save every {format_seconds(self.seconds)}: it blocks training for {format_seconds(self.blocked_s)}, is "
            f"committed after {format_seconds(self.committed_s)}, and the job fails every "
            f"{format_seconds(self.mtbf_s)}; about {100 * self.lost:.2g} % of the time is lost to saves and failures"
        )
        if self.bound == "storage":
            text += f" (storage is too slow to save more often: it takes {format_seconds(self.storage_s)})"
        return text


def best_interval(
    *, blocked_s: float, committed_s: float, mtbf_s: float, restart_s: float = 0.0, storage_s: float | None = None
) -> Interval:
    """See the module text. Seconds all of them.

    Args:
        blocked_s: what a save takes from training.
        committed_s: from its beginning until it is committed; at least `blocked_s`, else that is taken.
        mtbf_s: mean time between failures of the whole job: that of one node, divided by the number of nodes.
        restart_s: from a failure to the first step after it. It does not move the interval, but `lost`.
        storage_s: `committed_s` without what the save gave away to reads; None: it gave way to nobody.
    """
    storage_s = committed_s if storage_s is None else storage_s
    given = {"blocked_s": blocked_s, "committed_s": committed_s, "restart_s": restart_s, "storage_s": storage_s}
    for name, value in given.items():
        if not 0 <= value < math.inf:
            raise UsageError(name, expected="seconds, at least 0", found=str(value))
    if not 0 < mtbf_s < math.inf:
        raise UsageError("mtbf_s", expected="seconds, above 0", found=str(mtbf_s))
    storage_s = max(storage_s, blocked_s)
    committed_s = max(committed_s, storage_s)
    half = blocked_s / (2 * mtbf_s)
    work = mtbf_s
    if half < 1:
        work = math.sqrt(2 * blocked_s * mtbf_s) * (1 + math.sqrt(half) / 3 + half / 9) - blocked_s
    best = work + blocked_s
    seconds = max(best, storage_s)
    lost = 0.0
    if seconds:
        lost = blocked_s / seconds + (seconds / 2 + committed_s + restart_s) / mtbf_s
    return Interval(
        seconds=seconds,
        blocked_s=blocked_s,
        committed_s=committed_s,
        mtbf_s=mtbf_s,
        lost=min(1.0, lost),
        bound="failures" if seconds == best else "storage",
        storage_s=storage_s,
    )
