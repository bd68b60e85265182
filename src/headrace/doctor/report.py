"""The examination as text, for a terminal or a log."""

from __future__ import annotations

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table
from rich.text import Text

from headrace.doctor import describe
from headrace.doctor.examine import Examination
from headrace.doctor.finding import ERROR, NOTE, WARNING, Finding

_STYLES = {ERROR: "bold red", WARNING: "bold yellow", NOTE: "bold cyan"}
#: Where there is no terminal nothing is folded.
_WIDE = 10_000


def print_report(found: Examination, console: Console | None = None, *, more: Sequence[describe.Section] = ()) -> None:
    """Storage and verdicts, measurements, findings with what to do, and what was not looked at."""
    console = console or Console(highlight=False, markup=False, width=None if Console().is_terminal else _WIDE)
    _table(console, "Storage", ("what", "verdict", "size", "mounted", "why"), describe.storage_rows(found))
    _table(console, "Controllers over a fabric", describe.CONTROLLER_COLUMNS, describe.controller_rows(found))
    _table(console, "Paths", ("disk", "by", "ANA state"), describe.path_rows(found))
    _table(console, "Targets, measured", describe.TARGET_COLUMNS, describe.target_rows(found))
    _table(
        console, "Disks and file systems, touched", ("what", "outcome", "took", "engine", "fence", "free"),
        describe.touch_rows(found),
    )  # fmt: skip
    _table(
        console, "Network", ("interface", "state", "MTU", "speed", "driver", "queues", "NUMA", "RDMA"),
        describe.interface_rows(found),
    )  # fmt: skip
    for section in more:
        _table(console, section.heading, section.columns, section.rows, note=section.note)
    console.print(Text("Machine", style="bold"))
    facts = describe.machine_facts(found)
    width = max(map(len, facts))
    for name, value in facts.items():
        console.print(f"  {name:<{width}}  {value}")
    console.print()
    for finding in found.findings:
        _finding(console, finding)
    if found.unseen:
        console.print(Text("Not seen", style="bold"))
        for one in found.unseen:
            console.print(f"  {one}")
        console.print()
    if not found.measured:
        console.print("Nothing was measured.\n")
    console.print(found.sentence)


def _finding(console: Console, finding: Finding) -> None:
    head = Text()
    head.append(f"{finding.severity}", style=_STYLES[finding.severity])
    head.append(f"  {finding.title}")
    head.append(f"  [{finding.id}]", style="dim")
    console.print(head)
    rows = (("seen", finding.evidence), ("why", finding.why), ("do", finding.what_to_do), ("command", finding.command))
    for name, text in rows:
        if text:
            # Folded by the terminal's width, under its own column.
            grid = Table.grid(padding=(0, 2))
            grid.add_column(width=9)
            grid.add_column(overflow="fold")
            grid.add_row(Text(f"  {name}", style="dim"), Text(text))
            console.print(grid)
    console.print()


def _table(
    console: Console, heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]], *, note: str = ""
) -> None:
    if not rows and not note:
        return
    console.print(Text(heading, style="bold"))
    if note:
        console.print(Text(f"  {note}", style="dim"))
    if not rows:
        console.print()
        return
    table = Table(box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    table.add_column("")
    for column in columns:
        table.add_column(column, overflow="fold")
    for row in rows:
        table.add_row("", *(Text(cell) for cell in row))
    console.print(table)
    console.print()
