"""Cleaning up that a signal does not cut short."""

from __future__ import annotations

import signal
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from types import FrameType
from typing import Any

_ENDING = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def in_peace() -> Iterator[None]:
    """Ctrl-C, SIGTERM and SIGHUP that come in here are put off until its end, and heard then; an error that ends it
    is told instead, and ends the command as well.

    For what must not stop half-way and has a bound of its own. On another thread than the main one it changes nothing:
    no signal is heard there.
    """
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    came: list[int] = []

    def note(number: int, _: FrameType | None) -> None:
        came.append(number)

    # What somebody chose to ignore (`nohup`), and what Python cannot put back (a handler in C), stays as it is.
    before = {
        number: handler
        for number in _ENDING
        if (handler := signal.getsignal(number)) is not None and handler is not signal.SIG_IGN
    }
    try:
        for number in before:
            signal.signal(number, note)
        yield
    except BaseException:
        came.clear()
        raise
    finally:
        try:
            _put_back(before)
        finally:
            # One that is heard as soon as it can be ends the first time.
            _put_back(before)
        for first in came[:1]:
            signal.raise_signal(first)


def _put_back(handlers: Mapping[signal.Signals, Any]) -> None:
    for number, handler in handlers.items():
        signal.signal(number, handler)
