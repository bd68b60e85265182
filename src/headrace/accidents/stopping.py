"""Processes that are stopped for a while, and surely so: a signal that was sent has not stopped anybody yet."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from headrace.errors import HeadraceError

#: A thread that is in the kernel stops when it comes out of it.
PATIENCE_S = 30.0


def stop(pid: int) -> None:
    """SIGSTOP, until every thread stands: one that runs goes on until it next enters the kernel, and may answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + PATIENCE_S
    while any(state != "T" for state in _thread_states(pid)):
        if time.monotonic() >= deadline:
            raise HeadraceError(f"process {pid} does not stop", expected=f"all its threads within {PATIENCE_S:g} s")
        time.sleep(0.001)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _thread_states(pid: int) -> list[str]:
    states = []
    for stat in Path(f"/proc/{pid}/task").glob("*/stat"):
        # One that was about to end has.
        with suppress(FileNotFoundError, ProcessLookupError):
            states.append(stat.read_text().rpartition(")")[2].split()[0])
    return states
