"""What retention leaves, what a pin keeps from it, and the space that is reserved for both."""

from __future__ import annotations

import pytest

from headrace.checkpoint import CheckpointId, Retention, Save, delete_checkpoints, keep_last, list_checkpoints
from headrace.checkpoint.retention import pin, read_pin, reserve, unpin
from headrace.errors import CheckpointFailed, ObjectNotFound, UsageError, VolumeFull
from headrace.units import MIB
from headrace.volume import Session, Transaction, Volume
from tests.checkpoint.steps import manifest, save_step


def steps(volume: Volume, run: str = "run") -> list[int]:
    return [info.step for info in list_checkpoints(volume, run)]


def test_the_last_ones_the_multiples_and_the_pinned_stay(
    session: Session, volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    retention = Retention(keep_last=2, keep_every=10)
    for step in range(5, 35, 5):
        save_step(session, step, retention=retention)
        if step == 5:
            assert pin(session, CheckpointId("run", 5), "before the spike")
            assert not pin(session, CheckpointId("run", 5))
    assert steps(volume) == [5, 10, 20, 25, 30]
    assert [info.step for info in list_checkpoints(volume, "run") if info.pinned] == [5]
    found = read_pin(volume, CheckpointId("run", 5))
    assert found is not None and found.note == "before the spike"
    # A reader elsewhere sees pins as it sees all else.
    with Volume.open(volume.uris) as reader:
        assert list_checkpoints(reader, "run")[0].pinned
    assert unpin(session, CheckpointId("run", 5)) and not unpin(session, CheckpointId("run", 5))
    commits: list[Transaction] = []
    commit = session.commit
    monkeypatch.setattr(session, "commit", lambda tx: commits.append(tx) or commit(tx))
    assert [id.step for id in keep_last(session, "run", 1)] == [5, 10, 20, 25]
    assert len(commits) == 1
    assert steps(volume) == [30]
    # Not of another run, also where its name begins alike.
    save_step(session, 1, run="run/step-x")
    save_step(session, 40, retention=Retention(keep_last=1))
    assert steps(volume) == [40] and steps(volume, "run/step-x") == [1]
    for bad in ({"keep_last": 0}, {"keep_last": 1, "keep_every": 0}):
        with pytest.raises(UsageError):
            Retention(**bad)


def test_a_pinned_step_is_neither_deleted_nor_replaced(session: Session, volume: Volume) -> None:
    one, two = CheckpointId("run", 1), CheckpointId("run", 2)
    for id in (one, two):
        save_step(session, id.step)
    pin(session, one)
    with pytest.raises(UsageError, match=r"run/step-00000001 is pinned.*unpin"):
        delete_checkpoints(session, [two, one])
    assert steps(volume) == [1, 2]
    with pytest.raises(CheckpointFailed, match="pinned"):
        save_step(session, 1, overwrite=True)
    # Pinned while what is to replace it was written.
    save = Save(session, two, overwrite=True)
    [grant] = save.allocate([100])
    assert grant is not None
    save.accept([volume.write_grant(grant, bytes(100))])
    pin(session, two)
    with pytest.raises(CheckpointFailed, match="pinned"):
        save.commit(manifest(save, [100]))
    save.abort()
    assert [info.data_bytes for info in list_checkpoints(volume, "run")] == [71_000, 71_000]
    for call in (pin, unpin):
        with pytest.raises(ObjectNotFound, match="no committed checkpoint"):
            call(session, CheckpointId("run", 3))
    with pytest.raises(UsageError, match="too long"):
        pin(session, one, "x" * 5000)


def test_a_pin_of_any_bytes_holds(session: Session, volume: Volume) -> None:
    id = CheckpointId("run", 1)
    save_step(session, 1)
    for data in (b"", b"[" * 5000, b'{"pinned_unix": 1e999, "note": {}}', b"{}"):
        with session.transaction() as tx:
            tx.put(id.pin, data)
        found = read_pin(volume, id)
        assert found is not None
        with pytest.raises(UsageError, match="pinned"):
            delete_checkpoints(session, [id])
        assert unpin(session, id)
    # A pin without a checkpoint is none.
    with session.transaction() as tx:
        tx.put("run/step-00000002/pin", b"")
    assert [info.pinned for info in list_checkpoints(volume, "run")] == [False]


def test_too_little_space_is_told_before_a_byte_is_written(session: Session, volume: Volume) -> None:
    retention = Retention(keep_last=3)
    free = session.free_bytes
    size = free // 4 - MIB // 2
    save = Save(session, CheckpointId("run", 1), retention=retention)
    with pytest.raises(VolumeFull, match=r"keep_last=3 checkpoints and one in the making.* are missing") as caught:
        save.allocate([size + MIB])
    assert caught.value.where == "run 'run'"
    save.abort()
    # So much fits; and nobody else of the session gets it.
    reserve(session, "run", size, retention)
    with pytest.raises(VolumeFull):
        session.reserve(4 * MIB, "other/")
    save_step(session, 1, lengths=(size,))
    # A step that stays beside the last ones takes what they need.
    pin(session, CheckpointId("run", 1))
    for step in (2, 3):
        save_step(session, step, lengths=(10_000,))
    with pytest.raises(VolumeFull, match=r"beside 1 older ones that stay, .*MiB"):
        reserve(session, "run", size, Retention(keep_last=3), CheckpointId("run", 5))
    unpin(session, CheckpointId("run", 1))
    reserve(session, "run", size, Retention(keep_last=3), CheckpointId("run", 5))
