"""Tables for people, JSON for machines, plain lines where nobody looks."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any


def check_page(page: Path | None) -> None:
    """Before any work: UsageError where the page that is asked for could not be written at its end."""
    if page is None:
        return
    from headrace.errors import UsageError

    folder = page.parent
    try:
        if page.is_dir() or not folder.is_dir():
            found = "a folder" if page.is_dir() else f"no folder {folder}"
            raise UsageError("--html", where=str(page), expected="a file in a folder that is there", found=found)
        if page.exists() and not page.is_file():
            raise UsageError("--html", where=str(page), expected="a file", found="a device, a pipe or a socket")
        if not os.access(page if page.exists() else folder, os.W_OK):
            raise UsageError("--html", where=str(page), expected="a file that may be written", found="no right to")
    except (OSError, ValueError) as error:
        found = getattr(error, "strerror", None) or str(error)
        raise UsageError("--html", where=repr(str(page)), expected="a file that may be written", found=found) from None


def print_json(value: Any) -> None:
    """One line of JSON on standard output, at once."""
    print(json.dumps(value, separators=(", ", ": "), default=str), flush=True)


def print_sentence(text: str) -> None:
    """On a terminal its lines end between words; elsewhere it is one line."""
    if sys.stdout.isatty():
        width = max(40, shutil.get_terminal_size().columns - 1)
        text = textwrap.fill(text, width, break_long_words=False, break_on_hyphens=False)
    print(text)


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
