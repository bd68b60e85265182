"""What was measured against what a provider claims. Pure: whoever measures (`doctor`, `bench`) hands the figures in.

Three verdicts, and each says why:

    met                         as much as is claimed, or a limit that was not passed (which promises nothing)
    below                       less than is claimed, by more than two runs of one benchmark may differ
    cannot be measured here     nothing was measured, or what was measured says nothing of the claim: one node cannot
                                show that all of them together would not get more
"""

from __future__ import annotations

import datetime
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace.errors import UsageError
from headrace.fabric.table import Table
from headrace.plan import units
from headrace.plan.catalogue import PERS, UNITS, Claim, Offering

#: Two runs of one benchmark may differ by this much (MLPerf Storage's rule).
TOLERANCE = 0.05
#: A link of which so much is used is full: headers take the rest.
_FULL = 0.8

MEASURES = ("read", "write", "iops", "capacity", "network")
MET, BELOW, CANNOT = "met", "below", "cannot be measured here"


@dataclass(frozen=True, kw_only=True)
class Measured:
    """A figure of `doctor` or `bench`. `value` in B/s, IOPS or B; `per` as in a claim ("node", "TiB", "" in all)."""

    what: str
    per: str
    value: float
    how: str = ""
    #: Why storage may have more than this; "" where it has not. Then less than is claimed says nothing.
    held_back: str = ""


@dataclass(frozen=True, kw_only=True)
class Here:
    """The node that measured, and the storage: what a figure per node says of claims per GPU, TiB or volume.

    `None`: not known; then claims of that kind cannot be measured here.
    """

    gpus: int | None = None
    size_bytes: float | None = None
    #: Devices that the storage is made of.
    devices: int = 1
    #: B/s of the link by which this node reaches it, and its name.
    link: float | None = None
    link_name: str = ""
    #: Why nothing was measured, by what: "read", "write", "iops", "capacity", "network".
    missing: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True, kw_only=True)
class Comparison:
    """`verdict`: "met", "below" or "cannot be measured here"; `why`: what that rests on, or what stands in the way."""

    claim: Claim
    way: str
    measured: Measured | None
    verdict: str
    why: str
    #: Measured over claimed; None where nothing was measured.
    ratio: float | None

    @property
    def figure(self) -> str:
        """What was measured, in the unit of the claim."""
        if self.measured is None:
            return ""
        factor, base = UNITS[self.claim.unit]
        per = f" per {self.measured.per}" if self.measured.per else ""
        return f"{units.significant(self.measured.value / factor)} {self.claim.unit if base else ''}".strip() + per

    def __str__(self) -> str:
        if self.measured is None or self.ratio is None:
            return f"{self.way}: {self.verdict}: {self.why}; claimed: {self.claim}"
        share = units.significant(100 * self.ratio)
        return f"{self.way}: {self.verdict}: measured {self.figure}, {share} % of what is claimed: {self.claim}"

    def to_json(self, today: datetime.date) -> dict[str, Any]:
        """`measured` and `claimed` in B/s, IOPS or B."""
        return {
            "way": self.way, "verdict": self.verdict, "why": self.why, "ratio": self.ratio,
            "measured": None if self.measured is None else self.measured.value,
            "how": None if self.measured is None else self.measured.how,
            "claimed": list(self.claim.ends()), "claim": str(self.claim), **self.claim.word.to_json(today),
        }  # fmt: skip


def compare(offering: Offering, measured: Iterable[Measured], here: Here | None = None) -> list[Comparison]:
    """Each claim of a figure that can be measured, with the measured one of the same kind, or with what one node
    measured (`per` "node"), put as the claim has it. Prices are left out; of two figures of one kind the last counts.
    """
    by_kind = {(one.what, one.per): one for one in measured}
    found = []
    for claim in offering.claims:
        ways = ("read", "write") if claim.what == "throughput" else (claim.what,)
        found += [_compare(claim, way, by_kind, here or Here()) for way in ways if way in MEASURES]
    return found


def _compare(claim: Claim, way: str, by_kind: Mapping[tuple[str, str], Measured], here: Here) -> Comparison:
    def cannot(why: str, one: Measured | None = None, ratio: float | None = None) -> Comparison:
        return Comparison(claim=claim, way=way, measured=one, verdict=CANNOT, why=why, ratio=ratio)

    low, high = claim.ends()
    one, part = by_kind.get((way, claim.per)), ""
    if one is None:
        base = by_kind.get((way, "volume" if way == "capacity" else "node"))
        if base is None:
            return cannot(here.missing.get(way, "nothing was measured"))
        try:
            one, part = _as_claimed(claim, base, here)
        except _Unknown as unknown:
            return cannot(str(unknown))
    claimed = high if claim.bound == "at most" else low
    if not claimed:
        return cannot("nothing is claimed: 0", one)
    ratio = one.value / claimed
    share = f"{units.significant(100 * ratio)} %"

    def met(why: str) -> Comparison:
        return Comparison(claim=claim, way=way, measured=one, verdict=MET, why=why, ratio=ratio)

    if claim.bound == "at most":
        if ratio > 1 + TOLERANCE:
            return met(f"more than the limit that is claimed: {share} of it")
        return met(f"a limit promises nothing: this is {share} of it")
    if ratio >= 1 - TOLERANCE:
        return met("the lowest of the tiers; which one was bought is not to be seen" if claim.bound == "tiers" else "")
    if part := part or one.held_back:
        return cannot(f"{part}: {share} of the claim", one, ratio)
    rate = by_kind.get((way, "node"))
    if way in ("read", "write") and here.link is not None and rate is not None and rate.value > _FULL * here.link:
        link = units.show(here.link, units.LINK)
        return cannot(
            f"the link of this node, {here.link_name} with {link}, was full: {share} of the claim", one, ratio
        )
    why = f"{share} of " + ("the lowest tier" if claim.bound == "tiers" else "the claim")
    return Comparison(claim=claim, way=way, measured=one, verdict=BELOW, why=why, ratio=ratio)


class _Unknown(Exception):
    """Why a figure of this node says nothing of a claim."""


def _as_claimed(claim: Claim, base: Measured, here: Here) -> tuple[Measured, str]:
    """A figure of this node as the claim has it; and, where there may be more than this node saw, what it saw."""
    value, part = base.value, ""
    if claim.per == "gpu":
        if not here.gpus:
            raise _Unknown("the claim is per GPU, and this node shows none")
        value /= here.gpus
    elif claim.per == "device":
        if here.devices != 1:
            raise _Unknown(f"the claim is per device, and this is made of {here.devices}: name one of them")
    elif claim.per == "TiB":
        if not here.size_bytes:
            raise _Unknown("the claim is per TiB, and the size is not known")
        value /= here.size_bytes / 2**40
        part = "one node reads it, and the claim is of all nodes together"
    elif claim.per == "":
        part = "" if claim.what == "capacity" else "one node reads it, and the claim is of all nodes together"
    elif claim.per == "node" and claim.what == "capacity":
        part = "this is one volume of the node, and the claim is of all of them"
    elif claim.per not in ("node", "instance", "volume"):
        raise _Unknown(f"the claim is per {claim.per}, and how much was bought is not to be seen")
    return Measured(what=base.what, per=claim.per, value=value, how=base.how, held_back=base.held_back), part


def read_measured(tree: Mapping[str, Any], *, file: str) -> list[Measured]:
    """Out of JSON: `{"measured": [{"what": "read", "per": "node", "value": 11.2, "unit": "GB/s"}]}`."""
    if not isinstance(tree, Mapping):
        raise UsageError("not a report of measurements", where=file, expected='an object with "measured"')
    found = []
    for table in Table(tree, file=file).tables("measured"):
        table.only("what", "per", "value", "unit", "how", "held_back")
        what, unit = table.choice("what", MEASURES), table.choice("unit", tuple(UNITS))
        value = table.number("value", 0, 1e18)
        if what is None or unit is None or value is None:
            raise table.error("value", expected="what, value and unit", found="not all of them")
        wanted = {"iops": "IOPS", "capacity": "B"}.get(what, "B/s")
        if UNITS[unit][1] != wanted:
            raise table.error("unit", expected=f"a unit of {what}", found=unit)
        per = table.choice("per", PERS) or ""
        how, held_back = (table.text(key, 400) or "" for key in ("how", "held_back"))
        found.append(Measured(what=what, per=per, value=value * UNITS[unit][0], how=how, held_back=held_back))
    if not found:
        raise UsageError("nothing was measured in it", where=file, expected='a list "measured" that is not empty')
    return found
