"""Ranks that meet, as threads of one process."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any

from headrace.bench.meeting import Meeting, Seat, meet
from tests.waiting import PATIENCE_S


def seat(rank: int, world: int, run: str = "a") -> Seat:
    return Seat(rank=rank, world=world, address="127.0.0.1", run=run, host=f"node{rank}")


class Crew:
    """Ranks as threads; each has its result, or its error."""

    def __init__(self, work: Callable[[Meeting], Any], ranks: list[int], world: int, **how: Any) -> None:
        self.results: dict[int, Any] = {}
        self._threads = [
            threading.Thread(target=self._run, args=(work, seat(rank, world), how), name=f"rank-{rank}")
            for rank in ranks
        ]
        for thread in self._threads:
            thread.start()

    def _run(self, work: Callable[[Meeting], Any], mine: Seat, how: dict[str, Any]) -> None:
        try:
            with meet(mine, **how) as meeting:
                self.results[mine.rank] = work(meeting)
        except Exception as error:
            self.results[mine.rank] = error

    def join(self) -> dict[int, Any]:
        for thread in self._threads:
            thread.join(PATIENCE_S)
            assert not thread.is_alive(), thread.name
        return self.results
