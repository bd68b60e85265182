"""A member that is not there, in its place: a volume that was opened without it goes on with the rest.

Whatever is asked of it fails by name. Batches go to the native engine, which knows its own devices only; so what lies
on such a member is refused beforehand (`refuse`), and another device stands in its place (`solid`), which nothing is
sent to.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from headrace.device import BlockDevice
from headrace.device.events import Events, no_events
from headrace.device.protocol import Buffer
from headrace.errors import MemberMissing
from headrace.volume.data.extents import I64
from headrace.volume.layout import ALIGN, Member


class AbsentMember:
    """A `BlockDevice` that fails every command with MemberMissing."""

    volatile_cache = False
    read_only = True
    block_bytes = ALIGN

    def __init__(self, index: int, row: Member) -> None:
        self.index = index
        self.uri = f"missing:{index}"
        self.size_bytes = row.size_bytes
        self._name = f"member {index} (id {row.id.hex()})"

    def missing(self, what: str, where: str | None = None) -> MemberMissing:
        return MemberMissing(
            what, where=where, found=f"no device for {self._name}", next_step="open the volume with this member, too"
        )

    def loss_count(self) -> int:
        return 0

    def events(self) -> Events:
        raise no_events(self.uri)

    def read_into(self, offset: int, buffer: Buffer) -> None:
        raise self.missing("a member of the volume is missing")

    def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
        raise self.missing("a member of the volume is missing")

    def flush(self) -> None:
        raise self.missing("a member of the volume is missing")

    def deallocate(self, offset: int, length: int) -> None:
        raise self.missing("a member of the volume is missing")

    def close(self) -> None:
        pass

    def describe(self) -> dict[str, Any]:
        return {"transport": "absent"}


def absent(devices: Sequence[BlockDevice]) -> list[int]:
    """Which members are not there."""
    return [index for index, device in enumerate(devices) if isinstance(device, AbsentMember)]


def present(devices: Sequence[BlockDevice]) -> list[BlockDevice]:
    return [device for device in devices if not isinstance(device, AbsentMember)]


def solid(devices: Sequence[BlockDevice]) -> Sequence[BlockDevice]:
    """The same, with some other device in each place where none is: for a batch that `refuse` has let through."""
    there = present(devices)
    if len(there) == len(devices):
        return devices
    return [there[0] if isinstance(device, AbsentMember) else device for device in devices]


def refuse(devices: Sequence[BlockDevice], members: I64, where: str) -> None:
    """MemberMissing where one of these members is not there."""
    for index in absent(devices):
        if bool(np.any(members == index)):
            device = devices[index]
            assert isinstance(device, AbsentMember)
            raise device.missing("bytes are on a member that is missing", where)
