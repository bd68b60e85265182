"""What one rank did over all steps of a job."""

from __future__ import annotations

from collections import defaultdict
from dataclasses import dataclass, field

from headrace.measure.watch.record import WatchStep

#: A rank that computes longer than the others by less than this share of what they do is as fast as they are.
STRAGGLES = 0.1


@dataclass(kw_only=True)
class RankRow:
    """One rank over all steps."""

    rank: int
    node: str = ""
    steps: int = 0
    #: Steps in which it was the slowest.
    slowest: int = 0
    #: What it computed longer than the others, where these waited for it.
    straggled_s: float = 0.0
    #: Of the last start: its last step, and its last one in which it trained; -1: none. None: it is not in that start.
    last_step: int | None = None
    trained_step: int = -1
    wall_s: float = 0.0
    spent: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    windows: dict[str, float] = field(default_factory=lambda: defaultdict(float))
    sm_activity: list[float] = field(default_factory=lambda: [0.0, 0.0])

    def add(self, row: WatchStep, slowest: bool) -> None:
        self.steps, self.slowest, self.wall_s = self.steps + 1, self.slowest + slowest, self.wall_s + row.wall_s
        self.last_step = row.step
        # One of a last save, which a single rank may do, holds nobody up.
        if row["compute"] + row["collective"] > STRAGGLES * row.wall_s:
            self.trained_step = row.step
        for cause, seconds in row.spent.items():
            self.spent[cause] += seconds
        window = row.window or {}
        for key, value in window.items():
            if isinstance(value, int | float) and key not in ("sm_activity", "helpers", "reads_ahead", "reads_apart"):
                self.windows[key] += value
        if "sm_activity" in window:
            self.sm_activity[0] += window["sm_activity"] * window["window_s"]
            self.sm_activity[1] += window["window_s"]
