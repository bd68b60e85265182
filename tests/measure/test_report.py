"""The page: one file that needs nothing else, well formed, whatever is put into it."""

from __future__ import annotations

import itertools
import math
import re
from html.parser import HTMLParser

import pytest

from headrace.measure import charts
from headrace.measure.report import PARTS, Page, badge, table

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
            charts.Series(name="b", points=[(0, 4.0), (1, 3.5)], style="s3"),
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
    heights = [float(h) for h in re.findall(r'<rect class="part \w+"[^>]* height="([\d.]+)"', svg)]
    assert heights[0] / heights[1] == pytest.approx(3.0, rel=1e-2)


#: What is left of red, green and blue light to people without one kind of cones (Machado, Oliveira, Fernandes 2009).
EYES = {
    "all cones": ((1.0, 0.0, 0.0), (0.0, 1.0, 0.0), (0.0, 0.0, 1.0)),
    "no red": ((0.152286, 1.052583, -0.204868), (0.114503, 0.786281, 0.099216), (-0.003882, -0.048116, 1.051998)),
    "no green": ((0.367322, 0.860646, -0.227968), (0.280085, 0.672501, 0.047413), (-0.011820, 0.042940, 0.968881)),
    "no blue": ((1.255528, -0.076749, -0.178779), (-0.078411, 0.930809, 0.147602), (0.004733, 0.691367, 0.303900)),
}


def seen(colour: str, eyes: str) -> tuple[float, float, float]:
    """CIE L*a*b* of a colour as these eyes see it."""
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    light = [one / 12.92 if one <= 0.04045 else ((one + 0.055) / 1.055) ** 2.4 for one in parts]
    r, g, b = (min(1.0, max(0.0, sum(f * one for f, one in zip(row, light, strict=True)))) for row in EYES[eyes])
    xyz = (
        (0.4124 * r + 0.3576 * g + 0.1805 * b) / 0.95047,
        0.2126 * r + 0.7152 * g + 0.0722 * b,
        (0.0193 * r + 0.1192 * g + 0.9505 * b) / 1.08883,
    )
    x, y, z = (one ** (1 / 3) if one > 0.008856 else 7.787 * one + 16 / 116 for one in xyz)
    return 116 * y - 16, 500 * (x - y), 200 * (y - z)


@pytest.mark.parametrize("eyes", EYES)
@pytest.mark.parametrize("theme", [0, 1], ids=["light", "dark"])
def test_who_does_not_see_a_colour_tells_parts_of_a_step_apart(theme: int, eyes: str) -> None:
    colours = {name: seen(both[theme], eyes) for name, both in PARTS.items()}
    apart = {(a, b): math.dist(colours[a], colours[b]) for a, b in itertools.combinations(colours, 2)}
    # Just noticed are 2.3; lines of the same page that lie side by side are seen at 10.
    closest = min(apart, key=lambda pair: apart[pair])
    assert apart[closest] > 10, (closest, apart[closest])


def test_a_logarithmic_axis_has_a_decade_as_wide_as_another() -> None:
    svg = charts.line_chart(
        [charts.Series(name="a", points=[(1, 0.0), (10, 5.0), (100, 10.0)], style="s1", dots=True)],
        x_label="x", y_label="y", log_x=True,
        markers=[charts.Marker(x=0, text="not there"), charts.Marker(x=10, text="here")],
    )  # fmt: skip
    points = re.search(r'points="([^"]+)"', svg)
    assert points is not None
    first, second, third = (float(pair.split(",")[0]) for pair in points.group(1).split())
    assert third - second == pytest.approx(second - first, abs=0.2)
    assert "here" in svg and "not there" not in svg
    assert charts.log_ticks(0.3, 30) == [0.5, 1, 2, 5, 10, 20]
    assert charts.log_ticks(1, 1e6) == [1, 10, 100, 1e3, 1e4, 1e5, 1e6]


def test_texts_of_markers_stand_above_what_is_drawn() -> None:
    plain = charts.line_chart([charts.Series(name="a", points=[(0, 0), (9, 9)], style="s0")], x_label="x", y_label="y")
    marks = [charts.Marker(x=9, text="at the right edge"), charts.Marker(x=9, text="another one there")]
    marked = charts.line_chart(
        [charts.Series(name="a", points=[(0, 0), (9, 9)], style="s0")], x_label="x", y_label="y", markers=marks
    )
    heights = [float(re.search(r'viewBox="0 0 760 (\d+)"', svg).group(1)) for svg in (plain, marked)]  # type: ignore[union-attr]
    assert heights[1] == heights[0] + 2 * 14
    places = [float(y) for y in re.findall(r'class="note" x="[\d.]+" y="([\d.]+)"', marked)]
    assert len(set(places)) == 2
    highest = min(float(pair.split(",")[1]) for pair in re.findall(r'points="([^"]+)"', marked)[0].split())
    assert max(places) < highest


def test_columns_without_a_name_have_no_head() -> None:
    assert "<thead" not in table([""], [["a note"]])
    assert "<thead" in table(["", "path"], [["A", "/"]])


def test_nothing_to_draw_says_so() -> None:
    assert "Nothing was recorded" in charts.line_chart([], x_label="x", y_label="y")
    assert "Nothing was recorded" in charts.stacked_bars([], x_label="x", y_label="y")
    assert "Nothing was recorded" in charts.timeline([])
