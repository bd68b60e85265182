"""One outcome of those of all ranks: what the path gave to all of them together.

Rates add where all ranks ran: over the window from the last start to the first end, by their series, on rank 0's clock.
Latencies come from the ranks' histograms put together. Times of whole phases (a save, a load) are the longest rank's,
as a job waits for it. The slowest rank is named.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Sequence
from dataclasses import fields, replace
from typing import Any

import numpy as np

from headrace.bench.figures import BYTES_PER_S, PER_S, SECONDS, Figure, Latencies, Outcome, Series, to_json
from headrace.bench.histogram import LEAST, MOST, added, quantile
from headrace.bench.meeting.together import Meeting, printable
from headrace.bench.sustained import span
from headrace.errors import DeviceTimeout, MeetingFailed
from headrace.measure.statistics import median
from headrace.units import format_rate

#: Slots and buckets of one rank, at most: what it says is not believed beyond.
_MOST_SLOTS = 1 << 20
#: A rank that is so much slower than the median is named as the slowest.
_SLOWER = 0.9
_QUANTILES = {"p50": 0.5, "p90": 0.9, "p99": 0.99, "p99.9": 0.999}


def round_of(
    meeting: Meeting, run: Callable[[], Outcome], *, what: Any, within_s: float, end_s: float = math.inf
) -> Outcome | None:
    """One round on all ranks: they start it together, and each has the outcome of all. None on every rank where one
    gave its part up because the time of the run is over: `DeviceTimeout`, from `end_s` (`time.monotonic`) on.

    `what`: what is run, the same on every rank. `within_s`: how long they wait for each other, before and after it.
    """
    begin_s = meeting.start(what, within_s=within_s)
    time.sleep(max(0.0, begin_s - time.monotonic()))
    own: Outcome | None
    try:
        own = run()
    except DeviceTimeout:
        if time.monotonic() < end_s:
            raise
        own = None
    # From seconds since 1970 here to rank 0's monotonic clock.
    shift_s = meeting.clock_s - (time.time() - time.monotonic())
    value = {"outcome": None if own is None else to_json(own), "shift_s": shift_s}

    def answer(values: list[Any]) -> Any:
        if any(isinstance(one, dict) and one.get("outcome", "") is None for one in values):
            return None
        found = [read(one, meeting.names([rank])) for rank, one in enumerate(values)]
        return to_json(merged([one for one, _ in found], [shift for _, shift in found], meeting))

    said = meeting.gather(value, answer, within_s=within_s)
    return None if said is None else outcome_of(said, "rank 0")


def merged(outcomes: Sequence[Outcome], shifts_s: Sequence[float], meeting: Meeting) -> Outcome:
    """`shifts_s`: what brings each rank's series to one clock."""
    first = outcomes[0]
    names = {(one.pattern, one.work, one.flows) for one in outcomes}
    if len(names) != 1:
        raise MeetingFailed("ranks measured different work", found=str(sorted(map(str, names)))[:200])
    starts = [one.series.started_s + shift for one, shift in zip(outcomes, shifts_s, strict=True) if one.series]
    series, window = None, None
    if len(starts) == len(outcomes):
        window = _window(outcomes, starts)
        series = _added(outcomes, starts, shifts_s[0])
    latencies = _latencies([one.latencies for one in outcomes])
    figures = [_figure(figure, outcomes, window, latencies) for figure in first.figures]
    notes = list(dict.fromkeys(note for one in outcomes for note in one.notes))
    notes += _told(outcomes, starts, window, meeting)
    return replace(
        first, bytes=sum(one.bytes for one in outcomes), seconds=max(one.seconds for one in outcomes), series=series,
        latencies=latencies, figures=figures, notes=notes, nodes=len(set(meeting.hosts)), rounds={},
    )  # fmt: skip


def _figure(
    figure: Figure, outcomes: Sequence[Outcome], window: tuple[float, float, list[float]] | None,
    latencies: Latencies | None,
) -> Figure:  # fmt: skip
    values = [_value(one, figure.name) for one in outcomes]
    if figure.unit == BYTES_PER_S and window is not None and figure is outcomes[0].main:
        return replace(figure, value=sum(window[2]), note=_noted(figure, "added where all ranks ran"))
    if figure.unit in (BYTES_PER_S, PER_S):
        return replace(figure, value=sum(values), note=_noted(figure, "added"))
    if figure.unit == SECONDS and figure.name in _QUANTILES and latencies is not None and latencies.histogram:
        return replace(figure, value=quantile(latencies.histogram, _QUANTILES[figure.name]))
    if figure.unit == SECONDS:
        return replace(figure, value=max(values), note=_noted(figure, "of the slowest rank"))
    return replace(figure, value=median(values), note=_noted(figure, "median of ranks"))


def _window(outcomes: Sequence[Outcome], starts: Sequence[float]) -> tuple[float, float, list[float]] | None:
    """From when to when all ranks ran, and the bytes a second of each within it; None where they did not overlap."""
    begin = max(starts)
    end = min(start + one.seconds for one, start in zip(outcomes, starts, strict=True))
    if end - begin <= 0:
        return None
    rates = []
    for one, start in zip(outcomes, starts, strict=True):
        assert one.series is not None
        counts = np.asarray(one.series.bytes, np.float64)
        # Of the slots at the edges the share that lies inside; the last slot ends where the rank ended.
        lows = start + np.arange(len(counts)) * one.series.every_s
        highs = np.minimum(lows + one.series.every_s, max(start + one.seconds, start + 1e-9))
        widths = np.maximum(highs - lows, 1e-9)
        inside = np.clip(np.minimum(highs, end) - np.maximum(lows, begin), 0.0, None) / widths
        rates.append(float((counts * inside).sum()) / (end - begin))
    return begin, end, rates


def _added(outcomes: Sequence[Outcome], starts: Sequence[float], back_s: float) -> Series | None:
    """On the slots of the rank that began first, as wall time of rank 0."""
    every = max(one.series.every_s for one in outcomes if one.series)
    begin = min(starts)
    length = 1
    for one, start in zip(outcomes, starts, strict=True):
        assert one.series is not None
        length = max(length, int((start - begin + len(one.series.bytes) * one.series.every_s) / every) + 1)
    if length > _MOST_SLOTS:
        return None
    total = np.zeros(length)
    for one, start in zip(outcomes, starts, strict=True):
        assert one.series is not None
        middles = start - begin + (np.arange(len(one.series.bytes)) + 0.5) * one.series.every_s
        np.add.at(total, (middles / every).astype(np.int64), np.asarray(one.series.bytes, np.float64))
    return Series(started_s=begin - back_s, every_s=every, bytes=[int(one) for one in total])


def _latencies(found: Sequence[Latencies | None]) -> Latencies | None:
    there = [one for one in found if one is not None]
    if not there:
        return None
    histogram = added(one.histogram for one in there)
    p50, p90, p99, p999 = (quantile(histogram, q) for q in _QUANTILES.values())
    return Latencies(
        count=sum(one.count for one in there), p50=p50, p90=p90, p99=p99, p999=p999,
        max=max(one.max for one in there), histogram=histogram,
    )  # fmt: skip


def _told(
    outcomes: Sequence[Outcome], starts: Sequence[float], window: tuple[float, float, list[float]] | None,
    meeting: Meeting,
) -> list[str]:  # fmt: skip
    nodes = len(set(meeting.hosts))
    told = [f"{len(outcomes)} ranks on {nodes} node{'' if nodes == 1 else 's'}"]
    rates = window[2] if window else [one.bytes / one.seconds if one.seconds > 0 else 0.0 for one in outcomes]
    slowest = int(np.argmin(rates))
    if rates[slowest] < _SLOWER * median(rates):
        told.append(
            f"the slowest is {meeting.names([slowest])}: {format_rate(rates[slowest])}, median "
            f"{format_rate(median(rates))}"
        )
    if window is None and len(starts) == len(outcomes):
        told.append("the ranks never ran at the same moment: their rates are added though one may have had it alone")
    elif window is not None:
        longest = max(one.seconds for one in outcomes)
        if window[1] - window[0] < 0.8 * longest:
            told.append(f"all ranks ran for {span(window[1] - window[0])} of {span(longest)}; rates are of that time")
    if meeting.clock_error_s is None:
        told.append("ranks met in a folder: their clocks are taken to agree")
    return told


# ---- what a rank says ----


def read(value: Any, who: str) -> tuple[Outcome, float]:
    if not isinstance(value, dict) or not _number(value.get("shift_s")):
        raise MeetingFailed(f"{who} sent no outcome")
    return outcome_of(value.get("outcome"), who), float(value["shift_s"])


def outcome_of(value: Any, who: str) -> Outcome:
    """From JSON; `MeetingFailed` where it is none that can be."""
    try:
        return _outcome(value)
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise MeetingFailed(f"{who} sent no outcome", found=printable(error, 100)) from None


def _outcome(value: Any) -> Outcome:
    given = {name: value[name] for name in (one.name for one in fields(Outcome)) if name in value}
    for name in ("pattern", "path", "work", "cache", "durable"):
        given[name] = printable(_of(str, given[name]), 500)
    for name in ("flows", "bytes", "nodes"):
        given[name] = _whole(given[name])
    given["seconds"] = _positive(given["seconds"])
    given["notes"] = tuple(printable(_of(str, note), 500) for note in _of(list, given["notes"])[:100])
    given["figures"] = tuple(_one_figure(one) for one in _of(list, given["figures"])[:100])
    given["rounds"] = {}
    if given["series"] is not None:
        series = given["series"]
        counts = [_whole(count) for count in _of(list, series["bytes"])[:_MOST_SLOTS]]
        every_s = _positive(series["every_s"])
        if every_s <= 0:
            raise ValueError("slots of no length")
        given["series"] = Series(started_s=_positive(series["started_s"]), every_s=every_s, bytes=counts)
    if given["latencies"] is not None:
        found = dict(given["latencies"])
        histogram = {_place(key): _whole(count) for key, count in _of(dict, found.pop("histogram")).items()}
        numbers = {name: _positive(found[name]) for name in ("p50", "p90", "p99", "p999", "max")}
        given["latencies"] = Latencies(count=_whole(found["count"]), histogram=histogram, **numbers)
    return Outcome(**given)


def _one_figure(value: Any) -> Figure:
    number = value["value"]
    return Figure(
        name=printable(_of(str, value["name"]), 80), unit=printable(_of(str, value["unit"]), 20),
        value=math.nan if number is None else float(_of((int, float), number)), n=_whole(value["n"]),
        note=printable(_of(str, value["note"]), 500),
    )  # fmt: skip


def _of(kind: Any, value: Any) -> Any:
    if not isinstance(value, kind) or isinstance(value, bool):
        raise ValueError(f"not what is expected: {value!r:.60}")
    return value


def _whole(value: Any) -> int:
    if not 0 <= _of(int, value) < 1 << 63:
        raise ValueError(f"out of range: {value}")
    return int(value)


def _positive(value: Any) -> float:
    if not 0 <= _of((int, float), value) < 1e18:
        raise ValueError(f"out of range: {value}")
    return float(value)


def _place(text: str) -> int:
    number = int(text)
    if not LEAST <= number <= MOST:
        raise ValueError(f"no bucket: {number}")
    return number


def _number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _value(outcome: Outcome, name: str) -> float:
    try:
        return outcome.figure(name).value
    except KeyError:
        return 0.0


def _noted(figure: Figure, text: str) -> str:
    return f"{figure.note}; {text}" if figure.note else text
