"""A comparison as one HTML page that needs nothing but itself: the sentence, one plot, one table."""

from __future__ import annotations

from html import escape

from headrace.bench.compare import CHANCE, LETTERS, Comparison, Ratio, Row, times
from headrace.measure.charts import Interval, intervals, legend
from headrace.measure.report import Html, Page

_STYLES = ("s0", "s1", "s2")


def build(found: Comparison) -> Page:
    page = Page(
        "headrace bench compare",
        verdict=found.sentence,
        subtitle=f"{found.rounds} rounds in turns: each path meets the same moments",
    )
    keys = [(_STYLES[index], f"{LETTERS[index + 1]}: {path}") for index, path in enumerate(found.paths[1:])]
    rows = [
        (
            row.work + (" (time)" if row.unit == "s" else ""),
            [
                Interval(value=one.median, low=one.low, high=one.high, style=_STYLES[index], title=ratio(one))
                for index, one in enumerate(row.ratios)
            ],
        )
        for row in found.rows
    ]
    page.section(
        f"As a multiple of A: {found.paths[0]}",
        legend(keys, dots=True),
        intervals(rows, x_label="times A (rates: more is better; times: less is better)"),
        note=f"Dot: median of the rounds. Line: where it lies, but for a chance of {CHANCE:.0%} in the whole table.",
    )
    page.table("All of it", columns(found), [_marked(row, cells(row)) for row in found.rows])
    page.table("Paths", ["", "path", "what it is"], [
        [LETTERS[index], path, ", ".join(f"{k}: {v}" for k, v in (found.facts or {}).get(path, {}).items())]
        for index, path in enumerate(found.paths)
    ])  # fmt: skip
    if found.notes:
        page.table("Worth knowing", [""], [[note] for note in found.notes])
    return page


def columns(found: Comparison) -> list[str]:
    letters = LETTERS[: len(found.paths)]
    return ["work", *letters, *(f"{one}/A" for one in letters[1:]), "difference"]


def cells(row: Row) -> list[str]:
    """A row of the table, as text."""
    values = [row.shown(index) for index in range(len(row.values))]
    return [row.work, *values, *(ratio(one) for one in row.ratios), _difference(row)]


def ratio(one: Ratio) -> str:
    return f"{times(one.median)} ({times(one.low)} to {times(one.high)})"


def _difference(row: Row) -> str:
    said = []
    for index, one in enumerate(row.ratios):
        if one.faster is not None:
            said.append(f"{LETTERS[index + 1]} is {'faster' if one.faster else 'slower'}")
    return ", ".join(said) or "within noise"


def _marked(row: Row, texts: list[str]) -> list[str | Html]:
    """Who differs is told in bold; faster of one is slower of another, so nothing of it is good or bad."""
    if all(one.faster is None for one in row.ratios):
        return [*texts]
    return [*texts[:-1], Html(text=f"<b>{escape(texts[-1])}</b>")]
