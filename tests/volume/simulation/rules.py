"""The rules of the volume, each switched off: then the world must notice.

`without(NAME)` patches the one function that is the rule.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

from headrace.testing import HostDevice, Quirks
from headrace.volume.catalog import commit, log
from headrace.volume.data import durable
from headrace.volume.writing import fence, session
from tests.volume.simulation.world import Weather


def _nothing(*_: Any, **__: Any) -> None:
    pass


def _never(*_: Any, **__: Any) -> bool:
    return False


def _always(*_: Any, **__: Any) -> bool:
    return True


def _unforced(device: Any, offset: int, data: Any) -> None:
    device.write(offset, data)


#: Name of a rule -> (owner, attribute, what stands in its place).
RULES: dict[str, list[tuple[Any, str, Callable[..., Any]]]] = {
    # "What may be written where": space that a late command may hit is not used again.
    "quarantine": [(session, "may_still_be_written", _never)],
    # "When is it durable": a flush that succeeds after a loss proves nothing.
    "loss counter": [(durable, "lost_since", _never)],
    # Who wrote flushes, before it says that it wrote.
    "flush": [(durable, "flush_all", _nothing)],
    # Promise 1: a record is believed once a later one says that it is durable.
    "marker": [(log, "believed", _always)],
    # Promise 2: the log is durable when it is acknowledged.
    "write through": [(commit, "write_through", _unforced)],
    # "Sessions" 5: after every new association, ask before anything is written.
    "report after reconnect": [(HostDevice, "guard_writes", _nothing)],
    # "Sessions" 4: everybody else is shut out, on every member, before the log is read.
    "fence": [
        (fence.Fence, "register", _nothing),
        (fence.Fence, "win", _nothing),
        (fence.Fence, "still_held", _nothing),
        (HostDevice, "guard_writes", _nothing),
    ],
}

#: Where a rule matters often.
STORMS: dict[str, tuple[Weather, Quirks]] = {
    "quarantine": (
        Weather(lose_answer=0.02, given_up=1.0, cut=0.0, undrained_ghosts=True, data_only=True),
        Quirks(fences_without_draining=True),
    ),
    "marker": (Weather(early=0.2, cut=0.1), Quirks()),
    "report after reconnect": (
        Weather(restart=0.02, stop=0.05, lose_answer=0.02, land=0.02, early=0.0),
        Quirks(forgets=True),
    ),
}


@contextmanager
def without(rule: str) -> Iterator[None]:
    with ExitStack() as stack:
        for owner, name, stand_in in RULES[rule]:
            stack.enter_context(patch.object(owner, name, stand_in))
        yield
