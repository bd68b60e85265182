"""How far long work is, on standard error: a bar on a terminal, else a line now and then."""

from __future__ import annotations

import sys
import time
from typing import Any

#: Seconds between two lines of progress where no terminal is.
LINE_EVERY_S = 5.0


class Progress:
    """`with Progress("reading") as progress: progress.show(fraction, text)`, from one thread."""

    def __init__(self, text: str, *, quiet: bool = False) -> None:
        self._text = text
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._last_s = time.monotonic()

    def __enter__(self) -> Progress:
        if sys.stderr is not None and sys.stderr.isatty() and not self._quiet:
            from rich.console import Console
            from rich.progress import BarColumn, TextColumn
            from rich.progress import Progress as Bar

            text = TextColumn("{task.description}", markup=False)
            self._bar = Bar(BarColumn(), text, console=Console(stderr=True), transient=True)
            self._task = self._bar.add_task(self._text, total=1.0)
            try:
                self._bar.start()
            except BaseException:
                # Ctrl-C right here: the cursor is hidden already, and nobody else would show it again.
                self._bar.stop()
                raise
        return self

    def __exit__(self, *_: object) -> None:
        if self._bar is not None:
            self._bar.stop()

    def show(self, fraction: float, text: str, *, now: bool = False) -> None:
        """`now`: as a line at once, where there is no bar."""
        if self._bar is not None:
            self._bar.update(self._task, completed=fraction, description=text)
            return
        moment = time.monotonic()
        if not self._quiet and (now or moment - self._last_s >= LINE_EVERY_S):
            self._last_s = moment
            print(text, file=sys.stderr, flush=True)

    def say(self, line: str) -> None:
        """A line that stays, above the bar."""
        if self._bar is not None:
            self._bar.console.print(line, markup=False, highlight=False, soft_wrap=True)
        else:
            print(line, file=sys.stderr, flush=True)


def speed(done_bytes: float, total_bytes: float, seconds: float) -> str:
    """`512.0 MiB of 2.0 GiB, 400.0 MiB/s, 4 s left`"""
    from headrace.units import format_bytes, format_seconds

    text = f"{format_bytes(done_bytes)} of {format_bytes(total_bytes)}"
    if seconds > 0.2 and done_bytes:
        rate = done_bytes / seconds
        text += f", {format_bytes(rate)}/s"
        if total_bytes > done_bytes:
            text += f", {format_seconds(max(1.0, (total_bytes - done_bytes) / rate))} left"
    return text
