"""Rounds put together, noise, and what is counted in slots."""

from __future__ import annotations

import json
import math
import time

import numpy as np
import pytest

from headrace.bench import report
from headrace.bench.figures import Figure, Outcome, differ, latencies_of, rate, to_json, together
from headrace.bench.meter import Meter, latencies_of_all, series_of
from headrace.bench.patterns.options import Options
from headrace.bench.suite import Result
from headrace.errors import UsageError


def outcome(value: float, *, flows: int = 1, notes: tuple[str, ...] = ()) -> Outcome:
    figures = (Figure(name="read", value=value, unit="B/s"), Figure(name="p99", value=1 / value, unit="s"))
    return Outcome(
        pattern="random", path="/mnt/a", flows=flows, bytes=int(value), seconds=1.0, figures=figures, notes=notes
    )


def test_rounds_become_their_median_and_half_their_span() -> None:
    one = together([outcome(10, notes=("a",)), outcome(40, notes=("a", "b")), outcome(20)])
    assert (one.main.value, one.main.noise, one.main.n) == (20, 15, 3)
    assert one.bytes == 20 and one.notes == ["a", "b"] and one.rounds["read"] == [10, 40, 20]
    assert one.figure("p99").value == 1 / 20
    with pytest.raises(KeyError):
        one.figure("write")


def test_rounds_of_other_work_are_not_put_together() -> None:
    for rounds in ([], [outcome(1), outcome(1, flows=2)]):
        with pytest.raises(UsageError):
            together(rounds)


def test_one_round_has_no_noise_and_no_winner() -> None:
    one = together([outcome(10)])
    assert one.main.noise is None
    assert not differ(one.main, together([outcome(1000)]).main)
    wide, far = together([outcome(8), outcome(12)]), together([outcome(14), outcome(16)])
    assert differ(wide.main, far.main)
    assert not differ(wide.main, together([outcome(11), outcome(15)]).main)


def test_latencies_are_percentiles() -> None:
    found = latencies_of(np.arange(1, 1001, dtype=np.float64))
    assert found is not None and found.count == 1000 and found.max == 1000
    assert found.p50 == pytest.approx(500.5) and found.p99 == pytest.approx(990.01)
    assert found.p999 == pytest.approx(999.001)
    assert latencies_of(np.zeros(0)) is None


def test_meters_of_flows_become_one_series() -> None:
    begun = time.perf_counter() - 0.35
    early, late = Meter(begun), Meter(begun - 1.0)
    early.count(100, 0.5)
    late.count(7, 1.5)
    series = series_of([early, late], 12.0)
    assert series.total_bytes == 107 and len(series.bytes) >= 14 and series.bytes[0] == 0
    assert len(series.rates()) == len(series.bytes) - 1
    found = latencies_of_all([early, late])
    assert found is not None and (found.count, found.max) == (2, 1.5)


def test_latencies_kept_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.bench.meter._MOST_KEPT", 64)
    meter = Meter(time.perf_counter())
    for index in range(10_000):
        meter.count(1, index / 10_000)
    assert 16 <= len(meter.latencies) <= 64 and meter.bytes == 10_000
    # From the beginning to the end, not the last ones only.
    assert 0.3 < float(np.median(meter.latencies)) < 0.7


def test_json_has_no_number_that_json_has_not() -> None:
    said = to_json(Outcome(pattern="a", path="b", flows=1, bytes=0, seconds=0.0, figures=(rate("x", 5, 0.0),
                   Figure(name="y", value=math.nan, unit="s", noise=math.inf))))  # fmt: skip
    found = json.loads(json.dumps(said, allow_nan=False))
    assert found["figures"][0]["value"] == 0 and found["figures"][1]["value"] is None


@pytest.mark.parametrize(
    "wrong",
    [{"flows": 0}, {"depth": 10**6}, {"seconds": math.nan}, {"request_bytes": 1}, {"scale": 0}, {"cache": "cold"},
     {"budget_bytes": 0}, {"ranks": 10**9}],
)  # fmt: skip
def test_options_check_themselves(wrong: dict[str, object]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        Options(**wrong)  # type: ignore[arg-type]


def test_a_remark_of_many_rounds_is_told_once() -> None:
    outcomes = [
        outcome(1e6, flows=flows, notes=(f"all were read in {flows}.5 s", *(["stood"] if flows == 4 else [])))
        for flows in (1, 2, 4)
    ]
    result = Result(
        path="/mnt/a", kind="folder", hosts=["a"], facts={}, started_s=0.0, seconds=1.0, budget=[], outcomes=outcomes
    )
    told = report.notes(result)
    assert "random samples, 1, 2, 4 flows, as an example: all were read in 1.5 s" in told
    assert "random samples, 4 flows: stood" in told
    assert sum("were read" in one for one in told) == 1


@pytest.mark.parametrize(
    ("value", "text"),
    [(7.5, "8 B/s"), (999.4, "999 B/s"), (999.6, "1 kB/s"), (47.83e6, "47.8 MB/s"), (999.9e6, "1 GB/s"),
     (2**30, "1.07 GB/s"), (5.25e12, "5.25 TB/s"), (4e15, "4 PB/s"), (0.0, "0 B/s")],
)  # fmt: skip
def test_rates_are_decimal(value: float, text: str) -> None:
    assert report.value_text(value, "B/s") == text
