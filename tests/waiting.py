"""Waiting for what another thread or process is about to do."""

from __future__ import annotations

import time
from collections.abc import Callable

#: For a machine that is busy with something else: what is waited for takes far less.
PATIENCE_S = 60.0


def until(condition: Callable[[], object], what: str = "it came true", timeout_s: float = PATIENCE_S) -> None:
    """AssertionError, naming what did not happen."""
    deadline = time.monotonic() + timeout_s
    while not condition():
        assert time.monotonic() < deadline, f"not within {timeout_s:g} s: {what}"
        time.sleep(0.01)
