"""A plan as one HTML page that needs nothing but itself."""

from __future__ import annotations

import math
from collections.abc import Sequence

from headrace.measure.charts import Bar, Marker, Series, legend, line_chart, stacked_bars
from headrace.measure.report import Page
from headrace.plan import goodput, units
from headrace.plan.plan import PARTS, Plan
from headrace.plan.quantities import Answer, Range
from headrace.plan.situation import Shares

_STYLES = {"data_wait": "data_wait", "saves": "checkpoint", "rework": "rework", "restarts": "restart"}
_POINTS = 80


def build(plan: Plan) -> Page:
    model, verdict = plan.model, plan.verdict
    page = Page(
        "headrace plan",
        verdict=verdict.sentence,
        subtitle=f"{units.show(model.parameters.likely, units.PARAMETERS)} on {model.gpus:,} GPUs, "
        f"{math.ceil(plan.nodes.likely):,} nodes" + (f", {plan.storage.over}" if plan.provider else ""),
    )
    by_name = {question.name: {a.formula.result: a.value for a in question.answers} for question in plan.questions}
    page.cards(
        [
            (_likely(verdict.share), "of the time lost to storage", _span(verdict.share)),
            (_likely(plan.goodput.value), "of the time trains", _span(plan.goodput.value)),
            *_card(by_name["feeding"]["needed to read, in all"], "to read while training"),
            *_card(by_name["saves"]["needed to write, in all"], "to write saves"),
            *_card(by_name["restarts"]["needed to read in a restart, in all"], "to read in a restart"),
        ]
    )
    page.section(
        "What is lost, and what each change would leave",
        legend([(_STYLES[name], text) for name, text in PARTS.items()]),
        _lost(plan),
        note="Shares of the whole time, as likely. Each bar is one change alone: "
        + "; ".join(f"{name}: {text}" for name, text, _ in _bars(plan)) + ".",
    )  # fmt: skip
    chart, note = _over_rates(plan)
    page.section("What a rate of storage gives", chart, note=note)
    for question in plan.questions:
        page.table(question.title, *table(question.answers), note=question.note)
    rows = [
        [key, str(value) if isinstance(value, Range) else _words(value), source] for key, value, source in plan.assumed
    ]
    page.table(
        "What was assumed", ["key", "value", "why"], rows, note="Nothing was said of these; any of them may be given."
    )
    return page


def table(answers: Sequence[Answer]) -> tuple[list[str], list[list[str]]]:
    """Columns and rows; numbers that stand in the row above already are not told again."""
    rows = []
    before = ""
    for answer in answers:
        numbers = answer.numbers
        note = f" ({answer.note})" if answer.note else ""
        rows.append(
            [
                answer.formula.result, str(answer.value), answer.formula.text,
                "the same" if numbers == before else numbers, answer.formula.source + note,
            ]
        )  # fmt: skip
        before = numbers
    return ["", "result", "formula", "put in", "source"], rows


def _words(value: object) -> str:
    return ", ".join(value) if isinstance(value, tuple) else str(value)


def _likely(value: Range) -> str:
    return units.show(value.likely, value.unit)


def _span(value: Range) -> str:
    return "" if value.exact else f"{units.show(value.low, value.unit)} to {units.show(value.high, value.unit)}"


def _card(value: Range, name: str) -> list[tuple[str, str, str]]:
    return [(_likely(value), name, _span(value) or "in all")]


# ---- pictures -------------------------------------------------------------------------------------------------------


def _bars(plan: Plan) -> list[tuple[str, str, Shares]]:
    put = goodput.put(
        plan.ranges, synchronous=plan.job.flag("checkpoint.synchronous"),
        given_interval=plan.job.has("checkpoint.interval"),
    )  # fmt: skip
    here = goodput.situation(
        {name: value.likely for name, value in put.items()}, synchronous=plan.job.flag("checkpoint.synchronous")
    )
    return [
        ("now", plan.storage.over.removeprefix("with ").removeprefix("over "), plan.shares),
        *((cure.name, cure.text, cure.shares) for cure in plan.cures),
        ("ideal", "storage that takes no time, and nothing else changed", here.over_ideal_storage().shares()),
    ]


def _lost(plan: Plan) -> str:
    bars = []
    for name, text, shares in _bars(plan):
        parts = [(_STYLES[part], 100 * getattr(shares, part)) for part in PARTS]
        told = ", ".join(f"{PARTS[part]} {units.show(getattr(shares, part), units.SHARE)}" for part in PARTS)
        bars.append(Bar(label=name, parts=parts, title=f"{text}: {told}"))
    return stacked_bars(bars, x_label="one change alone", y_label="% of the time lost")


def _over_rates(plan: Plan) -> tuple[str, str]:
    """Goodput over a storage that reads and writes alike, from a fifth of the least need to twice the greatest."""
    synchronous, given = plan.job.flag("checkpoint.synchronous"), plan.job.has("checkpoint.interval")
    formula = goodput.formulas(synchronous=synchronous, given_interval=given)["goodput"]
    needs = {
        answer.formula.result: answer.value.likely
        for question in plan.questions if question.name in ("feeding", "saves", "restarts")
        for answer in question.answers if answer.formula.result.startswith("needed") and answer.value.unit == units.RATE
    }  # fmt: skip
    there = min(plan.storage.read.likely, plan.storage.write.likely)
    most, least = 2 * max(needs.values()), min(*needs.values(), there) / 5
    lines: dict[str, list[tuple[float, float]]] = {"low": [], "likely": [], "high": []}
    for index in range(_POINTS + 1):
        rate = Range.point(least * (most / least) ** (index / _POINTS), units.RATE)
        ranges = {**plan.ranges, "read rate": rate, "write rate": rate}
        value = formula.put(goodput.put(ranges, synchronous=synchronous, given_interval=given)).value
        for end, points in lines.items():
            points.append((rate.likely, 100 * getattr(value, end)))
    names = {"needed to read, in all": "feeding", "needed to write, in all": "saves",
             "needed to read in a restart, in all": "restarts"}  # fmt: skip
    markers = [Marker(x=need, text=names[name], style="good") for name, need in needs.items()]
    if there <= most:
        markers.append(Marker(x=there, text="there now", style="bad"))
    markers.sort(key=lambda marker: marker.x)
    chart = line_chart(
        [
            Series(name="likely", points=lines["likely"], style="s0"),
            Series(name="at worst", points=lines["low"], style="s1"),
            Series(name="at best", points=lines["high"], style="s4"),
        ],
        x_label="rate of reads and of writes, all nodes together", y_label="% of the time trains",
        markers=markers, from_zero=True, log_x=True, x_text=lambda rate: units.show(rate, units.RATE),
    )  # fmt: skip
    note = "If storage read and wrote at this rate. Lines mark what feeding, saves and restarts need, and what is there"
    if there > most:
        note += f" ({units.show(there, units.RATE)}, beyond the right edge)"
    key = legend([("s0", "likely"), ("s1", "at worst"), ("s4", "at best")], lines=True)
    return key + chart, note + "."
