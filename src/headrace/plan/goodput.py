"""Which share of the time trains, and which is lost to what: the formulas, in ranges.

These turn. Where failures come so often that little or nothing trains over any storage, there is little left that
storage could cost: `what storage costs` goes up as failures come more often, and down again. An interval that is given
may be too short and too long; where it is shorter than a save takes, slower storage makes it longer, and better. So
their ends are not at corners: `headrace.plan.extremes` finds them.
"""

from __future__ import annotations

from collections.abc import Mapping

from headrace.plan import units
from headrace.plan.extremes import Extremes
from headrace.plan.quantities import Formula, Range
from headrace.plan.situation import Situation, goodput, storage_share
from headrace.plan.units import Unit

SOURCE = "MLPerf Storage's utilisation, Young's and Daly's loss; first order"
TEXT = "busy * (1 - blocked / interval) * (1 - (interval / 2 + committed + load + other) / mtbf)"

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


def _formula(result: str, text: str, what: str, *, synchronous: bool, given_interval: bool) -> Formula:
    function = {"goodput": goodput, "storage": storage_share}.get(what)

    def of(**values: float) -> float:
        here = situation({name.replace("_", " "): v for name, v in values.items()}, synchronous=synchronous)
        return float(function(here) if function else getattr(here.shares(), what))

    return Formula(
        result=result, text=text, unit=units.SHARE, source=SOURCE, function=of,
        symbols=symbols(synchronous=synchronous, given_interval=given_interval),
        extremes=Extremes(what, synchronous=synchronous).within,
    )  # fmt: skip


def formulas(*, synchronous: bool, given_interval: bool) -> dict[str, Formula]:
    """By name: "storage", "goodput", and of `Shares` what is lost to what."""
    kinds = {"synchronous": synchronous, "given_interval": given_interval}
    apart = ", saves no further apart than here" if given_interval else ""
    busy = "busy = min(1, read rate / needed), committed = size / write rate, load = restart bytes / read rate"
    return {
        "goodput": _formula("share of the time that trains", f"{TEXT}; {busy}", "goodput", **kinds),
        "storage": _formula(
            "what storage costs of it", f"goodput over storage that takes no time{apart} - goodput", "storage", **kinds
        ),
        "data_wait": _formula("lost to waiting for data", "the factor of busy", "data_wait", **kinds),
        "saves": _formula("lost to saves that stop training", "the factor of blocked", "saves", **kinds),
        "rework": _formula("lost to work done again", "(interval / 2 + committed) / mtbf", "rework", **kinds),
        "restarts": _formula("lost to restarts", "(load + other) / mtbf", "restarts", **kinds),
    }


def put(ranges: Mapping[str, Range], *, synchronous: bool, given_interval: bool) -> dict[str, Range]:
    """Those of `ranges` that the formulas want."""
    return {name: ranges[name] for name in symbols(synchronous=synchronous, given_interval=given_interval)}
