"""Which checkpoint of a run is its latest, and which ones go: a job may go back to an earlier step."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.checkpoint import CheckpointId, Retention, delete_checkpoints, keep_last, latest, list_checkpoints
from headrace.checkpoint.inspect import look
from headrace.checkpoint.listing import latest_id
from headrace.checkpoint.order import line
from headrace.checkpoint.retention import pin, unpin_above
from headrace.errors import CheckpointFailed, ChecksumMismatch, ObjectExists
from headrace.volume import Session, Volume
from headrace.volume.copy import CopyOptions, copy_between
from tests.checkpoint.steps import save_step


def steps(volume: Volume, run: str = "run") -> list[int]:
    return [info.step for info in list_checkpoints(volume, run)]


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
        at = (tmp_path / "copy").read_bytes().index(bytes(volume.read("run/step-00000510/manifest")))
        with (tmp_path / "copy").open("r+b") as file:
            file.seek(at + 100)
            file.write(b"\xff")
    with Volume.open(uri) as other, pytest.raises(ChecksumMismatch, match="step-00000510"):
        latest(other, "run")
