"""The most accelerators that stay above a threshold, by as few trials as that takes.

Upwards by doubling until a trial fails, then between the two, where what a failed trial moved says how many would have
been fed. The answer is a bracket: the most that passed, and the fewest that failed above it. It is exact when they are
neighbours; when the time is up before, it is told as it is.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from headrace.errors import UsageError
from headrace.measure.statistics import median

#: Within so much of the threshold (2 points of AU) a trial is repeated, and the median of three counts.
NEAR = 0.02
REPEATS = 3


class Measured(Protocol):
    """A trial, as far as the search looks at it. `feeds`: how many accelerators its rate would feed, None: unknown."""

    @property
    def au(self) -> float: ...

    @property
    def feeds(self) -> float | None: ...


@dataclass(frozen=True, kw_only=True)
class Found:
    """`largest`: the most that passed (0: one is too many). `fails_at`: the fewest that failed, None: none did.

    `complete`: nothing between them is left to be tried. `tried`: (accelerators, AU) of every trial, in order. `only`:
    so many were asked for, and nothing was searched.
    """

    largest: int
    fails_at: int | None
    threshold: float
    tried: Sequence[tuple[int, float]] = field(default_factory=tuple)
    most: int = 0
    only: bool = False

    @property
    def complete(self) -> bool:
        return (
            self.only or self.largest >= self.most or (self.fails_at is not None and self.fails_at == self.largest + 1)
        )

    @property
    def sentence(self) -> str:
        au = dict(self.tried)
        need = f"{self.threshold:.0%}"
        if self.only and self.fails_at is not None:
            return f"{_count(self.fails_at)} below {need} AU ({au[self.fails_at]:.1%}); fewer were not asked for"
        if self.fails_at is None:
            if not self.largest:
                return "nothing was tried: the time was up"
            more = "more were not asked for" if self.complete else "the time was up before more were tried"
            return f"{_count(self.largest)} above {need} AU ({au[self.largest]:.1%}); {more}"
        failed = f"{self.fails_at} had {au[self.fails_at]:.1%}"
        if not self.largest:
            text = f"not one accelerator above {need} AU: {failed}"
            return text if self.complete else f"{text}; fewer were not tried: the time was up"
        text = f"{_count(self.largest)} above {need} AU ({au[self.largest]:.1%}; {failed})"
        return text if self.complete else f"at least {text}; between them nothing was tried: the time was up"


def search(
    measure: Callable[[int], Measured],
    *,
    threshold: float,
    most: int,
    start: int = 1,
    time_is_up: Callable[[], bool] = lambda: False,
) -> Found:
    """Find the most accelerators, 1 to `most`, for which `measure(n).au >= threshold`, beginning with `start`.

    Where AU does not fall as accelerators are added, the answer still passed, and its neighbour above failed.
    `time_is_up` is asked before each trial but the first.
    """
    if not 1 <= start <= most:
        raise UsageError("accelerators to begin with", expected=f"1 to {most}", found=str(start))
    tried: list[tuple[int, float]] = []
    low, high, count = 0, most + 1, start
    failed = guessed = False
    while low + 1 < high:
        if tried and time_is_up():
            break
        au, feeds = _trial(measure, count, threshold, tried, time_is_up)
        if au >= threshold:
            low = count
        else:
            high, failed = count, True
        if not failed:
            count = min(2 * count, most)
        elif feeds is not None and au < threshold and not guessed:
            # What the first failed trial moved is what storage gives: so many would have been fed. Only once, so that
            # wrong guesses do not make the search a long one.
            guessed = True
            count = int(min(max(feeds / threshold, low + 1), high - 1))
        else:
            count = (low + high) // 2
    return Found(largest=low, fails_at=high if failed else None, threshold=threshold, tried=tuple(tried), most=most)


def _trial(
    measure: Callable[[int], Measured],
    count: int,
    threshold: float,
    tried: list[tuple[int, float]],
    time_is_up: Callable[[], bool],
) -> tuple[float, float | None]:
    trials = [measure(count)]
    while abs(trials[0].au - threshold) < NEAR and len(trials) < REPEATS and not time_is_up():
        trials.append(measure(count))
    au = median([one.au for one in trials])
    tried.append((count, au))
    return au, trials[-1].feeds


def _count(number: int) -> str:
    return "1 accelerator" if number == 1 else f"{number} accelerators"
