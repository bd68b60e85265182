"""Power cuts at every write: devices that record what was done to them, and every medium that a crash may leave.

    timeline = Timeline()
    devices = [CrashDevice(timeline, 4 * MIB), CrashDevice(timeline, 4 * MIB)]
    ... make a volume, then: timeline.begin()
    ... work; timeline.note(state) whenever something was acknowledged
    for crash in timeline.crashes(): for media in crash.media(random): open and compare with crash.notes

What a crash may leave, for each logical block by itself: any of the writes to it that were not yet durable, or what was
durable before. That covers lost, torn (at the logical block) and reordered writes at once. Durable is a write with FUA
that was acknowledged, or one that was acknowledged before a Flush of the same device began that was acknowledged. The
command during which the power fails may have done any part of its work.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from headrace.device.protocol import Buffer
from headrace.device.reference import as_bytes
from headrace.testing.devices import MemoryDevice

#: Chooses what a block holds after the crash: from how many candidates, oldest first; 0 is what was durable.
Choice = Callable[[int], int]


@dataclass(frozen=True)
class Event:
    """One command, acknowledged in this order. `kind`: "write", "flush" or "loss" (the controller's cache was lost)."""

    kind: str
    device: int
    offset: int = 0
    data: bytes = b""
    fua: bool = False


class Timeline:
    """The commands to several devices, in one order."""

    def __init__(self) -> None:
        self.devices: list[CrashDevice] = []
        self.events: list[Event] = []
        #: (number of events before it, what was noted)
        self.notes: list[tuple[int, Any]] = []
        self._start: list[bytes] = []
        #: Called after every event with its index; may lose a cache, raise, or look.
        self.after_event: Callable[[int], None] | None = None

    def begin(self) -> None:
        """Everything so far is durable; record from here."""
        for device in self.devices:
            MemoryDevice.flush(device)
        self._start = [bytes(device.data) for device in self.devices]
        self.events.clear()
        self.notes.clear()

    def record(self, event: Event) -> None:
        self.events.append(event)
        if self.after_event is not None:
            self.after_event(len(self.events) - 1)

    def note(self, what: Any) -> None:
        """Something was acknowledged now."""
        self.notes.append((len(self.events), what))

    def crashes(self, stride: int = 1) -> Iterator[Crash]:
        """A crash before the first command, during every one (every `stride`-th), and after the last."""
        for position in range(0, len(self.events) + 1, stride):
            yield self.crash(position)

    def crash(self, position: int) -> Crash:
        """The crash during event `position`, all events before having been acknowledged."""
        return Crash(self, position)

    def start(self, device: int) -> bytes:
        return self._start[device]


class Crash:
    """What one moment may leave on the media."""

    def __init__(self, timeline: Timeline, position: int) -> None:
        self.timeline = timeline
        self.position = position
        #: What had been acknowledged.
        self.notes = [what for before, what in timeline.notes if before <= position]
        self._candidates = [self._replay(index) for index in range(len(timeline.devices))]

    def _replay(self, index: int) -> tuple[bytearray, dict[int, list[bytes]]]:
        """The durable bytes, and for each block with writes in the air what they would make of it."""
        durable = bytearray(self.timeline.start(index))
        air: dict[int, list[bytes]] = {}
        block = self.timeline.devices[index].block_bytes
        for position, event in enumerate(self.timeline.events[: self.position + 1]):
            if event.device != index:
                continue
            acknowledged = position < self.position
            if event.kind == "write":
                for at in range(0, len(event.data), block):
                    piece = event.data[at : at + block]
                    if event.fua and acknowledged:
                        durable[event.offset + at : event.offset + at + block] = piece
                        air.pop(event.offset + at, None)
                    else:
                        air.setdefault(event.offset + at, []).append(piece)
            elif event.kind == "flush" and acknowledged:
                for offset, pieces in air.items():
                    durable[offset : offset + block] = pieces[-1]
                air.clear()
            elif event.kind == "loss":
                air.clear()
        return durable, air

    @property
    def blocks_in_the_air(self) -> int:
        return sum(len(air) for _, air in self._candidates)

    def media(self, choose: Choice, **options: Any) -> list[MemoryDevice]:
        """New devices that hold what `choose` leaves; `options` go to `MemoryDevice`."""
        result = []
        for device, (durable, air) in zip(self.timeline.devices, self._candidates, strict=True):
            copy = MemoryDevice(device.size_bytes, block_bytes=device.block_bytes, **options)
            copy.data[:] = durable
            for offset, pieces in air.items():
                chosen = choose(len(pieces) + 1)
                if chosen:
                    copy.data[offset : offset + device.block_bytes] = pieces[chosen - 1]
            result.append(copy)
        return result

    def nothing(self, **options: Any) -> list[MemoryDevice]:
        """All that was not durable is lost."""
        return self.media(lambda count: 0, **options)

    def everything(self, **options: Any) -> list[MemoryDevice]:
        """All of it arrived."""
        return self.media(lambda count: count - 1, **options)

    def some(self, random: random.Random, **options: Any) -> list[MemoryDevice]:
        """Any subset, torn and reordered."""
        return self.media(random.randrange, **options)


class CrashDevice(MemoryDevice):
    """A `BlockDevice` with a volatile cache whose commands are recorded on a timeline that it shares with others."""

    def __init__(self, timeline: Timeline, size_bytes: int, *, block_bytes: int = 4096) -> None:
        super().__init__(size_bytes, block_bytes=block_bytes, volatile_cache=True)
        self._timeline = timeline
        self._index = len(timeline.devices)
        timeline.devices.append(self)

    def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
        super().write(offset, data, fua=fua)
        self._timeline.record(Event("write", self._index, offset, as_bytes(data).tobytes(), fua))

    def flush(self) -> None:
        super().flush()
        self._timeline.record(Event("flush", self._index))

    def lose_cache(self) -> None:
        """The controller is lost with its cache; the next one answers, and its Flush succeeds."""
        super().lose_cache()
        self._timeline.events.append(Event("loss", self._index))


__all__ = ["Crash", "CrashDevice", "Event", "Timeline"]
