"""What a writer that was stopped at the worst moment, or died in it, can do to its successor."""

from __future__ import annotations

import pytest

from headrace.device.protocol import Buffer
from headrace.device.reference import as_bytes
from headrace.errors import CommandFailed, SessionLost
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume
from headrace.volume import session as session_module
from tests.volume.support import STRIPE, open_read, state_of

BEAT = 0.05


def new_volume() -> Volume:
    return Volume.create(devices=[MemoryDevice(4 * MIB) for _ in range(2)], stripe_bytes=STRIPE)


def test_a_commit_that_a_taker_did_not_see_is_not_acknowledged(monkeypatch: pytest.MonkeyPatch) -> None:
    """Stopped behind its look at the heartbeat: the record goes to a log that is not in force, and the caller must not
    be told that it is durable."""
    volume = new_volume()
    old = volume.session("run", heartbeat_s=BEAT)
    old._beat._stop.set()
    tx = old.transaction()
    tx.put("late", b"x" * 5000)
    after = Volume.open(volume.devices, write=True)
    original = session_module.commit_records
    taken = []

    def stopped(*args: object) -> object:
        monkeypatch.setattr(session_module, "commit_records", original)
        taken.append(after.session("run", heartbeat_s=BEAT))
        return original(*args)  # type: ignore[arg-type]

    monkeypatch.setattr(session_module, "commit_records", stopped)
    with pytest.raises(SessionLost, match="took the volume over"):
        tx.commit()
    with pytest.raises(SessionLost):
        old.transaction()
    old.close()
    with taken[0] as session, session.transaction() as tx2:
        tx2.put("new", b"y")
    assert open_read(volume.devices) == {"new": b"y"} == state_of(after)


def test_a_late_move_of_the_log_has_another_generation_than_its_successors() -> None:
    """What a dead session wrote when it moved the log can land in the area that its successor moved to. It must not be
    taken for a record of that."""

    class Full(MemoryDevice):
        def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
            if refuse and as_bytes(data)[:8].tobytes() == b"HRLOGHDR":
                raise CommandFailed("no", where=self.uri)
            super().write(offset, data, fua=fua)

    refuse = False
    volume = Volume.create(devices=[Full(4 * MIB) for _ in range(2)], stripe_bytes=STRIPE)
    generations = []
    for _ in range(3):
        session = volume.session("run", heartbeat_s=BEAT)
        generations.append(session._writer.cursor.header.generation)
        refuse = True
        with pytest.raises(CommandFailed):
            session._writer.move(say_so=True)  # It would have been the generation after.
        generations.append(session._writer.cursor.header.generation + 1)
        session._beat.stop(None)
        refuse = False
        volume = Volume.open(volume.devices, write=True)
    assert len(set(generations)) == len(generations)
