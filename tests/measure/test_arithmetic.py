"""The figures of the verdict, by hand."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import UsageError
from headrace.measure import StepRecord, arithmetic, statistics, summarise


def record(step: int, rank: int = 0, **times: float) -> StepRecord:
    values = {"data_wait_s": 0.0, "compute_s": 1.0, "checkpoint_s": 0.0, "restart_s": 0.0} | times
    return StepRecord(rank=rank, step=step, started_s=100.0 + step, tokens=1000, **values)


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_quantiles_are_those_of_numpy(count: int) -> None:
    values = [float((i * 7919) % 1009) for i in range(count)]
    for q in (0.0, 0.25, 0.5, 0.9, 0.99, 1.0):
        assert statistics.quantile(values, q) == pytest.approx(np.quantile(values, q))
    assert statistics.median(values) == pytest.approx(np.median(values))


def test_quantile_of_nothing_is_an_error() -> None:
    with pytest.raises(UsageError, match="at least one value"):
        statistics.p99([])


@pytest.mark.parametrize(
    ("part", "whole", "expected"), [(1, 4, 0.25), (5, 4, 1.0), (1, 0, 0.0), (0, 4, 0.0), (-1, 4, 0.0)]
)
def test_share(part: float, whole: float, expected: float) -> None:
    assert statistics.share(part, whole) == expected


def test_price() -> None:
    assert arithmetic.dollars(3600.0, 2.5) == 2.5
    with pytest.raises(UsageError):
        arithmetic.dollars(1.0, -1.0)


def test_every_rank_pays_for_the_slowest() -> None:
    # Rank 0 waited 1 s for data; rank 1 sat in the collective for that second and calls it compute.
    summary = summarise([record(0, 0, data_wait_s=1.0, compute_s=3.0), record(0, 1, data_wait_s=0.0, compute_s=4.0)])
    assert summary.total_gpu_s == 8.0
    assert summary.data_wait_gpu_s == 2.0
    assert summary.compute_gpu_s == 6.0
    assert summary.storage_share == 0.25
    assert summary.wall_s == 4.0
    assert summary.tokens == 2000
    assert summary.tokens_per_s == 500.0


def test_categories_add_up() -> None:
    rows = [
        record(i, r, data_wait_s=0.1 * r, checkpoint_s=0.2, compute_s=1.0 - 0.1 * r) for i in range(5) for r in (0, 1)
    ]
    summary = summarise(rows)
    parts = summary.data_wait_gpu_s + summary.compute_gpu_s + summary.checkpoint_gpu_s + summary.restart_gpu_s
    assert parts == pytest.approx(summary.total_gpu_s)


def test_what_came_after_the_last_step_belongs_to_it() -> None:
    after = StepRecord(rank=0, step=1, started_s=200.0, data_wait_s=0, compute_s=0, checkpoint_s=2.0)
    summary = summarise([record(0), record(1), after])
    assert summary.steps == 2
    assert summary.checkpoint_gpu_s == 2.0
    assert summary.total_gpu_s == 4.0


def test_no_steps_is_an_error() -> None:
    with pytest.raises(UsageError, match="at least one step"):
        summarise([])


def test_verdict_says_that_feeding_is_fine_only_when_it_is() -> None:
    fine = summarise([record(i, data_wait_s=0.019, compute_s=0.981) for i in range(10)]).verdict(token_bytes=2)
    assert fine.feeding_is_fine
    assert "not the bottleneck for feeding" in fine.sentence
    assert "under 2.0 %" in fine.sentence
    slow = summarise([record(i, data_wait_s=0.021, compute_s=0.979) for i in range(10)]).verdict(token_bytes=2)
    assert not slow.feeding_is_fine
    assert "not the bottleneck" not in slow.sentence


def test_dollars_only_where_a_price_is_given() -> None:
    rows = [record(i, checkpoint_s=1.0, compute_s=1.0) for i in range(1800)]
    assert "$" not in summarise(rows).verdict().sentence
    assert summarise(rows).verdict().storage_dollars is None
    priced = summarise(rows, gpu_hour_price=4.0).verdict()
    assert priced.storage_dollars == pytest.approx(2.0)
    assert "$2.00 at $4 an hour" in priced.sentence
    with pytest.raises(UsageError):
        summarise(rows, gpu_hour_price=-1.0)
