"""Processes that are stopped for a while, and surely so: a signal that was sent has not stopped anybody yet."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path


def stop(pid: int) -> None:
    """SIGSTOP, until every thread stands: one that runs goes on until it next enters the kernel, and may answer."""
    os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 30
    while any(state != "T" for state in _thread_states(pid)):
        assert time.monotonic() < deadline, f"process {pid} does not stop"
        time.sleep(0.001)


@contextmanager
def stopped(pid: int) -> Iterator[None]:
    stop(pid)
    try:
        yield
    finally:
        os.kill(pid, signal.SIGCONT)


def _thread_states(pid: int) -> list[str]:
    return [stat.read_text().rpartition(")")[2].split()[0] for stat in Path(f"/proc/{pid}/task").glob("*/stat")]
