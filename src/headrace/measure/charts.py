"""Charts as inline SVG: lines, stacked bars, a time line, intervals. Text in, text out; colours come from the page's
style sheet.

Colours are classes, never values, so one drawing serves the light page, the dark page and paper: `s0`..`s5` for series
(each with a dash and a shape of its own, for who does not see its colour), `compute`, `fetch`, `checkpoint` ... for
causes (`headrace.measure.report`), `good`, `bad`, `idle` for states.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from html import escape

#: Room around the plot for axes and labels, in SVG units (the drawing scales with the page).
_LEFT, _RIGHT, _TOP, _BOTTOM = 58.0, 16.0, 26.0, 40.0
WIDTH = 760.0
#: Width of a letter, where room for a text is kept: as on narrow screens, where letters are larger than elsewhere.
_LETTER = 6.8
_WIDEST_BAR = 96.0


@dataclass(frozen=True, kw_only=True)
class Series:
    """A line. `style`: a class of the page, which says its colour and dash. `dots`: its points are measurements."""

    name: str
    points: Sequence[tuple[float, float]]
    style: str
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


def log_ticks(low: float, high: float, about: int = 10) -> list[float]:
    """1, 2 and 5 times powers of ten from low to high; of a wide range the powers only."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    steps = (1.0, 2.0, 5.0) if 3 * math.log10(high / low) <= about else (1.0,)
    return [one for power in powers for step in steps if low <= (one := float(f"{step}e{power}")) <= high]


def legend(entries: Iterable[tuple[str, str]], *, lines: bool = False, dots: bool = False) -> str:
    """(class, text) pairs -> the key of a chart, as HTML: boxes, `lines`, or `dots` as `intervals` draws them."""
    keys = "".join(
        f'<span class="key">{_sample(style, dots=dots) if lines or dots else _box(style)}{escape(text)}</span>'
        for style, text in entries
    )
    return f'<div class="legend">{keys}</div>'


def _box(style: str) -> str:
    return f'<i class="box {escape(style)}"></i>'


def _sample(style: str, *, dots: bool) -> str:
    kind = "span" if dots else "curve"
    line = f'<line class="{kind} {escape(style)}" x1="1" x2="29" y1="6" y2="6"/>'
    dot = _dot(style, 15, 6, 4.0) if dots else ""
    return f'<svg class="sample" viewBox="0 0 30 12" aria-hidden="true">{line}{dot}</svg>'


def _dot(style: str, x: float, y: float, r: float, title: str = "") -> str:
    """A point of a series, in the series' shape."""
    about = f"<title>{escape(title)}</title>" if title else ""
    attributes = f'class="dot {escape(style)}"'
    if style == "s1":
        return f'<rect {attributes} x="{x - r:.1f}" y="{y - r:.1f}" width="{2 * r}" height="{2 * r}">{about}</rect>'
    if style in ("s2", "s4"):
        far = 1.4 * r
        corners = [(0, -far), (far, 0), (0, far), (-far, 0)] if style == "s4" else [(0, -far), (far, r), (-far, r)]
        points = " ".join(f"{x + dx:.1f},{y + dy:.1f}" for dx, dy in corners)
        return f'<polygon {attributes} points="{points}">{about}</polygon>'
    return f'<circle {attributes} cx="{x:.1f}" cy="{y:.1f}" r="{r}">{about}</circle>'


def line_chart(
    series: Sequence[Series],
    *,
    x_label: str,
    y_label: str,
    markers: Sequence[Marker] = (),
    height: float = 270.0,
    from_zero: bool = False,
    log_x: bool = False,
    x_at: Sequence[float] = (),
    x_text: Callable[[float], str] = number,
) -> str:
    """Lines over a common x axis.

    The y axis spans the data, for it is the shape that is looked at; or begins at 0 (`from_zero`), for what is compared
    in size. `log_x`: a logarithmic x axis, of what is above 0. `x_at`: where it has ticks, for numbers that are counts
    of something. Texts of markers stand above the lines.
    """
    xs = [x for s in series for x, _ in s.points if x > 0 or not log_x]
    ys = [y for s in series for _, y in s.points if math.isfinite(y)]
    if not xs or not ys:
        return _nothing()
    scale = math.log if log_x else float
    low, high = min(xs), max(xs)
    x_ticks = x_at or (log_ticks(low, high) if log_x else ticks(low, high, 8))
    y_ticks = ticks(0.0 if from_zero else min(ys), max(ys))
    x_low, x_high = scale(low), max(scale(high), scale(low) + 1e-9)
    shown = [Marker(x=scale(m.x), text=m.text, style=m.style) for m in markers if m.x > 0 or not log_x]
    frame = _Frame(height, x_low, x_high, y_ticks[0], max(y_ticks[-1], y_ticks[0] + 1e-9)).under(shown)
    body = [frame.y_axis(y_ticks, y_label)]
    names = {scale(t): x_text(t) for t in x_ticks if low <= t <= high}
    body.append(frame.x_axis(list(names), x_label, names.__getitem__))
    body.append(_markers(shown, frame))
    for s in series:
        points = [
            (frame.x(scale(x)), frame.y(y), x, y) for x, y in s.points if math.isfinite(y) and (x > 0 or not log_x)
        ]
        path = " ".join(f"{x:.1f},{y:.1f}" for x, y, *_ in points)
        body.append(f'<polyline class="curve {escape(s.style)}" points="{path}"><title>{escape(s.name)}</title>')
        body.append("</polyline>")
        if s.dots:
            body.extend(_dot(s.style, x, y, 2.8, f"{s.name}: {x_text(at)}, {of:.6g}") for x, y, at, of in points)
    return _svg(frame.height, body, f"{y_label} over {x_label}")


def stacked_bars(
    bars: Sequence[Bar], *, x_label: str, y_label: str, markers: Sequence[Marker] = (), height: float = 270.0
) -> str:
    """Bars from zero; a part of no height is left out; each bar's `title` is shown when it is pointed at."""
    if not bars:
        return _nothing()
    top = max(sum(v for _, v in bar.parts) for bar in bars)
    y_ticks = ticks(0.0, top or 1.0)
    frame = _Frame(height, -0.5, len(bars) - 0.5, 0.0, y_ticks[-1]).under(markers)
    every = max(1, math.ceil(len(bars) / 20))
    body = [frame.y_axis(y_ticks, y_label)]
    body.append(frame.x_axis(list(range(0, len(bars), every)), x_label, lambda i: bars[int(i)].label))
    body.append(_markers(markers, frame))
    width = min((frame.x(1) - frame.x(0)) * 0.78, _WIDEST_BAR)
    for index, bar in enumerate(bars):
        low = 0.0
        body.append(f"<g><title>{escape(bar.title or bar.label)}</title>")
        for style, value in bar.parts:
            if value <= 0:
                continue
            y = frame.y(low + value)
            tall = max(0.4, frame.y(low) - y)
            body.append(
                f'<rect class="part {escape(style)}{_thin(tall)}" x="{frame.x(index) - width / 2:.1f}" y="{y:.1f}" '
                f'width="{width:.1f}" height="{tall:.2f}"/>'
            )
            low += value
        body.append("</g>")
    return _svg(frame.height, body, f"{y_label} per {x_label}")


def _thin(size: float) -> str:
    """Of what the line around it would leave nothing."""
    return "" if size >= 4 else " thin"


def timeline(lanes: Sequence[Lane], *, markers: Sequence[Marker] = (), x_label: str = "seconds") -> str:
    """Lanes of spans over wall time; events are lines through all of them, their texts staggered."""
    ends = [s.end for lane in lanes for s in lane.spans] + [m.x for m in markers]
    if not ends:
        return _nothing()
    lane_height, gap = 24.0, 10.0
    left = max(104.0, 18.0 + _LETTER * max(len(lane.name) for lane in lanes)) if lanes else 104.0
    frame = _Frame(
        10.0 + len(lanes) * (lane_height + gap) + _BOTTOM, 0.0, max(ends), 0.0, 1.0, left=left, top=10.0
    ).under(markers)
    body = [frame.x_axis([t for t in ticks(0.0, max(ends), 10) if t <= max(ends)], x_label, grid=True)]
    for index, lane in enumerate(lanes):
        y = frame.top + index * (lane_height + gap) + gap / 2
        body.append(f'<text class="lane" x="{left - 10}" y="{y + lane_height / 2 + 4}" text-anchor="end">')
        body.append(f"{escape(lane.name)}</text>")
        labels = []
        for span in lane.spans:
            x, width = frame.x(span.start), max(1.0, frame.x(span.end) - frame.x(span.start))
            body.append(
                f'<rect class="part {escape(span.style)}{_thin(width)}" x="{x:.1f}" y="{y:.1f}" width="{width:.1f}" '
                f'height="{lane_height}" rx="2"><title>{escape(span.title)}</title></rect>'
            )
            if span.label and width > len(span.label) * _LETTER + 8:
                labels.append(f'<text class="inside" x="{x + 6:.1f}" y="{y + lane_height / 2 + 4:.1f}">')
                labels.append(f"{escape(span.label)}</text>")
        # Last, so that a later span does not cover the label of the one that it lies on.
        body += labels
    body.append(_markers(markers, frame))
    return _svg(frame.height, body, "time line")


def intervals(rows: Sequence[tuple[str, Sequence[Interval]]], *, x_label: str, height_of_row: float = 30.0) -> str:
    """Ratios, a row each: a dot in its range, over a logarithmic axis with a line at 1."""
    found = [number for _, row in rows for one in row for number in (one.low, one.value, one.high)]
    finite = [number for number in found if math.isfinite(number) and number > 0]
    if not finite:
        return _nothing()
    low, high = min(*finite, 0.8), max(*finite, 1.25)
    names = [name if len(name) <= 36 else name[:35] + "…" for name, _ in rows]
    left, top = 18.0 + _LETTER * max(map(len, names)), 20.0
    height = top + height_of_row * len(rows) + _BOTTOM
    frame = _Frame(height, math.log(low), math.log(high), 0.0, 1.0, left=left, top=top)

    def x(value: float) -> float:
        return frame.x(math.log(min(max(value, low), high))) if value > 0 else left

    body = [
        frame.x_axis([math.log(t) for t in _ratio_ticks(low, high)], x_label, lambda v: number(math.exp(v)), grid=True)
    ]
    body.append(f'<line class="base" x1="{x(1):.1f}" x2="{x(1):.1f}" y1="{top - 8}" y2="{height - _BOTTOM:.1f}"/>')
    for index, (short, (name, row)) in enumerate(zip(names, rows, strict=True)):
        middle = top + height_of_row * (index + 0.5)
        body.append(f'<text class="lane" x="{left - 10}" y="{middle + 4:.1f}" text-anchor="end">{escape(short)}</text>')
        for place, one in enumerate(row):
            y = middle + (place - (len(row) - 1) / 2) * 9.0
            style = escape(one.style)
            body.append(f'<g><title>{escape(one.title or name)}</title><line class="span {style}" ')
            body.append(f'x1="{x(one.low):.1f}" x2="{x(one.high):.1f}" y1="{y:.1f}" y2="{y:.1f}"/>')
            body.append(_dot(one.style, x(one.value), y, 4.0) + "</g>")
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

    def under(self, markers: Sequence[Marker]) -> _Frame:
        """With room for texts of markers above what is drawn."""
        rows = 1 + max(_rows(markers, self), default=-1)
        more = 14.0 * rows
        return _Frame(
            self.height + more, self.x_low, self.x_high, self.y_low, self.y_high, left=self.left, top=self.top + more
        )

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
            name = text(value)
            inside = x + len(name) * _LETTER / 2 <= WIDTH
            at_x, anchor = (x, "middle") if inside else (WIDTH, "end")
            parts.append(f'<text class="tick" x="{at_x:.1f}" y="{bottom + 16:.1f}" text-anchor="{anchor}">')
            parts.append(f"{escape(name)}</text>")
        middle = (self.left + WIDTH - _RIGHT) / 2
        parts.append(f'<text class="axis" x="{middle:.1f}" y="{self.height - 6:.1f}" text-anchor="middle">')
        parts.append(f"{escape(label)}</text>")
        return "".join(parts)


def _rows(markers: Sequence[Marker], frame: _Frame) -> list[int]:
    widths = [len(m.text) * _LETTER for m in markers]
    # A text that would leave the picture stands to the left of its line.
    starts = [x if _fits(x, w) else x - w for x, w in zip((frame.x(m.x) for m in markers), widths, strict=True)]
    return _stagger(starts, widths)


def _fits(x: float, width: float) -> bool:
    return x + width <= WIDTH - _RIGHT


def _markers(markers: Sequence[Marker], frame: _Frame) -> str:
    """Texts above the plot (`_Frame.under` kept room for them), each at the head of its line."""
    rows = _rows(markers, frame)
    first = frame.top - 6 - 14.0 * max(rows, default=0)
    parts = []
    for marker, row in zip(markers, rows, strict=True):
        x, y = frame.x(marker.x), first + 14.0 * row
        anchor, shift = ("start", 4.0) if _fits(x, len(marker.text) * _LETTER) else ("end", -4.0)
        parts.append(
            f'<line class="event {escape(marker.style)}" x1="{x:.1f}" x2="{x:.1f}" '
            f'y1="{y - 9:.1f}" y2="{frame.height - _BOTTOM:.1f}"/>'
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
    drawing = f'<svg viewBox="0 0 {WIDTH:.0f} {height:.0f}" role="img" aria-label="{escape(label)}">{inner}</svg>'
    return f'<div class="scroll">{drawing}</div>'


def _nothing() -> str:
    return '<p class="quiet">Nothing was recorded.</p>'
