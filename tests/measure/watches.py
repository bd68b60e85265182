"""What the tests of the watch share: clocks by hand, and files of ranks."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any


class Hands:
    """A clock that stands until it is moved; `wall` is the system's."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now

    def wall(self) -> float:
        return self.now + 1_000_000.0

    def pass_s(self, seconds: float) -> None:
        self.now += seconds

    @property
    def options(self) -> dict[str, Any]:
        return {"monotonic": self, "wall": self.wall, "device": None}


class Gpu:
    """A device that carries out, one after the other and behind the host's back, what it is asked for."""

    kind = "fake"
    gpu = None

    def __init__(self, clock: Hands) -> None:
        self._clock = clock
        self._free_at = clock.now

    def work(self, seconds: float) -> None:
        """Asked for in no time."""
        self._free_at = max(self._free_at, self._clock.now) + seconds

    def synchronise(self) -> None:
        self._clock.now = max(self._clock.now, self._free_at)

    def mark(self) -> float:
        return max(self._free_at, self._clock.now)

    def passed(self, mark: float) -> bool:
        return mark <= self._clock.now

    def between_s(self, first: float, second: float) -> float:
        self._clock.now = max(self._clock.now, second)
        return second - first


def header(rank: int, world: int, started_s: float = 1000.0, **others: Any) -> dict[str, Any]:
    return {
        "headrace_watch": 1, "rank": rank, "world": world, "node": f"node{rank}", "pid": 1, "started_s": started_s,
        "clock": "host", "sm_activity": "there is no GPU", **others,
    }  # fmt: skip


def step(number: int, started_s: float = 1000.0, window: Any = None, bytes: int = 0, **spent: float) -> dict[str, Any]:
    """`fetch=0.1`, by cause."""
    line: dict[str, Any] = {"step": number, "started_s": started_s, "wall_s": sum(spent.values())}
    line |= {f"{cause}_s": seconds for cause, seconds in spent.items()}
    if window is not None:
        line["window"] = window
    if bytes:
        line["bytes"] = bytes
    return line


def write(path: Path, lines: Sequence[dict[str, Any]]) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps(line) + "\n" for line in lines), encoding="utf-8")
    return path


def batches(clock: Hands, *waits: float) -> Iterator[int]:
    """Numbers, each waited for by the clock that is moved by hand."""
    for number, seconds in enumerate(waits):
        clock.pass_s(seconds)
        yield number
