"""Outcomes of ranks put together: rates over the time that they have in common, latencies by histogram."""

from __future__ import annotations

import copy
import json
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.figures import Figure, Latencies, Outcome, Series, latencies_of, to_json
from headrace.bench.histogram import PER_OCTAVE, added, counted, quantile
from headrace.bench.meeting import Meeting, Seat
from headrace.bench.meeting.folder import FolderMeeting
from headrace.bench.merge import merged, outcome_of, read
from headrace.errors import MeetingFailed


@pytest.fixture
def meeting(tmp_path: Any) -> Meeting:
    made = FolderMeeting(Seat(rank=0, world=2, host="a"), tmp_path)
    made.hosts = ["a", "b"]
    made.clock_error_s = 1e-4
    return made


def outcome(started_s: float, counts: list[int], seconds: float, latencies: Latencies | None = None) -> Outcome:
    total = sum(counts)
    return Outcome(
        pattern="random", path="/x", flows=1, work="128 KiB", bytes=total, seconds=seconds, latencies=latencies,
        series=Series(started_s=started_s, every_s=1.0, bytes=counts),
        figures=(
            Figure(name="read", value=total / seconds, unit="B/s"), Figure(name="p99", value=1.0, unit="s"),
            Figure(name="samples", value=10.0, unit="1/s"), Figure(name="save", value=started_s, unit="s"),
        ),
    )  # fmt: skip


def test_rates_add_over_the_common_window(meeting: Meeting) -> None:
    # Rank 1 begins 2 s later by rank 0's clock (its own wall clock is 100 s ahead), and ends 3 s later.
    first = outcome(1000.0, [10] * 6, 6.0)
    second = outcome(1102.0, [5, 5, 5, 5, 50, 50, 50], 7.0)
    found = merged([first, second], [-1000.0, -1100.0], meeting)
    # From 2 s to 6 s: 10 a second of the one, 5 of the other.
    assert found.figure("read").value == pytest.approx(15.0)
    assert found.bytes == 60 + 170
    assert found.series is not None
    assert found.series.started_s == pytest.approx(1000.0)
    assert found.series.bytes == [10, 10, 15, 15, 15, 15, 50, 50, 50, 0]
    assert found.figure("samples").value == 20.0
    assert found.figure("save").value == 1102.0
    assert "2 ranks on 2 nodes" in found.notes
    assert "the slowest is rank 1 (b): 5 B/s, median 8 B/s" in found.notes
    assert any("all ranks ran for 4 s of 7 s" in note for note in found.notes)


def test_ranks_that_never_ran_together_are_told(meeting: Meeting) -> None:
    found = merged([outcome(0.0, [10], 1.0), outcome(50.0, [10], 1.0)], [0.0, 0.0], meeting)
    assert found.figure("read").value == 20.0
    assert any("never ran at the same moment" in note for note in found.notes)


def test_different_work_is_not_added(meeting: Meeting) -> None:
    other = Outcome(pattern="sequential", path="/x", flows=1, bytes=1, seconds=1.0)
    with pytest.raises(MeetingFailed, match="different work"):
        merged([outcome(0.0, [1], 1.0), other], [0.0, 0.0], meeting)


def test_latencies_are_those_of_all_requests(meeting: Meeting) -> None:
    chance = np.random.default_rng(1)
    fast, slow = chance.lognormal(-9, 0.5, 9000), chance.lognormal(-5, 0.5, 1000)
    both = latencies_of(np.concatenate([fast, slow]))
    found = merged(
        [outcome(0.0, [1], 1.0, latencies_of(fast)), outcome(0.0, [1], 1.0, latencies_of(slow))], [0, 0], meeting
    ).latencies
    assert found is not None and both is not None
    assert (found.count, found.max) == (both.count, both.max)
    for name in ("p50", "p90", "p99", "p999"):
        assert getattr(found, name) == pytest.approx(getattr(both, name), rel=0.05)


@settings(max_examples=60)
@given(st.lists(st.lists(st.floats(1e-8, 1e3), max_size=40), min_size=1, max_size=4), st.floats(0.01, 1.0))
def test_histograms_of_parts_are_that_of_the_whole(parts: list[list[float]], q: float) -> None:
    everything = np.array([one for part in parts for one in part], np.float64)
    whole = counted(everything)
    assert added(counted(np.array(part, np.float64)) for part in parts) == whole
    if len(everything):
        exact = float(np.quantile(everything, q, method="inverted_cdf"))
        assert quantile(whole, q) == pytest.approx(exact, rel=2 ** (1 / PER_OCTAVE) - 1 + 1e-6)


def test_an_outcome_comes_back_from_json() -> None:
    given_one = outcome(3.0, [1, 2], 2.0, latencies_of(np.array([0.1, 0.2])))
    back = outcome_of(json.loads(json.dumps(to_json(given_one))), "rank 1")
    assert to_json(back) == to_json(given_one)
    assert back.latencies == given_one.latencies


@pytest.mark.parametrize(
    "where, value",
    [
        (("bytes",), -1), (("bytes",), True), (("seconds",), "x"), (("seconds",), float("nan")), (("series",), 7),
        (("series", "bytes"), [1.5]), (("series", "every_s"), 0), (("latencies", "histogram"), {"999999": 1}),
        (("latencies", "p50"), None), (("figures",), [{"name": "x"}]), (("notes",), [None]), (("path",), None),
        (("pattern",), []), (("figures",), None),
    ],
)  # fmt: skip
def test_what_a_rank_says_is_looked_at(where: tuple[str, ...], value: Any) -> None:
    good = json.loads(json.dumps(to_json(outcome(3.0, [1], 1.0, latencies_of(np.array([0.1]))))))
    bad = copy.deepcopy(good)
    inner = bad
    for key in where[:-1]:
        inner = inner[key]
    inner[where[-1]] = value
    read({"outcome": good, "shift_s": 0.0}, "rank 1")
    for said in ({"outcome": bad, "shift_s": 0.0}, {"outcome": good, "shift_s": None}, {}, None, []):
        with pytest.raises(MeetingFailed, match="rank 1 sent no outcome"):
            read(said, "rank 1")
