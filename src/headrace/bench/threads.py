"""The end of threads that carry out one piece of work together."""

from __future__ import annotations

import threading
import time
from collections.abc import Sequence
from contextlib import suppress


def all_ended(threads: Sequence[threading.Thread], within_s: float) -> bool:
    """Wait for all of them, so long at most. What has not begun has ended, too.

    Ctrl-C comes at any moment, also while they are started, and who waits for their end then must not fail over those
    that have not begun: `Thread.join` raises RuntimeError for them, and nobody would hear of the Ctrl-C any more.
    """
    deadline = time.monotonic() + within_s
    for thread in threads:
        with suppress(RuntimeError):
            thread.join(max(0.0, deadline - time.monotonic()))
    return not any(thread.is_alive() for thread in threads)
