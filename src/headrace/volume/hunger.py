"""Who reads ahead for training in this process, and whether one of them runs dry.

A step that finds no batch stands still, with all its accelerators. So whoever uses the same way to the same targets,
and has time, asks here first, and lets those reads go before its own work (`headrace.torch.save.pacing`).
"""

from __future__ import annotations

import os
from collections.abc import Sequence
from typing import Protocol
from weakref import ref


class Ahead(Protocol):
    """What reads batches ahead of who consumes them."""

    def batches_ahead(self) -> Sequence[bool]:
        """Of each batch that is on its way or lies ready, in the order in which they are handed out: is it ready? Any
        thread may ask."""


#: By identity. No lock: each step is one of the dictionary's own, so that whatever the collector closes in the middle
#: may leave, too, and no fork finds it held.
_reading: dict[int, ref[Ahead]] = {}
#: Feeds of the parent do not go on in a child, and never come to have their batches there.
os.register_at_fork(after_in_child=_reading.clear)


def join(ahead: Ahead) -> None:
    """It counts until `leave`, or until nobody holds it any more."""
    number, forget = id(ahead), _reading.pop
    # Not by a name of this module: where a program ends with a loader open, names are gone before what they held.
    _reading[number] = ref(ahead, lambda _: forget(number, None))


def leave(ahead: Ahead) -> None:
    """Safe to call again."""
    _reading.pop(id(ahead), None)


def is_low(ready: Sequence[bool]) -> bool:
    """The next batch is not there, or of those ahead less than half: it may soon be so."""
    return len(ready) > 0 and (not ready[0] or 2 * sum(ready) < len(ready))


def dry() -> bool:
    """A step waits for a batch that is on its way, or will soon. Of one that has all that it asked for, or asked for
    nothing, this is false."""
    reading = [each() for each in list(_reading.values())]
    return any(is_low(each.batches_ahead()) for each in reading if each is not None)
