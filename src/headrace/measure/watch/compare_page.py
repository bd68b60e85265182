"""Stalls by subtraction as one HTML page: three runs of a loop, and what other storage would give."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.measure import charts
from headrace.measure.report import Page
from headrace.measure.watch import tell
from headrace.measure.watch.predict import Prediction, Stalls
from headrace.measure.watch.verdict import percent
from headrace.units import format_rate, format_seconds

_POINTS = 60
#: Class of the page's style and name of each part of a step.
_PARTS = [("compute", "the loop itself"), ("preparation", "preparation"), ("fetch", "reads")]


def page(found: Stalls, predictions: Sequence[Prediction] = ()) -> str:
    """`predictions`: for the rates that were asked for."""
    made = Page("headrace watch compare", verdict=found.sentence)
    total = found.storage.mean_s
    cards = [
        (percent(found.utilisation), "utilisation", "share of a step that computes, from storage"),
        (percent(found.fetch_s / total), "of a step waits for reads", _stall(found.fetch_s, found.fetch_error_s)),
        (percent(found.preparation_s / total), "prepares data",
         _stall(found.preparation_s, found.preparation_error_s)),
    ]  # fmt: skip
    if found.measured_rate is not None:
        cards.append((format_rate(found.measured_rate), "from storage", "as it was measured"))
    made.cards(cards)
    made.section(
        "A step of each run",
        charts.legend(_PARTS),
        charts.stacked_bars(_bars(found), x_label="data from", y_label="milliseconds a step", height=220),
        note="What a step takes longer from a warm cache is preparation, what it takes longer from storage is reads.",
    )
    if found.step_bytes > 0:
        _other_storage(made, found, predictions)
    else:
        made.section(
            "With other storage",
            note="It is not known how many bytes a step reads (batch_bytes= of Watch.loader, or --step-bytes).",
        )
    made.facts("What it rests on", tell.facts_of_stalls(found))
    return made.html()


def _stall(seconds: float, error: float) -> str:
    return f"{format_seconds(seconds)} ± {format_seconds(error)}"


def _bars(found: Stalls) -> list[charts.Bar]:
    base = min(found.synthetic.mean_s, found.cached.mean_s, found.storage.mean_s)
    rows = [
        ("memory", found.synthetic.mean_s, 0.0, 0.0),
        ("a warm cache", min(found.cached.mean_s, found.synthetic.mean_s), found.preparation_s, 0.0),
        ("storage", min(base, found.storage.mean_s), found.preparation_s, found.fetch_s),
    ]
    return [
        charts.Bar(
            label=label,
            parts=[(style, seconds * 1e3) for (style, _), seconds in zip(_PARTS, parts, strict=True)],
            title=", ".join(
                f"{name} {format_seconds(seconds)}" for (_, name), seconds in zip(_PARTS, parts, strict=True)
            ),
        )
        for label, *parts in rows
    ]


def _other_storage(made: Page, found: Stalls, predictions: Sequence[Prediction]) -> None:
    """Utilisation over the rate of storage, around that at which reads take as long as the rest of a step."""
    even = found.step_bytes / found.cached.mean_s
    told = [each.rate_bytes_per_s for each in predictions]
    there = [] if found.measured_rate is None else [found.measured_rate]
    least, most = min(even, *told, *there) / 4, max(even, *told, *there) * 4
    points = [found.predict(least * (most / least) ** (at / _POINTS)) for at in range(_POINTS + 1)]
    lines = [
        charts.Series(
            name=name, style=style, points=[(each.rate_bytes_per_s, 100 * getattr(each, end)) for each in points]
        )
        for name, style, end in (
            ("predicted", "s0", "utilisation"),
            ("at least", "s1", "low"),
            ("at most", "s4", "high"),
        )
    ]
    markers = [charts.Marker(x=rate, text=f"{format_rate(rate)}, asked for", style="idle") for rate in told]
    markers += [charts.Marker(x=rate, text=f"{format_rate(rate)}, measured", style="bad") for rate in there]
    made.section(
        "With other storage",
        charts.legend([(line.style, line.name) for line in lines], lines=True),
        charts.line_chart(
            lines, x_label="rate of storage, for one rank", y_label="utilisation, %", from_zero=True, log_x=True,
            x_text=format_rate, markers=sorted(markers, key=lambda marker: marker.x),
        ),
        note="Utilisation of the same loop. Where a line is flat, faster storage gains nothing.",
    )  # fmt: skip
    if predictions:
        made.table(
            "What was asked for",
            ["storage of", "utilisation", "at least", "at most"],
            [
                [format_rate(each.rate_bytes_per_s), *map(percent, (each.utilisation, each.low, each.high))]
                for each in predictions
            ],
        )
