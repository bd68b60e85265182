"""What the demo says while it works: on a terminal with a live line, elsewhere plain lines, never both."""

from __future__ import annotations

import sys
import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Console
from rich.status import Status
from rich.table import Table
from rich.text import Text


class Teller:
    """A context manager; it owns the live line. `to_stderr`: standard output is kept for the summary in JSON."""

    #: Where nobody can watch a live line, one in so many seconds is printed.
    QUIET_PERIOD_S = 10.0

    def __init__(self, *, to_stderr: bool = False) -> None:
        self.console = Console(stderr=to_stderr, highlight=False, markup=False, soft_wrap=True)
        self._began = time.monotonic()
        self._status: Status | None = None
        self._printed = 0.0

    def title(self, number: int, text: str) -> None:
        """A step of the demo begins."""
        self.rest()
        elapsed = time.monotonic() - self._began
        self.console.print(Text.assemble((f"[{elapsed:5.1f} s] ", "dim"), (f"{number}. {text}", "bold")))

    def line(self, text: str, style: str = "") -> None:
        self.rest()
        self.console.print(Text("          " + text, style=style))

    def live(self, text: str) -> None:
        """What is happening now; replaces what was said before."""
        if self.console.is_terminal:
            if self._status is None:
                self._status = self.console.status(Text(text), spinner="dots")
                self._status.start()
            else:
                self._status.update(Text(text))
        elif time.monotonic() - self._printed > self.QUIET_PERIOD_S:
            self._printed = time.monotonic()
            self.console.print("          " + text)

    def rest(self) -> None:
        """Take the live line away."""
        self._printed = time.monotonic()
        if self._status is not None:
            self._status.stop()
            self._status = None

    def table(self, heading: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
        self.rest()
        if not self.console.is_terminal:
            self.console.print(f"\n{heading}")
            lines = [columns, *rows]
            widths = [max(len(line[index]) for line in lines) for index in range(len(columns))]
            for line in lines:
                cells = (cell.ljust(width) for cell, width in zip(line, widths, strict=True))
                self.console.print(("  " + "  ".join(cells)).rstrip())
            return
        table = Table(title=heading, title_justify="left", title_style="bold", box=None, pad_edge=False)
        for column in columns:
            table.add_column(column, header_style="dim", overflow="fold")
        for row in rows:
            table.add_row(*row)
        self.console.print()
        self.console.print(table)

    def __enter__(self) -> Teller:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.rest()
        sys.stdout.flush()
