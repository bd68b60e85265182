"""A sustained run as tables and one HTML page: the rate over time, and the levels that were found in it."""

from __future__ import annotations

from collections.abc import Mapping

from headrace.bench.figures import Outcome
from headrace.bench.sustained import Judgement, rate, size, span
from headrace.measure import charts
from headrace.measure.report import Page

COLUMNS = ("from", "for", "rate", "noise", "moved")
#: Points of the line, at most: a page is looked at, not analysed.
_POINTS = 600


def rows(found: Judgement) -> list[list[str]]:
    """A level each."""
    return [
        [span(one.start_s), span(one.seconds), rate(one.rate), f"± {one.noise:.0%}", size(one.bytes)]
        for one in found.segments
    ]


def build(outcome: Outcome, found: Judgement, facts: Mapping[str, str]) -> Page:
    page = Page("headrace bench sustained", verdict=found.sentence, subtitle=f"{outcome.path}, {outcome.flows} flows")
    cards = [(rate(found.sustained_rate), "lasts", found.kind)]
    if len(found.segments) > 1:
        cards.insert(0, (rate(found.segments[0].rate), "at first", f"for {span(found.segments[0].seconds)}"))
    if found.credit_bytes:
        cards.append((size(found.credit_bytes), "burst credit", "moved above the rate that lasts"))
    if found.segments:
        cards.append((size(sum(one.bytes for one in found.segments)), "moved", f"in {span(found.segments[-1].end_s)}"))
    page.cards(cards)
    series = outcome.series
    if series is not None and len(series.bytes) > 1:
        fold = -(-len(series.bytes) // _POINTS)
        every = fold * series.every_s
        # Not the last slot, in which it ended.
        counts = [sum(series.bytes[at : at + fold]) for at in range(0, len(series.bytes) - fold, fold)]
        line = [((at + 0.5) * every, count / every / 1e6) for at, count in enumerate(counts)]
        levels = [(at, one.rate / 1e6) for one in found.segments for at in (one.start_s, one.end_s)]
        lines = [
            charts.Series(name="rate", points=line, style="s0"),
            charts.Series(name="levels", points=levels, style="s1"),
        ]
        markers = [charts.Marker(x=one.start_s, text=rate(one.rate), style="idle") for one in found.segments[1:9]]
        page.section(
            "The rate, and its levels", charts.legend([("s0", "rate"), ("s1", "levels")], lines=True),
            charts.line_chart(lines, x_label="seconds", y_label="MB/s", markers=markers, from_zero=True),
        )  # fmt: skip
    page.table("Levels", list(COLUMNS), rows(found))
    said = {"caches": outcome.cache, "durable when": outcome.durable}
    page.facts("The path", {**facts, **{name: text for name, text in said.items() if text}})
    return page
