"""What could be changed, and what each change alone would win, in points of the time that trains."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from headrace.plan import checkpoint, goodput, units
from headrace.plan.extremes import Change, Extremes
from headrace.plan.quantities import Answer, Formula, Range
from headrace.plan.situation import Shares, Situation
from headrace.plan.situation import goodput as trains


@dataclass(frozen=True, kw_only=True)
class Goals:
    """What is good enough: plain numbers, likely ones."""

    lost: float
    part: float
    restart_s: float | None

    def read(self, here: Situation) -> float:
        """What training and restarts ask for, B/s in all."""
        time = self.lost * here.mtbf_s if self.restart_s is None else min(self.restart_s, self.lost * here.mtbf_s)
        return max(here.feed_needed, here.restart_bytes / time)

    def write(self, here: Situation) -> float:
        if here.interval_s is not None:
            return here.size / ((self.lost if here.synchronous else self.part) * here.interval_s)
        if here.synchronous:
            return float(checkpoint.WRITE_SYNCHRONOUS.function(here.size, self.lost, here.mtbf_s))
        return float(checkpoint.WRITE_ASYNCHRONOUS.function(here.size, self.part, self.lost, here.mtbf_s))


@dataclass(frozen=True, kw_only=True)
class Cure:
    name: str
    #: In words, an imperative.
    text: str
    gain: Answer
    #: Shares of the time once it is done, as likely.
    shares: Shares

    def to_json(self) -> dict[str, Any]:
        return {"name": self.name, "do": self.text, "gain": self.gain.value.to_json(), "trains": self.shares.trains}


def cures(
    ranges: Mapping[str, Range], goals: Goals, *, synchronous: bool, given_interval: bool, nodes: float
) -> list[Cure]:
    """Those that apply, the one that wins most first, and "all" of them last where there are several.

    `ranges`: all symbols of `goodput.SYMBOLS`, "interval" only where it is given.
    """
    here = goodput.situation({name: value.likely for name, value in ranges.items()}, synchronous=synchronous)
    found: list[tuple[str, str, Change]] = []
    read, write = goals.read(here), goals.write(here)
    if here.read < read:
        change: Change = lambda s: replace(s, read=max(s.read, goals.read(s)))  # noqa: E731
        found.append(("read", f"storage that delivers {_rates(read, here.read, nodes)}", change))
    if here.write < write:
        change = lambda s: replace(s, write=max(s.write, goals.write(s)))  # noqa: E731
        found.append(("write", f"storage that takes {_rates(write, here.write, nodes)}", change))
    if synchronous:
        found.append(
            ("asynchronous", "asynchronous saves: training stands only while they are copied",
             lambda s: replace(s, synchronous=False))
        )  # fmt: skip
    if given_interval:
        best = replace(here, interval_s=None).chosen_interval_s
        text = f"a save every {units.show(best, units.SECONDS)} (now {units.show(here.interval_s or 0, units.SECONDS)})"
        found.append(("interval", text, lambda s: replace(s, interval_s=None)))
    result = [_cure(name, text, change, ranges, synchronous) for name, text, change in found]
    result = sorted((cure for cure in result if cure.gain.value.likely > 0), key=lambda c: -c.gain.value.likely)
    rates = [one for one in found if one[0] in ("read", "write")]
    if not result and len(rates) == 2:
        # Each of them alone wins nothing, where the other one still takes all the time.
        (_, delivers, reads), (_, takes, writes) = rates
        text = f"{delivers}, and {takes.removeprefix('storage that ')}"
        both = _cure("read and write", text, lambda s: writes(reads(s)), ranges, synchronous)
        result = [both] if both.gain.value.likely > 0 else []
    if len(result) > 1:
        names = {cure.name for cure in result}
        changes = [change for name, _, change in found if name in names]
        # What is done at once comes first: rates are asked for by what is left.
        changes.reverse()

        def every(situation: Situation) -> Situation:
            for change in changes:
                situation = change(situation)
            return situation

        result.append(_cure("all", "all of these", every, ranges, synchronous))
    return result


def _cure(name: str, text: str, change: Change, ranges: Mapping[str, Range], synchronous: bool) -> Cure:
    def gain(**values: float) -> float:
        here = goodput.situation({key.replace("_", " "): v for key, v in values.items()}, synchronous=synchronous)
        return trains(change(here)) - trains(here)

    formula = Formula(
        result=f"won by {text}", text="goodput then - goodput now", unit=units.SHARE,
        symbols={key: value.unit for key, value in ranges.items()}, source=goodput.SOURCE, function=gain,
        extremes=Extremes("gain", synchronous=synchronous, change=change).within,
    )  # fmt: skip
    likely = goodput.situation({key: value.likely for key, value in ranges.items()}, synchronous=synchronous)
    return Cure(name=name, text=text, gain=formula.put(ranges), shares=change(likely).shares())


def _rate(value: float) -> str:
    return units.show(value, units.RATE) if math.isfinite(value) else "without end"


def _rates(value: float, there: float, nodes: float) -> str:
    now = f"(now {_rate(there)})"
    return f"{_rate(value)} {now}" if nodes <= 1 else f"{_rate(value)} in all {now}, {_rate(value / nodes)} a node"
