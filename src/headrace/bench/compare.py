"""The same work on several paths, in turns, and what may be said of it: never that one is faster within noise.

Rounds are interleaved (A B C, then C B A, ...), so that what changes with time meets all of them alike. What is
compared are ratios within a round: B's figure over A's, taken seconds apart. From n rounds the median ratio has an
interval of order statistics that needs no assumption about noise (the sign test's: David and Nagaraja, "Order
Statistics", 7.1): the lowest and the highest of n hold the true median but for a chance of 2^(1-n). That chance is
shared out over all that is compared (Bonferroni), so that a table of many rows has no winner by luck, and
`rounds_needed` says how many rounds that takes. A path is faster where the whole interval lies beyond `LEAST` on one
side.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from headrace.bench.figures import SECONDS, Figure, Outcome
from headrace.bench.report import value_text
from headrace.errors import UsageError
from headrace.measure.statistics import median

#: A chance of naming a winner where there is none: in the whole table.
CHANCE = 0.05
#: Less than this is no difference, however sure: 3 %.
LEAST = 0.03
MOST_ROUNDS = 99
LETTERS = "ABC"

#: What the work is called in a sentence; `{}` is what makes it special.
_CALLED = {
    "random": "random samples of {}",
    "sequential": "sequential reads of {}",
    "latency": "single reads of {}",
    "ingest": "ingest in {}",
    "load": "model load",
    "sustained": "sustained reads",
    "sustained_write": "sustained writes",
}


@dataclass(frozen=True, kw_only=True)
class Ratio:
    """A path's figure over the first one's. `low` to `high` holds the median ratio but for `chance`.

    `faster`: whether more of it was had (less time, where it is a time); None: within noise, or too few rounds.
    """

    median: float
    low: float
    high: float
    chance: float
    faster: bool | None


@dataclass(frozen=True, kw_only=True)
class Row:
    """One kind of work: the figure of every path by round, and how the later paths compare with the first."""

    work: str
    unit: str
    values: tuple[tuple[float, ...], ...]
    ratios: tuple[Ratio, ...]

    def shown(self, path: int) -> str:
        """`2.1 GiB/s ± 3%`: median, and half the span of the rounds as a share of it."""
        found = self.values[path]
        middle = median(found)
        noise = f" ± {(max(found) - min(found)) / 2 / middle:.0%}" if len(found) > 1 and middle > 0 else ""
        return value_text(middle, self.unit) + noise


@dataclass(frozen=True, kw_only=True)
class Comparison:
    paths: tuple[str, ...]
    rounds: int
    rows: tuple[Row, ...]
    notes: tuple[str, ...] = ()
    facts: Mapping[str, Mapping[str, str]] | None = None

    @property
    def needed(self) -> int:
        return rounds_needed(len(self.rows), len(self.paths))

    @property
    def sentence(self) -> str:
        """Who is how much faster at what; and that the rest is within noise."""
        if self.rounds < self.needed:
            return (
                f"{counted(self.rounds, 'round')} cannot tell paths apart: that takes {self.needed} for "
                f"{counted(len(self.rows), 'kind')} of work and {len(self.paths)} paths"
            )
        first = f"A ({self.paths[0]})"
        others = [f"{LETTERS[index + 1]} ({path})" for index, path in enumerate(self.paths[1:])]
        parts: list[str] = []
        for index, name in enumerate(others):
            told = [row for row in self.rows if row.ratios[index].faster is not None]
            if told:
                # The first path is named in full once, and is A from then on.
                names = ["A" if parts or number else first for number in range(len(told))]
                works = [f"{_times(row, index, of)} for {row.work}" for row, of in zip(told, names, strict=True)]
                parts.append(f"{name} is {' and '.join(works)}")
        if not parts:
            return f"what lies between {first} and {' and '.join(others)} is within noise"
        within = any(one.faster is None for row in self.rows for one in row.ratios)
        return "; ".join(parts) + ("; the rest is within noise" if within else "")

    def to_json(self) -> dict[str, Any]:
        return {
            "sentence": self.sentence,
            "paths": dict(zip(LETTERS, self.paths, strict=False)),
            "rounds": self.rounds,
            "rounds_needed": self.needed,
            "works": [
                {
                    "work": row.work,
                    "unit": row.unit,
                    "values": {LETTERS[i]: list(found) for i, found in enumerate(row.values)},
                    "ratios": {
                        f"{LETTERS[i + 1]}/A": {
                            "median": _finite(one.median), "low": _finite(one.low), "high": _finite(one.high),
                            "chance": one.chance, "faster": one.faster,
                        }
                        for i, one in enumerate(row.ratios)
                    },
                }
                for row in self.rows
            ],
            "notes": list(self.notes),
            "facts": {path: dict(facts) for path, facts in (self.facts or {}).items()},
        }  # fmt: skip


def order(paths: int, number: int) -> list[int]:
    """Whose turn it is in round `number`: A B C, then C B A, and so on."""
    turn = list(range(paths))
    return turn if number % 2 == 0 else turn[::-1]


def rounds_needed(works: int, paths: int) -> int:
    """Rounds from which on a winner can be named, when so many kinds of work are compared on so many paths."""
    compared = max(1, works * (paths - 1))
    return math.ceil(1 + math.log2(compared / CHANCE) - 1e-9)


def check_rounds(rounds: int) -> None:
    if not 1 <= rounds <= MOST_ROUNDS:
        raise UsageError("rounds", expected=f"1 to {MOST_ROUNDS}", found=str(rounds))


def ratio_of(ours: Sequence[float], first: Sequence[float], *, less_is_more: bool, compared: int = 1) -> Ratio:
    """Of figures by round. `compared`: how many ratios there are in all. UsageError: not equally many, or none."""
    if len(ours) != len(first) or not ours:
        raise UsageError("figures compared", expected="as many rounds of each path", found=f"{len(ours)}, {len(first)}")
    found = sorted(_over(one, other) for one, other in zip(ours, first, strict=True))
    drop, chance = _trimmed(len(found), CHANCE / max(1, compared))
    low, high = found[drop], found[-1 - drop]
    faster: bool | None = None
    if chance <= CHANCE / max(1, compared):
        if low > 1 + LEAST:
            faster = not less_is_more
        elif high < 1 / (1 + LEAST):
            faster = less_is_more
    return Ratio(median=median(found), low=low, high=high, chance=chance, faster=faster)


def compared(
    paths: Sequence[str], rounds: Sequence[Sequence[Sequence[Outcome]]], *, facts: Mapping[str, Any] | None = None
) -> Comparison:
    """`rounds[round][path]`: outcomes, the same kinds of work in the same order everywhere."""
    count = len(rounds[0][0])
    rows = []
    for index in range(count):
        mains = [[rounds[number][path][index].main for number in range(len(rounds))] for path in range(len(paths))]
        values = tuple(tuple(_value(figure) for figure in of) for of in mains)
        unit = mains[0][0].unit
        ratios = tuple(
            ratio_of(ours, values[0], less_is_more=unit == SECONDS, compared=count * (len(paths) - 1))
            for ours in values[1:]
        )
        rows.append(Row(work=called(rounds[0][0][index]), unit=unit, values=values, ratios=ratios))
    notes: dict[str, str] = {}
    for path in range(len(paths)):
        for number in range(len(rounds)):
            for outcome in rounds[number][path]:
                said = [outcome.cache and f"caches: {outcome.cache}", outcome.durable and f"writes: {outcome.durable}"]
                for note in [*said, *outcome.notes]:
                    # Rounds that say the same but for its figures are told once.
                    if note:
                        notes.setdefault(
                            f"{LETTERS[path]}: {re.sub(r'[0-9.]+', '#', note)}", f"{LETTERS[path]}: {note}"
                        )
    return Comparison(
        paths=tuple(paths), rounds=len(rounds), rows=tuple(rows), notes=tuple(notes.values()), facts=facts
    )


def run(
    paths: Sequence[str],
    works: Sequence[Callable[[int, int], Outcome]],
    *,
    rounds: int,
    tell: Callable[[float, str], None] = lambda fraction, text: None,
    facts: Mapping[str, Any] | None = None,
) -> Comparison:
    """Do all of `works(round, path)` on all paths (by number) in `rounds` rounds; each kind of work goes through all
    paths before the next one begins."""
    if not 2 <= len(paths) <= len(LETTERS):
        raise UsageError("paths to be compared", expected=f"2 to {len(LETTERS)}", found=str(len(paths)))
    check_rounds(rounds)
    total = rounds * len(works) * len(paths)
    done = 0
    found: list[list[list[Outcome]]] = []
    for number in range(rounds):
        of: list[list[Outcome]] = [[] for _ in paths]
        for work in works:
            for path in order(len(paths), number):
                tell(done / total, f"round {number + 1} of {rounds}: {LETTERS[path]} ({paths[path]})")
                of[path].append(work(number, path))
                done += 1
        found.append(of)
    return compared(paths, found, facts=facts)


def called(outcome: Outcome) -> str:
    """What a pattern's work is called in a sentence."""
    text = _CALLED.get(outcome.pattern, f"{outcome.pattern} ({{}})" if outcome.work else outcome.pattern)
    text = text.format(outcome.work)
    return text if outcome.flows == 1 else f"{text}, {outcome.flows} flows"


def times(ratio: float) -> str:
    """`2.3`, `0.43`, `12`: two digits that count."""
    if not math.isfinite(ratio):
        return "∞"
    return f"{ratio:.0f}" if ratio >= 9.95 else f"{ratio:.1f}" if ratio >= 1.995 else f"{ratio:.2f}"


def _times(row: Row, index: int, first: str) -> str:
    one = row.ratios[index]
    if row.unit != SECONDS:
        return f"{times(one.median)} times {first} ({times(one.low)} to {times(one.high)})"
    if one.faster:
        span = f"{times(_inverse(one.high))} to {times(_inverse(one.low))}"
        return f"{times(_inverse(one.median))} times as fast as {first} ({span})"
    return f"{times(one.median)} times as slow as {first} ({times(one.low)} to {times(one.high)})"


def _inverse(value: float) -> float:
    return 1 / value if value else math.inf


def _over(one: float, other: float) -> float:
    if other > 0:
        return one / other
    return math.inf if one > 0 else 1.0


def _trimmed(count: int, chance: float) -> tuple[int, float]:
    """How many of `count` sorted ratios may be left out at each end, and the chance that the median lies outside of
    what remains: the most for which it is at most `chance`; none where there are too few for that."""
    drop, total = 0, 0.5 ** (count - 1)
    cumulated = 1
    while drop + 1 < (count + 1) // 2:
        cumulated += math.comb(count, drop + 1)
        wider = cumulated * 0.5 ** (count - 1)
        if wider > chance:
            break
        drop, total = drop + 1, wider
    return drop, min(1.0, total)


def _value(figure: Figure) -> float:
    return figure.value if math.isfinite(figure.value) else 0.0


def _finite(value: float) -> float | None:
    return value if math.isfinite(value) else None


def counted(count: int, of: str) -> str:
    """`1 kind`, `2 kinds`."""
    return f"{count} {of}" + ("" if count == 1 else "s")
