"""Signals that come while something is cleaned up are heard when it is done."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest

from headrace.accidents.peace import in_peace


def test_a_signal_waits_for_the_end_and_is_heard_once() -> None:
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda number, _: heard.append(number))
    try:
        with in_peace():
            os.kill(os.getpid(), signal.SIGTERM)
            os.kill(os.getpid(), signal.SIGTERM)
            assert not heard
        assert heard == [signal.SIGTERM]
        os.kill(os.getpid(), signal.SIGTERM)
        assert len(heard) == 2
    finally:
        signal.signal(signal.SIGTERM, before)


def test_ctrl_c_waits_too_and_what_is_ignored_stays_ignored() -> None:
    done = []
    with pytest.raises(KeyboardInterrupt), in_peace():
        os.kill(os.getpid(), signal.SIGINT)
        done.append(True)
    assert done
    with pytest.raises(ZeroDivisionError), in_peace():
        os.kill(os.getpid(), signal.SIGINT)
        raise ZeroDivisionError
    before = signal.signal(signal.SIGHUP, signal.SIG_IGN)
    try:
        with in_peace():
            os.kill(os.getpid(), signal.SIGHUP)
        assert signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGHUP, before)


def test_one_that_comes_while_it_ends_keeps_no_other_from_being_heard(monkeypatch: pytest.MonkeyPatch) -> None:
    put, interrupts = signal.signal, [True]

    def then_interrupted(number: int, handler: Any) -> Any:
        found = put(number, handler)
        if handler is signal.default_int_handler and interrupts.pop():
            interrupts.append(False)
            os.kill(os.getpid(), signal.SIGINT)
        return found

    before = [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)]
    monkeypatch.setattr(signal, "signal", then_interrupted)
    with pytest.raises(KeyboardInterrupt), in_peace():
        pass
    assert [signal.getsignal(number) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)] == before
