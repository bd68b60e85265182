"""What the drill found as one HTML page that needs nothing but itself: to be shown to whoever runs the storage."""

from __future__ import annotations

from html import escape

from headrace.drill.report import FENCES, NOT_TRIED, TRUSTED, Finding, Report, rows_of
from headrace.measure.report import Html, Page, badge
from headrace.units import format_bytes, format_seconds


def build(report: Report) -> Page:
    tried = [one for one in report.findings if one.verdict != NOT_TRIED]
    late = [one for one in tried if one.watched_bytes]
    page = Page("headrace drill", verdict=report.sentence, subtitle=", ".join(report.uris))
    page.cards(
        [
            (
                f"{sum(one.verdict == TRUSTED for one in tried)} of {len(tried)}",
                "accidents went well",
                _left_out(report),
            ),
            (f"{sum(one.refused for one in late)}", "late commands refused", "of writers that were followed"),
            (f"{sum(one.moved_bytes for one in late)} B", "changed by late writes", "on the media"),
            (f"{sum(one.whole is True for one in tried)} of {len(tried)}", "times all steps whole", "bit for bit"),
        ]
    )
    page.table(
        "What came of it",
        ["accident", "verdict", "late commands refused", "changed on the media", "acknowledged steps", "took"],
        [
            [one.scenario, _verdict(one), *_late(one), _steps(one), format_seconds(one.seconds)]
            for one in report.findings
        ],
        note=f"Fenced {FENCES.get(report.fence, report.fence)}." if report.fence else "",
    )
    for one in report.findings:
        rows = "".join(
            f"<tr><th>{name}</th><td>{'<br>'.join(map(escape, texts))}</td></tr>" for name, texts in rows_of(one)
        )
        lines = f'<div class="finding"><div class="scroll"><table class="facts">{rows}</table></div></div>'
        page.section(f"{one.scenario}: {one.verdict}", lines)
    return page


def _left_out(report: Report) -> str:
    count = sum(one.verdict == NOT_TRIED for one in report.findings)
    return f"{count} not tried" if count else "none left out"


def _verdict(one: Finding) -> str | Html:
    return one.verdict if one.verdict == NOT_TRIED else badge(one.verdict == TRUSTED, one.verdict)


def _late(one: Finding) -> tuple[str, str | Html]:
    if not one.watched_bytes:
        return "none came", ""
    told = f"{one.moved_bytes} B of {format_bytes(one.watched_bytes)}"
    return str(one.refused), badge(False, told) if one.moved_bytes else told


def _steps(one: Finding) -> str | Html:
    if one.verdict == NOT_TRIED or one.whole is None:
        return "not read"
    return "whole" if one.whole else badge(False, "not as saved")
