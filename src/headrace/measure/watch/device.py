"""Clocks of devices that work behind their callers' backs, and what a step is by such a clock.

On a GPU the host only asks: what it asks for is carried out later, one after the other. So marks are put between the
work, and read when the device has come by. Between two marks of the same step the device is busy with what lies there.
What is left of a step is the time in which it had nothing to do, and that is what the host's waits cost: a wait for
data that ended before the device ran dry cost nothing, and is not told.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Protocol

#: What is carried out by the device, and so timed by its marks.
ON_DEVICE = ("copy", "compute", "collective")


class DeviceClock(Protocol):
    """`headrace.torch.device_clock.CudaClock`, or a test's own."""

    #: As it stands in files: "cuda".
    kind: str
    #: Identifier of the GPU for NVML (`GPU-...`); None: not known.
    gpu: str | None

    def mark(self) -> Any:
        """A mark behind all that was asked for by now. Costs microseconds, waits for nothing."""

    def passed(self, mark: Any) -> bool:
        """The device has come by."""

    def between_s(self, first: Any, second: Any) -> float:
        """Seconds between two marks that it has come by; waits for the second where it has not."""


@dataclass
class DeviceStep:
    """The marks of one step: its begin, and begin and end of each part."""

    begin: Any
    end: Any = None
    parts: list[tuple[str, Any, Any]] = field(default_factory=list)

    def passed(self, clock: DeviceClock) -> bool:
        return self.end is not None and clock.passed(self.end)

    def spent(self, clock: DeviceClock, host: Mapping[str, float]) -> tuple[float, dict[str, float]]:
        """Wall time by the device, and by cause. `host`: what the host did in the same step, by the host's clock."""
        busy = dict.fromkeys(ON_DEVICE, 0.0)
        for cause, first, second in self.parts:
            busy[cause] += max(0.0, clock.between_s(first, second))
        wall = max(0.0, clock.between_s(self.begin, self.end))
        total = sum(busy.values())
        if total > wall:
            busy = {cause: seconds * wall / total for cause, seconds in busy.items()}
        idle = max(0.0, wall - total)
        waits = {cause: seconds for cause, seconds in host.items() if cause not in (*ON_DEVICE, "other")}
        waited = sum(waits.values())
        # What did not keep the device idle was hidden behind its work.
        visible = min(1.0, idle / waited) if waited > 0 else 0.0
        found = {cause: seconds * visible for cause, seconds in waits.items()} | busy
        found["other"] = max(0.0, wall - sum(found.values()))
        return wall, found
