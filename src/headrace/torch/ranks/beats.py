"""Signs of life of ranks, in the store of the job: a key that changes, watched on the watcher's own clock."""

from __future__ import annotations

import threading
import time
import uuid
from collections.abc import Callable, Sequence
from types import TracebackType
from typing import Any

import torch.distributed as dist

#: A rank changes its key, and is looked at, so many times in the time after which it is taken for dead.
BEATS = 6


class Beats:
    """What one thread has seen of the beats of others."""

    def __init__(self, store: Any, stall_s: float) -> None:
        self._store = store
        self._stall_s = stall_s
        self._seen: dict[int, tuple[bytes, float]] = {}
        self._looked = time.monotonic()

    def silent(self, ranks: Sequence[int]) -> list[int]:
        """Those that gave no sign for `stall_s`, as far as this was called all the time. DistError."""
        now = time.monotonic()
        # A gap in our own looking (this process was stopped) must not count against the others.
        if now - self._looked > self._stall_s:
            self._seen.clear()
        self._looked = now
        for rank in ranks:
            key = f"beat/{rank}"
            beat = bytes(self._store.get(key)) if self._store.check([key]) else b""
            if rank not in self._seen or self._seen[rank][0] != beat:
                self._seen[rank] = (beat, now)
        return [rank for rank in ranks if now - self._seen[rank][1] >= self._stall_s]


class _Thread:
    """One that does something at once and then every `interval_s`, until it is left, or the store is gone (whoever
    waits for the others meets the same error, and reports it)."""

    def __init__(self, name: str, interval_s: float, what: Callable[[], bool]) -> None:
        self._interval_s = interval_s
        self._what = what
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._run, name=name, daemon=True)

    def __enter__(self) -> _Thread:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()

    def _run(self) -> None:
        try:
            while self._what() and not self._stop.wait(self._interval_s):
                pass
        except dist.DistError:
            return


class Pulse(_Thread):
    """Changes this rank's key. `store`: a client of its own. `also`: done with each beat, on its thread."""

    def __init__(self, store: Any, rank: int, stall_s: float, also: Callable[[], None] = lambda: None) -> None:
        def beat() -> bool:
            store.set(f"beat/{rank}", uuid.uuid4().hex)
            also()
            return True

        super().__init__("headrace-pulse", stall_s / BEATS, beat)


class Watch(_Thread):
    """While bytes go from rank to rank, where nobody says who is missing: rank 0 looks at the beats of all, the others
    at its own, so that the store is asked a few times a rank; and all at the word of whoever gave up.

    Args:
        store: a client of its own.
        word: the key of that.
        silent: called once at most, on the thread, with those that are silent; its word.
        given_up: called once at most, on the thread, with a word that is there.
        gone: called once at most, on the thread, where the store is not to be had any more.
    """

    def __init__(
        self,
        store: Any,
        word: str,
        rank: int,
        world: int,
        stall_s: float,
        silent: Callable[[list[int]], bytes],
        given_up: Callable[[bytes], None],
        gone: Callable[[dist.DistError], None],
    ) -> None:
        beats = Beats(store, stall_s)

        def look() -> bool:
            try:
                if store.check([word]):
                    given_up(store.get(word))
                    return False
                found = beats.silent(range(1, world) if rank == 0 else [0])
                if found:
                    store.set(word, silent(found))
                return not found
            except dist.DistError as error:
                gone(error)
                return False

        super().__init__("headrace-watch", stall_s / BEATS, look)
