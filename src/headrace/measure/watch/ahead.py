"""Ranks that are ahead of the others in a step, and wait for them there.

A rank that saves behind the last collective of a step holds the others up in the next one, which they have begun
already: their wait there is a part of its save, and is not to be paid for twice. So a step of the job begins when its
last rank begins it, and what the others have done of theirs until then is left out, waiting first.

Ranks of one node go by one clock. That of another node is brought beside it by the begins of steps, which are nearly
the same for all ranks but where one was held up.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from headrace.measure.watch.causes import CAUSES, WAIT
from headrace.measure.watch.record import WatchHeader, WatchStep

#: Ranks that are ahead by less than this share of the shortest of them begin together. Where a device carries out the
#: work, its host may be a whole step ahead, which is no wait.
TOGETHER, TOGETHER_CUDA = 0.1, 1.0
#: A step tells so much of how far clocks of nodes are apart, as a share of itself.
_TELLS = 0.02


def hidden_in(spent: Iterable[Mapping[str, float]]) -> str:
    """Of the ranks in a step: where their waiting for each other is."""
    return "collective" if any(each.get("collective", 0.0) > 0 for each in spent) else "compute"


def shortened(spent: Mapping[str, float], seconds: float, hidden: str) -> dict[str, float]:
    """Without so many seconds at its begin: of waiting for others; else what comes first in a step."""
    left = dict(spent)
    for cause in (hidden, WAIT, *CAUSES):
        part = min(seconds, left.get(cause, 0.0))
        if part > 0:
            left[cause] -= part
            seconds -= part
    return left


class Ahead:
    """Over the steps of a start."""

    def __init__(self) -> None:
        self._nodes: dict[int, str] = {}
        self._share = TOGETHER
        #: Clocks of ranks on other nodes than the first one's; None: the first step has not been.
        self._apart: dict[int, float] | None = None

    def begin(self, headers: Iterable[WatchHeader]) -> None:
        for header in headers:
            self._nodes[header.rank] = header.node
            self._share = TOGETHER_CUDA if header.clock == "cuda" else self._share
        self._apart = None

    def without(self, rows: dict[int, WatchStep]) -> dict[int, WatchStep]:
        """The rows of a step, those of ranks that are ahead shortened. The first step is as it is: ranks start when
        they like."""
        if len(rows) < 2:
            return rows
        if self._apart is None:
            self._apart = {}
            return rows
        shortest = min(row.wall_s for row in rows.values())
        started = self._started(rows, self._apart, shortest)
        begun = max(started.values())
        ahead = {rank: min(begun - at, rows[rank].wall_s) for rank, at in started.items()}
        ahead = {rank: seconds for rank, seconds in ahead.items() if seconds > self._share * shortest}
        if not ahead:
            return rows
        hidden = hidden_in(row.spent for row in rows.values())
        return rows | {
            rank: replace(
                rows[rank], started_s=rows[rank].started_s + seconds, wall_s=rows[rank].wall_s - seconds,
                spent=shortened(rows[rank].spent, seconds, hidden),
            )
            for rank, seconds in ahead.items()
        }  # fmt: skip

    def _started(self, rows: dict[int, WatchStep], apart: dict[int, float], shortest: float) -> dict[int, float]:
        first = min(rows)
        node, at = self._nodes.get(first), rows[first].started_s
        found = {}
        for rank, row in rows.items():
            found[rank] = row.started_s
            if self._nodes.get(rank) != node:
                by = row.started_s - at - apart.setdefault(rank, row.started_s - at)
                found[rank] = at + by
                apart[rank] += max(-_TELLS * shortest, min(_TELLS * shortest, by))
        return found
