"""Step 7: `python -m headrace.demo.publish CONFIG.json STEP RESULT.json`. A checkpoint becomes a model.

The model part of a committed checkpoint is read into plain tensors, published in the volume as safetensors, read back
with headrace, exported to a file, and read with the `safetensors` library; every pair is compared bit for bit.
"""

from __future__ import annotations

import json
import sys
import time
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.distributed.checkpoint.state_dict_loader import load

from headrace.accidents.processes import die_with_parent
from headrace.demo.model import Gpt, GptOptions
from headrace.demo.train_config import TrainConfig
from headrace.torch import VolumeReader, load_model, save_model
from headrace.volume import Volume

NAME = "models/demo.safetensors"


def same_bits(a: dict[str, Tensor], b: dict[str, Tensor]) -> bool:
    """Equal names, shapes, dtypes and bytes (so NaN equals itself and -0 is not 0)."""
    return a.keys() == b.keys() and all(
        a[name].shape == b[name].shape
        and a[name].dtype == b[name].dtype
        and torch.equal(_bytes(a[name]), _bytes(b[name]))
        for name in a
    )


def _bytes(tensor: Tensor) -> Tensor:
    return tensor.detach().contiguous().reshape(-1).view(torch.uint8)


def publish(config: TrainConfig, step: int, directory: Path) -> dict[str, Any]:
    gpt = Gpt(
        GptOptions(
            vocabulary=config.vocabulary,
            sequence=config.sequence,
            width=config.width,
            heads=config.heads,
            layers=config.layers,
        )
    )
    state = {"learner": {"model": gpt.state_dict()}}
    began = time.perf_counter()
    load(
        state,
        checkpoint_id=f"{config.run}/step-{step}",
        storage_reader=VolumeReader(config.uris, config.run),
        no_dist=True,
    )
    loaded_s = time.perf_counter() - began
    tensors: dict[str, Tensor] = state["learner"]["model"]
    with Volume.open(config.uris, write=True) as volume:
        began = time.perf_counter()
        with volume.session(run_id=config.run, takeover="if-dead") as session:
            save_model(session, NAME, tensors, {"format": "pt", "step": str(step)})
        published_s = time.perf_counter() - began
        began = time.perf_counter()
        back = load_model(volume, NAME)
        read_s = time.perf_counter() - began
        exported = directory / "demo.safetensors"
        exported.write_bytes(volume.read(NAME))
        length = volume.stat(NAME).length_bytes
    return {
        "name": NAME,
        "step": step,
        "length_bytes": length,
        "tensors": len(tensors),
        "checkpoint_read_s": loaded_s,
        "publish_s": published_s,
        "read_s": read_s,
        "headrace_bitwise": same_bits(tensors, back),
        "safetensors_bitwise": same_bits(tensors, load_file(exported)),
    }


def main() -> None:
    die_with_parent()
    config = TrainConfig.read(Path(sys.argv[1]))
    result = Path(sys.argv[3])
    result.write_text(json.dumps(publish(config, int(sys.argv[2]), result.parent)), encoding="utf-8")


if __name__ == "__main__":
    main()
