"""Each hazard of DCP's own storage, tried here: a kill between two shards or before the end, `os.sync`, bit rot."""

from __future__ import annotations

import math
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed.checkpoint as dcp
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from headrace.checkpoint import Manifest, Save, Summary, list_checkpoints
from headrace.checkpoint.manifest import ObjectEntry
from headrace.errors import (
    CheckpointFailed,
    ChecksumMismatch,
    ObjectExists,
    ObjectNotFound,
    UsageError,
    VolumeFull,
    WriterActive,
)
from headrace.torch import VolumeReader, VolumeWriter, WriterOptions, load_model, save_model
from headrace.torch.metadata import Place, to_manifest
from headrace.torch.save.without_collectives import put_together
from headrace.volume import Session, Volume

MIB = 1 << 20


@pytest.fixture
def members(tmp_path: Path) -> list[Path]:
    paths = [tmp_path / f"member{i}" for i in range(2)]
    Volume.create([f"file:{path}?create=32MiB" for path in paths]).close()
    return paths


@pytest.fixture
def volume(members: list[Path]) -> list[str]:
    return [f"file:{path}" for path in members]


def state(value: float) -> dict[str, Any]:
    return {name: torch.full((1000,), float(value)) for name in "ab"}


def load(uris: list[str], path: str = "run") -> tuple[float, float]:
    found = state(-1)
    with VolumeReader(uris, path) as reader:
        dcp.load(found, storage_reader=reader, no_dist=True)
    return found["a"][0].item(), found["b"][0].item()


def test_killed_before_the_end_leaves_the_last_committed_step(
    volume: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    with VolumeWriter(volume, "run", options=WriterOptions(overwrite=True)) as writer:
        writer.save(state(1), "run/step-1")
        monkeypatch.setattr(Save, "commit", lambda *_: (_ for _ in ()).throw(RuntimeError("killed before finish")))
        # Another step, and the same one again: neither may be seen.
        for step in (2, 1):
            with pytest.raises(CheckpointFailed, match="killed before finish"):
                writer.save(state(2), f"run/step-{step}")
            assert load(volume) == (1.0, 1.0)
        monkeypatch.undo()
        writer.save(state(3), "run/step-1")
        assert load(volume) == (3.0, 3.0)


def test_killed_between_two_tensors_leaves_the_last_committed_step(volume: list[str]) -> None:
    class Second(dcp.DefaultSavePlanner):
        resolved = 0

        def resolve_data(self, write_item: Any) -> Any:
            self.resolved += 1
            if self.resolved == 2:
                raise RuntimeError("killed before the second")
            return super().resolve_data(write_item)

    with VolumeWriter(volume, "run") as writer:
        writer.save(state(1), "run/step-1")
        with pytest.raises(CheckpointException) as caught:
            dcp.save(state(2), checkpoint_id="run/step-2", storage_writer=writer, planner=Second(), no_dist=True)
        assert "killed before the second" in str(caught.value)
        assert load(volume) == (1.0, 1.0)
        with pytest.raises(ObjectNotFound):
            VolumeReader(volume, "run/step-2").read_metadata()
        writer.save(state(2), "run/step-2")
        assert load(volume) == (2.0, 2.0)


def test_no_save_calls_os_sync(volume: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    calls = []
    monkeypatch.setattr(os, "sync", lambda: calls.append(1))
    with VolumeWriter(volume) as writer:
        writer.save(state(1), "run/step-1")
    assert calls == []


def flip_a_bit(members: list[Path], pattern: bytes) -> None:
    """In the middle of the only place where the data lies."""
    for path in members:
        data = path.read_bytes()
        at = data.find(pattern)
        if at >= 0:
            assert data.find(pattern, at + 1) < 0
            with path.open("r+b") as file:
                file.seek(at + len(pattern) // 2)
                file.write(bytes([pattern[len(pattern) // 2] ^ 0x40]))
            return
    raise AssertionError("the data was not found")


def test_a_flipped_bit_names_the_tensor(members: list[Path], volume: list[str]) -> None:
    pattern = torch.arange(100, 300, dtype=torch.int16)
    saved = {"good": torch.ones(300_000), "layer.weight": pattern.clone(), "also good": torch.ones(300_000)}
    with VolumeWriter(volume) as writer:
        writer.save(saved, "run/step-1")
    flip_a_bit(members, pattern.numpy().tobytes())
    into = {name: torch.zeros_like(tensor) for name, tensor in saved.items()}
    with VolumeReader(volume, "run/step-1") as reader:
        with pytest.raises(CheckpointException) as caught:
            dcp.load(into, storage_reader=reader, no_dist=True)
        [(error, _)] = caught.value.failures.values()
        assert isinstance(error, ChecksumMismatch)
        # What shares its checksum block is as suspect; a tensor that lies elsewhere is not.
        assert "'layer.weight'" in str(error) or "'good'" in str(error)
        with pytest.raises(ChecksumMismatch, match=r"'layer\.weight'"):
            reader.load({"layer.weight": torch.zeros(200, dtype=torch.int16)})


def test_a_flipped_bit_in_a_model_names_the_tensor(members: list[Path], volume: list[str]) -> None:
    pattern = torch.arange(100, 300, dtype=torch.int16)
    tensors = {"a": torch.ones(100_000), "layer.weight": pattern.clone(), "z": torch.ones(100_000, dtype=torch.int8)}
    with Volume.open(volume, write=True) as opened:
        with opened.session(run_id="publish") as session:
            save_model(session, "model.safetensors", tensors)
        flip_a_bit(members, pattern.numpy().tobytes())
        with pytest.raises(ChecksumMismatch, match="of a model is damaged"):
            load_model(opened, "model.safetensors")
        with pytest.raises(ChecksumMismatch, match=r"'layer\.weight'"):
            load_model(opened, "model.safetensors", keys=["layer.weight"])


def test_a_step_is_not_saved_twice_unless_asked(volume: list[str]) -> None:
    with VolumeWriter(volume) as writer:
        writer.save(state(1), "run/step-1")
        with pytest.raises(ObjectExists, match="committed already"):
            writer.save(state(2), "run/step-1")
    assert load(volume) == (1.0, 1.0)


def test_a_full_volume_is_said_before_a_byte_is_written(volume: list[str]) -> None:
    with VolumeWriter(volume) as writer:
        writer.save(state(1), "run/step-1")
        with pytest.raises(VolumeFull):
            writer.save({"big": torch.zeros(80 * MIB, dtype=torch.uint8)}, "run/step-2")
        writer.save(state(3), "run/step-3")
    assert load(volume) == (3.0, 3.0)


@pytest.mark.parametrize("plain", [False, True])
def test_a_failed_asynchronous_save_does_not_hold_up_the_next(volume: list[str], plain: bool) -> None:
    """It never came to write from its copy, and its exception keeps the frames that know it."""

    def save(writer: VolumeWriter, saved: dict[str, Any], path: str) -> Any:
        if not plain:
            return writer.async_save(saved, path)
        return dcp.async_save(saved, checkpoint_id=path, storage_writer=writer, async_stager=writer.stager)

    with VolumeWriter(volume, "run", options=WriterOptions(stall_s=10.0, deadline_s=10.0)) as writer:
        failed = save(writer, {"big": torch.zeros(80 * MIB, dtype=torch.uint8)}, "run/step-1")
        with pytest.raises(BaseException, match="the volume is full"):
            failed.result(60)
        save(writer, state(2), "run/step-2").result(60)
    assert load(volume) == (2.0, 2.0)


def test_an_empty_id_is_not_the_one_before(volume: list[str]) -> None:
    with VolumeWriter(volume, "run", options=WriterOptions(overwrite=True)) as writer:
        writer.save(state(1), "run/step-1")
        with pytest.raises(UsageError):
            writer.save(state(2), "")
    assert load(volume) == (1.0, 1.0)


def test_a_closed_writer_begins_no_session(volume: list[str]) -> None:
    with VolumeWriter(volume, "run") as writer:
        writer.save(state(1), "run/step-1")
    with pytest.raises(UsageError, match="closed"):
        writer.save(state(2), "run/step-2")
    # Nobody holds the volume: another run can write at once.
    with Volume.open(volume, write=True) as again, again.session(run_id="other"):
        pass
    assert load(volume) == (1.0, 1.0)


def test_old_steps_go_in_the_commit_of_the_new(volume: list[str]) -> None:
    with VolumeWriter(volume, options=WriterOptions(keep_last=2)) as writer:
        for step in range(4):
            writer.save(state(step), f"run/step-{step}")
            with Volume.open(volume) as opened:
                kept = [c.step for c in list_checkpoints(opened, "run")]
            assert kept == list(range(max(0, step - 1), step + 1))


def test_a_second_asynchronous_save_does_not_disturb_the_first(volume: list[str]) -> None:
    tensors = {name: torch.zeros(500_000) for name in "ab"}
    with VolumeWriter(volume) as writer:
        futures = []
        for step in range(4):
            for tensor in tensors.values():
                tensor.fill_(step)
            futures.append(writer.async_save(tensors, f"run/step-{step}"))
        for tensor in tensors.values():
            tensor.fill_(-1)
        assert [future.result().checkpoint_id for future in futures] == [f"run/step-{s:08d}" for s in range(4)]
    for step in range(4):
        found = {name: torch.zeros(500_000) for name in "ab"}
        with VolumeReader(volume, f"run/step-{step}") as reader:
            reader.load(found)
        assert all(bool((tensor == step).all()) for tensor in found.values())


def test_an_existing_session_is_used_and_left_open(volume: list[str]) -> None:
    with Volume.open(volume, write=True) as opened, opened.session(run_id="job") as session:
        with VolumeWriter(opened, session=session) as writer:
            writer.save(state(1), "run/step-1")
        with session.transaction() as tx:
            tx.put("beside", b"x")
        assert opened.read("beside") == b"x"
        into = state(0)
        assert VolumeReader(opened, "run").load(into).step == 1
        assert into["a"][0] == 1


@pytest.mark.parametrize("path", ["", "run//x", "step-5"])
def test_what_is_no_run_is_refused(path: str) -> None:
    with pytest.raises(UsageError):
        VolumeWriter(["file:/nowhere"], path)


@pytest.mark.parametrize(("path", "named"), [("run", "other/step-1"), ("run/step-1", "run/step-2")])
def test_a_save_that_is_named_otherwise_than_its_writer_is_refused(volume: list[str], path: str, named: str) -> None:
    with VolumeWriter(volume, path) as writer:
        with pytest.raises(UsageError, match="otherwise"):
            writer.save(state(1), named)
        with pytest.raises(UsageError, match="otherwise"):
            dcp.save(state(1), checkpoint_id=named, storage_writer=writer, no_dist=True)
        writer.save(state(1), "run/step-1")
    with Volume.open(volume) as opened:
        assert [str(c.id) for c in list_checkpoints(opened)] == ["run/step-00000001"]


def part(rank: int, size: list[int], offsets: list[int], sizes: list[int]) -> Manifest:
    """What a rank says that has one piece of one tensor, and something of its own."""
    properties = TensorProperties(dtype=torch.float32)
    chunk = ChunkStorageMetadata(offsets=torch.Size(offsets), sizes=torch.Size(sizes))
    own, name, length = f"own {rank}", f"run/step-00000001/rank-{rank:05d}.data", 4 * math.prod(sizes)
    metadata = Metadata(
        {"w": TensorStorageMetadata(properties, torch.Size(size), [chunk]), own: BytesStorageMetadata()},
        planner_data={own: (own,), "w": ("w",)},
    )
    places = {MetadataIndex("w", chunk.offsets): Place(name, 0, length), MetadataIndex(own): Place(name, length, 1)}
    summary = Summary(run="run", step=1, created_unix=0.0, ranks=1, item_count=2, data_bytes=length + 1)
    return to_manifest(summary, metadata, places, [ObjectEntry(name=name, length_bytes=length + 1)])


def test_ranks_that_planned_apart_must_make_a_whole(volume: list[str]) -> None:
    # Rows, columns, and a square of squares.
    put_together([part(rank, [4, 2], [0, rank], [4, 1]) for rank in range(2)])
    put_together([part(rank, [4, 2], [2 * (rank // 2), rank % 2], [2, 1]) for rank in range(4)])
    metadata, places = put_together([part(0, [4, 2], [0, 0], [3, 2]), part(1, [4, 2], [3, 0], [1, 2])])
    assert metadata.planner_data == {"w": ("w",), "own 0": ("own 0",), "own 1": ("own 1",)}
    assert {place.object[-6] for place in places.values()} == {"0", "1"} and len(places) == 4
    # What all have is read from the first.
    _, places = put_together([part(rank, [4, 2], [0, 0], [4, 2]) for rank in (0, 1)])
    assert places[MetadataIndex("w", torch.Size([0, 0]))].object.endswith("rank-00000.data") and len(places) == 3
    for other, wrong in (
        (part(1, [4, 2], [2, 0], [1, 2]), "do not have tensor 'w' once.* expected 8 elements, found 6"),
        (part(1, [4, 2], [1, 0], [3, 2]), "do not have tensor 'w' once.* found 10 in 2 pieces, two of which overlap"),
        # As many elements as there are, some of them twice.
        (part(1, [4, 2], [1, 0], [2, 2]), "do not have tensor 'w' once.* found 8 in 2 pieces, two of which overlap"),
        (part(1, [5, 2], [2, 0], [3, 2]), "different things as 'w' at rank 1"),
        (part(1, [4, 2], [0, 0], [4, 2]), "cut tensor 'w' in different ways at rank 1"),
    ):
        with pytest.raises(CheckpointFailed, match=wrong):
            put_together([part(0, [4, 2], [0, 0], [2, 2]), other])
    # One process alone.
    with VolumeWriter(volume, "run/step-1") as writer:
        dcp.save(state(1), storage_writer=writer, no_dist=True, use_collectives=False)
    assert load(volume) == (1.0, 1.0)


def test_a_writer_goes_to_another_process_by_address(volume: list[str]) -> None:
    with VolumeWriter(volume, "run") as writer:
        copy, again = (pickle.loads(pickle.dumps(writer)) for _ in range(2))
        # Copies share one session, as those that DCP sends to its checkpoint process do.
        copy.save(state(1), "run/step-1")
        again.save(state(2), "run/step-2")
        with pytest.raises(WriterActive):
            writer.save(state(3), "run/step-3")
        copy.close()
        writer.save(state(3), "run/step-3")
    assert load(volume) == (3.0, 3.0)
    with Volume.open(volume, write=True) as opened:
        given = VolumeWriter(opened, session=opened.session(run_id="job"))
        with pytest.raises(UsageError, match="given a session"):
            pickle.dumps(given)


def die(session: Session) -> None:
    """As if its process were gone: no beat, no lock, and no end."""
    session._beat.stop(None)
    session._fence.close()


def test_a_silent_writer_of_another_run_is_taken_over_from_only_when_asked(volume: list[str]) -> None:
    """It may live and only be stopped; a dead one of the same run is followed without being asked."""
    with Volume.open(volume, write=True) as held:
        die(held.session(run_id="other", heartbeat_s=0.1))
        with VolumeWriter(volume, "run") as writer, pytest.raises(WriterActive, match="if-dead"):
            writer.save(state(1), "run/step-1")
        with VolumeWriter(volume, "run", run_id="other") as writer:
            writer.save(state(1), "run/step-1")
    with Volume.open(volume, write=True) as held:
        die(held.session(run_id="other", heartbeat_s=0.1))
        # What is asked for goes to the checkpoint process, too.
        with VolumeWriter(volume, "run", options=WriterOptions(takeover="if-dead")) as writer:
            pickle.loads(pickle.dumps(writer)).save(state(2), "run/step-2")
    assert load(volume) == (2.0, 2.0)
    with pytest.raises(UsageError, match="takeover"):
        WriterOptions(takeover="always")  # type: ignore[arg-type]


def test_a_reader_says_what_is_there(volume: list[str]) -> None:
    reader = VolumeReader(volume, "run")
    with pytest.raises(ObjectNotFound, match="no committed checkpoint of run 'run'"):
        reader.load(state(0))
    reader.close()
    with VolumeWriter(volume) as writer:
        writer.save(state(1), "run/step-1")
    with VolumeReader(volume, "run/step-2") as reader:
        with pytest.raises(ObjectNotFound, match=r"1 of this run, the last run/step-00000001"):
            reader.load(state(0))
        with pytest.raises(CheckpointFailed, match="Missing key"):
            reader.load({"c": torch.zeros(1)}, "run/step-1")
