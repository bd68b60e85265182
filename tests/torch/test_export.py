"""Model files out of checkpoints: the bytes that the library would write, with the tensors' bytes shared."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch

from headrace.checkpoint import CheckpointId, delete_checkpoints
from headrace.errors import CheckpointFailed, ObjectExists, ObjectNotFound, UsageError
from headrace.torch import VolumeWriter, export_model, load_model
from headrace.volume import Volume
from headrace.volume.repair.scrub import scrub
from tests.torch.crew import Crew, Rank

STEP = "run/step-00000001"


def small_model() -> torch.nn.Module:
    torch.manual_seed(3)
    layer = torch.nn.TransformerEncoderLayer(d_model=64, nhead=4, dim_feedforward=256, batch_first=True)
    return torch.nn.Sequential(
        torch.nn.Embedding(1000, 64), torch.nn.TransformerEncoder(layer, 2), torch.nn.Linear(64, 9)
    )


def save_sharded(rank: Rank, uri: str) -> None:
    """FSDP's layout: dimension 0 cut into shards; one tensor cut along dimension 1, as tensor parallelism does."""
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (rank.world,))
    state: dict[str, Any] = {
        name: distribute_tensor(tensor, mesh, [Shard(1 if name == "2.weight" else 0)])
        for name, tensor in small_model().state_dict().items()
    }
    with VolumeWriter(uri, "run") as writer:
        writer.save({"model": state, "optimizer": {"m": torch.ones(10_000)}, "step": 1}, "run/step-1")


@pytest.fixture
def volume(tmp_path: Path) -> Volume:
    uri = f"file:{tmp_path}/member"
    Volume.create(f"{uri}?create=32MiB", stripe_bytes=65536).close()
    Crew(2, save_sharded, uri).join()
    return Volume.open(uri, write=True)


def test_a_sharded_checkpoint_becomes_model_files_by_headers(volume: Volume, tmp_path: Path) -> None:
    expected = small_model().state_dict()
    size = sum(tensor.nbytes for tensor in expected.values())
    before = volume.info().used_bytes
    with volume.session("export") as session:
        report = export_model(session, STEP, "models/one", prefix="model.")
        # One tensor had to be copied, and the report says why.
        assert dict(report.copied) == {"2.weight": "its shards do not follow one another along dimension 0"}
        assert report.copied_bytes == expected["2.weight"].nbytes
        assert report.shared_bytes == size - report.copied_bytes > 100 * report.copied_bytes
        assert volume.info().used_bytes - before < report.copied_bytes + 64 * 1024
        several = export_model(session, STEP, "models/several", prefix="model.", shard_bytes=200_000)
        assert len(several.files) > 2 and several.index == "models/several/model.safetensors.index.json"
        with pytest.raises(ObjectExists):
            export_model(session, STEP, "models/one", prefix="model.")
        # The files outlive the checkpoint.
        delete_checkpoints(session, [CheckpointId("run", 1)])
    names = [info.name for info in volume.list()]
    assert names[0] == "models/one/model.safetensors" and names[1].startswith("models/several/model-00001-of-0000")
    assert not [name for name in names if name.startswith("run/")]
    volume.close()

    reader = Volume.open(volume.uris)
    data = reader.read("models/one/model.safetensors")
    contiguous = {name: tensor.contiguous() for name, tensor in expected.items()}
    assert data == safetensors.torch.save(contiguous, {"format": "pt"})
    index = json.loads(reader.read("models/several/model.safetensors.index.json"))
    assert index["metadata"]["total_size"] == size and set(index["weight_map"]) == set(expected)
    found: dict[str, torch.Tensor] = {}
    for name in sorted(set(index["weight_map"].values())):
        found |= load_model(reader, f"models/several/{name}")
    model = small_model()
    for parameter in model.parameters():
        torch.nn.init.zeros_(parameter)
    model.load_state_dict(found)
    tokens = torch.arange(20).reshape(2, 10)
    assert torch.equal(model.eval()(tokens), small_model().eval()(tokens))
    # The library itself, through a file.
    file = tmp_path / "model.safetensors"
    file.write_bytes(data)
    assert all(torch.equal(tensor, expected[name]) for name, tensor in safetensors.torch.load_file(file).items())
    assert scrub(reader.devices).clean


def test_another_dtype_is_written_and_said(volume: Volume) -> None:
    with volume.session("export") as session, session.transaction() as tx:
        report = export_model(tx, STEP, "m", prefix="model.", dtype=torch.bfloat16, metadata={"a": "b"})
        assert report.shared_bytes == 0 and set(report.copied.values()) == {"float32 to bfloat16"}
    expected = small_model().state_dict()
    found = load_model(volume, "m/model.safetensors")
    assert all(torch.equal(found[name], tensor.to(torch.bfloat16)) for name, tensor in expected.items())
    # Everything of the checkpoint but the model is left out; what is not there is said.
    with volume.session("export") as session:
        assert export_model(session, STEP, "o", prefix="optimizer.").files[0].header.tensors[0].name == "m"
        for arguments, error in (
            ({"prefix": "nothing."}, CheckpointFailed),
            ({"shard_bytes": 0}, UsageError),
            ({"dtype": torch.complex128}, UsageError),
        ):
            with pytest.raises(error):
                export_model(session, STEP, "x", **{"prefix": "model.", **arguments})  # type: ignore[arg-type]
        with pytest.raises(ObjectNotFound):
            export_model(session, "run/step-2", "x")
    assert [info.name for info in volume.list("x")] == []
