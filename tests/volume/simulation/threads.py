"""Threads, locks and clocks of the volume in a world: a thread is one more actor of its process, time is the world's.

So heartbeats, deallocations and commits of one process interleave as the seed wants, and all of them stop when the
process is stopped, and end when it ends. Outside of a world (looking at what a power cut left) a thread never runs, and
no time passes but for who sleeps: its time is not the world's.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from tests.volume.simulation.actor import Actor
from tests.volume.simulation.world import World


class Threads:
    """What stands in place of `threading` and `time` in the modules of the volume."""

    def __init__(self) -> None:
        #: Where it is: set when the world is made.
        self.world: World | None = None
        #: How long was slept outside of it.
        self._slept = 0.0

    def actor(self) -> Actor | None:
        return None if self.world is None else self.world.current.get(threading.get_ident())

    def now(self) -> float:
        if self.actor() is None:
            return self._slept
        return 0.0 if self.world is None else self.world.now

    def sleep(self, seconds: float) -> None:
        if (actor := self.actor()) is None:
            self._slept += seconds
        else:
            actor.wait(lambda: False, self.now() + seconds)

    def wait(self, until: Callable[[], bool], timeout: float | None = None) -> bool:
        actor = self.actor()
        if actor is not None and not until():
            actor.wait(until, None if timeout is None else self.now() + timeout)
        return until()

    def lock(self) -> _Lock:
        made = _Lock()
        made.threads = self
        return made

    def module(self) -> SimpleNamespace:
        """As `threading`."""
        here = self

        class Thread(_Thread):
            threads = here

        class Worker(_Worker):
            threads = here

        class Lock(_Lock):
            threads = here

        class Event(_Event):
            threads = here

        class Condition(_Condition):
            threads = here

        made = {"Thread": Thread, "Worker": Worker, "Lock": Lock, "RLock": Lock, "Event": Event, "Condition": Condition}
        return SimpleNamespace(**{**vars(threading), **made})

    def clock(self, ticks: Callable[[], int]) -> SimpleNamespace:
        """As `time`."""
        return SimpleNamespace(sleep=self.sleep, monotonic=self.now, time=self.now, time_ns=ticks)


class _Thread:
    threads: Threads

    def __init__(self, target: Callable[..., None], args: tuple[Any, ...] = (), name: str = "", **_: object) -> None:
        self._target, self._args, self._name = target, args, name
        self._actor: Actor | None = None

    def start(self) -> None:
        parent = self.threads.actor()
        if parent is not None and self.threads.world is not None:
            self._actor = self.threads.world.spawn(
                f"{self._name} of {parent.main.name}", lambda _: self._target(*self._args), main=parent.main
            )

    def join(self, timeout: float | None = None) -> None:
        if self._actor is not None:
            self.threads.wait(lambda: self._actor is None or self._actor.done, timeout)

    def is_alive(self) -> bool:
        return self._actor is not None and not self._actor.done


class _Worker(_Thread):
    @property
    def current(self) -> bool:
        return self._actor is not None and self._actor is self.threads.actor()

    def start_living(self) -> None:
        self.start()

    def stillborn(self) -> bool:
        return False

    #: What a process has that is killed dies with it.
    died = False


class _Lock:
    """One that its owner may take again."""

    threads: Threads

    def __init__(self) -> None:
        self._owner: int | None = None
        self.count = 0

    def acquire(self, blocking: bool = True, timeout: float = -1) -> bool:
        me = threading.get_ident()
        if self._owner != me:
            if not self.threads.wait(lambda: self._owner is None, None if timeout < 0 else timeout):
                return False
            self._owner = me
        self.count += 1
        return True

    def release(self) -> None:
        self.count -= 1
        if not self.count:
            self._owner = None

    def give_up(self) -> int:
        """Release it, however often it was taken; returns how often."""
        count, self.count, self._owner = self.count, 0, None
        return count

    def __enter__(self) -> bool:
        return self.acquire()

    def __exit__(self, *_: object) -> None:
        self.release()


class _Event:
    threads: Threads

    def __init__(self) -> None:
        self._set = False

    def set(self) -> None:
        self._set = True

    def is_set(self) -> bool:
        return self._set

    def wait(self, timeout: float | None = None) -> bool:
        return self.threads.wait(self.is_set, timeout)


class _Condition:
    threads: Threads

    def __init__(self, lock: _Lock | None = None) -> None:
        self._lock = lock or self.threads.lock()
        self._told = 0

    def __enter__(self) -> bool:
        return self._lock.acquire()

    def __exit__(self, *_: object) -> None:
        self._lock.release()

    def notify(self) -> None:
        self._told += 1

    notify_all = notify

    def wait(self, timeout: float | None = None) -> bool:
        before, count = self._told, self._lock.give_up()
        try:
            return self.threads.wait(lambda: self._told > before, timeout)
        finally:
            self._lock.acquire()
            self._lock.count = count
