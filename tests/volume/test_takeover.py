"""What a writer that was stopped at the worst moment, or died in it, can do to its successor."""

from __future__ import annotations

from typing import Any

import pytest

from headrace.device.protocol import Buffer
from headrace.device.reference import as_bytes
from headrace.errors import CommandFailed, DeviceError, SessionLost, WriterActive
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Session, Volume, layout
from headrace.volume.writing import fence
from headrace.volume.writing import session as session_module
from headrace.volume.writing.heartbeat import HeartbeatBlock
from tests.volume.support import KIB, STRIPE, open_read, state_of

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


def test_a_late_beat_does_not_bring_a_writer_back() -> None:
    """Stopped between its look and its beat: the heartbeat block names it again when it wakes up, and still nothing
    that it commits is acknowledged."""
    volume = new_volume()
    old = volume.session("run", heartbeat_s=BEAT)
    old._beat._stop.set()
    old._beat._thread.join()
    tx = old.transaction()
    tx.put("late", b"x" * 5000)
    after = Volume.open(volume.devices, write=True)
    with after.session("run", heartbeat_s=60) as session:
        old._beat._block.write(old._beat._mine)
        with pytest.raises(SessionLost, match="took the volume over"):
            tx.commit()
        with pytest.raises(SessionLost):
            old.transaction()
        old.close()
        with session.transaction() as tx2:
            tx2.put("new", b"y")
    assert open_read(volume.devices) == {"new": b"y"} == state_of(after)


def test_a_late_end_of_an_old_session_does_not_open_the_door() -> None:
    """The same writer closes when it wakes up, and the heartbeat block says that an older session has ended: whoever
    comes then finds the living one by its next beat."""
    volume = new_volume()
    old = volume.session("run", heartbeat_s=BEAT)
    old._beat._stop.set()
    old._beat._thread.join()
    after = Volume.open(volume.devices, write=True)
    with after.session("run", heartbeat_s=1.0) as session, session.transaction() as tx:
        tx.put("mine", b"y")
        old._beat._block.write(old._beat._mine._replace(state=layout.CLOSED, beat=99))
        with pytest.raises(WriterActive, match="its heart beats"):
            Volume.open(volume.devices, write=True).session("third", takeover="if-dead")
    assert state_of(after) == {"mine": b"y"}


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


def test_who_was_stopped_between_its_look_and_its_claim_meets_whom_nobody_judged(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Another session came in between, and died: its ranks may still write to what it gave them."""
    volume = new_volume()
    take = fence.take

    def late(*args: Any, **how: Any) -> fence.Fence:
        monkeypatch.setattr(fence, "take", take)
        other = Volume.open(volume.devices, write=True).session("other", heartbeat_s=BEAT)
        other.transaction().allocate("late", 300 * KIB)
        other._beat.abandon()
        others.append(other)
        return take(*args, **how)

    others: list[Session] = []
    monkeypatch.setattr(fence, "take", late)
    with pytest.raises(WriterActive, match="at the same moment"):
        volume.session("run")
    with volume.session("run", takeover="if-dead", missed_beats=2) as session:
        assert session.quarantined_bytes >= 300 * KIB
    others[0].close()


def test_a_successor_that_was_lost_before_it_had_a_window_has_not_waited_for_late_writes() -> None:
    volume = new_volume()
    for run in ("first", "second"):
        opened = Volume.open(volume.devices, write=True)
        session = opened.session(run, takeover="if-dead", missed_beats=2, heartbeat_s=BEAT)
        if run == "first":
            session.transaction().allocate("late", 300 * KIB)
        session._beat.abandon()
    assert Volume.open(volume.devices).info().quarantined_bytes >= 300 * KIB
    with volume.session("third", takeover="if-dead", missed_beats=2, heartbeat_s=BEAT) as session:
        assert session.quarantined_bytes >= 300 * KIB
    assert volume.info().quarantined_bytes == 0


def test_a_session_that_could_not_open_is_not_closed_as_one_that_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(session: Session) -> None:
        raise DeviceError("unrecovered read error")

    devices = new_volume().devices
    volume = Volume.open(devices, write=True)
    with monkeypatch.context() as patch:
        patch.setattr(Session, "_count_space", fail)
        with pytest.raises(DeviceError) as failed:
            volume.session("run", heartbeat_s=BEAT)
        with pytest.raises(DeviceError), Volume.open(devices, write=True) as other:
            other.session("run", heartbeat_s=BEAT)
    found = HeartbeatBlock(volume.superblock, devices).read()
    assert found is not None and found.state == layout.CLOSED_OUTSTANDING and found.session == 2
    # Also while somebody holds the error.
    with volume.session("run", heartbeat_s=BEAT) as session:
        assert session.number == 3 and failed.value


def test_a_job_that_went_round_the_volume_leaves_room_for_its_restart() -> None:
    """Checkpoints replace each other for a long time, then the job is killed: only what its writes could still reach
    waits, not every place that it ever wrote to."""
    volume = new_volume()
    session = volume.session("run", heartbeat_s=BEAT)
    for step in range(40):
        with session.transaction() as tx:
            tx.put(f"step-{step}", bytes(500 * KIB))
            if step:
                tx.delete(f"step-{step - 1}")
    open_tx = session.transaction()
    grant = open_tx.allocate("under way", 300 * KIB)
    open_tx2 = session.transaction()
    open_tx2.allocate("given up", 100 * KIB)
    open_tx2.abort()
    for step in range(40, 60):
        with session.transaction() as tx:
            tx.put(f"step-{step}", bytes(500 * KIB))
            tx.delete(f"step-{step - 1}")
    session._beat.stop(None)
    after = Volume.open(volume.devices, write=True)
    with after.session("run", heartbeat_s=BEAT) as successor:
        capacity = after.info().capacity_bytes
        assert successor.quarantined_bytes >= 400 * KIB
        assert successor.free_bytes > capacity // 3
        with successor.transaction() as tx:
            tx.put("step-60", bytes(500 * KIB))
        for _ in range(30):
            with successor.transaction() as tx:
                tx.put("more", bytes(400 * KIB))
            with successor.transaction() as tx:
                tx.delete("more")
        with successor.transaction() as tx:
            tx.put("last", bytes(400 * KIB))
        # The writer that was under way lands late, and meets nobody.
        Volume.open(volume.devices, write=True).write_grant(grant, b"\xee" * (300 * KIB))
        assert set(state_of(after)) == {"step-59", "step-60", "last"}
