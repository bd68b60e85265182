"""Comparing two things on a machine that is never quiet: interleaved pairs, medians of ratios, a noise floor.

One round runs ours, the peer, and the peer again, in an order that turns from round to round, so that a slow drift of
the machine meets all three alike. ours/peer of each round is one sample; peer/peer of each round is what the machine
alone does.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable
from dataclasses import dataclass

Measure = Callable[[], float]


@dataclass(frozen=True, kw_only=True)
class Pairs:
    """`ratios`: ours/peer a round; `ours`, `peer`: the values themselves; `noise`: see `quartile_spread`."""

    ratios: list[float]
    ours: list[float]
    peer: list[float]
    noise: float

    @property
    def median_ratio(self) -> float:
        return statistics.median(self.ratios)


def quartile_spread(values: list[float]) -> float:
    """Half the distance between the quartiles."""
    low, _, high = statistics.quantiles(values, n=4, method="inclusive")
    return (high - low) / 2


def interleaved(ours: Measure, peer: Measure, rounds: int) -> Pairs:
    """Run both `rounds` times (at least 3), each measure giving a rate (higher is better)."""
    if rounds < 3:
        raise ValueError(f"rounds: expected at least 3, found {rounds}")
    ours(), peer()  # Warm: pages touched, connections grown, clocks up.
    got: dict[str, list[float]] = {"ours": [], "peer": [], "again": []}
    steps: list[tuple[str, Measure]] = [("ours", ours), ("peer", peer), ("again", peer)]
    for turn in range(rounds):
        for name, measure in steps[turn % 3 :] + steps[: turn % 3]:
            got[name].append(measure())
    same = [again / first for again, first in zip(got["again"], got["peer"], strict=True)]
    both = [(first + again) / 2 for first, again in zip(got["peer"], got["again"], strict=True)]
    return Pairs(
        ratios=[mine / theirs for mine, theirs in zip(got["ours"], both, strict=True)],
        ours=got["ours"],
        peer=both,
        noise=quartile_spread(same),
    )
