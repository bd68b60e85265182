"""What ranks do together, whatever carries their messages: come, begin, gather, leave."""

from __future__ import annotations

import abc
import json
import time
from collections.abc import Callable, Sequence
from typing import Any

from headrace.bench.meeting.seat import Seat
from headrace.errors import HeadraceError, MeetingFailed

#: How long ranks wait for each other at first: jobs are started node by node.
JOIN_S = 60.0
#: Rank 0 says who is missing when the deadline passes; the others wait so much longer for its word.
GRACE_S = 5.0
#: Ranks wait for what others measure so much longer than it takes.
SLACK_S = 300.0
#: The common start is never so far ahead, but by the clocks of nodes that do not agree.
_FAR_S = 30.0
#: Of a reason that a rank gives for its failure.
_REASON = 400

Value = Any


class Meeting(abc.ABC):
    """All ranks of a run. One thread uses it. `clock_s`: this rank's `time.monotonic()` plus it is rank 0's clock.

    `clock_error_s`: how far that may be wrong; None where nobody could tell.
    """

    #: The common start lies so far ahead: everybody has heard of it by then.
    ahead_s = 0.25
    #: A rank that is waited for is given up when no beat of it came for so long (`beats`).
    silent_s = 15.0

    def __init__(self, seat: Seat) -> None:
        self.seat = seat
        self.clock_s = 0.0
        self.clock_error_s: float | None = 0.0
        #: Of every rank, by rank, once all are there.
        self.hosts: list[str] = [seat.host]

    @abc.abstractmethod
    def join(self, within_s: float) -> None:
        """Wait for every rank."""

    @abc.abstractmethod
    def gather(self, value: Value, answer: Callable[[list[Value]], Value], *, within_s: float) -> Value:
        """Every rank brings a value; rank 0 makes one answer of all, by rank; every rank has that answer.

        All ranks call it equally often. `MeetingFailed` on every rank where one does not come, dies or fails, and where
        `answer` raises on rank 0.
        """

    @abc.abstractmethod
    def leave(self, error: BaseException | None = None) -> None:
        """Go. With an error the others are told that this rank failed, and why."""

    def start(self, asked: Value, *, within_s: float = JOIN_S) -> float:
        """When to begin, on this rank's `time.monotonic()`: the same moment on every rank, a little ahead.

        `asked`: what this rank was told to do; `MeetingFailed` names the ranks that were told otherwise.
        """

        def answer(values: list[Value]) -> Value:
            others = [rank for rank, value in enumerate(values) if value != values[0]]
            if others:
                raise MeetingFailed(
                    f"{self.names(others)} measures something else than rank 0 does",
                    next_step="start every rank with the same options",
                )
            return {"begin": time.monotonic() + self.ahead_s}

        # As JSON makes it of what the others bring: rank 0's own is compared with theirs.
        begin = self.gather(json.loads(json.dumps(asked)), answer, within_s=within_s)
        moment = begin.get("begin") if isinstance(begin, dict) else None
        if not isinstance(moment, int | float):
            raise MeetingFailed("rank 0 said no time to begin at")
        begin_s = float(moment) - self.clock_s
        # Written so that a NaN is outside. Clocks that are so far apart cannot say when.
        if not begin_s < time.monotonic() + _FAR_S:
            raise MeetingFailed(
                "rank 0 would begin long after this rank", expected="clocks of all nodes that agree",
                next_step="set them (chrony, NTP), or meet on a port and not in a folder",
            )  # fmt: skip
        return begin_s

    def names(self, ranks: Sequence[int]) -> str:
        """`rank 2 (gpu003)`; `ranks 2, 3 and 5`; of many the first."""
        if len(ranks) == 1:
            host = self.hosts[ranks[0]] if ranks[0] < len(self.hosts) else ""
            return f"rank {ranks[0]}" + (f" ({host})" if host else "")
        shown = [str(rank) for rank in ranks[:8]]
        more = f" and {len(ranks) - 8} more" if len(ranks) > 8 else ""
        return "ranks " + (", ".join(shown) + more if more else ", ".join(shown[:-1]) + f" and {shown[-1]}")

    def __enter__(self) -> Meeting:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self.leave(error)


def reason(error: BaseException) -> str:
    """Why a rank failed, short enough for a message."""
    text = str(error) if isinstance(error, HeadraceError) else f"{type(error).__name__} {error}".strip()
    if isinstance(error, KeyboardInterrupt):
        text = "interrupted"
    return " ".join(text.split())[:_REASON]


def printable(text: object, most: int = _REASON) -> str:
    """Words of a peer, as one line that steers no terminal."""
    return "".join(c if c.isprintable() else "?" for c in str(text)[:most])
