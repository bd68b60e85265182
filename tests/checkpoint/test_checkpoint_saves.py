"""Saves without a framework: the sequence of `Save`, listings, retention; and that nothing else is ever visible."""

from __future__ import annotations

import pytest

from headrace.checkpoint import (
    CheckpointId,
    Retention,
    Save,
    delete_checkpoints,
    keep_last,
    latest,
    list_checkpoints,
    read_manifest,
)
from headrace.errors import CheckpointFailed, ObjectExists, ObjectNotFound, UsageError, VolumeFull
from headrace.volume import Session, Volume
from tests.checkpoint.steps import manifest, save_step


def test_a_listing_shows_checkpoints_in_the_order_of_their_commits(session: Session, volume: Volume) -> None:
    sequences = {step: save_step(session, step) for step in (20, 100, 3)}
    save_step(session, 5, run="other/run")
    found = list_checkpoints(volume, "run")
    assert [(c.checkpoint_id, c.ranks, c.item_count, c.data_bytes) for c in found] == [
        (f"run/step-{step:08d}", 3, 2, 71_000) for step in (20, 100, 3)
    ]
    assert [c.sequence for c in found] == [sequences[c.step] for c in found]
    newest = latest(volume, "run")
    assert newest is not None
    assert newest.step == 3
    assert latest(volume, "nothing") is None
    assert [c.id.run for c in list_checkpoints(volume)] == ["other/run", "run", "run", "run"]
    assert read_manifest(volume, newest.id).tensors[0].shape == (71_000,)


def test_a_reader_elsewhere_follows(session: Session, volume: Volume) -> None:
    with Volume.open(volume.uris) as reader:
        assert latest(reader, "run") is None
        save_step(session, 1)
        assert read_manifest(reader, CheckpointId("run", 1)).summary.ranks == 3
        save_step(session, 2)
        found = latest(reader, "run")
        assert found is not None
        assert found.step == 2


def test_nothing_of_an_unfinished_save_is_visible(session: Session, volume: Volume) -> None:
    save_step(session, 1)
    names = [entry.name for entry in volume.list("")]
    save = Save(session, CheckpointId("run", 2))
    [grant] = save.allocate([5000])
    assert grant is not None
    assert [entry.name for entry in volume.list("")] == names
    save.accept([volume.write_grant(grant, bytes(5000))])
    assert [entry.name for entry in volume.list("")] == names
    save.abort()
    save.abort()
    assert [entry.name for entry in volume.list("")] == names
    with pytest.raises(CheckpointFailed, match="not under way"):
        save.commit(manifest(save, [5000]))
    save_step(session, 2)


def test_a_save_without_all_receipts_is_not_committed(session: Session, volume: Volume) -> None:
    save = Save(session, CheckpointId("run", 1))
    first, _ = save.allocate([10, 10])
    assert first is not None
    with pytest.raises(CheckpointFailed, match=r"did not confirm.*rank-00001"):
        save.accept([volume.write_grant(first, bytes(10)), None])
    with pytest.raises(CheckpointFailed, match=r"did not confirm"):
        save.commit(manifest(save, [10, 10]))
    save.abort()
    assert volume.list("") == []


def test_a_committed_step_is_replaced_only_when_asked(session: Session, volume: Volume) -> None:
    save_step(session, 1)
    with pytest.raises(ObjectExists, match="committed already"):
        save_step(session, 1)
    save_step(session, 1, lengths=(10,), overwrite=True)
    assert [c.data_bytes for c in list_checkpoints(volume, "run")] == [10]
    assert len(volume.list("run/")) == 2


def test_retention(session: Session, volume: Volume) -> None:
    for step in range(5):
        save_step(session, step)
    save_step(session, 0, run="run2")
    assert [id.step for id in keep_last(session, "run", 3)] == [0, 1]
    assert keep_last(session, "run", 3) == []
    before = volume.sequence
    delete_checkpoints(session, [CheckpointId("run", 2), CheckpointId("run", 4)])
    assert volume.sequence > before
    with pytest.raises(ObjectNotFound):
        delete_checkpoints(session, [CheckpointId("run", 3), CheckpointId("run", 4)])
    assert [str(c.id) for c in list_checkpoints(volume)] == ["run/step-00000003", "run2/step-00000000"]
    save_step(session, 7, retention=Retention(keep_last=1))
    assert [str(c.id) for c in list_checkpoints(volume)] == ["run/step-00000007", "run2/step-00000000"]
    with pytest.raises(UsageError):
        keep_last(session, "run", 0)


def test_a_manifest_that_does_not_fit_its_objects_is_refused(session: Session, volume: Volume) -> None:
    save_step(session, 1)
    with session.transaction() as tx:
        tx.delete("run/step-00000001/rank-00002.data")
        tx.put("run/step-00000001/rank-00002.data", b"shorter")
        tx.put("run/step-00000009/manifest", b"no manifest")
    with pytest.raises(CheckpointFailed, match="not what the manifest says"):
        read_manifest(volume, CheckpointId("run", 1))
    with pytest.raises(CheckpointFailed, match="run/step-00000009/manifest"):
        list_checkpoints(volume, "run")
    with pytest.raises(ObjectNotFound, match=r"2 of this run, the last run/step-00000009"):
        read_manifest(volume, CheckpointId("run", 8))


def test_a_save_that_does_not_fit_takes_no_space(session: Session) -> None:
    """The first rank's part fits, the second's does not: neither rank ever hears of a grant."""
    before = session.free_bytes
    for _ in range(3):
        save = Save(session, CheckpointId("run", 1))
        with pytest.raises(VolumeFull):
            save.allocate([before * 3 // 4, before // 2])
        save.abort()
        assert (session.free_bytes, session.quarantined_bytes) == (before, 0)
