"""Ranges, and formulas that take them.

A figure of a plan is a range: the least, the most, and what is likely. A formula is a function of plain numbers that
goes up or down with each of them and never turns; so its least and its most lie at corners of the box of its ranges,
and are found there. Interval arithmetic operator by operator would give wider ones wherever a symbol stands twice in a
formula (decision 0039). A formula that does turn with some of its symbols says itself what its ends are.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import UsageError
from headrace.plan.units import Unit, show

#: Where a figure is from.
GIVEN, ASSUMED, CLAIMED, COMPUTED = "given", "assumed", "claimed", "computed"


@dataclass(frozen=True)
class Range:
    """`low <= likely <= high`, finite, in one unit. `origin` says where it is from and `source` on whose word."""

    low: float
    likely: float
    high: float
    unit: Unit
    origin: str = field(default=COMPUTED, compare=False)
    source: str = field(default="", compare=False)

    def __post_init__(self) -> None:
        if not (math.isfinite(self.low) and math.isfinite(self.high) and self.low <= self.likely <= self.high):
            found = f"{self.low:g}, {self.likely:g}, {self.high:g}"
            raise UsageError("a range", expected="low, likely and high in this order, finite", found=found)

    @staticmethod
    def point(value: float, unit: Unit, origin: str = COMPUTED, source: str = "") -> Range:
        return Range(value, value, value, unit, origin, source)

    @property
    def exact(self) -> bool:
        return self.low == self.high

    def with_origin(self, origin: str, source: str) -> Range:
        return Range(self.low, self.likely, self.high, self.unit, origin, source)

    def __contains__(self, value: float) -> bool:
        return self.low <= value <= self.high

    def __str__(self) -> str:
        if self.exact:
            return show(self.likely, self.unit, 4)
        low, likely, high = (show(value, self.unit) for value in (self.low, self.likely, self.high))
        if low == high:
            return likely
        # A unit that all three have is said once.
        (low_figure, _, low_unit), (_, _, unit), (high_figure, _, high_unit) = (
            text.partition(" ") for text in (low, likely, high)
        )
        if low_unit == unit == high_unit:
            return f"{likely} ({low_figure} to {high_figure})"
        return f"{likely} ({low} to {high})"

    def to_json(self) -> dict[str, Any]:
        return {
            "low": self.low, "likely": self.likely, "high": self.high, "unit": str(self.unit), "origin": self.origin,
            **({"source": self.source} if self.source else {}),
        }  # fmt: skip


def least(ranges: Sequence[Range]) -> Range:
    """The smallest of several, of one unit; where one of them is everywhere the smallest, that one, with its origin."""
    low, likely, high = (min(getattr(one, end) for one in ranges) for end in ("low", "likely", "high"))
    for one in ranges:
        if (one.low, one.likely, one.high) == (low, likely, high):
            return one
    return Range(low, likely, high, ranges[0].unit, source="; ".join(one.source for one in ranges if one.source))


@dataclass(frozen=True, kw_only=True)
class Formula:
    """What `result` follows from. `symbols`: the unit of each, by its name in `text` and in `function`.

    `function` takes the symbols by name (blanks as `_`). It must be monotone in each, or `extremes` gives its least and
    its most for ranges of them.
    """

    result: str
    text: str
    unit: Unit
    symbols: Mapping[str, Unit]
    source: str
    function: Callable[..., float]
    extremes: Callable[[Mapping[str, Range]], tuple[float, float]] | None = None

    def of(self, values: Mapping[str, float]) -> float:
        return self.function(**{name.replace(" ", "_"): value for name, value in values.items()})

    def put(self, values: Mapping[str, Range], note: str = "") -> Answer:
        """Raises ValueError where a symbol is missing, unknown, or in another unit: a defect of the caller."""
        if set(values) != set(self.symbols):
            raise ValueError(f"{self.result}: wants {sorted(self.symbols)}, was given {sorted(values)}")
        for name, value in values.items():
            if value.unit != self.symbols[name]:
                raise ValueError(f"{self.result}: {name} is in {value.unit}, expected {self.symbols[name]}")
        if self.extremes is not None:
            found = list(self.extremes(values))
        else:
            ends = [(value.low,) if value.exact else (value.low, value.high) for value in values.values()]
            found = [self.of(dict(zip(values, corner, strict=True))) for corner in itertools.product(*ends)]
        likely = self.of({name: value.likely for name, value in values.items()})
        # Rounding may put what is likely a last digit outside.
        return Answer(
            formula=self, put=dict(values), value=Range(min(*found, likely), likely, max(*found, likely), self.unit),
            note=note,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Answer:
    """A result, the formula it is from, and what was put in."""

    formula: Formula
    put: Mapping[str, Range]
    value: Range
    note: str = ""

    @property
    def numbers(self) -> str:
        return ", ".join(f"{name} = {value}" for name, value in self.put.items())

    def to_json(self) -> dict[str, Any]:
        return {
            "result": self.formula.result, "value": self.value.to_json(), "formula": self.formula.text,
            "put": {name: value.to_json() for name, value in self.put.items()}, "source": self.formula.source,
            **({"note": self.note} if self.note else {}),
        }  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Question:
    """What a plan answers, in one table."""

    name: str
    title: str
    answers: tuple[Answer, ...]
    note: str = ""

    def to_json(self) -> dict[str, Any]:
        return {"question": self.name, "answers": [answer.to_json() for answer in self.answers], "note": self.note}
