"""Dumps of black boxes made by hand: ranks that go in step, and what their devices did meanwhile."""

from __future__ import annotations

from typing import Any

import numpy as np

from headrace.device.events import EventKind
from headrace.measure.blackbox import Clocks, Dump, DumpedDevice, DumpedPath, DumpedStep
from headrace.measure.blackbox.dump import DUMPED
from headrace.measure.blackbox.evidence import Evidence, of_dump, together
from headrace.measure.watch.causes import WAIT

MS = 1_000_000
#: A target with two paths, and one with one.
DEVICES = (
    DumpedDevice(
        uri="nvme+tcp://10.0.0.1:4420/nqn.a?nsid=1",
        paths=(
            DumpedPath(name="10.0.0.1:4420", address="10.0.0.1:4420", target="nqn.a"),
            DumpedPath(name="10.0.1.1:4420", address="10.0.1.1:4420", target="nqn.a"),
        ),
    ),
    DumpedDevice(
        uri="nvme+tcp://10.0.0.2:4420/nqn.b?nsid=1",
        paths=(DumpedPath(name="10.0.0.2:4420", address="10.0.0.2:4420", target="nqn.b"),),
    ),
)


class Rank:
    """Every step begins where the one before ended; a read by each path takes 1 ms, ten of them a step."""

    def __init__(
        self, rank: int = 0, world: int = 1, *, host: str = "", ahead_ns: int = 0, devices: Any = DEVICES
    ) -> None:
        self.rank, self.world, self.host = rank, world, host or f"node{rank}"
        self.ahead_ns = ahead_ns
        self.devices = devices
        self.now = 10**9 + ahead_ns
        self.steps: list[DumpedStep] = []
        self.under_way: DumpedStep | None = None
        self.events: list[tuple[int, ...]] = []

    def step(
        self, *, slow: dict[tuple[int, int], float] | None = None, quiet: bool = False,
        kind: EventKind = EventKind.READ, hangs: tuple[int, int] | None = None, cause: str | None = None,
        size: int = 4096, **spent: float,
    ) -> Rank:  # fmt: skip
        """`spent`: by cause, seconds. `slow`: by device and path, how long each command took. `hangs`: a command on
        this path has no answer, and the step is under way with it, at `cause`."""
        begun = self.now
        self.now += round(sum(spent.values()) * 1e9)
        if not quiet:
            for device, found in enumerate(self.devices):
                for path in range(len(found.paths)):
                    took = round((slow or {}).get((device, path), 0.001) * 1e9)
                    for number in range(10):
                        # They end with the step at the latest.
                        start = max(begun, min(begun + number * MS, self.now - took))
                        self.event(device, path, start, start + took, kind, size)
        number = len(self.steps)
        if cause is None:
            self.steps.append(DumpedStep(step=number, started_ns=begun, ended_ns=self.now, spent=spent))
            return self
        if hangs is not None:
            self.event(*hangs, begun + MS, 0, kind, size)
        self.under_way = DumpedStep(
            step=number, started_ns=begun, ended_ns=None, spent=spent, cause=cause, cause_since_ns=begun
        )
        return self

    def event(self, device: int, path: int, start: int, end: int, kind: EventKind, size: int = 4096) -> None:
        self.events.append((device, start, end, 8192, size, path, 0, kind, 0))

    def usual(self, steps: int = 8, **spent: float) -> Rank:
        for _ in range(steps):
            self.step(**(spent or {"fetch": 0.002, "compute": 0.02, "collective": 0.005}))
        return self

    def dump(self, why: str = "request") -> Dump:
        return Dump(
            rank=self.rank, world=self.world, host=self.host, pid=1, why=why, detail="",
            started=Clocks(monotonic_ns=0, realtime_ns=10**18),
            dumped=Clocks(monotonic_ns=self.now, realtime_ns=10**18 + self.now - self.ahead_ns), devices=self.devices,
            events=np.array(self.events, DUMPED), steps=tuple(self.steps), under_way=self.under_way,
        )  # fmt: skip


def evidence(*ranks: Rank, why: str = "request") -> Evidence:
    return together([of_dump(rank.dump(why)) for rank in ranks])


#: For `cause` of a step that is under way in a wait for a batch.
IN_A_WAIT = WAIT
