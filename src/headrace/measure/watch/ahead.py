"""Ranks that are ahead of the others in a step, and wait for them there.

A rank that saves behind the last collective of a step holds the others up in the next one, which they have begun
already: their wait there is a part of its save, and is not to be paid for twice. So a step of the job begins when its
last rank begins it, and what the others have done of theirs until then is left out, waiting first.

Ranks of one node go by one clock. That of another node is brought beside it by the begins of steps, which are nearly
the same for all nodes but where one was held up: the middle one of some steps tells how far clocks are apart.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace

from headrace.measure.watch.causes import CAUSES, WAIT
from headrace.measure.watch.record import WatchHeader, WatchStep

#: Ranks that are ahead by less than this share of the shortest of them begin together. Where a device carries out the
#: work, its host may be a whole step ahead, which is no wait.
TOGETHER, TOGETHER_CUDA = 0.1, 1.0
#: Steps that tell how far clocks of nodes are apart: the last ones, and at the begin of a start those that come.
TELL = 15


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
        #: By two nodes, how much later the second one has begun each of some steps, by their clocks.
        self._apart: dict[tuple[str, str], deque[float]] = {}
        self._first = True

    def begin(self, headers: Iterable[WatchHeader], steps: Sequence[dict[int, WatchStep]]) -> None:
        """`steps`: the first ones of this start, which come again."""
        for header in headers:
            self._nodes[header.rank] = header.node
            self._share = TOGETHER_CUDA if header.clock == "cuda" else self._share
        self._apart.clear()
        self._first = True
        for rows in steps[1 : 1 + TELL]:
            self._started(rows)

    def without(self, rows: dict[int, WatchStep]) -> dict[int, WatchStep]:
        """The rows of a step, those of ranks that are ahead shortened. The first step is as it is: ranks start when
        they like."""
        first, self._first = self._first, False
        if first or len(rows) < 2:
            return rows
        shortest = min(row.wall_s for row in rows.values())
        started = self._started(rows)
        begun = max(started.values())
        ahead = {rank: begun - at for rank, at in started.items() if begun - at > self._share * shortest}
        # Nobody ends a step before all have begun it: then a clock was set, and what it tells of others is not known.
        if not ahead or any(seconds > rows[rank].wall_s for rank, seconds in ahead.items()):
            return rows
        hidden = hidden_in(row.spent for row in rows.values())
        return rows | {
            rank: replace(
                rows[rank], started_s=rows[rank].started_s + seconds, wall_s=rows[rank].wall_s - seconds,
                spent=shortened(rows[rank].spent, seconds, hidden),
            )
            for rank, seconds in ahead.items()
        }  # fmt: skip

    def _started(self, rows: dict[int, WatchStep]) -> dict[int, float]:
        """By the clock of the first rank's node."""
        nodes = {rank: self._nodes.get(rank, "") for rank in rows}
        # A node is held up where all its ranks are.
        begun: dict[str, float] = {}
        for rank, row in rows.items():
            begun[nodes[rank]] = min(row.started_s, begun.get(nodes[rank], row.started_s))
        first = nodes[min(rows)]
        shift = dict.fromkeys(begun, 0.0)
        for node in shift.keys() - {first}:
            told = self._apart.setdefault((first, node), deque(maxlen=TELL))
            told.append(begun[node] - begun[first])
            shift[node] = sorted(told)[len(told) // 2]
        return {rank: row.started_s - shift[nodes[rank]] for rank, row in rows.items()}
