"""Tables for people, JSON for machines, plain lines where nobody looks."""

from __future__ import annotations

import json
import sys
from collections.abc import Mapping, Sequence
from typing import Any


def print_json(value: Any) -> None:
    """One line of JSON on standard output, at once."""
    print(json.dumps(value, separators=(", ", ": "), default=str), flush=True)


def print_table(
    columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = (), page: bool = False
) -> None:
    """On a terminal a table; else lines with tabs, which `cut` and `awk` understand. `right`: columns of numbers.

    `page`: part of a page for people, as `watch` shows it, and so a table everywhere.
    """
    terminal = sys.stdout.isatty()
    if not terminal and not page:
        for row in rows:
            print("\t".join(row))
        return
    from rich.console import Console
    from rich.table import Table

    table = Table(box=None, pad_edge=False, header_style="dim")
    for index, column in enumerate(columns):
        table.add_column(column, justify="right" if index in right else "left", overflow="fold")
    for row in rows:
        table.add_row(*row)
    # Nothing is folded where no screen is that narrow.
    Console(highlight=False, markup=False, width=None if terminal else 10_000).print(table)


def print_facts(facts: Mapping[str, str]) -> None:
    """Names and values, one a line."""
    width = max((len(name) for name in facts), default=0)
    for name, value in facts.items():
        print(f"{name:<{width}}  {value}")
