"""The measuring itself: bounds, ratios, the JSON line."""

from __future__ import annotations

import io
import json

import pytest
from rich.console import Console

from benchmarks import __main__ as command
from benchmarks.cores import layout_of
from benchmarks.figures import Figure, table
from benchmarks.pairs import interleaved, quartile_spread


@pytest.mark.parametrize(
    ("bounds", "holds"),
    [
        ({}, True),
        ({"at_least": 0.7}, True),
        ({"at_least": 0.71}, False),
        ({"at_most": 0.7}, True),
        ({"at_most": 0.69}, False),
    ],
)
def test_a_bound_is_kept_or_missed(bounds: dict[str, float], holds: bool) -> None:
    assert Figure(suite="s", figure="f", value=0.7, unit="ratio", **bounds).holds is holds


def test_the_json_line_has_the_agreed_keys() -> None:
    line = Figure(suite="s", figure="f", value=1 / 3, unit="ratio", at_least=0.2, samples=[1 / 3]).json_line()
    assert "\n" not in line
    got = json.loads(line)
    assert set(got) == {"suite", "figure", "value", "unit", "at_least", "samples", "environment"}
    assert got["value"] == 0.3333
    assert {"cpu", "cores", "kernel", "python", "headrace"} <= set(got["environment"])


def test_a_figure_that_there_is_not_is_told_and_keeps_no_bound() -> None:
    figure = Figure(suite="s", figure="f", value=None, unit="offers no states", version="package 1.2")
    got = json.loads(figure.json_line())
    assert got["value"] is None and got["version"] == "package 1.2" and figure.holds
    assert not Figure(suite="s", figure="f", value=None, unit="", at_least=0.0).holds
    console = Console(width=200, file=io.StringIO())
    with console.capture() as shown:
        console.print(table([figure]))
    assert "none" in shown.get() and "package 1.2" in shown.get()


def test_interleaved_pairs_cancel_a_drift() -> None:
    clock = iter(range(1, 1000))  # Each measurement finds the machine faster than the one before.
    pairs = interleaved(lambda: 0.8 * (100 + next(clock)), lambda: 100.0 + next(clock), rounds=9)
    assert len(pairs.ratios) == 9
    assert pairs.median_ratio == pytest.approx(0.8, abs=0.01)
    assert pairs.noise < 0.05


def test_too_few_rounds_are_refused() -> None:
    with pytest.raises(ValueError, match="at least 3"):
        interleaved(lambda: 1.0, lambda: 1.0, rounds=2)


def test_quartile_spread() -> None:
    assert quartile_spread([1.0, 2.0, 3.0, 4.0, 5.0]) == 1.0


def test_with_cores_enough_every_role_has_its_own() -> None:
    layout = layout_of(set(range(1000, 1016)))
    assert len({layout.client, layout.server, layout.second}) == 3
    assert not layout.driver & {layout.client, layout.server, layout.second}
    assert len({core for pair in layout.pairs for core in pair}) == 16


@pytest.mark.parametrize("count", [1, 2, 3])
def test_with_few_cores_roles_share_them(count: int) -> None:
    usable = set(range(1000, 1000 + count))
    layout = layout_of(usable)
    assert {layout.client, layout.server, layout.second} == usable
    assert layout.driver <= usable and len(layout.pairs) == 8


def test_an_unknown_figure_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        command.main(["fabric", "--only", "read_2mib"])
    assert "read_2mib" in capsys.readouterr().err
