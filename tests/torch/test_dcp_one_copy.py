"""The state is copied once or not at all: what a save writes, and from where."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from headrace.torch import VolumeReader, VolumeWriter
from headrace.volume import Parts, Volume

MIB = 1 << 20


@pytest.fixture
def volume(tmp_path: Path) -> list[str]:
    uris = [f"file:{tmp_path}/member{i}" for i in range(2)]
    Volume.create([f"{uri}?create=32MiB" for uri in uris]).close()
    return uris


def awkward_state() -> dict[str, Any]:
    """Tied, sliced, transposed, empty, without dimensions, of dtypes that numpy lacks, and what is no tensor."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(700, 300, generator=generator)
    flat = torch.randn(100_003, generator=generator)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "transposed": weight.t(),
            "rows": weight[10:20],
            "column": weight[:, 7],
            "first": flat[:50_001],
            "second": flat[50_001:],
            "half": weight.to(torch.bfloat16),
            "fp8": weight[:3].to(torch.float8_e4m3fn),
            "bytes": torch.arange(77, dtype=torch.uint8)[5:],
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 4),
            "expanded": torch.ones(1).expand(5000),
            "conjugate": torch.randn(9, dtype=torch.complex64, generator=generator).conj(),
        },
        "optimizer": {"steps": [torch.tensor(3), torch.tensor(4)], "lr": 0.1},
        "step": 5,
        "note": ("a", b"\x00", None),
    }


def leaves(state: Any) -> Any:
    """Comparable: every tensor as its dtype, shape and bytes."""
    if isinstance(state, torch.Tensor):
        plain = state.detach().resolve_conj().contiguous().clone().reshape(-1).view(torch.uint8)
        return str(state.dtype), tuple(state.shape), plain.numpy().tobytes()
    if isinstance(state, dict):
        return {key: leaves(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [leaves(value) for value in state]
    return state


def loaded(uris: list[str], path: str) -> Any:
    def cleared(value: Any) -> Any:
        if isinstance(value, torch.Tensor):
            return torch.zeros(value.shape, dtype=value.dtype)
        if isinstance(value, dict):
            return {key: cleared(inner) for key, inner in value.items()}
        return [cleared(inner) for inner in value] if isinstance(value, list) else None

    state = cleared(awkward_state())
    with VolumeReader(uris, path) as reader:
        reader.load(state)
    return leaves(state)


def test_a_synchronous_save_writes_from_where_the_tensors_are(
    volume: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    written: list[Parts] = []
    write_grant = Volume.write_grant

    def seen(self: Volume, grant: Any, buffer: Any) -> Any:
        written.append(buffer)
        return write_grant(self, grant, buffer)

    monkeypatch.setattr(Volume, "write_grant", seen)
    state = awkward_state()
    with VolumeWriter(volume, "run") as writer:
        report = writer.save(state, "run/step-1")
        model = state["model"]
        weight_bytes = model["weight"].nbytes
        # What had to be copied, and why: these are not in memory as they are stored.
        assert report.copied == {
            "not contiguous": weight_bytes + 700 * 4 + 5000 * 4,
            "conjugated or negated when it is read": 9 * 8,
        }
        del state["model"]
        assert writer.save({"w": model["weight"], "t": model["tied"]}, "run/step-2").copied == {}
    [first, second] = written
    places = {view.ctypes.data for view in first.views}
    assert model["weight"].data_ptr() in places and model["rows"].data_ptr() in places
    # Two names of one tensor: two objects in the checkpoint, read from one place.
    assert [view.ctypes.data for view in second.views] == [model["weight"].data_ptr()] * 2
    assert loaded(volume, "run/step-1") == leaves(awkward_state())
