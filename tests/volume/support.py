"""What the tests of the volume share."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace.device import BlockDevice
from headrace.testing import CrashDevice, MemoryDevice, Timeline
from headrace.units import MIB
from headrace.volume import Session, Transaction, Volume

KIB = 1 << 10
STRIPE = 64 * KIB
#: Of sessions whose silence is waited for.
BEAT = 0.05
#: What a volume holds: name -> bytes.
State = dict[str, bytes]


def content(seed: int, length: int) -> bytes:
    return random.Random(seed).randbytes(length)


def new_volume(members: int = 2, size: int = 4 * MIB) -> Volume:
    return Volume.create(devices=[MemoryDevice(size) for _ in range(members)], stripe_bytes=STRIPE)


def second(volume: Volume) -> Volume:
    return Volume.open(volume.devices, write=True)


def silent(volume: Volume, run_id: str) -> None:
    """A session whose process died: it never beats again, and never closed."""
    session = volume.session(run_id, heartbeat_s=BEAT)
    session._beat.stop(None)


def state_of(volume: Volume) -> State:
    """Every object, read whole and verified."""
    return {info.name: volume.read(info.name) for info in volume.list()}


@contextmanager
def writing(volume: Volume, run_id: str = "test") -> Iterator[Session]:
    """A session that beats too seldom to disturb a recording."""
    session = volume.session(run_id, takeover="if-dead", heartbeat_s=60.0)
    try:
        yield session
    finally:
        session.close()


def crash_volume(members: int = 2, *, block_bytes: int = 4096) -> tuple[Timeline, Volume]:
    timeline = Timeline()
    size_bytes = 2 * MIB if members > 1 else 5 * MIB // 2
    devices = [CrashDevice(timeline, size_bytes, block_bytes=block_bytes) for _ in range(members)]
    return timeline, Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)


class Model:
    """A volume's state as it must be, commit by commit."""

    def __init__(self) -> None:
        self.states: list[State] = [{}]

    def put(self, tx: Transaction, name: str, data: bytes, **options: int) -> None:
        tx.put(name, data, **options)
        self.next[name] = data

    def delete(self, tx: Transaction, name: str) -> None:
        tx.delete(name)
        del self.next[name]

    @contextmanager
    def transaction(self, session: Session, timeline: Timeline | None = None) -> Iterator[Transaction]:
        self.next = dict(self.states[-1])
        with session.transaction() as tx:
            yield tx
        self.states.append(self.next)
        if timeline is not None:
            timeline.note(len(self.states) - 1)


def open_read(devices: Sequence[BlockDevice]) -> State:
    return state_of(Volume.open(devices))
