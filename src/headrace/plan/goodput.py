"""Which share of the time trains, and which is lost to what.

    goodput = busy * (1 - blocked / interval) * (1 - (interval / 2 + committed + load + other) / mtbf)

`busy` is the accelerator utilisation of MLPerf Storage; the rest is first order, as Young's. Each part is a share of
the whole time: a failure takes its share first, then saves, then waiting for data.

These turn. Where failures come so often that little or nothing trains over any storage, there is little left that
storage could cost: `what storage costs` goes up as failures come more often, and down again. An interval that is given
may be too short and too long; where it is shorter than a save takes, slower storage makes it longer, and better.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace

from headrace.checkpoint.interval import best_interval
from headrace.plan import units
from headrace.plan.quantities import Formula, Range
from headrace.plan.units import Unit

SOURCE = "MLPerf Storage's utilisation, Young's and Daly's loss; first order"
TEXT = "busy * (1 - blocked / interval) * (1 - (interval / 2 + committed + load + other) / mtbf)"


@dataclass(frozen=True, kw_only=True)
class Situation:
    """A job over a storage: B, B/s, s, as plain numbers. `interval_s` None: the best one is taken."""

    feed_needed: float
    read: float
    write: float
    size: float
    share: float
    copy: float
    mtbf_s: float
    restart_bytes: float
    other_s: float
    synchronous: bool
    interval_s: float | None = None

    @property
    def blocked_s(self) -> float:
        return self.size / self.write if self.synchronous else self.share / self.copy

    @property
    def committed_s(self) -> float:
        return self.size / self.write

    @property
    def chosen_interval_s(self) -> float:
        """A save cannot begin before the one before it is committed."""
        if self.interval_s is not None:
            return max(self.interval_s, self.committed_s)
        return best_interval(
            blocked_s=self.blocked_s, committed_s=self.committed_s, mtbf_s=self.mtbf_s
        ).seconds  # fmt: skip

    def over_ideal_storage(self) -> Situation:
        """The same job where storage takes no time at all. An asynchronous save still copies."""
        return replace(self, read=math.inf, write=math.inf)

    def shares(self) -> Shares:
        interval = self.chosen_interval_s
        rework = (interval / 2 + self.committed_s) / self.mtbf_s
        restart = (self.restart_bytes / self.read + self.other_s) / self.mtbf_s
        # More than all cannot be lost: then the job gets nowhere, and what is lost is lost to both in proportion.
        failures = min(1.0, rework + restart)
        both = rework + restart or 1.0
        left = 1.0 - failures
        saves = left * (min(1.0, self.blocked_s / interval) if interval else 0.0)
        left -= saves
        waits = left * (1.0 - min(1.0, self.read / self.feed_needed)) if self.feed_needed else 0.0
        return Shares(
            data_wait=waits, saves=saves, rework=failures * rework / both, restarts=failures * restart / both,
            trains=left - waits,
        )  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Shares:
    """Of the whole time; they add up to 1."""

    data_wait: float
    saves: float
    rework: float
    restarts: float
    trains: float


def goodput(situation: Situation) -> float:
    return situation.shares().trains


def storage_share(situation: Situation) -> float:
    """Share of the time that would train if storage took none: what storage costs."""
    return goodput(situation.over_ideal_storage()) - goodput(situation)


#: What a situation is made of, by the names that formulas and tables use.
SYMBOLS: dict[str, tuple[str, Unit]] = {
    "needed": ("feed_needed", units.RATE),
    "read rate": ("read", units.RATE),
    "write rate": ("write", units.RATE),
    "size": ("size", units.BYTES),
    "share of a rank": ("share", units.SHARE_OF_GPU),
    "copy rate": ("copy", units.RATE_PER_GPU),
    "mtbf": ("mtbf_s", units.SECONDS),
    "restart bytes": ("restart_bytes", units.BYTES),
    "other": ("other_s", units.SECONDS),
    "interval": ("interval_s", units.SECONDS),
}


def symbols(*, synchronous: bool, given_interval: bool) -> dict[str, Unit]:
    left_out = {"share of a rank", "copy rate"} if synchronous else set()
    if not given_interval:
        left_out.add("interval")
    return {name: unit for name, (_, unit) in SYMBOLS.items() if name not in left_out}


def situation(values: Mapping[str, float], *, synchronous: bool) -> Situation:
    """Out of values by the names of `SYMBOLS`."""
    fields = {"share": 1.0, "copy": 1.0, "interval_s": None}
    fields |= {SYMBOLS[name][0]: value for name, value in values.items()}
    return Situation(synchronous=synchronous, **fields)  # type: ignore[arg-type]


#: By what formulas turn. With others some turn a little, where next to nothing trains.
TURNS = {
    "storage": {"mtbf", "interval"}, "goodput": {"interval"},
    "data_wait": {"read rate", "interval"}, "saves": {"mtbf", "size", "write rate"}, "rework": {"mtbf"},
    "restarts": set[str](),
}  # fmt: skip
#: And where an interval is given that may be shorter than a save takes.
_TURNS_GIVEN = {"write rate", "size"}


def turns(what: str, *, given_interval: bool) -> frozenset[str]:
    return frozenset(TURNS[what] | (_TURNS_GIVEN if given_interval else set()))


def _formula(result: str, text: str, what: str, *, synchronous: bool, given_interval: bool) -> Formula:
    function = {"goodput": goodput, "storage": storage_share}.get(what)

    def of(**values: float) -> float:
        here = situation({name.replace("_", " "): v for name, v in values.items()}, synchronous=synchronous)
        return float(function(here) if function else getattr(here.shares(), what))

    return Formula(
        result=result, text=text, unit=units.SHARE, source=SOURCE, function=of,
        symbols=symbols(synchronous=synchronous, given_interval=given_interval),
        turns=turns(what, given_interval=given_interval),
    )  # fmt: skip


def formulas(*, synchronous: bool, given_interval: bool) -> dict[str, Formula]:
    """By name: "storage", "goodput", and of `Shares` what is lost to what."""
    kinds = {"synchronous": synchronous, "given_interval": given_interval}
    busy = "busy = min(1, read rate / needed), committed = size / write rate, load = restart bytes / read rate"
    return {
        "goodput": _formula("share of the time that trains", f"{TEXT}; {busy}", "goodput", **kinds),
        "storage": _formula(
            "what storage costs of it", "goodput over storage that takes no time - goodput", "storage", **kinds
        ),
        "data_wait": _formula("lost to waiting for data", "the factor of busy", "data_wait", **kinds),
        "saves": _formula("lost to saves that stop training", "the factor of blocked", "saves", **kinds),
        "rework": _formula("lost to work done again", "(interval / 2 + committed) / mtbf", "rework", **kinds),
        "restarts": _formula("lost to restarts", "(load + other) / mtbf", "restarts", **kinds),
    }


def put(ranges: Mapping[str, Range], *, synchronous: bool, given_interval: bool) -> dict[str, Range]:
    """Those of `ranges` that the formulas want."""
    return {name: ranges[name] for name in symbols(synchronous=synchronous, given_interval=given_interval)}
