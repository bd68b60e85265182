"""Calls that somebody else, or a deadline, can end.

Neither torch's store nor gloo can be called so that the call surely ends. A question to the store of a node that fell
silent waits as long as TCP does; nothing ends a wait of gloo from outside but a time-out that another one meets, which
closes the connections of the group, and a wait has been seen to sleep through that. So a thread aside makes the call,
and who needs its result looks at both: at that thread, and at whether there is still something to wait for.
"""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable
from queue import SimpleQueue
from typing import Any, Generic, TypeVar

import torch.distributed as dist

from headrace.errors import UsageError

#: Between two looks.
LOOK_S = 0.2
#: What was given up ends by itself within this time, or is left behind.
GRACE_S = 3.0

T = TypeVar("T")


class LeftBehind(RuntimeError):
    """The call goes on, without anybody who waits for it, until `ended` is set."""

    def __init__(self, ended: threading.Event) -> None:
        super().__init__("it was given up, and did not end")
        self.ended = ended


class _Call(Generic[T]):
    def __init__(self, what: Callable[[], T]) -> None:
        self.ended = threading.Event()
        self.result: T
        self.error: BaseException | None = None
        self._what = what

    def run(self) -> None:
        try:
            self.result = self._what()
        except BaseException as error:  # whoever asked raises it
            self.error = error
        finally:
            self.ended.set()


class Aside:
    """One thread, begun by the first call and left behind by one that does not end. For one caller at a time, in the
    process that made it: neither the thread nor the connections that it asks over are a forked child's."""

    def __init__(self, name: str) -> None:
        self._name = name
        self._pid = os.getpid()
        self._asked: SimpleQueue[_Call[Any] | None] | None = None

    def call(self, what: Callable[[], T], over: Callable[[], object], grace_s: float | None = None) -> T:
        """What `what` returns or raises; LeftBehind where it is `over`, and goes on for `grace_s` all the same.
        UsageError in a forked child.

        What the call holds stays in memory until it ends, whatever the caller does.
        """
        if self._pid != os.getpid():
            raise UsageError(
                "a process that was forked cannot talk to the other ranks over what its parent has",
                found=f"process {os.getpid()}, forked from {self._pid}",
                next_step="do this in the parent, or start the process with spawn or forkserver",
            )
        if self._asked is None:
            asked: SimpleQueue[_Call[Any] | None] = SimpleQueue()
            threading.Thread(target=_run, args=(asked,), name=self._name, daemon=True).start()
            # Not before: of a thread that did not start nobody would hear.
            self._asked = asked
        call = _Call(what)
        self._asked.put(call)
        try:
            while not call.ended.wait(LOOK_S):
                if over() and not call.ended.wait(GRACE_S if grace_s is None else grace_s):
                    raise LeftBehind(call.ended)
        except BaseException:
            # Also where `over` raises, or the caller is interrupted: the next call does not wait for this one.
            self.close()
            raise
        if call.error is not None:
            raise call.error
        return call.result

    def close(self) -> None:
        """The thread ends behind what it does now."""
        if self._asked is not None:
            self._asked.put(None)
            self._asked = None

    def __del__(self) -> None:
        self.close()


def _run(asked: SimpleQueue[_Call[Any] | None]) -> None:
    while (call := asked.get()) is not None:
        call.run()
        # Nothing of it stays in here until the next one comes.
        del call


class StoreClient:
    """A client of its own of the store of a job, for one thread: its questions end.

    Args:
        prefix: of all keys.
        store: any torch.distributed store; used through a clone.
        limit_s: who does not answer within this time, and what it says itself to a `get`, is gone: DistError, here and
            from all later questions until that answer has come. A network may be away for longer than a save waits, and
            this process may have been stopped: the next saves go on.
    """

    def __init__(self, prefix: str, store: Any, limit_s: float) -> None:
        self._limit_s = limit_s
        self._aside = Aside("headrace-store")
        #: Of the question that is not answered; it has the connection.
        self._unanswered: threading.Event | None = None
        # Any: the stubs know neither PrefixStore's clone nor values of bytes.
        self._store: Any = self._ask(lambda: dist.PrefixStore(prefix, store.clone()))  # type: ignore[attr-defined]

    def set_timeout(self, timeout: Any) -> None:
        self._store.set_timeout(timeout)

    def check(self, keys: list[str]) -> bool:
        return self._ask(lambda: bool(self._store.check(keys)))

    def get(self, key: str) -> bytes:
        return self._ask(lambda: bytes(self._store.get(key)))

    def set(self, key: str, value: str | bytes) -> None:
        self._ask(lambda: self._store.set(key, value))

    def compare_set(self, key: str, expected: str, value: str) -> bytes:
        return self._ask(lambda: bytes(self._store.compare_set(key, expected, value)))

    def add(self, key: str, by: int) -> int:
        return self._ask(lambda: int(self._store.add(key, by)))

    def delete_key(self, key: str) -> bool:
        return self._ask(lambda: bool(self._store.delete_key(key)))

    def _ask(self, what: Callable[[], T]) -> T:
        silent = dist.DistStoreError(f"no answer within {self._limit_s:g} s")
        if self._unanswered is not None and not self._unanswered.is_set():
            raise silent
        self._unanswered = None
        end = time.monotonic() + self._limit_s
        try:
            return self._aside.call(what, lambda: time.monotonic() >= end, LOOK_S)
        except LeftBehind as left:
            self._unanswered = left.ended
            raise silent from None
