"""A wait that sleeps through everything that should end it is left behind once it was given up."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

from headrace.torch.ranks import waits
from headrace.torch.ranks.waits import Waits
from tests.waiting import until


class Work:
    """Of gloo: what `wait` does is told from outside."""

    def __init__(self, error: Exception | None = None) -> None:
        self.over = threading.Event()
        self.error = error

    def wait(self, timeout: timedelta) -> bool:
        assert self.over.wait(timeout.total_seconds())
        if self.error is not None:
            raise self.error
        return True


def ended(error: Exception | None = None) -> Work:
    work = Work(error)
    work.over.set()
    return work


def threads() -> int:
    return sum(thread.name == "headrace-waits" for thread in threading.enumerate())


def test_a_wait_that_sleeps_on_is_left_behind_and_the_next_one_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(waits, "GRACE_S", 0.01)
    before, waiter, stuck = threads(), Waits(), Work()
    waiter.wait(ended(), 60, lambda: False)
    with pytest.raises(ConnectionError, match="reset"):
        waiter.wait(ended(ConnectionError("reset")), 60, lambda: True)
    with pytest.raises(RuntimeError, match="given up, and did not end"):
        waiter.wait(stuck, 60, lambda: "rank 1 gave no sign of life")
    waiter.wait(ended(), 60, lambda: False)
    assert threads() == before + 2
    stuck.over.set()
    waiter.close()
    until(lambda: threads() == before, "both threads end")
