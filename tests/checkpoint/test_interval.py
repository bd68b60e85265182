"""The interval that loses least, held against what it follows from: a job in simulated time."""

from __future__ import annotations

import math
import random

import pytest

from headrace.checkpoint.interval import best_interval
from headrace.errors import UsageError


def lost(interval_s: float, blocked_s: float, mtbf_s: float, failures: int) -> float:
    """Share of the time that is no progress that lasts: failures by chance, work since the last save thrown away."""
    chance = random.Random(1)
    spent = kept = 0.0
    for _ in range(failures):
        until_failure = chance.expovariate(1 / mtbf_s)
        spent += until_failure
        kept += int(until_failure / interval_s) * (interval_s - blocked_s)
    return 1 - kept / spent


@pytest.mark.parametrize("blocked_s", [1.0, 30.0, 300.0])
def test_no_other_interval_loses_less(blocked_s: float) -> None:
    best = best_interval(blocked_s=blocked_s, committed_s=blocked_s, mtbf_s=10_000.0)
    found = lost(best.seconds, blocked_s, 10_000.0, 20_000)
    for factor in (0.5, 0.7, 1.5, 2.0):
        assert lost(best.seconds * factor, blocked_s, 10_000.0, 20_000) > found
    # Two half intervals are lost to a failure as seen from the first order, which is exact only for rare failures.
    assert best.lost == pytest.approx(found + blocked_s / 10_000.0, rel=0.1)


def test_where_it_is_known() -> None:
    # Young's, where a save costs next to nothing.
    assert best_interval(blocked_s=1e-6, committed_s=0.0, mtbf_s=1e6).seconds == pytest.approx(math.sqrt(2), rel=1e-5)
    # Daly's other branch: a save costs more than twice what the job lives for.
    assert best_interval(blocked_s=50.0, committed_s=50.0, mtbf_s=20.0).seconds == 70.0
    never = best_interval(blocked_s=0.0, committed_s=0.0, mtbf_s=1.0)
    assert never.seconds == 0.0


def test_no_save_begins_before_the_one_before_it_is_committed() -> None:
    slow = best_interval(blocked_s=0.1, committed_s=500.0, mtbf_s=10_000.0, restart_s=100.0)
    assert (slow.seconds, slow.bound) == (500.0, "storage")
    assert "storage is too slow" in str(slow) and "a save every 8.3 min" in str(slow)
    assert slow.lost == pytest.approx(0.1 / 500 + (250 + 500 + 100) / 10_000)


def test_what_a_save_gave_away_to_reads_bounds_nothing() -> None:
    gave_way = best_interval(blocked_s=0.1, committed_s=500.0, storage_s=20.0, mtbf_s=10_000.0)
    alone = best_interval(blocked_s=0.1, committed_s=20.0, mtbf_s=10_000.0)
    assert gave_way.seconds == alone.seconds and gave_way.bound == "failures"
    # What is lost with a failure is more all the same.
    assert gave_way.lost == pytest.approx(alone.lost + 480 / 10_000)
    slow = best_interval(blocked_s=0.1, committed_s=500.0, storage_s=200.0, mtbf_s=10_000.0)
    assert (slow.seconds, slow.bound) == (200.0, "storage") and "it takes 3.3 min" in str(slow)


@pytest.mark.parametrize("wrong", [{"mtbf_s": 0.0}, {"blocked_s": -1.0}, {"committed_s": math.inf}])
def test_what_cannot_be(wrong: dict[str, float]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        best_interval(**{"blocked_s": 1.0, "committed_s": 1.0, "mtbf_s": 100.0, **wrong})
