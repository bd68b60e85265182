"""Bytes as they complete, by slots of time: one `Meter` a flow, so that nobody waits for a lock; put together at the
end."""

from __future__ import annotations

import time
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from headrace.bench.figures import Latencies, Series, latencies_of

#: Seconds of a slot.
SLOT_S = 0.1
#: Latencies that a flow keeps; beyond that every second one goes, and later ones are kept as seldom.
_MOST_KEPT = 1 << 18


class Meter:
    """Of one thread. `begun`: of `time.perf_counter`, the same for all meters of a run."""

    def __init__(self, begun: float, slot_s: float = SLOT_S) -> None:
        self._begun = begun
        self._slot_s = slot_s
        self._slots: list[int] = []
        self._taken: list[float] = []
        self._every = 1
        self._count = 0
        self.bytes = 0
        self.requests = 0
        self.last = begun

    def count(self, bytes: int, seconds: float | None = None, requests: int = 1) -> None:
        """`bytes`, of so many requests, have come just now; `seconds`: what they took together."""
        self.last = time.perf_counter()
        slot = int((self.last - self._begun) / self._slot_s)
        if slot >= len(self._slots):
            self._slots.extend([0] * (slot + 1 - len(self._slots)))
        self._slots[slot] += bytes
        self.bytes += bytes
        self.requests += requests
        if seconds is not None:
            self._count += 1
            if self._count % self._every == 0:
                self._taken.append(seconds)
                if len(self._taken) >= _MOST_KEPT:
                    self._taken = self._taken[1::2]
                    self._every *= 2

    @property
    def slots(self) -> Sequence[int]:
        return self._slots

    @property
    def latencies(self) -> npt.NDArray[np.float64]:
        return np.array(self._taken, np.float64)


def series_of(meters: Sequence[Meter], started_s: float, slot_s: float = SLOT_S) -> Series:
    """Of all flows together."""
    length = max((len(meter.slots) for meter in meters), default=0)
    total = np.zeros(length, np.int64)
    for meter in meters:
        total[: len(meter.slots)] += np.array(meter.slots, np.int64)
    return Series(started_s=started_s, every_s=slot_s, bytes=[int(one) for one in total])


def latencies_of_all(meters: Sequence[Meter]) -> Latencies | None:
    return latencies_of(np.concatenate([meter.latencies for meter in meters])) if meters else None
