"""What sleeps through everything that should end it is left behind once it was given up; the next call is not."""

from __future__ import annotations

import contextlib
import os
import threading
from typing import Any

import pytest
import torch.distributed as dist

from headrace.errors import UsageError
from headrace.torch.ranks import aside
from headrace.torch.ranks.aside import Aside, LeftBehind, StoreClient
from tests.waiting import PATIENCE_S, until


def threads(name: str) -> int:
    return sum(thread.name == name for thread in threading.enumerate())


def raised(error: Exception) -> None:
    raise error


def test_a_call_that_does_not_end_is_left_behind_and_the_next_one_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    # What ends is waited for, however long its thread takes to begin.
    monkeypatch.setattr(aside, "GRACE_S", PATIENCE_S)
    calls, over = Aside("test-aside"), threading.Event()
    assert calls.call(lambda: 7, lambda: False) == 7
    with pytest.raises(ConnectionError, match="reset"):
        calls.call(lambda: raised(ConnectionError("reset")), lambda: True)
    monkeypatch.setattr(aside, "GRACE_S", 0.01)
    with pytest.raises(LeftBehind):
        calls.call(over.wait, lambda: "rank 1 gave no sign of life")
    assert calls.call(lambda: 8, lambda: False) == 8
    assert threads("test-aside") == 2
    over.set()
    calls.close()
    until(lambda: not threads("test-aside"), "both threads end")


def test_a_thread_that_does_not_start_is_told_and_the_next_call_starts_one(monkeypatch: pytest.MonkeyPatch) -> None:
    calls = Aside("test-aside-start")
    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", lambda thread: raised(RuntimeError("can't start new thread")))
        with pytest.raises(RuntimeError, match="can't start new thread"):
            calls.call(lambda: 7, lambda: True, PATIENCE_S)
    assert calls.call(lambda: 7, lambda: False) == 7


def test_a_forked_child_is_told_that_what_it_asks_over_is_its_parents() -> None:
    client = StoreClient("here", dist.HashStore(), PATIENCE_S)
    hears, says = os.pipe()
    child = os.fork()
    if not child:
        with contextlib.suppress(BaseException):
            try:
                client.get("key")
            except UsageError as error:
                os.write(says, str(error).encode())
        os._exit(0)
    os.close(says)
    with os.fdopen(hears, "rb") as pipe:
        assert f"found process {child}, forked from {os.getpid()}" in pipe.read().decode()
    os.waitpid(child, 0)


@pytest.mark.parametrize("error", [dist.DistStoreError, KeyboardInterrupt])
def test_who_stops_waiting_holds_the_next_call_up_with_nothing(error: type[BaseException]) -> None:
    """The store is gone while it looks whether to wait, or somebody pressed Ctrl-C."""
    aside, goes_on, ended = Aside("test"), threading.Event(), threading.Event()

    def waits() -> None:
        goes_on.wait(PATIENCE_S)
        ended.set()

    def over() -> bool:
        raise error("gone")

    try:
        with pytest.raises(error):
            aside.call(waits, over)
        assert not aside.call(ended.is_set, lambda: None), "it is not waited for"
    finally:
        goes_on.set()


class Silent:
    """A store whose node cannot be reached any more, once `fell` is set."""

    def __init__(self, store: Any, fell: threading.Event, over: threading.Event) -> None:
        self._store, self._fell, self._over = store, fell, over

    def __getattr__(self, name: str) -> Any:
        if self._fell.is_set():
            self._over.wait()
        return getattr(self._store, name)


def test_a_store_that_falls_silent_is_gone_after_its_limit_until_it_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    fell, over = threading.Event(), threading.Event()
    monkeypatch.setattr(dist, "PrefixStore", lambda prefix, store: Silent(store, fell, over))
    client = StoreClient("here", dist.HashStore(), PATIENCE_S)
    client.set("key", "word")
    assert client.check(["key"]) and client.get("key") == b"word" and client.add("count", 2) == 2
    assert client.delete_key("key") and not client.check(["key"])
    fell.set()
    client._limit_s = 1.0
    try:
        for _ in range(3):
            with pytest.raises(dist.DistStoreError, match="no answer within 1 s"):
                client.check(["key"])
    finally:
        over.set()
    # The next save asks again.
    client._limit_s = PATIENCE_S
    assert client._unanswered is not None and client._unanswered.wait(PATIENCE_S)
    client.set("key", "again")
    assert client.get("key") == b"again"
