"""What a run gives: numbers with their unit and noise, and the series and latencies that they are made of.

Frozen, and JSON-able by `to_json`. A round of a pattern is one `Outcome`; `together` makes one of several rounds of the
same work: medians, and half of what lies between the lowest and the highest round as noise.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.bench.histogram import counted
from headrace.errors import UsageError
from headrace.measure.statistics import median

#: Bytes a second, seconds, or a count: what `report` knows how to say.
BYTES_PER_S, SECONDS, PER_S, COUNT, SHARE = "B/s", "s", "1/s", "", "share"


@dataclass(frozen=True, kw_only=True)
class Series:
    """Bytes completed in each slot of `every_s` seconds, from `started_s` (seconds since 1970) on.

    The last slot may have been cut short: `rates` leaves it out unless it is the only one.
    """

    started_s: float
    every_s: float
    bytes: Sequence[int]

    @property
    def total_bytes(self) -> int:
        return sum(self.bytes)

    def rates(self) -> list[float]:
        """Bytes a second, of each whole slot."""
        whole = self.bytes[:-1] if len(self.bytes) > 1 else self.bytes
        return [count / self.every_s for count in whole]


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Of single requests, or of whole batches where the pattern says so; seconds. `p999` is the 99.9th percentile."""

    count: int
    p50: float
    p90: float
    p99: float
    p999: float
    max: float
    #: How many in which bucket (see `histogram`): what ranks put together.
    histogram: Mapping[int, int] = field(default_factory=dict)


def latencies_of(seconds: npt.NDArray[np.float64]) -> Latencies | None:
    """Of float64[n]; None where nothing was timed."""
    if not len(seconds):
        return None
    p50, p90, p99, p999 = (float(one) for one in np.percentile(seconds, (50, 90, 99, 99.9)))
    return Latencies(
        count=len(seconds), p50=p50, p90=p90, p99=p99, p999=p999, max=float(seconds.max()), histogram=counted(seconds)
    )


@dataclass(frozen=True, kw_only=True)
class Figure:
    """One number. `noise`: in the same unit, of `n` rounds; None where there was one round, so that nobody knows."""

    name: str
    value: float
    unit: str
    noise: float | None = None
    n: int = 1
    note: str = ""


@dataclass(frozen=True, kw_only=True)
class Outcome:
    """What a pattern gave at this many flows: one round, or several put together."""

    pattern: str
    #: As the user named it.
    path: str
    flows: int
    #: Of one round: bytes moved, and the seconds of it that are measured.
    bytes: int
    seconds: float
    #: What makes this work differ from other work of the same pattern: the size of requests, ranks, layout.
    work: str = ""
    series: Series | None = None
    latencies: Latencies | None = None
    figures: Sequence[Figure] = ()
    #: In words: what was done about caches, and what could not be.
    cache: str = ""
    #: Of writes, in words: when they counted as done. "": nothing was written.
    durable: str = ""
    notes: Sequence[str] = ()
    #: Of ranks: how many nodes they ran on. Rates are of all together.
    nodes: int = 1
    #: Of every round, by the name of the figure, in the order in which they were run.
    rounds: Mapping[str, Sequence[float]] = field(default_factory=dict)

    @property
    def key(self) -> tuple[str, str, int]:
        """Rounds that have the same one are of the same work."""
        return self.pattern, self.work, self.flows

    def figure(self, name: str) -> Figure:
        """KeyError where the pattern has none of this name."""
        for one in self.figures:
            if one.name == name:
                return one
        raise KeyError(name)

    @property
    def main(self) -> Figure:
        """The first one: what the pattern is about."""
        return self.figures[0]


def rate(name: str, bytes: int, seconds: float, note: str = "") -> Figure:
    """Bytes a second; 0 where no time passed."""
    return Figure(name=name, value=bytes / seconds if seconds > 0 else 0.0, unit=BYTES_PER_S, note=note)


def together(rounds: Sequence[Outcome]) -> Outcome:
    """Of each figure the median, with half the span of the rounds as noise; all else is of the round whose main figure
    is the median one (the lower of the two where their number is even). UsageError where they are not of one work."""
    if not rounds or len({(*one.key, one.path) for one in rounds}) != 1:
        raise UsageError("rounds put together are of the same work", found=str([one.key for one in rounds])[:200])
    names = [figure.name for figure in rounds[0].figures]
    values = {name: [one.figure(name).value for one in rounds if _has(one, name)] for name in names}
    figures = []
    for figure in rounds[0].figures:
        of = values[figure.name]
        noise = (max(of) - min(of)) / 2 if len(of) > 1 else None
        figures.append(replace(figure, value=median(of), noise=noise, n=len(of)))
    by_main = sorted(rounds, key=lambda one: one.main.value if one.figures else 0.0)
    middle = by_main[(len(by_main) - 1) // 2]
    notes = list(dict.fromkeys(note for one in rounds for note in one.notes))
    return replace(middle, figures=figures, notes=notes, rounds=values)


def _has(outcome: Outcome, name: str) -> bool:
    return any(one.name == name for one in outcome.figures)


def differ(a: Figure, b: Figure) -> bool:
    """Is what lies between them more than the noise of both? Of single rounds nothing is known: no."""
    if a.noise is None or b.noise is None:
        return False
    return abs(a.value - b.value) > a.noise + b.noise


def to_json(value: Any) -> Any:
    """Dataclasses as objects; numbers that JSON has not, as null."""
    plain = asdict(value) if hasattr(value, "__dataclass_fields__") else value
    return _plain(plain)


def _plain(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {str(key): _plain(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(one) for one in value]
    if isinstance(value, np.generic):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    return value
