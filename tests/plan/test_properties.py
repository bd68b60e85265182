"""What holds of every formula and of every plan: dimensions, ranges that contain, more never needs less."""

from __future__ import annotations

import importlib
import math
import pkgutil
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import headrace.plan
from headrace.errors import UsageError
from headrace.plan import Plan, Range, goodput, make_plan, read_job, units
from headrace.plan.extremes import TOLERANCE
from headrace.plan.quantities import Formula, least
from headrace.plan.situation import Situation, storage_share
from headrace.plan.situation import goodput as goodput_of
from headrace.plan.units import BASES, KINDS, Unit, parse_one, show


def _formulas() -> dict[str, Formula]:
    found: dict[str, Formula] = {}
    for module in pkgutil.iter_modules(headrace.plan.__path__):
        for name, value in vars(importlib.import_module(f"headrace.plan.{module.name}")).items():
            if isinstance(value, Formula):
                found[f"{module.name}.{name}"] = value
    for synchronous in (False, True):
        for given_interval in (False, True):
            for name, formula in goodput.formulas(synchronous=synchronous, given_interval=given_interval).items():
                found[f"{name}, synchronous {synchronous}, interval {given_interval}"] = formula
    return found


FORMULAS = _formulas()

#: Likely sizes of things, in SI units: where a formula is used, not where floats end.
_SIZES: dict[str, tuple[float, float]] = {
    "B": (1e9, 1e14), "B/s": (1e6, 1e13), "s": (0.1, 1e7), "gpu": (1, 1e5), "node": (1, 1e4), "B/gpu": (1e6, 1e12),
    "B/s/gpu": (1e3, 1e11), "B/s/node": (1e5, 1e12), "param": (1e6, 1e13),
    "B/param": (1, 32), "B/token": (1, 8), "B/sample": (1e2, 1e10), "token/s/gpu": (1, 1e6),
    "sample/s/gpu": (0.01, 1e5),
    "token/read": (1, 1e6), "token": (1e6, 1e14), "FLOP/s": (1e12, 1e17), "flop/param/token": (1, 12),
    "gpu s": (1e4, 1e10), "price/gpu/s": (1e-6, 1), "price/s": (1e-6, 1e6), "price/B": (1e-13, 1e-6),
}  # fmt: skip


def figure(unit: Unit) -> st.SearchStrategy[float]:
    low, high = (0.005, 1.0) if unit.kind == "share" else _SIZES.get(str(unit), (1.0, 64.0))
    return st.floats(math.log(low), math.log(high)).map(math.exp)


def test_there_are_formulas_for_every_question() -> None:
    modules = {name.partition(".")[0] for name in FORMULAS}
    assert {"model", "feeding", "checkpoint", "network", "money", "storage"} <= modules
    assert len(FORMULAS) > 50
    assert all(formula.source and formula.text and formula.result for formula in FORMULAS.values())


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=6)
@given(data=st.data())
def test_dimensions(name: str, data: st.DataObject) -> None:
    """Were bytes, seconds or GPUs counted in another unit, results would be the same in that unit."""
    formula = FORMULAS[name]
    values = {symbol: data.draw(figure(unit), symbol) for symbol, unit in formula.symbols.items()}
    base, factor = data.draw(st.sampled_from(BASES)), data.draw(st.sampled_from([0.125, 8.0, 1024.0]))
    scaled = {symbol: value * formula.symbols[symbol].scale(base, factor) for symbol, value in values.items()}
    expected = formula.of(values) * formula.unit.scale(base, factor)
    assert formula.of(scaled) == pytest.approx(expected, rel=1e-6, abs=1e-12)


@pytest.mark.parametrize("name", FORMULAS)
@settings(max_examples=6)
@given(data=st.data())
def test_a_range_contains_what_lies_between(name: str, data: st.DataObject) -> None:
    """Which holds where a formula goes up or down with each symbol and never turns, or says what its ends are."""
    formula = FORMULAS[name]
    put, inside = {}, {}
    for symbol, unit in formula.symbols.items():
        middle = data.draw(figure(unit), symbol)
        low, high = middle / data.draw(st.sampled_from([1, 1.5, 4])), middle * data.draw(st.sampled_from([1, 1.5, 4]))
        if unit.kind == "share":
            high = min(1.0, high)
        put[symbol] = Range(low, min(middle, high), high, unit)
        inside[symbol] = data.draw(st.floats(low, high), f"inside {symbol}")
    found, value = formula.put(put).value, formula.of(inside)
    slack = TOLERANCE if formula.extremes is not None else 1e-9 * max(abs(found.low), abs(found.high), 1e-9)
    assert found.low - slack <= value <= found.high + slack
    assert found.likely in found


def test_what_turns_is_contained() -> None:
    """What storage costs goes up as failures come more often, and down again once little trains over any storage."""
    formula = goodput.formulas(synchronous=False, given_interval=False)["storage"]
    likely = {
        "needed": 1e9, "read rate": 5e9, "write rate": 5e9, "size": 1e13, "share of a rank": 1e10, "copy rate": 1e10,
        "restart bytes": 1e13, "other": 60.0,
    }  # fmt: skip
    put = {name: Range.point(value, formula.symbols[name]) for name, value in likely.items()}
    within = [formula.of({**likely, "mtbf": 600.0 * 1.1**step}) for step in range(90)]
    ends = (within[0], within[-1])
    assert max(within) > max(ends) + 0.1
    found = formula.put({**put, "mtbf": Range(600, 7200, 600 * 1.1**89, units.SECONDS)}).value
    assert all(found.low - TOLERANCE <= value <= found.high + TOLERANCE for value in within)
    # Slower writes make saves longer, until failures leave nothing that could be stopped.
    formula = goodput.formulas(synchronous=True, given_interval=False)["saves"]
    here = {name: value for name, value in likely.items() if name in formula.symbols} | {"mtbf": 30_000.0}
    within = [formula.of({**here, "write rate": 1e8 * 1.1**step}) for step in range(90)]
    assert max(within) > max(within[0], within[-1]) + 0.1
    put = {name: Range.point(value, formula.symbols[name]) for name, value in here.items()}
    found = formula.put({**put, "write rate": Range(1e8, 1e9, 1e8 * 1.1**89, units.RATE)}).value
    assert all(found.low - TOLERANCE <= value <= found.high + TOLERANCE for value in within)


def test_units_are_checked() -> None:
    formula = FORMULAS["feeding.PER_NODE"]
    nodes = Range.point(8, units.NODES)
    assert formula.put({"in all": Range.point(8e9, units.RATE), "nodes": nodes}).value.likely == 1e9
    with pytest.raises(ValueError, match="in all is in B, expected B/s"):
        formula.put({"in all": Range.point(8e9, units.BYTES), "nodes": nodes})
    with pytest.raises(ValueError, match="wants"):
        formula.put({"in all": Range.point(8e9, units.RATE)})
    with pytest.raises(ValueError, match="no base"):
        Unit.of("furlong/s")
    assert str(Unit.of("B/s/gpu")) == "B/s/gpu" and Unit.of("B/B") == Unit.of("")


def test_a_range_is_in_order_and_finite() -> None:
    for low, likely, high in ((2, 1, 3), (1, 4, 3), (1, 2, math.inf), (math.nan, 1, 2)):
        with pytest.raises(UsageError):
            Range(low, likely, high, units.RATE)
    assert least([Range(1, 5, 9, units.RATE), Range(2, 3, 12, units.RATE)]) == Range(1, 3, 9, units.RATE)


@pytest.mark.parametrize(
    ("value", "unit", "text"),
    [(1.2e9, units.RATE, "1.2 GB/s"), (0.0003, units.SHARE, "0.03 %"), (0.99958, units.SHARE, "99.958 %"),
     (8.03e9, units.PARAMETERS, "8.03 billion parameters"), (14_451, units.TOKEN_RATE, "14,451 token/s/gpu"),
     (90.0, units.SECONDS, "90.0 s"), (5e5, units.SECONDS, "5.79 d"), (16_384, units.GPUS, "16,384 gpu"),
     (25e9, units.LINK, "200 Gbit/s"), (3 / 3600, units.PRICE_PER_GPU_HOUR, "3 an hour"), (0.0, units.SHARE, "0 %"),
     (57_804, units.RATE_PER_GPU, "57.8 kB/s/gpu"), (50_700 * 3600.0, units.GPU_TIME, "50,700 GPU hours")],
)  # fmt: skip
def test_how_figures_are_shown(value: float, unit: Unit, text: str) -> None:
    assert show(value, unit) == text


def test_a_range_says_its_unit_once() -> None:
    assert str(Range(1e9, 1.5e9, 2e9, units.RATE)) == "1.5 GB/s (1 to 2)"
    assert str(Range(5e8, 1.5e9, 2e9, units.RATE)) == "1.5 GB/s (500 MB/s to 2 GB/s)"
    assert str(Range.point(2e9, units.RATE)) == "2 GB/s"
    assert str(Range(2.0, 3.0, 4.0, units.COUNT)) == "3 (2 to 4)"
    assert str(Range(3e-9, 4e-9, 5e-9, units.SHARE)) == "<0.0001 %"
    assert str(Range(3e-9, 0.02, 0.03, units.SHARE)) == "2 % (<0.0001 to 3)"


@given(text=st.text(max_size=40), kind=st.sampled_from(sorted(KINDS)))
def test_any_text_is_a_figure_or_told(text: str, kind: str) -> None:
    try:
        value = parse_one(text, kind)
    except ValueError as error:
        assert "such as" in str(error)
    else:
        assert math.isfinite(value) and value >= 0


@pytest.mark.parametrize(
    ("text", "kind", "value"),
    [("2GB/s", "rate", 2e9), ("100 Gbit/s", "rate", 12.5e9), ("1GiB/s", "rate", 2.0**30), ("8.03B", "count", 8.03e9),
     ("64MiB", "bytes", 2.0**26), ("30min", "duration", 1800), ("2 h", "duration", 7200), ("1%", "share", 0.01),
     ("400TFLOPS", "flops", 4e14), (".5", "number", 0.5), ("1_000", "count", 1000), ("150kb", "bytes", 150e3)],
)  # fmt: skip
def test_what_people_write(text: str, kind: str, value: float) -> None:
    assert parse_one(text, kind) == pytest.approx(value)


# ---- whole plans ----------------------------------------------------------------------------------------------------


def plan(**options: Any) -> Plan:
    return make_plan(read_job(None, {key.replace("__", "."): value for key, value in options.items()}))


def needs(made: Plan) -> dict[str, Range]:
    return {
        answer.formula.result: answer.value
        for question in made.questions
        for answer in question.answers
        if answer.formula.result.startswith("needed") and answer.value.unit == units.RATE
    }


jobs = st.fixed_dictionaries(
    {
        "gpus": st.integers(1, 20_000),
        "model__parameters": st.floats(1e8, 2e12),
        "checkpoint__synchronous": st.booleans(),
        "storage__read": st.floats(1e8, 1e12),
        "storage__write": st.floats(1e8, 1e12),
    },
    optional={
        "feed__tokens_per_s": st.floats(1, 1e5),
        "checkpoint__interval": st.floats(1, 1e5),
        "failures__mtbf": st.floats(600, 1e7),
        "failures__restart": st.floats(1, 1e4),
        "network__nic_gbit": st.sampled_from([10, 100, 400]),
        "price__gpu_hour": st.floats(0, 100),
    },
)


@settings(max_examples=12)
@given(options=jobs, factor=st.integers(2, 8))
def test_more_gpus_never_need_less(options: dict[str, Any], factor: int) -> None:
    few, many = plan(**options), plan(**{**options, "gpus": options["gpus"] * factor})
    for name, need in needs(few).items():
        more = needs(many)[name]
        for end in ("low", "likely", "high"):
            assert getattr(more, end) >= getattr(need, end) * (1 - 1e-9), name


@settings(max_examples=12)
@given(options=jobs, factor=st.floats(1.1, 100))
def test_faster_storage_never_loses_more(options: dict[str, Any], factor: float) -> None:
    slow = plan(**options)
    # A save that takes longer than the interval that is given makes that longer, and that may be better.
    stretched = any(text.startswith("A save every") for text in slow.verdict.unmet)
    for way in ("storage__read", "storage__write"):
        fast = plan(**{**options, way: options[way] * factor})
        assert stretched or fast.goodput.value.likely >= slow.goodput.value.likely - 1e-9
        assert fast.verdict.share.likely <= slow.verdict.share.likely + 1e-9


def _span(low: float, high: float) -> st.SearchStrategy[float]:
    return st.floats(math.log(low), math.log(high)).map(math.exp)


situations = st.builds(
    Situation, feed_needed=_span(1e6, 1e12), read=_span(1e8, 1e12), write=_span(1e7, 1e12), size=_span(1e9, 1e14),
    share=_span(1e6, 1e12), copy=_span(1e9, 1e11), mtbf_s=_span(10, 1e7), restart_bytes=_span(1e9, 1e14),
    other_s=st.sampled_from([0.0, 60.0, 5000.0]), synchronous=st.booleans(),
    interval_s=st.none() | _span(1, 1e6),
)  # fmt: skip


@settings(max_examples=300)
@given(here=situations, read=st.floats(1, 1000), write=st.floats(1, 1000))
def test_storage_never_costs_less_than_nothing(here: Situation, read: float, write: float) -> None:
    """Nor less than faster storage wins; also where saves take longer than the interval that was given."""
    cost = goodput_of(here.over_ideal_storage()) - goodput_of(here)
    assert cost >= -1e-12 and storage_share(here) == max(0.0, cost)
    faster = replace(here, read=here.read * read, write=here.write * write)
    assert goodput_of(faster) - goodput_of(here) <= cost + 1e-12
    assert storage_share(faster) <= cost + 1e-12


def test_saves_that_take_longer_than_their_interval_cost_something() -> None:
    """Storage made the interval longer, and that trains more: nothing that storage won. And where it makes it so long
    that nothing trains any more, storage is at fault, not failures."""
    made = plan(gpus=64, model__parameters="8B", checkpoint__interval=30)
    share = made.verdict.share
    assert 0 < share.low < share.likely < share.high < 0.001
    # At 93.3 s from save to save: what is not committed yet, and the load, 2 * 93.3 s every 33 days.
    assert share.likely == pytest.approx(2 * 112e9 / 1.2e9 / (50_700 * 3600 / 64), rel=0.01)
    made = plan(gpus=64, model__parameters="8B", checkpoint__interval="1h", storage__write=1e6, failures__mtbf="20h")
    assert made.goodput.value.likely == 0 and made.verdict.share.likely > 0.95
    assert "whatever the storage" not in made.verdict.sentence


@settings(max_examples=12)
@given(options=jobs)
def test_a_plan_adds_up(options: dict[str, Any]) -> None:
    made = plan(**options)
    shares = made.shares
    whole = shares.trains + shares.data_wait + shares.saves + shares.rework + shares.restarts
    assert whole == pytest.approx(1)
    assert made.goodput.value.likely == pytest.approx(shares.trains)
    assert all(0 <= value <= 1 for value in vars(shares).values())
    assert made.verdict.share.low >= 0 and made.verdict.share.high <= 1
    figures = [answer.value.low for question in made.questions for answer in question.answers]
    assert min(figures) >= 0
    assert made.verdict.problem != "no" or made.verdict.share.high < 0.01
    gains = [cure.gain.value.likely for cure in made.cures if cure.name != "all"]
    assert gains == sorted(gains, reverse=True)
    for cure in made.cures:
        assert cure.shares.trains == pytest.approx(shares.trains + cure.gain.value.likely)


@settings(max_examples=12)
@given(options=jobs)
def test_storage_as_needed_is_no_problem_any_more(options: dict[str, Any]) -> None:
    """With what a plan asks for, storage costs what is good enough: a part for each of feeding, saves and restarts."""
    options = {key: value for key, value in options.items() if key not in ("checkpoint__interval", "network__nic_gbit")}
    fastest = {name: need.high for name, need in needs(plan(**options)).items()}
    read = max(value for name, value in fastest.items() if "read" in name)
    write = max(value for name, value in fastest.items() if "write" in name)
    if max(read, write) > 1e16:
        return
    cured = plan(**{**options, "storage__read": max(read, 1e3), "storage__write": max(write, 1e3)})
    assert cured.verdict.share.likely <= 3 * 0.01


@settings(max_examples=12)
@given(gpus=st.integers(1, 2048), parameters=st.floats(1e9, 5e11), tokens=st.floats(100, 20_000))
def test_text_never_waits_for_storage(gpus: int, parameters: float, tokens: float) -> None:
    """Four bytes a token: even the plain NFS server that is assumed feeds thousands of GPUs."""
    made = plan(gpus=gpus, model__parameters=parameters, feed__tokens_per_s=tokens)
    assert made.shares.data_wait == 0
    assert "waiting for data" not in made.verdict.sentence


@settings(max_examples=12)
@given(gpus=st.integers(8, 2048), megabytes=st.floats(0.1, 150), factor=st.floats(1.1, 50))
def test_samples_over_slow_storage_are_a_problem(gpus: int, megabytes: float, factor: float) -> None:
    """Where storage delivers a part of what training eats, the rest is lost, and faster reads are what helps."""
    rate = 1e9 / (megabytes * 1e6)
    made = plan(
        gpus=gpus, model__parameters="1B", feed__samples_per_s=rate, feed__sample_bytes=megabytes * 1e6,
        storage__read=gpus * 1e9 / factor, storage__write=1e12, failures__mtbf="1000h",
    )  # fmt: skip
    assert made.verdict.problem in ("probably", "yes") and not made.verdict.nothing_to_change
    assert made.shares.data_wait == pytest.approx(1 - 1 / factor, abs=0.03)
    assert made.verdict.cures[0].name in ("read", "all")
