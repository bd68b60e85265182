"""Which checkpoint of a run is its latest, and which ones go: a job may go back to an earlier step."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.checkpoint import (
    CheckpointId,
    Retention,
    delete_checkpoints,
    is_manifest,
    keep_last,
    latest,
    list_checkpoints,
)
from headrace.checkpoint.inspect import look
from headrace.checkpoint.listing import latest_id
from headrace.checkpoint.order import Found, back_from, find, line
from headrace.checkpoint.retention import pin, unpin_above
from headrace.cli import main
from headrace.errors import CheckpointFailed, ChecksumMismatch, CopyFailed, ObjectExists
from headrace.volume import Session, Volume
from headrace.volume.copy import CopyOptions, copy_between, run
from headrace.volume.copy.objects import ObjectSink
from tests.checkpoint.steps import save_step


def steps(volume: Volume, run: str = "run") -> list[int]:
    return [info.step for info in list_checkpoints(volume, run)]


def steps_named(volume: Volume) -> list[int]:
    """Though one of them is damaged."""
    volume.refresh()
    return [id.step for id in find(volume, "run").ids]


def back(volume: Volume) -> list[int]:
    """Which steps are tried for the latest, one after another."""
    volume.refresh()
    found = find(volume, "run")
    return [id.step for id in back_from(found, found.ids[-1])]


def damage(copy: Path, volume: Volume, step: int) -> None:
    """Of the manifest that is this one there."""
    at = copy.read_bytes().index(bytes(volume.read(CheckpointId("run", step).manifest)))
    with copy.open("r+b") as file:
        file.seek(at + 100)
        file.write(b"\xff")


@pytest.mark.parametrize(
    ("committed", "stands_on"),
    [
        ([], []),
        ([500, 1000, 1500], [500, 1000, 1500]),
        ([500, 1000, 510], [500, 510]),
        ([500, 1000, 510, 520], [500, 510, 520]),
        ([500, 1000, 1500, 600, 1000, 550], [500, 550]),
        ([500, 1000, 0], [0]),
    ],
)
def test_what_the_last_one_goes_on_from(committed: list[int], stands_on: list[int]) -> None:
    assert [id.step for id in line([CheckpointId("run", step) for step in committed])] == stands_on


def test_a_run_that_went_back_goes_on_from_what_it_saved_last(session: Session, volume: Volume) -> None:
    retention = Retention(keep_last=2)
    with Volume.open(volume.uris) as reader:
        for step, stays in (
            (500, [500]),
            (1000, [500, 1000]),
            # Back to 500: what was left behind goes, not what the job stands on, nor what it saves.
            (510, [500, 510]),
            (520, [510, 520]),
            (1000, [520, 1000]),
        ):
            sequence = save_step(session, step, retention=retention)
            assert steps(volume) == steps(reader) == stays
            newest = latest(reader, "run")
            assert newest is not None and (newest.step, newest.sequence) == (step, sequence)
            assert latest_id(reader, "run") == newest.id
        assert [(found.id.step, found.latest) for found in look(reader)] == [(520, False), (1000, True)]


def test_a_step_that_comes_again_is_replaced_where_that_was_said(session: Session, volume: Volume) -> None:
    for step in (500, 1000, 1500):
        save_step(session, step)
    save_step(session, 600)
    with pytest.raises(ObjectExists, match=r"step-00001000 is committed already.*went back.*overwrite=True"):
        save_step(session, 1000)
    save_step(session, 1000, overwrite=True, lengths=(5,))
    assert [(info.step, info.data_bytes) for info in list_checkpoints(volume, "run")][-1] == (1000, 5)
    assert steps(volume) == [500, 1500, 600, 1000]
    pin(session, CheckpointId("run", 1500), "mine")
    with pytest.raises(CheckpointFailed, match=r"step-00001500 is pinned, and not replaced"):
        save_step(session, 1500, overwrite=True)
    unpin_above(session, CheckpointId("run", 1500), "mine")
    unpin_above(session, CheckpointId("run", 1000), "another's")
    assert [info.step for info in list_checkpoints(volume, "run") if info.pinned] == [1500]
    unpin_above(session, CheckpointId("run", 1000), "mine")
    save_step(session, 1500, overwrite=True)


def test_what_stays_of_what_was_left_behind(session: Session, volume: Volume) -> None:
    """As many as are to stay, the newest of them; multiples and pinned ones; by hand as with a save."""
    for step in (500, 700, 900, 1000):
        save_step(session, step)
    pin(session, CheckpointId("run", 700))
    save_step(session, 600, retention=Retention(keep_last=3, keep_every=1000))
    assert steps(volume) == [500, 700, 1000, 600]
    assert [id.step for id in keep_last(session, "run", 1)] == [1000, 500]
    assert steps(volume) == [700, 600]


def test_a_copy_of_a_run_keeps_its_order(session: Session, volume: Volume, tmp_path: Path) -> None:
    """It is one commit; and one that is damaged there is not passed over for another one."""
    for step in (500, 1000, 510):
        save_step(session, step)
    uri = f"file:{tmp_path}/copy"
    Volume.create(f"{uri}?create=16MiB").close()
    with Volume.open(uri, write=True) as other, other.session(run_id="copy") as copying:
        copy_between(volume, copying, ["run"], "", CopyOptions(recursive=True))
        assert len({info.sequence for info in list_checkpoints(other)}) == 1
        assert steps(other) == [500, 1000, 510]
        save_step(copying, 520, retention=Retention(keep_last=3))
        assert steps(other) == [500, 510, 520]
        delete_checkpoints(copying, [CheckpointId("run", 520)])
        damage(tmp_path / "copy", volume, 510)
    with Volume.open(uri) as other, pytest.raises(ChecksumMismatch, match="step-00000510"):
        latest(other, "run")
    with Volume.open(uri, write=True) as other, other.session(run_id="copy") as writing:
        # The one before it; where that is damaged, too, the other that came with it, left behind or not.
        assert back(other) == [510, 500]
        save_step(writing, 520, retention=Retention(keep_last=2))
        assert steps_named(other) == [500, 520] and back(other) == [520, 500]


@pytest.mark.parametrize("packed_bytes", [run.PACKED_BYTES, 0])
def test_a_copy_in_many_commits_keeps_the_order(
    session: Session, volume: Volume, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, packed_bytes: int
) -> None:
    """Each manifest in one of its own, as where they are long; a job went back in between. And it goes on."""
    monkeypatch.setattr(run, "PACK_FILES", 1)
    monkeypatch.setattr(run, "PACKED_BYTES", packed_bytes)
    committed = [*range(10, 90, 10), *range(45, 95, 10)]
    for step in committed:
        save_step(session, step)
    uri = f"file:{tmp_path}/copy"
    Volume.create(f"{uri}?create=16MiB").close()
    commit = ObjectSink.commit

    def ends(sink: ObjectSink) -> list[int]:
        assert steps_named(other) == [], "nothing is there before all that it needs is"
        sink._held.append((min(place for place, _ in sink._held), _Broken()))  # type: ignore[arg-type]
        return commit(sink)

    options = CopyOptions(recursive=True, keep_going=True, last=is_manifest, existing="update", workers=4)
    with Volume.open(uri, write=True) as other, other.session(run_id="copy") as copying:
        with monkeypatch.context() as broken, pytest.raises(CopyFailed, match="broken"):
            broken.setattr(ObjectSink, "commit", ends)
            copy_between(volume, copying, ["run"], "", options)
        assert steps_named(other) == committed[:1]
        copy_between(volume, copying, ["run"], "", options)
        assert steps_named(other) == committed


def test_the_command_keeps_the_order(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "PACK_FILES", 1)
    ours, theirs = (f"file:{tmp_path}/{name}" for name in ("ours", "theirs"))
    for uri in (ours, theirs):
        Volume.create(f"{uri}?create=16MiB").close()
    with Volume.open(ours, write=True) as volume, volume.session(run_id="test") as session:
        for step in (10, 20, 15):
            save_step(session, step)
    copy = ["volume", "cp", "-r", "--keep-going", ":run", ":", "--volume", ours, "--to-volume", theirs]
    assert main([*copy, "--jobs", "1"]) == 0
    with Volume.open(theirs) as volume:
        assert steps_named(volume) == [10, 20, 15]


class _Broken:
    """A transaction that cannot be committed."""

    def commit(self) -> int:
        raise CopyFailed("broken")


def test_an_old_one_that_is_damaged_in_a_copy_leaves_nothing_behind(
    session: Session, volume: Volume, tmp_path: Path
) -> None:
    for step in (10, 20, 30):
        save_step(session, step)
    uri = f"file:{tmp_path}/copy"
    Volume.create(f"{uri}?create=16MiB").close()
    with Volume.open(uri, write=True) as other, other.session(run_id="copy") as copying:
        copy_between(volume, copying, ["run"], "", CopyOptions(recursive=True))
    damage(tmp_path / "copy", volume, 10)
    with Volume.open(uri, write=True) as other, other.session(run_id="copy") as writing:
        # Nobody can say that it is not the latest.
        assert back(other) == [10, 30, 20]
        save_step(writing, 40, retention=Retention(keep_last=3))
        assert steps_named(other) == [20, 30, 40] and back(other) == [40, 30, 20]


def test_what_goes_of_thousands_is_found_in_a_moment() -> None:
    """Under the lock of a commit. Each is looked at a few times, not as often as there are others."""
    looks = 0

    class Counted(CheckpointId):
        def __hash__(self) -> int:
            nonlocal looks
            looks += 1
            return super().__hash__()

    ids = [Counted("run", step) for step in range(1000)]
    assert len(Retention(keep_last=1).going(Found(ids=ids, pinned=frozenset()), CheckpointId("run", 1000))) == 1000
    assert looks < 20 * len(ids)
