"""The page: one file that needs nothing else, well formed, whatever is put into it."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import pytest

from headrace.measure import charts
from headrace.measure.report import Page, badge

VOID = {"meta", "br", "hr", "img", "link", "input"}


class Checker(HTMLParser):
    """Every element closed in order; keeps what could fetch something."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.tags: set[str] = set()
        self.outward: list[tuple[str, str, str | None]] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.add(tag)
        self.outward += [
            (tag, k, v) for k, v in attrs if k in ("src", "href", "xlink:href", "action", "srcset", "data")
        ]
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.handle_starttag(tag, attrs)
        if tag not in VOID:
            self.open.pop()

    def handle_endtag(self, tag: str) -> None:
        assert self.open, f"</{tag}> closes nothing"
        assert self.open.pop() == tag


def check_page(html: str) -> Checker:
    checker = Checker()
    checker.feed(html)
    checker.close()
    assert checker.open == []
    assert checker.outward == []
    assert not checker.tags & {"script", "link", "iframe", "object", "embed", "img"}
    assert not re.search(r"https?:|url\(|@import|//[a-z0-9.-]+\.[a-z]{2,}/", html)
    return checker


@pytest.fixture
def page() -> Page:
    nasty = '<script>alert("&")</script>'
    page = Page(nasty, verdict=nasty, subtitle=nasty)
    page.cards([("1", nasty, nasty)])
    line = charts.line_chart(
        [
            charts.Series(name=nasty, points=[(0, 4.0), (1, 3.5), (2, float("nan"))], style="s0", dots=True),
            charts.Series(name="b", points=[(0, 4.0), (1, 3.5)], style="s3", dashed=True),
        ],
        x_label=nasty,
        y_label=nasty,
        markers=[charts.Marker(x=1, text=nasty)],
    )
    bars = charts.stacked_bars(
        [charts.Bar(label=nasty, parts=[("compute", 1.0), ("data_wait", 0.0), ("checkpoint", 0.2)], title=nasty)],
        x_label="step",
        y_label="seconds",
        markers=[charts.Marker(x=0, text="kill")],
    )
    lanes = [charts.Lane(name=nasty, spans=[charts.Span(start=0, end=9, style="good", title=nasty, label="up")])]
    time = charts.timeline(lanes, markers=[charts.Marker(x=3, text="a"), charts.Marker(x=3.1, text=nasty)])
    page.section(nasty, charts.legend([("s0", nasty)]), line, bars, time, note=nasty)
    page.table("t", [nasty], [[nasty], [badge(True, nasty)], [badge(False, "no")]])
    page.facts("f", {nasty: nasty})
    return page


def test_the_page_needs_nothing_and_is_well_formed(page: Page) -> None:
    checker = check_page(page.html())
    assert {"svg", "table", "polyline", "rect", "main"} <= checker.tags


def test_the_checker_would_notice(page: Page) -> None:
    html = page.html()
    for bad in ('<img src="x">', '<link href="x">', "<p>", "<style>@import 'x'</style>", "<p>https://x.org</p>"):
        with pytest.raises(AssertionError):
            check_page(html.replace("</main>", bad + "</main>"))


@pytest.mark.parametrize(
    ("low", "high", "expected"),
    [(0, 1, [0, 0.2, 0.4, 0.6, 0.8, 1.0]), (0, 37, [0, 10, 20, 30, 40]), (8.1, 9.0, [8.0, 8.2, 8.4, 8.6, 8.8, 9.0])],
)
def test_ticks_are_round_and_cover_the_data(low: float, high: float, expected: list[float]) -> None:
    assert charts.ticks(low, high) == pytest.approx(expected)


def test_bars_are_as_high_as_their_values() -> None:
    svg = charts.stacked_bars(
        [charts.Bar(label="0", parts=[("compute", 3.0), ("data_wait", 1.0)])], x_label="step", y_label="s"
    )
    heights = [float(h) for h in re.findall(r'<rect class="\w+"[^>]* height="([\d.]+)"', svg)]
    assert heights[0] / heights[1] == pytest.approx(3.0, rel=1e-2)


def test_nothing_to_draw_says_so() -> None:
    assert "Nothing was recorded" in charts.line_chart([], x_label="x", y_label="y")
    assert "Nothing was recorded" in charts.stacked_bars([], x_label="x", y_label="y")
    assert "Nothing was recorded" in charts.timeline([])
