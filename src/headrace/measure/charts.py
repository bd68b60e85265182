"""Charts as inline SVG: lines, stacked bars, a time line, intervals. Text in, text out; colours come from the page's
style sheet.

Colours are classes, never values, so one drawing serves the light page, the dark page and paper:
`s0`..`s5` for series, `data_wait`, `compute`, `checkpoint`, `restart` for categories, `good`, `bad`, `idle` for states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

#: Room around the plot for axes and labels, in SVG units (the drawing scales with the page).
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 16.0, 26.0, 40.0
WIDTH = 760.0


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line. `style`: a class of the page; `dashed` and `dots` change its look, so that equal curves stay visible."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
    dashed: bool = False
    dots: bool = False


@dataclass(frozen=True, kw_only=True)
class Bar:
    """One stacked bar: parts as (class, value) from the bottom up."""

    label: str
    parts: Sequence[tuple[str, float]]
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Marker:
    """An event, at an x of the chart (for bars: an index, which may lie between two bars)."""

    x: float
    text: str
    style: str = "bad"


@dataclass(frozen=True, kw_only=True)
class Span:
    """A stretch of a time line's lane, seconds."""

    start: float
    end: float
    style: str
    title: str = ""
    label: str = ""


@dataclass(frozen=True, kw_only=True)
class Interval:
    """A value and the range that holds it, in a row of `intervals`. `style`: a class of the page."""

    value: float
    low: float
    high: float
    style: str
    title: str = ""


@dataclass(frozen=True, kw_only=True)
class Lane:
    name: str
    spans: Sequence[Span] = field(default_factory=tuple)


def ticks(low: float, high: float, about: int = 5) -> list[float]:
    """Round values that cover low..high: steps of 1, 2 or 5 times a power of ten."""
    if not (math.isfinite(low) and math.isfinite(high)) or high <= low:
        return [low]
    rough = (high - low) / max(1, about)
    power = 10.0 ** math.floor(math.log10(rough))
    step = next(m * power for m in (1, 2, 5, 10) if m * power >= rough * 0.999)
    first = math.floor(low / step + 1e-9)
    last = math.ceil(high / step - 1e-9)
    return [round(i * step, 12) for i in range(first, last + 1)]


def number(value: float) -> str:
    """A tick label: no needless zeros."""
    return f"{value:.6g}"


def legend(entries: Iterable[tuple[str, str]], *, lines: bool = False) -> str:
    """(class, text) pairs -> the key of a chart, as HTML."""
    kind = "line" if lines else "box"
    keys = "".join(f'<span class="key"><i class="{kind} {escape(c)}"></i>{escape(text)}</span>' for c, text in entries)
    return f'<div class="legend">{keys}</div>'


def line_chart(
    series: Sequence[Series], *, x_label: str, y_label: str, markers: Sequence[Marker] = (), height: float = 270.0
) -> str:
    """Lines over a common x axis. The y axis spans the data, not from zero: it is the shape that is looked at."""
    xs = [x for s in series for x, _ in s.points]
    ys = [y for s in series for _, y in s.points if math.isfinite(y)]
    if not xs or not ys:
        return _nothing()
    x_ticks, y_ticks = ticks(min(xs), max(xs), 8), ticks(min(ys), max(ys))
    x_low, x_high = min(xs), max(max(xs), min(xs) + 1e-9)
    frame = _Frame(height, x_low, x_high, y_ticks[0], max(y_ticks[-1], y_ticks[0] + 1e-9))
    body = [frame.y_axis(y_ticks, y_label), frame.x_axis([t for t in x_ticks if x_low <= t <= x_high], x_label)]
    body.append(_markers(markers, frame))
    for s in series:
        points = [(frame.x(x), frame.y(y)) for x, y in s.points if math.isfinite(y)]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y in points)
        dash = ' stroke-dasharray="2 5"' if s.dashed else ""
        body.append(f'<polyline class="curve {escape(s.style)}" points="{path}"{dash}><title>{escape(s.name)}</title>')
        body.append("</polyline>")
        if s.dots:
            body.extend(
                f'<circle class="dot {escape(s.style)}" cx="{frame.x(x):.1f}" cy="{frame.y(y):.1f}" r="2.6">'
                f"<title>{escape(s.name)}: {number(x)}, {y:.6f}</title></circle>"
                for x, y in s.points
                if math.isfinite(y)
            )
    return _svg(height, body, f"{y_label} over {x_label}")


def stacked_bars(
    bars: Sequence[Bar], *, x_label: str, y_label: str, markers: Sequence[Marker] = (), height: float = 270.0
) -> str:
    """Bars from zero; a part of no height is left out; each bar's `title` is shown when it is pointed at."""
    if not bars:
        return _nothing()
    top = max(sum(v for _, v in bar.parts) for bar in bars)
    y_ticks = ticks(0.0, top or 1.0)
    frame = _Frame(height, -0.5, len(bars) - 0.5, 0.0, y_ticks[-1])
    every = max(1, math.ceil(len(bars) / 20))
    body = [frame.y_axis(y_ticks, y_label)]
    body.append(frame.x_axis(list(range(0, len(bars), every)), x_label, lambda i: bars[int(i)].label))
    body.append(_markers(markers, frame))
    width = (frame.x(1) - frame.x(0)) * 0.78
    for index, bar in enumerate(bars):
        low = 0.0
        body.append(f"<g><title>{escape(bar.title or bar.label)}</title>")
        for style, value in bar.parts:
            if value <= 0:
                continue
            y = frame.y(low + value)
            body.append(
                f'<rect class="{escape(style)}" x="{frame.x(index) - width / 2:.1f}" y="{y:.1f}" '
                f'width="{width:.1f}" height="{max(0.4, frame.y(low) - y):.2f}"/>'
            )
            low += value
        body.append("</g>")
    return _svg(height, body, f"{y_label} per {x_label}")


def timeline(lanes: Sequence[Lane], *, markers: Sequence[Marker] = (), x_label: str = "seconds") -> str:
    """Lanes of spans over wall time; events are lines through all of them, their texts staggered."""
    ends = [s.end for lane in lanes for s in lane.spans] + [m.x for m in markers]
    if not ends:
        return _nothing()
    lane_height, gap = 24.0, 10.0
    left = 104.0
    rows = _stagger([m.x / max(ends) * (WIDTH - left - _RIGHT) for m in markers], [len(m.text) * 6.0 for m in markers])
    top = 10.0 + 15.0 * (max(rows, default=-1) + 1)
    height = top + len(lanes) * (lane_height + gap) + _BOTTOM
    frame = _Frame(height, 0.0, max(ends), 0.0, 1.0, left=left, top=top)
    body = [frame.x_axis([t for t in ticks(0.0, max(ends), 10) if t <= max(ends)], x_label, grid=True)]
    for index, lane in enumerate(lanes):
        y = top + index * (lane_height + gap) + gap / 2
        body.append(f'<text class="lane" x="{left - 10}" y="{y + lane_height / 2 + 4}" text-anchor="end">')
        body.append(f"{escape(lane.name)}</text>")
        labels = []
        for span in lane.spans:
            x, width = frame.x(span.start), max(1.0, frame.x(span.end) - frame.x(span.start))
            body.append(
                f'<rect class="{escape(span.style)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{lane_height}" rx="2"><title>{escape(span.title)}</title></rect>'
            )
            if span.label and width > len(span.label) * 6.2 + 8:
                labels.append(f'<text class="inside" x="{x + 6:.1f}" y="{y + lane_height / 2 + 4:.1f}">')
                labels.append(f"{escape(span.label)}</text>")
        # Last, so that a later span does not cover the label of the one that it lies on.
        body += labels
    for marker, row in zip(markers, rows, strict=True):
        x, y = frame.x(marker.x), 10.0 + 15.0 * row
        end = x + len(marker.text) * 6.0 > WIDTH
        body.append(f'<line class="event {escape(marker.style)}" x1="{x:.1f}" x2="{x:.1f}" y1="{y - 8:.1f}"')
        body.append(f' y2="{height - _BOTTOM:.1f}"/>')
        anchor, shift = ("end", -4.0) if end else ("start", 4.0)
        body.append(f'<text class="note" x="{x + shift:.1f}" y="{y:.1f}" text-anchor="{anchor}">')
        body.append(f"{escape(marker.text)}</text>")
    return _svg(height, body, "time line")


def intervals(rows: Sequence[tuple[str, Sequence[Interval]]], *, x_label: str, height_of_row: float = 30.0) -> str:
    """Ratios, a row each: a dot in its range, over a logarithmic axis with a line at 1."""
    found = [number for _, row in rows for one in row for number in (one.low, one.value, one.high)]
    finite = [number for number in found if math.isfinite(number) and number > 0]
    if not finite:
        return _nothing()
    low, high = min(*finite, 0.8), max(*finite, 1.25)
    left, top = 232.0, 20.0
    height = top + height_of_row * len(rows) + _BOTTOM
    frame = _Frame(height, math.log(low), math.log(high), 0.0, 1.0, left=left, top=top)

    def x(value: float) -> float:
        return frame.x(math.log(min(max(value, low), high))) if value > 0 else left

    body = [
        frame.x_axis([math.log(t) for t in _ratio_ticks(low, high)], x_label, lambda v: number(math.exp(v)), grid=True)
    ]
    body.append(f'<line class="base" x1="{x(1):.1f}" x2="{x(1):.1f}" y1="{top - 8}" y2="{height - _BOTTOM:.1f}"/>')
    for index, (name, row) in enumerate(rows):
        middle = top + height_of_row * (index + 0.5)
        short = name if len(name) <= 36 else name[:35] + "…"
        body.append(f'<text class="lane" x="{left - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(short)}</text>')
        for place, one in enumerate(row):
            y = middle + (place - (len(row) - 1) / 2) * 9.0
            style = escape(one.style)
            body.append(f'<g><title>{escape(one.title or name)}</title><line class="span {style}" ')
            body.append(f'x1="{x(one.low):.1f}" x2="{x(one.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            body.append(f'<circle class="dot {style}" cx="{x(one.value):.1f}" cy="{y:.1f}" r="4"/></g>')
    return _svg(height, body, x_label)


def _ratio_ticks(low: float, high: float) -> list[float]:
    """1, 2, 5 times powers of ten from low to high; in a narrow range steps of a tenth or a quarter."""
    steps: Sequence[float] = (1.0, 2.0, 5.0)
    if high / low < 8:
        steps = (1.0, 1.25, 1.5, 2.0, 2.5, 3.0, 4.0, 5.0, 6.0, 8.0)
    if high / low < 1.7:
        steps = tuple(round(1 + i / 10, 1) for i in range(10)) + tuple(float(i) for i in range(2, 10))
    first, last = math.floor(math.log10(low)), math.ceil(math.log10(high))
    found = [step * 10.0**power for power in range(first, last + 1) for step in steps]
    if high / low < 1.7:
        found += [0.85, 0.95, 1.05]
    return sorted({round(one, 6) for one in found if low <= one <= high})


class _Frame:
    """Data to drawing, and the axes around it."""

    def __init__(
        self,
        height: float,
        x_low: float,
        x_high: float,
        y_low: float,
        y_high: float,
        left: float = _LEFT,
        top: float = _TOP,
    ) -> None:
        self.height, self.left, self.top = height, left, top
        self.x_low, self.x_high, self.y_low, self.y_high = x_low, x_high, y_low, y_high

    def x(self, value: float) -> float:
        return self.left + (value - self.x_low) / (self.x_high - self.x_low) * (WIDTH - self.left - _RIGHT)

    def y(self, value: float) -> float:
        bottom = self.height - _BOTTOM
        return bottom - (value - self.y_low) / (self.y_high - self.y_low) * (bottom - self.top)

    def y_axis(self, at: Sequence[float], label: str) -> str:
        parts = [f'<text class="axis" x="4" y="12">{escape(label)}</text>']
        for value in at:
            y = self.y(value)
            parts.append(f'<line class="grid" x1="{self.left}" x2="{WIDTH - _RIGHT}" y1="{y:.1f}" y2="{y:.1f}"/>')
            parts.append(
                f'<text class="tick" x="{self.left - 8}" y="{y + 4:.1f}" text-anchor="end">{number(value)}</text>'
            )
        return "".join(parts)

    def x_axis(
        self, at: Sequence[float], label: str, text: Callable[[float], str] = number, *, grid: bool = False
    ) -> str:
        bottom = self.height - _BOTTOM
        parts = [f'<line class="base" x1="{self.left}" x2="{WIDTH - _RIGHT}" y1="{bottom:.1f}" y2="{bottom:.1f}"/>']
        for value in at:
            x = self.x(value)
            if grid:
                parts.append(f'<line class="grid" x1="{x:.1f}" x2="{x:.1f}" y1="{self.top}" y2="{bottom:.1f}"/>')
            parts.append(f'<text class="tick" x="{x:.1f}" y="{bottom + 16:.1f}" text-anchor="middle">')
            parts.append(f"{escape(text(value))}</text>")
        middle = (self.left + WIDTH - _RIGHT) / 2
        parts.append(f'<text class="axis" x="{middle:.1f}" y="{self.height - 6:.1f}" text-anchor="middle">')
        parts.append(f"{escape(label)}</text>")
        return "".join(parts)


def _markers(markers: Sequence[Marker], frame: _Frame) -> str:
    rows = _stagger([frame.x(m.x) for m in markers], [len(m.text) * 6.0 for m in markers])
    parts = []
    for marker, row in zip(markers, rows, strict=True):
        x, y = frame.x(marker.x), frame.top + 2 + 14.0 * row
        end = x + len(marker.text) * 6.0 > WIDTH - _RIGHT
        anchor, shift = ("end", -4.0) if end else ("start", 4.0)
        parts.append(
            f'<line class="event {escape(marker.style)}" x1="{x:.1f}" x2="{x:.1f}" '
            f'y1="{frame.top - 8:.1f}" y2="{frame.height - _BOTTOM:.1f}"/>'
            f'<text class="note" x="{x + shift:.1f}" y="{y:.1f}" text-anchor="{anchor}">{escape(marker.text)}</text>'
        )
    return "".join(parts)


def _stagger(starts: Sequence[float], widths: Sequence[float]) -> list[int]:
    """For texts at these places (in order) the first row in which each does not touch the one before it."""
    free_from: list[float] = []
    rows = []
    for start, width in zip(starts, widths, strict=True):
        row = next((r for r, free in enumerate(free_from) if start >= free), len(free_from))
        if row == len(free_from):
            free_from.append(0.0)
        free_from[row] = start + width + 12.0
        rows.append(row)
    return rows


def _svg(height: float, body: Iterable[str], label: str) -> str:
    inner = "".join(body)
    return f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">{inner}</svg>'


def _nothing() -> str:
    return '<p class="quiet">Nothing was recorded.</p>'
