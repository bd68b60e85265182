"""The examination as one HTML page that needs nothing but itself."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from html import escape

from headrace.doctor import describe
from headrace.doctor.examine import Examination
from headrace.doctor.finding import ERROR, NOTE, WARNING, Finding
from headrace.measure.report import Html, Page, table

_MARKS = {ERROR: ("bad", "✗"), WARNING: ("warn", "▲"), NOTE: ("quiet", "●")}


def build(found: Examination, *, more: Sequence[describe.Section] = ()) -> Page:
    facts = describe.machine_facts(found)
    page = Page(
        "headrace doctor",
        verdict=found.sentence,
        subtitle=f"{facts['machine']}, Linux {facts['kernel']}"
        if facts["machine"] != describe.UNKNOWN
        else facts["kernel"],
    )
    _cards(page, found)
    if found.findings:
        notes = [one for one in found.findings if one.severity == NOTE]
        grave = [one for one in found.findings if one.severity != NOTE]
        if grave:
            page.section("What is wrong", *(_finding(one) for one in grave))
        if notes:
            page.section("Worth knowing", *(_finding(one) for one in notes))
    page.table(
        "Storage", ["what", "verdict", "size", "mounted", "why"],
        [[row[0], Html(text=f"<b>{escape(row[1])}</b>"), *row[2:]] for row in describe.storage_rows(found)],
        note="What a hypervisor presents by PCIe may lie behind a fabric: that cannot be told from inside.",
    )  # fmt: skip
    parts = (
        ("Controllers over a fabric", describe.CONTROLLER_COLUMNS, describe.controller_rows(found)),
        ("Paths", ("disk", "by", "ANA state"), describe.path_rows(found)),
        ("Targets, measured", describe.TARGET_COLUMNS, describe.target_rows(found)),
        ("Disks and file systems, touched", ("what", "outcome", "took", "engine", "fence", "free"),
         describe.touch_rows(found)),
        ("Network", ("interface", "state", "MTU", "speed", "driver", "queues", "NUMA", "RDMA"),
         describe.interface_rows(found)),
    )  # fmt: skip
    for heading, columns, rows in parts:
        if rows:
            page.section(heading, table(list(columns), rows))
    for section in more:
        page.section(
            section.heading, *([table(section.columns, section.rows)] if section.rows else []), note=section.note
        )
    page.facts("Machine", facts)
    if found.unseen or not found.measured:
        rows = [[one] for one in found.unseen] + ([] if found.measured else [["nothing was measured"]])
        page.section("Not seen", table([""], rows))
    return page


def _cards(page: Page, found: Examination) -> None:
    words = Counter(one.verdict.word for one in found.storage)
    numbers = {severity: found.count(severity) for severity in (ERROR, WARNING, NOTE)}
    counts = [(str(count), severity if count == 1 else f"{severity}s", "") for severity, count in numbers.items()]
    kinds = [(str(count), word, "by what can be seen from here") for word, count in words.most_common(2)]
    page.cards([*counts, *kinds])


def _finding(finding: Finding) -> str:
    style, mark = _MARKS[finding.severity]
    rows = "".join(
        f"<tr><th>{name}</th><td>{f'<code>{escape(text)}</code>' if name == 'command' else escape(text)}</td></tr>"
        for name, text in (
            ("seen", finding.evidence), ("why", finding.why), ("do", finding.what_to_do), ("command", finding.command),
        ) if text
    )  # fmt: skip
    return (
        f'<div class="finding"><h3><span class="badge {style}">{mark} {finding.severity}</span> '
        f"{escape(finding.title)} <small>{escape(finding.id)}</small></h3>"
        f'<div class="scroll"><table class="facts">{rows}</table></div></div>'
    )
