"""What was measured against what a provider claims. Pure: whoever measures (`doctor`, `bench`) hands the figures in."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from headrace.errors import UsageError
from headrace.fabric.table import Table
from headrace.plan import units
from headrace.plan.catalogue import PERS, UNITS, Claim, Offering

#: Two runs of one benchmark may differ by this much (MLPerf Storage's rule).
TOLERANCE = 0.05

MEASURES = ("read", "write", "iops", "capacity", "network")


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A figure of `doctor` or `bench`. `value` in B/s, IOPS or B; `per` as in a claim ("node", "TiB", "" in all)."""

    what: str
    per: str
    value: float
    how: str = ""


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`finding`: "as claimed", "below", "above", "within the limit", "not measured"."""

    claim: Claim
    way: str
    measured: Measured | None
    finding: str
    #: Measured over claimed; None where nothing was measured.
    ratio: float | None

    def __str__(self) -> str:
        if self.measured is None or self.ratio is None:
            return f"{self.way}: not measured; claimed: {self.claim}"
        factor, base = UNITS[self.claim.unit]
        figure = f"{units.significant(self.measured.value / factor)} {self.claim.unit if base else ''}".strip()
        per = f" per {self.claim.per}" if self.claim.per else ""
        share = units.significant(100 * self.ratio)
        return f"{self.way}: {self.finding}: measured {figure}{per}, {share} % of what is claimed: {self.claim}"

    def to_json(self) -> dict[str, Any]:
        return {
            "way": self.way, "finding": self.finding, "ratio": self.ratio,
            "measured": None if self.measured is None else self.measured.value, "claim": str(self.claim),
            "source": self.claim.word.source, "date": self.claim.word.date, "grade": self.claim.word.grade,
        }  # fmt: skip


def compare(offering: Offering, measured: Iterable[Measured]) -> list[Comparison]:
    """Each claim of a figure that can be measured, with the measured one of the same kind. Prices are left out."""
    by_kind = {(one.what, one.per): one for one in measured}
    found = []
    for claim in offering.claims:
        ways = ("read", "write") if claim.what == "throughput" else (claim.what,)
        for way in ways:
            if way in MEASURES:
                found.append(_compare(claim, way, by_kind.get((way, claim.per))))
    return found


def _compare(claim: Claim, way: str, one: Measured | None) -> Comparison:
    if one is None:
        return Comparison(claim=claim, way=way, measured=None, finding="not measured", ratio=None)
    low, high = claim.ends()
    if claim.bound == "at most":
        finding = "above" if one.value > high * (1 + TOLERANCE) else "within the limit"
        return Comparison(claim=claim, way=way, measured=one, finding=finding, ratio=one.value / high)
    finding = "below" if one.value < low * (1 - TOLERANCE) else "as claimed"
    if one.value > high * (1 + TOLERANCE) and claim.bound != "at least":
        finding = "above"
    return Comparison(claim=claim, way=way, measured=one, finding=finding, ratio=one.value / low if low else None)


def read_measured(tree: Mapping[str, Any], *, file: str) -> list[Measured]:
    """Out of JSON: `{"measured": [{"what": "read", "per": "node", "value": 11.2, "unit": "GB/s"}]}`."""
    if not isinstance(tree, Mapping):
        raise UsageError("not a report of measurements", where=file, expected='an object with "measured"')
    found = []
    for table in Table(tree, file=file).tables("measured"):
        what, unit = table.choice("what", MEASURES), table.choice("unit", tuple(UNITS))
        value = table.number("value", 0, 1e18)
        if what is None or unit is None or value is None:
            raise table.error("value", expected="what, value and unit", found="not all of them")
        per = table.choice("per", PERS) or ""
        found.append(Measured(what=what, per=per, value=value * UNITS[unit][0], how=table.text("how", 400) or ""))
    return found
