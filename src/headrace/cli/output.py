"""Tables for people, JSON for machines, plain lines where nobody looks."""

from __future__ import annotations

import json
import os
import shutil
import sys
import textwrap
from collections.abc import Callable, Mapping, Sequence
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


def print_result(
    *, json: Callable[[], Any] | None, text: Callable[[], None], html: Path | None, page: Callable[[], str]
) -> None:
    """`json` where it is given, else `text`; then the page, which may meet a disk that is full by now: nothing that was
    found is lost with it."""
    from headrace.errors import UsageError

    if json is not None:
        print_json(json())
    else:
        text()
    if html is None:
        return
    try:
        html.write_text(page(), encoding="utf-8")
    except OSError as error:
        sys.stdout.flush()
        raise UsageError("the page was not written", where=str(html), found=error.strerror or str(error)) from None
    print(f"page: {html}", file=sys.stderr)


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

    `page`: part of a page for people, as `watch` shows it, and so a table everywhere; columns in which nothing stands
    are left out.
    """
    terminal = sys.stdout.isatty()
    if not terminal and not page:
        for row in rows:
            print("\t".join(row))
        return
    from rich.console import Console

    # Nothing is folded where no screen is that narrow.
    console = Console(highlight=False, markup=False, width=None if terminal else 10_000)
    told = [index for index in range(len(columns)) if not page or any(row[index] for row in rows)]
    grid = table_within(
        console.width, [columns[index] for index in told], [[row[index] for index in told] for row in rows],
        right=[place for place, index in enumerate(told) if index in right],
    )  # fmt: skip
    if isinstance(grid, str):
        print(grid)
    elif terminal:
        console.print(grid)
    else:
        with console.capture() as made:
            console.print(grid)
        print("\n".join(line.rstrip() for line in made.get().splitlines()))


#: A cell that is longer, and has words, may go on in the next line; not below so many columns.
_SENTENCE, _LEAST = 28, 20


def table_within(
    width: int, columns: Sequence[str], rows: Sequence[Sequence[str]], *, right: Sequence[int] = ()
) -> Any:
    """A table for rich in which no word is broken; where that is not to be had, text: a few lines for each row."""
    from rich.table import Table
    from rich.text import Text

    cells = [[column, *(row[index] for row in rows)] for index, column in enumerate(columns)]
    longest = [max(map(len, of_column)) for of_column in cells]
    words = [max(len(word) for cell in of_column for word in cell.split() or [""]) for of_column in cells]
    folds = [at for at, each in enumerate(longest) if each > _SENTENCE and any(" " in cell for cell in cells[at])]
    widths = [min(each, max(words[at], _LEAST)) if at in folds else each for at, each in enumerate(longest)]
    room = width - 2 * (len(columns) - 1) - sum(widths)
    if room < 0:
        return "\n".join(_paragraph(columns, row, width - 1) for row in rows)
    # Those that want least of it first. By itself rich makes columns narrower than their words, and cuts lines off.
    for left, at in enumerate(sorted(folds, key=lambda at: longest[at] - widths[at])):
        more = min(longest[at] - widths[at], room // (len(folds) - left))
        widths[at], room = widths[at] + more, room - more
    table = Table(box=None, pad_edge=False, header_style="dim")
    for at, column in enumerate(columns):
        table.add_column(
            column, justify="right" if at in right else "left", overflow="fold", no_wrap=at not in folds,
            width=widths[at] if at in folds else None,
        )  # fmt: skip
    for row in rows:
        table.add_row(*map(Text, row))
    return table


def _paragraph(columns: Sequence[str], row: Sequence[str], width: int) -> str:
    """`rank 3: took 2.0 s, lost 1.9 s`."""
    named = [f"{name} {cell}".strip() for name, cell in zip(columns, row, strict=True) if cell]
    text = named[0] + (f": {', '.join(named[1:])}" if named[1:] else "")
    return textwrap.fill(
        text, max(40, width), subsequent_indent="    ", break_long_words=False, break_on_hyphens=False
    )  # fmt: skip


def print_facts(facts: Mapping[str, str]) -> None:
    """Names and values, one a line; on a terminal lines end between words."""
    width = max((len(name) for name in facts), default=0)
    room = shutil.get_terminal_size().columns - 1 if sys.stdout.isatty() else 0
    for name, value in facts.items():
        line = f"{name:<{width}}  {value}"
        if len(line) > room > width + 2 + _LEAST:
            indent = " " * (width + 2)
            line = textwrap.fill(
                value, room, initial_indent=line[: width + 2], subsequent_indent=indent, break_long_words=False,
                break_on_hyphens=False,
            )  # fmt: skip
        print(line)
