"""The result as one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections.abc import Sequence
from html import escape

from headrace.bench import report
from headrace.bench.figures import Outcome
from headrace.bench.suite import Result
from headrace.measure import charts
from headrace.measure.report import Page, table


def build(result: Result) -> Page:
    page = Page("headrace bench", verdict=report.sentence(result), subtitle=f"{result.path}, {result.kind}")
    page.cards(_cards(result))
    _over_flows(page, result)
    _over_time(page, result)
    page.table("Figures", list(report.COLUMNS), report.rows(result.outcomes))
    page.facts("The path", {**result.facts, **{f"budget {at + 1}": text for at, text in enumerate(result.budget)}})
    lines = "".join(f"<li>{escape(line)}</li>" for line in report.notes(result))
    page.section("How to read this", f"<ul>{lines}</ul>")
    return page


def _cards(result: Result) -> list[tuple[str, str, str]]:
    found = []
    for pattern in ("sequential", "random", "latency", "ingest", "checkpoint", "load"):
        for work, ones in report.of_pattern(result.outcomes, pattern).items():
            one = report.enough(ones) if pattern != "latency" else ones[0]
            figure = one.main
            remark = f"{figure.name}, {work}, flows: {one.flows}" if work else f"{figure.name}, flows: {one.flows}"
            found.append((report.value_text(figure.value, figure.unit), report.NAMES[pattern], remark))
    return found


def _over_flows(page: Page, result: Result) -> None:
    """Rates over the number of flows, each round a dot's neighbour: the median is the line."""
    lines: list[charts.Series] = []
    for pattern in ("sequential", "random", "ingest"):
        for work, ones in report.of_pattern(result.outcomes, pattern).items():
            if len(ones) > 1:
                points = [(float(one.flows), one.main.value / 1e6) for one in ones]
                name = f"{report.NAMES[pattern]}, {work}"
                lines.append(charts.Series(name=name, points=points, style=f"s{len(lines) % 6}", dots=True))
    if lines:
        page.section(
            "More flows", charts.legend([(line.style, line.name) for line in lines], lines=True),
            charts.line_chart(
                lines, x_label="flows", y_label="MB/s", from_zero=True, log_x=True,
                x_at=sorted({x for line in lines for x, _ in line.points}),
            ),
            note="A flow has connections or file handles of its own. Where a line is flat, more of them gain nothing.",
        )  # fmt: skip


def _over_time(page: Page, result: Result) -> None:
    """Of each pattern with most flows, the rate in each slot of the median round."""
    lines: list[charts.Series] = []
    for pattern in ("sequential", "random", "ingest", "mixed"):
        for work, ones in report.of_pattern(result.outcomes, pattern).items():
            series = ones[-1].series
            if series is not None and len(series.rates()) > 2:
                points = [((at + 0.5) * series.every_s, rate / 1e6) for at, rate in enumerate(series.rates())]
                name = f"{report.NAMES[pattern]}, {work}, flows: {ones[-1].flows}"
                lines.append(charts.Series(name=name, points=points, style=f"s{len(lines) % 6}"))
    if lines:
        page.section(
            "While it ran", charts.legend([(line.style, line.name) for line in lines], lines=True),
            charts.line_chart(lines, x_label="seconds", y_label="MB/s", from_zero=True),
            note="The median round of each, in slots of a tenth of a second.",
        )  # fmt: skip
    spread = [one for one in result.outcomes if one.latencies is not None]
    if spread:
        page.section(
            "Latencies", table(["pattern", "flows", "p50", "p90", "p99", "p99.9", "longest"], _latencies(spread))
        )


def _latencies(outcomes: Sequence[Outcome]) -> list[list[str]]:
    found = []
    for one in outcomes:
        spread = one.latencies
        assert spread is not None
        values = (spread.p50, spread.p90, spread.p99, spread.p999, spread.max)
        name = f"{report.NAMES.get(one.pattern, one.pattern)}, {one.work}"
        found.append([name, str(one.flows), *(report.value_text(value, "s") for value in values)])
    return found
