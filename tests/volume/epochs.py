"""Volumes of which members go away and come back, for the tests of that."""

from __future__ import annotations

from collections.abc import Callable

from headrace.device.protocol import Buffer
from headrace.errors import CommandFailed
from headrace.testing import CrashDevice, MemoryDevice, Timeline
from headrace.units import MIB
from headrace.volume import Session, Volume
from headrace.volume.layout import ALIGN, Superblock
from headrace.volume.media.members import read_superblock
from tests.volume.support import KIB, STRIPE, content, writing


def made(members: int = 3) -> list[MemoryDevice]:
    devices = [MemoryDevice(2 * MIB) for _ in range(members)]
    with writing(Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)) as session:
        commit(session.volume, session, "wide", 300 * KIB)
    return devices


def commit(volume: Volume, session: Session, name: str, length: int = 5 * KIB) -> None:
    with session.transaction() as tx:
        tx.put(name, content(len(name), length))


def go_on(devices: list[MemoryDevice], name: str, *, degraded: bool = True) -> None:
    """A session that commits one object."""
    volume = Volume.open(devices, write=True, degraded=degraded)
    with writing(volume) as session:
        commit(volume, session, name)


def epochs_of(devices: list[MemoryDevice]) -> list[Superblock]:
    return [read_superblock(device)[0] for device in devices]


def copied(devices: list[MemoryDevice]) -> list[MemoryDevice]:
    copies = []
    for device in devices:
        copy = MemoryDevice(device.size_bytes)
        copy.data[:] = device.data
        copies.append(copy)
    return copies


def names(devices: list[MemoryDevice]) -> set[str]:
    return {info.name for info in Volume.open(devices, degraded=True).list()}


class Unread(MemoryDevice):
    """Its superblock cannot be read for a while."""

    fails = False

    def read_into(self, offset: int, buffer: Buffer) -> None:
        if self.fails and offset in (0, self.size_bytes - ALIGN):
            raise CommandFailed("unrecovered read error", where=self.uri)
        super().read_into(offset, buffer)


class Hole(MemoryDevice):
    """One block cannot be read."""

    at = -1

    def read_into(self, offset: int, buffer: Buffer) -> None:
        if offset <= self.at < offset + memoryview(buffer).nbytes:
            raise CommandFailed("unrecovered read error", where=self.uri)
        super().read_into(offset, buffer)


def recorded(scenario: Callable[[list[CrashDevice]], None], before: list[MemoryDevice]) -> Timeline:
    """What a scenario writes to these devices, and every point at which the power may fail."""
    timeline = Timeline()
    devices = [CrashDevice(timeline, device.size_bytes) for device in before]
    for device, medium in zip(devices, before, strict=True):
        device.data[:] = medium.data
    timeline.begin()
    scenario(devices)
    return timeline
