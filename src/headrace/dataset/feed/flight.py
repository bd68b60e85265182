"""Batches that are read with one request.

A request costs what it costs, whatever it reads, so small batches are read several at once.
"""

from __future__ import annotations

from headrace.dataset.feed.stretch import Stretch
from headrace.errors import HeadraceError
from headrace.units import MIB
from headrace.volume import VolumeTransfer

#: What a request reads, where it is of more than one batch: with twice as much it costs hardly less a byte, and the
#: first of its batches waits for the last.
GROUP_BYTES = 1 * MIB


def group_size(batch_bytes: int, prefetch: int) -> int:
    """Batches that are read together. Half of those that are ahead at most: while the caller goes through one half,
    the other is on its way."""
    return max(1, min(prefetch // 2, round(GROUP_BYTES / batch_bytes)))


class Flight:
    """Batches `[first, first + len(slots))` of a stretch, on their way to these slots of the ring."""

    __slots__ = ("arrived", "error", "failed", "first", "slots", "stretch", "taken", "transfers")

    def __init__(self, stretch: Stretch, first: int, slots: list[int]) -> None:
        self.stretch = stretch
        self.first = first
        self.slots = slots
        #: How many were handed out.
        self.taken = 0
        self.transfers: list[VolumeTransfer] = []
        self.arrived = False
        #: Of a request that could not even be made, which somebody has to be told.
        self.error: HeadraceError | None = None
        #: It ended with an error, which was told: read again when it is asked for again.
        self.failed = False

    def __len__(self) -> int:
        """Batches that were not handed out."""
        return len(self.slots) - self.taken

    def done(self) -> bool:
        return self.arrived or all(transfer.done() for transfer in self.transfers)

    def alone(self) -> list[Flight]:
        """Its batches, a flight each, into the same slots."""
        return [Flight(self.stretch, self.first + at, [slot]) for at, slot in enumerate(self.slots)]
