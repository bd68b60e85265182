"""Paths compared: in turns, in ratios with their range, and no winner within noise."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.compare import CHANCE, Comparison, compared, order, ratio_of, rounds_needed, run, times
from headrace.bench.compare_page import build, cells
from headrace.bench.compare_works import WORKS, Works
from headrace.bench.figures import Figure, Outcome
from headrace.bench.patterns.options import Options
from headrace.errors import UsageError


def outcome(pattern: str, value: float, *, path: str = "p", unit: str = "B/s", work: str = "128 KiB") -> Outcome:
    return Outcome(
        pattern=pattern, path=path, flows=1, bytes=1, seconds=1.0, work=work, cache="dropped",
        figures=(Figure(name="read", value=value, unit=unit),),
    )  # fmt: skip


def comparison(rounds: int, *figures: Callable[[int, int], Outcome]) -> Comparison:
    """Of two paths; `figures(round, path)`."""
    found = [[[figure(number, path) for figure in figures] for path in range(2)] for number in range(rounds)]
    return compared(["/mnt/nfs", "/mnt/nvme"], found)


def test_the_sentence_says_who_is_how_much_faster_at_what() -> None:
    noise = [1.0, 1.05, 0.97, 1.02, 0.95, 1.01, 1.03]
    found = comparison(
        7,
        lambda number, path: outcome("random", 1e9 * noise[number] * (2.3 + 0.1 * (number % 3 - 1) if path else 1)),
        lambda number, path: outcome("sequential", 1e9 * (noise[number] if path else noise[-1 - number]), work="1 MiB"),
    )
    assert found.needed == 7
    assert found.sentence == (
        "B (/mnt/nvme) is 2.3 times A (/mnt/nfs) (2.2 to 2.4) for random samples of 128 KiB; the rest is within noise"
    )
    assert [row.ratios[0].faster for row in found.rows] == [True, None]
    assert cells(found.rows[0])[3:] == ["2.3 (2.2 to 2.4)", "B is faster"]
    assert "A: caches: dropped" in found.notes
    again = json.loads(json.dumps(found.to_json()))
    assert again["works"][0]["ratios"]["B/A"]["faster"] is True and again["sentence"] == found.sentence


def test_less_time_is_faster() -> None:
    found = comparison(6, lambda number, path: outcome("latency", 0.001 / (4 if path else 1), unit="s", work="4 KiB"))
    assert found.sentence == (
        "B (/mnt/nvme) is 4.0 times as fast as A (/mnt/nfs) (4.0 to 4.0) for single reads of 4 KiB"
    )
    slower = comparison(6, lambda number, path: outcome("latency", 0.001 * (4 if path else 1), unit="s", work="4 KiB"))
    assert "4.0 times as slow as A (/mnt/nfs)" in slower.sentence
    assert slower.rows[0].ratios[0].faster is False


def test_too_few_rounds_name_nobody() -> None:
    found = comparison(5, lambda number, path: outcome("random", 1e9 * (9 if path else 1)))
    assert found.sentence == "5 rounds cannot tell paths apart: that takes 6 for 1 kind of work and 2 paths"
    assert found.rows[0].ratios[0].faster is None
    # Six are enough for one kind of work, and not for two: the chance to be wrong is that of the whole table.
    two = comparison(6, *(lambda number, path: outcome("random", 1e9 * (9 if path else 1)) for _ in range(2)))
    assert [row.ratios[0].faster for row in two.rows] == [None, None] and two.sentence.startswith("6 rounds cannot")
    assert [rounds_needed(*of) for of in ((1, 2), (2, 2), (3, 2), (3, 3), (8, 3))] == [6, 7, 7, 8, 10]


@settings(max_examples=60)
@given(works=st.integers(1, 8), paths=st.integers(2, 3))
def test_as_many_rounds_as_needed_and_not_one_more(works: int, paths: int) -> None:
    rounds = rounds_needed(works, paths)
    assert 0.5 ** (rounds - 1) * works * (paths - 1) <= CHANCE < 0.5 ** (rounds - 2) * works * (paths - 1)


def test_of_paths_that_are_alike_hardly_ever_one_wins() -> None:
    """A table of four kinds of work, a thousand times, all noise of 30 %: at most 5 % of the tables name a winner."""
    chance, wrong = np.random.default_rng(4), 0
    rounds = rounds_needed(4, 2)
    for _ in range(1000):
        figures = chance.lognormal(0, 0.3, (4, 2, rounds))
        found = [ratio_of(list(b), list(a), less_is_more=False, compared=4).faster for a, b in figures]
        wrong += any(one is not None for one in found)
    assert wrong <= 65


@settings(max_examples=100)
@given(
    first=st.lists(st.floats(0, 1e12), min_size=1, max_size=30), scale=st.floats(0.01, 100),
    less=st.booleans(), compared_to=st.integers(1, 20),
)  # fmt: skip
def test_ratios_have_their_median_within_their_range(
    first: list[float], scale: float, less: bool, compared_to: int
) -> None:
    found = ratio_of([scale * one for one in first], first, less_is_more=less, compared=compared_to)
    assert found.low <= found.median <= found.high
    assert found.chance <= CHANCE / compared_to or (found.faster is None and found.chance == 0.5 ** (len(first) - 1))
    opposite = ratio_of(first, [scale * one for one in first], less_is_more=less, compared=compared_to)
    assert (found.faster, opposite.faster) in ((None, None), (True, False), (False, True))


def test_a_path_that_gives_nothing() -> None:
    found = ratio_of([1.0] * 6, [0.0] * 6, less_is_more=False)
    assert found.faster is True and math.isinf(found.low) and times(found.low) == "∞"
    assert ratio_of([0.0] * 6, [0.0] * 6, less_is_more=False).faster is None
    with pytest.raises(UsageError):
        ratio_of([1.0], [1.0, 2.0], less_is_more=False)


def test_rounds_go_back_and_forth() -> None:
    assert [order(3, number) for number in range(3)] == [[0, 1, 2], [2, 1, 0], [0, 1, 2]]
    turns: list[str] = []

    def work(name: str) -> Callable[[int], Outcome]:
        def measure(number: int, path: int) -> Outcome:
            turns.append(f"{name}{path}")
            return outcome(name, 1.0)

        return measure

    found = run(["x", "y", "z"], [work("r"), work("s")], rounds=2)
    assert " ".join(turns) == "r0 r1 r2 s0 s1 s2 r2 r1 r0 s2 s1 s0"
    assert found.rounds == 2 and len(found.rows) == 2 and len(found.rows[0].ratios) == 2
    for paths, rounds in ((["x"], 3), (["x"] * 4, 3), (["x", "y"], 0)):
        with pytest.raises(UsageError):
            run(paths, [work("r")], rounds=rounds)


def test_each_round_reads_other_samples_and_all_paths_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    seeds: list[tuple[str, int]] = []

    def read(place: Any, options: Options, tell: Any) -> Outcome:
        seeds.append((place, options.seed))
        return outcome("random", 1.0)

    monkeypatch.setitem(WORKS, "random", read)  # type: ignore[arg-type]
    works = Works(places=["x", "y"], patterns={"random": Options(seed=3)}, size_bytes=1)  # type: ignore[list-item]
    run(["x", "y"], works.works(), rounds=2)
    assert seeds == [("x", 297), ("y", 297), ("y", 298), ("x", 298)]


def test_the_page_has_the_sentence_one_plot_and_one_table() -> None:
    found = comparison(7, lambda number, path: outcome("random", 1e9 * (2 + number / 10 if path else 1)))
    # Numbers stay with their units.
    text = build(found).html().replace("\N{NO-BREAK SPACE}", " ")
    assert found.sentence.split(";")[0] in text
    # One that is the key's sample, and the plot.
    assert text.count("<svg") == 2 and text.count('class="span s0"') == 2
    assert "within noise" not in text.split("<table", 1)[1] and "B is faster" in text
    hostile = compared(["<script>", "b"], [[[outcome("random", 0.0)], [outcome("random", 1.0)]]])
    assert "<script>" not in build(hostile).html()
