"""What trainers tell while they run: one line of JSON an event, a file a rank, followed by the one who breaks things.

    {"t": 1735689600.123, "rank": 1, "pid": 4711, "event": "write-begun", "step": 12, ...}

`t` is the system's clock, so that events of all ranks and of the orchestrator lie on one time line.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any


@dataclass(frozen=True, kw_only=True)
class Event:
    """`event`: started, restored, save-begun, write-begun, save-staged, save-committed, save-failed or finished."""

    t: float
    rank: int
    pid: int
    event: str
    step: int
    #: What else belongs to the event; JSON values.
    details: dict[str, Any] = field(default_factory=dict)


class EventWriter:
    """Appends events of one rank. A line is one `write`, so lines of several threads never mix."""

    def __init__(self, path: Path, rank: int) -> None:
        self._rank = rank
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)

    def __call__(self, event: str, step: int, **details: Any) -> None:
        row = {"t": time.time(), "rank": self._rank, "pid": os.getpid(), "event": event, "step": step}
        os.write(self._file, (json.dumps(row | {"details": details}) + "\n").encode())

    def close(self) -> None:
        os.close(self._file)


class EventFollower:
    """Reads the events of all ranks of one phase as they come."""

    #: How often files are looked at. A checkpoint of the demo takes some hundred milliseconds, a look ten microseconds.
    PERIOD_S = 0.002

    def __init__(self, directory: Path, pattern: str) -> None:
        self._directory = directory
        self._pattern = pattern
        self._offsets: dict[Path, int] = {}
        self.events: list[Event] = []

    def poll(self) -> list[Event]:
        """Events that were written since the last call."""
        new: list[Event] = []
        for path in sorted(self._directory.glob(self._pattern)):
            offset = self._offsets.get(path, 0)
            if path.stat().st_size <= offset:
                continue
            with path.open("rb") as file:
                file.seek(offset)
                data = file.read()
            complete = data[: data.rfind(b"\n") + 1]
            self._offsets[path] = offset + len(complete)
            new += [Event(**json.loads(line)) for line in complete.splitlines()]
        new.sort(key=lambda event: event.t)
        self.events += new
        return new

    def wait_for(
        self, wanted: Callable[[Event], bool], *, alive: Callable[[], bool], idle: Callable[[], None] | None = None
    ) -> Event | None:
        """The next event that is wanted; None when `alive` says no before it came. `idle` is called now and then."""
        looks = 0
        while True:
            living = alive()
            for event in self.poll():
                if wanted(event):
                    return event
            if not living:
                return None
            looks += 1
            if idle is not None and looks % 50 == 0:
                idle()
            time.sleep(self.PERIOD_S)
