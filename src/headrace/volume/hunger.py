"""Who reads ahead for training in this process, and whether one of them runs dry.

A step that finds no batch stands still, with all its accelerators. So whoever uses the same way to the same targets,
and has time, asks here first, and lets those reads go before its own work (`headrace.torch.save.pacing`).
"""

from __future__ import annotations

import threading
from collections.abc import Sequence
from typing import Protocol
from weakref import WeakSet


class Ahead(Protocol):
    """What reads batches ahead of who consumes them."""

    def batches_ahead(self) -> Sequence[bool]:
        """Of each batch that is on its way or lies ready, in the order in which they are handed out: is it ready? Any
        thread may ask."""


_lock = threading.Lock()
_reading: WeakSet[Ahead] = WeakSet()


def join(ahead: Ahead) -> None:
    """It counts until `leave`, or until nobody holds it any more."""
    with _lock:
        _reading.add(ahead)


def leave(ahead: Ahead) -> None:
    """Safe to call again."""
    with _lock:
        _reading.discard(ahead)


def is_low(ready: Sequence[bool]) -> bool:
    """The next batch is not there, or of those ahead less than half: it may soon be so."""
    return len(ready) > 0 and (not ready[0] or 2 * sum(ready) < len(ready))


def anyone() -> bool:
    """Somebody in this process reads ahead, or may begin to."""
    with _lock:
        return len(_reading) > 0


def dry() -> bool:
    """A step waits for a batch that is on its way, or will soon. Of one that has all that it asked for, or asked for
    nothing, this is false."""
    with _lock:
        reading = list(_reading)
    return any(is_low(each.batches_ahead()) for each in reading)
