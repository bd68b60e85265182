"""A load reads one commit, whatever is committed meanwhile: never tensors of two saves together."""

from __future__ import annotations

import threading
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.planner import LoadPlan

from headrace.checkpoint import latest, listing
from headrace.errors import CheckpointFailed, ObjectExists, ObjectNotFound
from headrace.testing import MemoryDevice
from headrace.torch import VolumeReader, VolumeWriter, WriterOptions
from headrace.volume import Volume
from headrace.volume.catalog.commit import LogWriter

MIB = 1 << 20


@pytest.fixture
def volume() -> Volume:
    return Volume.create(devices=[MemoryDevice(16 * MIB) for _ in range(2)])


def save(volume: Volume, step: int, value: float) -> None:
    with VolumeWriter(Volume.open(volume.devices, write=True), "run", options=WriterOptions(overwrite=True)) as writer:
        writer.save({"a": torch.full((1000,), value)}, f"run/step-{step}")


@pytest.mark.parametrize("second", [1, 2])
def test_ranks_that_saw_different_commits_do_not_load(volume: Volume, second: int) -> None:
    """The latest checkpoint of a run, found by each rank for itself; and a step that is replaced."""
    save(volume, 1, 1.0)
    readers = [VolumeReader(Volume.open(volume.devices), "run")]
    readers[0].read_metadata()
    plans = [readers[0].prepare_local_plan(LoadPlan([]))]
    save(volume, second, 2.0)
    readers.append(VolumeReader(Volume.open(volume.devices), "run"))
    readers[1].read_metadata()
    plans.append(readers[1].prepare_local_plan(LoadPlan([])))
    with pytest.raises(CheckpointFailed, match="different checkpoints"):
        readers[0].prepare_global_plan(plans)
    readers[0].read_metadata()
    plans[0] = readers[0].prepare_local_plan(LoadPlan([]))
    assert len(readers[0].prepare_global_plan([plans[0], plans[0]])) == 2


def test_a_checkpoint_that_is_replaced_while_it_is_loaded_is_not_mixed_with_its_successor(volume: Volume) -> None:
    save(volume, 1, 1.0)
    opened = Volume.open(volume.devices)

    class Slow(DefaultLoadPlanner):
        def create_local_plan(self) -> LoadPlan:
            save(volume, 1, 2.0)
            opened.refresh()
            return super().create_local_plan()

    state: dict[str, Any] = {"a": torch.zeros(1000)}
    with VolumeReader(opened, "run") as reader:
        with pytest.raises(ObjectNotFound, match="replaced"):
            reader.load(state, "run/step-1", planner=Slow())
        reader.load(state, "run/step-1")
    assert torch.equal(state["a"], torch.full((1000,), 2.0))


@pytest.mark.parametrize("plain", [True, False])
def test_another_thread_that_follows_the_volume_while_a_manifest_is_read(
    volume: Volume, monkeypatch: pytest.MonkeyPatch, plain: bool
) -> None:
    """One volume, several threads: what is found is of one commit, whichever of the two that are there by then."""
    save(volume, 1, 1.0)
    opened = Volume.open(volume.devices)
    decode, again = listing.decode, [True]

    def decoded(data: bytes) -> Any:
        found = decode(data)
        if again:
            again.clear()
            with VolumeWriter(
                Volume.open(volume.devices, write=True), "run", options=WriterOptions(overwrite=True)
            ) as writer:
                writer.save({"a": torch.full((1000,), 2.0), "longer": torch.ones(50_000)}, "run/step-1")
            other = threading.Thread(target=opened.refresh)
            other.start()
            other.join()
        return found

    monkeypatch.setattr(listing, "decode", decoded)
    state: dict[str, Any] = {"a": torch.zeros(1000)}
    with VolumeReader(opened, "run/step-1") as reader:
        if plain:
            dcp.load(state, storage_reader=reader, no_dist=True)
        else:
            reader.load(state)
    assert torch.equal(state["a"], torch.full((1000,), 2.0))


def test_a_commit_that_was_in_flight_at_a_crash_can_be_replaced_by_the_job_that_did_not_see_it(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Dead between the commit record and its marker: no reader sees it until the next session has made it whole."""
    save(volume, 1, 1.0)
    dying = Volume.open(volume.devices, write=True)
    session = dying.session("run", heartbeat_s=0.05)

    def die(*_: object) -> None:
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(LogWriter, "mark", die)
        with pytest.raises(CheckpointFailed):
            VolumeWriter(dying, "run", session=session).save({"a": torch.full((1000,), 2.0)}, "run/step-2")
    session._beat.stop(None)
    opened = Volume.open(volume.devices, write=True)
    found = latest(opened, "run")
    assert found is not None and found.step == 1
    with pytest.raises(ObjectExists), VolumeWriter(opened, "run") as writer:
        writer.save({"a": torch.full((1000,), 3.0)}, "run/step-2")
    save(volume, 2, 3.0)
    state = {"a": torch.zeros(1000)}
    with VolumeReader(Volume.open(volume.devices), "run") as reader:
        assert reader.load(state).step == 2
    assert torch.equal(state["a"], torch.full((1000,), 3.0))
