"""Where a rate changes for good: storage that is fast at first and slower later.

A medium that grows warm, a cache of writes that is full, a bucket of burst credits that is empty: each shows as a rate
that holds for a while, then falls and stays there. `segments` finds such levels in bytes per slot of time, `judge` says
in words what they mean. Neither is led by noise, nor by one stall.

How. The rates become ranks, so that a slot of any value counts no more than the lowest or the highest one: a stall is
one low rank. Levels are then the partition of the run that makes the Kruskal-Wallis statistic of its parts greatest,
less a penalty for each change; each bound then moves to where the slots fit their levels best. Ranks as in Lung-Yut-
Fong, Lévy-Leduc and Cappé, "Homogeneity and change-point detection tests for multivariate data using rank statistics"
(Journal de la SFdS 156(4), 2015), the exact optimum by Jackson et al., "An algorithm for optimal partitioning of data
on an interval" (IEEE Signal Processing Letters 12(2), 2005), which is PELT (Killick, Fearnhead, Eckley, JASA 107, 2012)
without its pruning: there are a few hundred slots. Under noise a change adds a chi-square of one degree of freedom, so
a penalty of 4 ln n lets through about one run in a thousand. Noise of storage is not independent from slot to slot, so
a change must be large, too: `LEAST_CHANGE` of the higher level, and twice the spread of the slots, up to four times
where what the levels leave over hangs together from slot to slot.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from headrace.errors import UsageError

#: A change of less than this share of the higher level is none: storage differs by so much from minute to minute.
LEAST_CHANGE = 0.15
#: Slots of the shortest level, and its share of the run: what is shorter is a stall.
LEAST_SLOTS = 5
LEAST_SHARE = 0.03
#: Slots that are looked at; longer series are added up to fewer of them.
MOST_SLOTS = 800
#: Fewer slots than this say nothing about levels.
FEWEST_SLOTS = 12
#: A slot below this share of its level is one in which the path stood, or nearly.
STALL = 0.25
#: A last level below this share of the highest one: nothing moves any more.
STOPPED = 0.01

#: Slots without bytes are told from a second on, or from a hundredth of the run.
_TOLD_S = 1.0
_PENALTY = 4.0
_SPREADS = 2.0
_MOST_MEMORY = 2.0
#: The standard deviation of a normal distribution, by its median absolute deviation.
_SIGMA = 1.4826


@dataclass(frozen=True, kw_only=True)
class Segment:
    """A level: from `start_s` on for `seconds`, `bytes` in all, at `rate` (median of its slots, bytes a second).

    `noise`: the spread of its slots as a share of the rate (median absolute deviation, as a standard deviation).
    """

    start_s: float
    seconds: float
    rate: float
    noise: float
    bytes: float

    @property
    def end_s(self) -> float:
        return self.start_s + self.seconds


@dataclass(frozen=True, kw_only=True)
class Judgement:
    """What levels mean. `kind`: "steady", "throttled", "warmed", "paused" (it stood for a while, and went on as
    before), "stopped" (nothing more moved), "changing", or "short" (too few slots to say).

    `credit_bytes`: what was moved above the last level before the rate fell to it; None unless throttled.
    `stalls`: slots in which nearly nothing moved.
    """

    kind: str
    segments: tuple[Segment, ...]
    sentence: str
    stalls: int = 0
    credit_bytes: float | None = None

    @property
    def sustained_rate(self) -> float:
        """What lasts: the rate of the last level, bytes a second."""
        return self.segments[-1].rate if self.segments else 0.0


def segments(counts: Sequence[float], every_s: float) -> tuple[Segment, ...]:
    """Levels of a series of bytes per slot of `every_s` seconds, in order and without gaps; one where nothing changes.

    The last slot must be a whole one. Nothing where there are no slots. `UsageError`: no time per slot, or counts that
    are not finite or below 0.
    """
    series, width_s = _prepared(counts, every_s)
    return _levels(series, width_s)


def judge(counts: Sequence[float], every_s: float, what: str = "") -> Judgement:
    """What the levels of a series mean, in one sentence; `what`: what ran, put in front of it ("reading")."""
    series, width_s = _prepared(counts, every_s)
    levels = _levels(series, width_s)
    front = f"{what}: " if what else ""
    if len(series) < FEWEST_SLOTS:
        total = float(series.sum()) / (len(series) * width_s) if len(series) else 0.0
        text = f"{front}{rate(total)}; it is too short ({len(series)} of {FEWEST_SLOTS} slots) to see whether it lasts"
        return Judgement(kind="short", segments=levels, sentence=text)
    kind, credit = _kind(levels)
    stalls = sum(_stalled(series, level, width_s) for level in levels)
    text = front + _told(levels, kind, credit)
    if stalls * width_s >= _TOLD_S or stalls > 0.01 * len(series):
        text += f"; it stood nearly still for {span(stalls * width_s)} of {span(len(series) * width_s)}"
    return Judgement(kind=kind, segments=levels, sentence=text, stalls=stalls, credit_bytes=credit)


def rate(bytes_per_s: float) -> str:
    """2.1e9 -> `"2.1 GB/s"`: decimal, as links and media are sold."""
    return f"{size(bytes_per_s)}/s"


def size(count: float) -> str:
    """2.7e11 -> `"270 GB"`: decimal, two or three digits."""
    unit = "B"
    for larger in ("kB", "MB", "GB", "TB", "PB"):
        if abs(count) < 999.5:
            break
        count, unit = count / 1000, larger
    return f"{count:.1f} {unit}" if abs(count) < 9.95 and unit != "B" else f"{count:.0f} {unit}"


def span(seconds: float) -> str:
    """180 -> `"180 s"`, 0.25 -> `"0.25 s"`, 900 -> `"15 min"`."""
    if seconds < 10:
        return f"{seconds:.2g} s"
    return f"{seconds:.0f} s" if seconds < 600 else f"{seconds / 60:.0f} min"


# ---- the levels ----


def _prepared(counts: Sequence[float], every_s: float) -> tuple[np.ndarray, float]:
    if not (math.isfinite(every_s) and every_s > 0):
        raise UsageError("slots of a series", expected="seconds above 0", found=str(every_s))
    series = np.asarray(counts, dtype=np.float64)
    if series.ndim != 1 or not np.isfinite(series).all() or (series < 0).any():
        raise UsageError("a series of bytes per slot", expected="numbers of 0 and above")
    fold = math.ceil(len(series) / MOST_SLOTS)
    if fold > 1:
        whole = len(series) // fold * fold
        series = series[:whole].reshape(-1, fold).sum(axis=1)
    return series, every_s * max(1, fold)


def _levels(series: np.ndarray, width_s: float) -> tuple[Segment, ...]:
    if not len(series):
        return ()
    least = max(LEAST_SLOTS, math.ceil(LEAST_SHARE * len(series)))
    bounds = [0, len(series)]
    if len(series) >= max(FEWEST_SLOTS, 2 * least):
        ranks = _ranks(series)
        bounds = _moved(series, _partition(ranks, least))
        memory = _memory(ranks, bounds)
        # One that is shorter than a level by now was a stall, or noise, at its edge.
        bounds = [0, *(b for a, b in itertools.pairwise(bounds[:-1]) if b - a >= least), len(series)]
        if bounds[-1] - bounds[-2] < least and len(bounds) > 2:
            del bounds[-2]
        bounds = _merged(series, bounds, _SPREADS * min(math.sqrt(memory), _MOST_MEMORY))
    pairs = itertools.pairwise(bounds)
    return tuple(_segment(series[begin:end], begin, width_s) for begin, end in pairs)


def _segment(slots: np.ndarray, begin: int, width_s: float) -> Segment:
    middle = float(np.median(slots))
    return Segment(
        start_s=begin * width_s,
        seconds=len(slots) * width_s,
        rate=middle / width_s,
        noise=_spread(slots) / middle if middle else 0.0,
        bytes=float(slots.sum()),
    )


def _spread(slots: np.ndarray) -> float:
    return _SIGMA * float(np.median(np.abs(slots - np.median(slots))))


def _ranks(series: np.ndarray) -> np.ndarray:
    """Mid-ranks, centred and scaled so that the Kruskal-Wallis statistic of a part is (its sum)^2 / its length."""
    _, inverse, counts = np.unique(series, return_inverse=True, return_counts=True)
    last = np.cumsum(counts)
    middle = (last - (counts - 1) / 2)[inverse.ravel()]
    centred = middle - middle.mean()
    # With ties corrected: the variance that the ranks have, in place of that of 1..n.
    scale = math.sqrt(float((centred**2).sum()) / max(1, len(series) - 1))
    scaled: np.ndarray = centred / scale if scale else centred
    return scaled


def _memory(ranks: np.ndarray, bounds: list[int]) -> float:
    """By how much the mean of slots that hang together varies more than that of independent ones: (1 + r) / (1 - r),
    where r is the correlation of neighbours within the levels; from 1 on."""
    rest = np.concatenate([ranks[a:b] - ranks[a:b].mean() for a, b in itertools.pairwise(bounds)])
    whole = float((rest**2).sum())
    # Ranks have a variance of one: what remains of two flat levels is rounding.
    r = float((rest[1:] * rest[:-1]).sum()) / whole if whole > 1e-6 else 0.0
    return (1 + r) / (1 - r) if 0 < r < 0.99 else 1.0


def _partition(ranks: np.ndarray, least: int) -> list[int]:
    """Bounds of the best partition into parts of at least `least` slots."""
    count = len(ranks)
    sums = np.concatenate(([0.0], np.cumsum(ranks)))
    penalty = _PENALTY * math.log(count)
    best = np.full(count + 1, -np.inf)
    best[0] = penalty  # The first part is no change.
    before = np.zeros(count + 1, dtype=np.int64)
    for end in range(least, count + 1):
        begins = np.arange(0, end - least + 1)
        gains = best[begins] + (sums[end] - sums[begins]) ** 2 / (end - begins) - penalty
        before[end] = int(np.argmax(gains))
        best[end] = gains[before[end]]
    bounds = [count]
    while bounds[-1]:
        bounds.append(int(before[bounds[-1]]))
    return bounds[::-1]


def _moved(series: np.ndarray, bounds: list[int]) -> list[int]:
    """Each bound to where the slots beside it deviate least from the median of their side: ranks say that there is a
    change, and may miss where by a few slots, as the lowest of a high level ranks near a low one."""
    levels = [float(np.median(series[begin:end])) for begin, end in itertools.pairwise(bounds)]
    moved = list(bounds)
    for at in range(1, len(bounds) - 1):
        begin = (moved[at - 1] + bounds[at]) // 2
        end = (bounds[at] + bounds[at + 1]) // 2
        part = series[begin:end]
        gain = np.abs(part - levels[at]) - np.abs(part - levels[at - 1])
        moved[at] = begin + int(np.argmax(np.concatenate(([0.0], np.cumsum(gain)))))
    return moved


def _merged(series: np.ndarray, bounds: list[int], spreads: float) -> list[int]:
    """Without the changes that are too small to matter, the smallest taken first; `spreads`: of noise, what matters."""
    while len(bounds) > 2:
        excess = []
        for begin, middle, end in zip(bounds, bounds[1:], bounds[2:], strict=False):
            one, two = series[begin:middle], series[middle:end]
            low, high = sorted((float(np.median(one)), float(np.median(two))))
            needed = max(LEAST_CHANGE * high, spreads * max(_spread(one), _spread(two)))
            excess.append((high - low) / needed if needed else 0.0)
        smallest = int(np.argmin(excess))
        if excess[smallest] > 1.0:
            break
        del bounds[smallest + 1]
    return bounds


def _stalled(series: np.ndarray, level: Segment, width_s: float) -> int:
    begin, end = round(level.start_s / width_s), round(level.end_s / width_s)
    return int((series[begin:end] < STALL * level.rate * width_s).sum())


# ---- what they mean ----


def _kind(levels: Sequence[Segment]) -> tuple[str, float | None]:
    if len(levels) == 1:
        return "steady", None
    last, most = levels[-1], max(one.rate for one in levels)
    if last.rate < STOPPED * most:
        return "stopped", None
    if _is_pause(levels):
        return "paused", None
    fell = all(later.rate < earlier.rate for earlier, later in itertools.pairwise(levels))
    if fell:
        return "throttled", sum(max(0.0, one.bytes - last.rate * one.seconds) for one in levels[:-1])
    rose = all(later.rate > earlier.rate for earlier, later in itertools.pairwise(levels))
    return ("warmed" if rose else "changing"), None


def _apart(levels: Sequence[Segment]) -> tuple[list[Segment], list[Segment]]:
    most = max(one.rate for one in levels)
    moving = [one for one in levels if one.rate >= STALL * most]
    return moving, [one for one in levels if one.rate < STALL * most]


def _is_pause(levels: Sequence[Segment]) -> bool:
    """It ran before and after at one rate; what is between is short beside that."""
    moving, standing = _apart(levels)
    alike = min(one.rate for one in moving) >= (1 - LEAST_CHANGE) * max(one.rate for one in moving)
    between = levels[0] in moving and levels[-1] in moving
    return (
        bool(standing)
        and between
        and alike
        and sum(one.seconds for one in standing) < sum(one.seconds for one in moving)
    )


def _told(levels: Sequence[Segment], kind: str, credit: float | None) -> str:
    last = levels[-1]
    if kind == "steady" and not last.rate:
        return f"nothing moved for all of {span(last.seconds)}"
    if kind == "steady":
        noise = f", slots differ by {last.noise:.0%}" if last.noise >= 0.005 else ""
        return f"{rate(last.rate)} for all of {span(last.seconds)}{noise}: no throttling and no burst credit seen"
    if kind == "paused":
        moving, standing = _apart(levels)
        level = sum(one.rate * one.seconds for one in moving) / sum(one.seconds for one in moving)
        stood = ", ".join(f"{span(one.seconds)} (from {span(one.start_s)} on)" for one in standing)
        return f"{rate(level)}, but it stood or nearly so for {stood}: an outage, neither throttling nor a burst credit"
    parts = [f"{rate(one.rate)} for {span(one.seconds)}" for one in _shown(levels)]
    text = ", then ".join([*parts[:-1], rate(last.rate)])
    if kind == "throttled":
        return f"{text}: a burst credit of about {size(credit or 0.0)}, or throttling"
    if kind == "stopped":
        return f"{text}: it stopped, and did not go on within {span(last.seconds)}"
    if kind == "warmed":
        return f"{text}: it grew faster, as caches that fill or storage that wakes up do; the last rate is what lasts"
    return f"{text}: it rose and fell, as storage does that others use too; no single rate lasts"


def _shown(levels: Sequence[Segment]) -> Sequence[Segment]:
    """Six at most in words: the first five, and the rest as one of their mean."""
    if len(levels) <= 6:
        return levels
    rest = levels[5:-1]
    seconds, count = sum(one.seconds for one in rest), sum(one.bytes for one in rest)
    return [*levels[:5], replace(rest[0], seconds=seconds, rate=count / seconds, bytes=count), levels[-1]]
