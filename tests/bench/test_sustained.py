"""Levels of a rate: found where they are, never made of noise or of one stall."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.sustained import LEAST_SLOTS, MOST_SLOTS, judge, segments, span
from headrace.errors import UsageError

GB = 1e9


def noisy(rate: float, noise: float, slots: int, seed: int) -> np.ndarray:
    values: np.ndarray = np.random.default_rng(seed).normal(rate, noise * rate, slots).clip(0)
    return values


def test_a_burst_credit_is_told_with_its_size() -> None:
    series = np.concatenate([noisy(2.1 * GB, 0.05, 180, 1), noisy(0.6 * GB, 0.05, 120, 2)])
    found = judge(series, 1.0, "reading")
    assert found.kind == "throttled"
    assert [round(one.seconds) for one in found.segments] == [180, 120]
    # What came above the rate that lasts: 180 s of 1.5 GB/s.
    assert found.credit_bytes == pytest.approx(270 * GB, rel=0.05)
    assert found.sustained_rate == pytest.approx(0.6 * GB, rel=0.05)
    assert found.sentence.startswith("reading: 2.1 GB/s for 180 s, then ")
    assert "a burst credit of about 26" in found.sentence


@settings(max_examples=25)
@given(
    at=st.floats(0.1, 0.9), fall=st.floats(0.1, 0.6), noise=st.floats(0.0, 0.1), slots=st.integers(80, 3000),
    seed=st.integers(0, 1 << 20),
)  # fmt: skip
def test_a_fall_is_found_where_it_is(at: float, fall: float, noise: float, slots: int, seed: int) -> None:
    change = round(at * slots)
    series = np.concatenate([noisy(GB, noise, change, seed), noisy(fall * GB, noise, slots - change, seed + 1)])
    found = judge(series, 0.1)
    assert found.kind == "throttled", found
    assert len(found.segments) == 2
    slack = 0.1 * max(2, 2 * slots / MOST_SLOTS)
    assert abs(found.segments[0].seconds - 0.1 * change) <= slack
    assert found.sustained_rate == pytest.approx(10 * fall * GB, rel=0.1)


@settings(max_examples=40)
@given(
    noise=st.floats(0.0, 0.6), slots=st.integers(0, MOST_SLOTS), seed=st.integers(0, 1 << 20),
    stall=st.integers(0, LEAST_SLOTS - 1), at=st.floats(0, 1),
)  # fmt: skip
def test_noise_and_one_stall_are_no_change(noise: float, slots: int, seed: int, stall: int, at: float) -> None:
    series = noisy(GB, noise, slots, seed)
    begin = int(at * max(0, slots - stall))
    series[begin : begin + stall] = 0
    found = judge(series, 1.0)
    assert found.kind in ("steady", "short")
    assert len(found.segments) == min(1, slots)
    if noise < 0.1 and slots >= 20:
        assert found.stalls == stall
        assert ("stood nearly still" in found.sentence) == (stall > 0)


@pytest.mark.parametrize("memory, slots", [(0.7, 300), (0.9, 40)])
def test_noise_with_a_memory_seldom_looks_like_levels(memory: float, slots: int) -> None:
    """Rates of storage hang together from slot to slot; a fall to half is seen in that noise, too."""
    chance, wrong, missed = np.random.default_rng(3), 0, 0
    fall = np.where(np.arange(slots) < slots // 2, 1.0, 0.5)
    for _ in range(50):
        series = np.zeros(slots)
        for slot in range(1, slots):
            series[slot] = memory * series[slot - 1] + chance.normal(0, 0.1)
        wrong += len(segments((1 + series).clip(0), 1.0)) > 1
        missed += len(segments((1 + series / 3).clip(0) * fall, 1.0)) != 2
    assert (wrong <= 4, missed <= 5) == (True, True), (wrong, missed)


@pytest.mark.parametrize(
    "levels, kind, word",
    [
        ([(0.3, 40), (2.0, 200)], "warmed", "grew faster"),
        ([(2.0, 100), (0.0, 30), (2.0, 100)], "paused", "stood or nearly so for 30 s (from 100 s on)"),
        ([(2.0, 100), (0.0, 50)], "stopped", "did not go on within 50 s"),
        ([(2.0, 100), (0.5, 60), (1.2, 100)], "changing", "no single rate lasts"),
        ([(3.0, 60), (2.0, 60), (1.0, 60)], "throttled", "3.0 GB/s for 60 s, then 2.0 GB/s for 60 s, then "),
        ([(2.0, 100)], "steady", "no throttling"),
        ([(0.0, 100)], "steady", "nothing moved"),
    ],
)
def test_what_levels_mean(levels: list[tuple[float, int]], kind: str, word: str) -> None:
    series = np.concatenate([noisy(rate * GB, 0.02, slots, 7 + i) for i, (rate, slots) in enumerate(levels)])
    found = judge(series, 1.0)
    assert (found.kind, word in found.sentence) == (kind, True), found.sentence


def test_segments_cover_the_run_and_all_its_bytes() -> None:
    series = np.concatenate([noisy(GB, 0.1, 100, 1), noisy(0.2 * GB, 0.1, 150, 2), noisy(0.7 * GB, 0.1, 90, 3)])
    found = segments(series, 0.5)
    assert len(found) == 3
    assert [one.end_s for one in found] == [*(one.start_s for one in found[1:]), 170.0]
    assert sum(one.bytes for one in found) == pytest.approx(series.sum())


def test_long_series_are_folded() -> None:
    found = segments(np.concatenate([np.full(50_000, 10.0), np.full(50_000, 2.0)]), 0.1)
    assert [one.rate for one in found] == pytest.approx([100.0, 20.0])
    assert found[0].seconds == pytest.approx(5000, rel=0.01)


@pytest.mark.parametrize("counts, every_s", [([1.0], 0.0), ([1.0], float("nan")), ([-1.0], 1.0), ([float("inf")], 1.0)])
def test_nonsense_is_refused(counts: list[float], every_s: float) -> None:
    with pytest.raises(UsageError):
        judge(counts, every_s)


def test_spans_are_short() -> None:
    assert [span(0.25), span(3.0), span(180), span(900)] == ["0.25 s", "3 s", "180 s", "15 min"]
