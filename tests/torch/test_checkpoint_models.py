"""State dicts as safetensors in a volume, compared with the library's own files."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest
import safetensors.torch
import torch

from headrace.errors import UsageError
from headrace.torch import load_model, save_model
from headrace.volume import Volume


@pytest.fixture
def volume(tmp_path: Path) -> Iterator[Volume]:
    Volume.create([f"file:{tmp_path}/member?create=32MiB"]).close()
    with Volume.open([f"file:{tmp_path}/member"], write=True) as opened:
        yield opened


def weights() -> dict[str, torch.Tensor]:
    torch.manual_seed(0)
    names = (
        "float32",
        "float16",
        "bfloat16",
        "float64",
        "int8",
        "int64",
        "uint16",
        "bool",
        "float8_e4m3fn",
        "float8_e5m2",
    )
    found = {name: (torch.randn(13, 7) * 4).to(getattr(torch, name)) for name in names}
    found |= {"turned": torch.randn(5, 9).t(), "scalar": torch.tensor(1.5), "empty": torch.zeros(0, 3)}
    found["parameter"] = torch.nn.Parameter(torch.randn(3))
    found["tied"] = found["float32"]
    return found


def same(a: torch.Tensor, b: torch.Tensor) -> bool:
    a, b = (t.detach().contiguous() for t in (a, b))
    return (
        a.dtype == b.dtype
        and a.shape == b.shape
        and torch.equal(a.reshape(-1).view(torch.uint8), b.reshape(-1).view(torch.uint8))
    )


def test_a_model_comes_back_and_the_library_agrees(volume: Volume, tmp_path: Path) -> None:
    mine = weights()
    with volume.session(run_id="publish") as session:
        save_model(session, "m.safetensors", mine, {"format": "pt"})
    found = load_model(volume, "m.safetensors")
    assert set(found) == set(mine)
    assert all(same(found[name], tensor) for name, tensor in mine.items())
    exported = tmp_path / "m.safetensors"
    exported.write_bytes(volume.read("m.safetensors"))
    assert all(same(tensor, mine[name]) for name, tensor in safetensors.torch.load_file(exported).items())
    # The library refuses memory that is shared; apart from that its file is ours.
    apart = {name: tensor.detach().clone().contiguous() for name, tensor in mine.items()}
    assert safetensors.torch.save(apart, {"format": "pt"}) == exported.read_bytes()
    some = load_model(volume, "m.safetensors", keys=["bfloat16"])
    assert list(some) == ["bfloat16"]


def test_what_safetensors_cannot_hold_is_refused(volume: Volume) -> None:
    with volume.session(run_id="publish") as session:
        for bad in (torch.zeros(2).to_sparse(), torch.zeros(2, dtype=torch.complex128), 3):
            with pytest.raises(UsageError, match="'w'"):
                save_model(session, "m", {"w": bad})  # type: ignore[dict-item]
    assert volume.list("") == []
