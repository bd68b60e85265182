"""Which process runs on which core, so that a figure compares programs and not what the scheduler did today."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path


@dataclass(frozen=True, kw_only=True)
class Layout:
    """Cores by role. With few cores roles share them, ours and the peer's alike."""

    usable: frozenset[int]
    client: int
    server: int
    #: For a second busy thread of the client.
    second: int
    #: Of the process that drives the others; all that is left.
    driver: frozenset[int]
    #: (client, server) of each of several pairs.
    pairs: tuple[tuple[int, int], ...]


def _threads_last(usable: set[int]) -> list[int]:
    """One hardware thread of every core first, its siblings after."""
    first: list[int] = []
    rest: list[int] = []
    seen: set[str] = set()
    for core in sorted(usable):
        topology = Path(f"/sys/devices/system/cpu/cpu{core}/topology/thread_siblings_list")
        siblings = topology.read_text().strip() if topology.exists() else str(core)
        (rest if siblings in seen else first).append(core)
        seen.add(siblings)
    return first + rest


def layout_of(usable: set[int]) -> Layout:
    order = _threads_last(usable)
    count = len(order)
    return Layout(
        usable=frozenset(usable),
        server=order[0],
        client=order[1 % count],
        second=order[2 % count],
        driver=frozenset(order[3:] or order),
        pairs=tuple((order[(2 * i + 1) % count], order[2 * i % count]) for i in range(8)),
    )


@cache
def layout() -> Layout:
    """Of the cores that this process may use when this is first called."""
    return layout_of(os.sched_getaffinity(0))


@contextmanager
def pinned(cores: set[int] | frozenset[int]) -> Iterator[None]:
    """This thread, and every process it starts meanwhile, on `cores`."""
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cores)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
