"""The checkpoints of MLPerf Storage, scaled down: saved by eight ranks over NVMe/TCP, restored by eight and by four.

    python -m tests.torch.layouts                       # each of the four models, 64 MiB
    python -m tests.torch.layouts --model 70b --mib 256

The model is in 16 bits, its optimizer in 32 (main copy and two moments): 14 bytes a parameter. The shapes keep their
proportions, and how they are spread keeps its kind:

    8b          ZeRO-3: each parameter as a row of elements, three rows of all of them for the optimizer, in eighths
    70b         tensors cut in two for tensor parallelism, each half in shares of ZeRO-3
    405b, 1t    layers in two stages, tensors cut in two, and ZeRO-1: two copies of the model, the optimizer in halves

What a rank restores is to the bit what it has to have, and nothing is read twice.
"""

from __future__ import annotations

import argparse
import json
import math
import zlib
from dataclasses import replace
from typing import Any

from benchmarks.checkpoint_jobs import Model
from headrace.testing.serve import serving
from headrace.units import MIB
from headrace.volume import Volume
from tests.torch.crew import Rank, run

NQN = "nqn.2026-01.io.headrace:layouts"
MODELS = {
    "8b": Model(hidden=4096, feed_forward=14336, layers=32, vocabulary=128_256, key_value=1024),
    "70b": Model(hidden=8192, feed_forward=28672, layers=80, vocabulary=128_256, key_value=512),
    "405b": Model(hidden=16384, feed_forward=53248, layers=126, vocabulary=128_256, key_value=1024),
    "1t": Model(hidden=25872, feed_forward=98304, layers=128, vocabulary=128_256, key_value=4288),
}
OPTIMIZER = ("main", "exp_avg", "exp_avg_sq")


def scaled(model: Model, bytes: int) -> Model:
    """Of about so many bytes; four layers at the least, so that two stages have some."""
    factor = 1.0
    while True:
        small = replace(
            model,
            hidden=max(3, int(model.hidden / factor)),
            feed_forward=max(5, int(model.feed_forward / factor)),
            vocabulary=max(7, int(model.vocabulary / factor)),
            key_value=max(2, int(model.key_value / factor)),
            layers=max(4, int(model.layers / math.sqrt(factor))),
        )
        if small.bytes <= bytes:
            return small
        factor *= 1.05


def full(key: str, shape: tuple[int, ...], dtype: Any) -> Any:
    """Random bits that follow from the name."""
    import torch

    chance = torch.Generator().manual_seed(zlib.crc32(key.encode()))
    count = math.prod(shape) * dtype.itemsize // 2
    bits = torch.randint(-32768, 32768, (count,), dtype=torch.int16, generator=chance)
    return bits.view(dtype).view(shape)


def state_of(name: str, model: Model, world: int) -> dict[str, Any]:
    """What this rank has of it."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    parameters = model.parameters()
    state: dict[str, Any] = {}

    def add(key: str, shape: tuple[int, ...], dtype: Any, mesh: Any, placements: list[Any]) -> None:
        # Each rank cuts its part out of what all of them make alike.
        state[key] = distribute_tensor(full(key, shape, dtype), mesh, placements, src_data_rank=None)

    if name == "8b":
        mesh = init_device_mesh("cpu", (world,))
        for key, shape in parameters.items():
            add(f"model.{key}", (math.prod(shape),), torch.float16, mesh, [Shard(0)])
        total = sum(map(math.prod, parameters.values()))
        for kind in OPTIMIZER:
            add(f"optimizer.{kind}", (total,), torch.float32, mesh, [Shard(0)])
        return state
    stages = 1 if name == "70b" or world < 8 else 2
    mesh = init_device_mesh("cpu", (stages, world // stages // 2, 2), mesh_dim_names=("pp", "dp", "tp"))
    here, own = mesh["dp", "tp"], mesh.get_local_rank("pp")
    for key, shape in parameters.items():
        layer = int(key.split(".")[1]) if key.startswith("layers.") else 0 if key == "embed" else model.layers - 1
        if layer * stages // model.layers != own:
            continue
        cut = Shard(1) if len(shape) > 1 else Replicate()
        add(f"model.{key}", shape, torch.float16, here, [Shard(0) if name == "70b" else Replicate(), cut])
        for kind in OPTIMIZER:
            add(f"optimizer.{kind}.{key}", shape, torch.float32, here, [Shard(0), cut])
    return state


def save(rank: Rank, argument: tuple[list[str], str, Model]) -> int:
    from headrace.torch import VolumeWriter

    uris, name, model = argument
    with VolumeWriter(uris, name) as writer:
        writer.save(state_of(name, model, rank.world), f"{name}/step-1")
    return restore(rank, argument)[0]


def restore(rank: Rank, argument: tuple[list[str], str, Model]) -> tuple[int, int, int]:
    """Bytes of this rank, all that the job read, and all that any rank wanted."""
    import torch

    from headrace.torch import VolumeReader

    uris, name, model = argument
    state = state_of(name, model, rank.world)
    expected = {key: value.to_local().clone() for key, value in state.items()}
    for value in state.values():
        value.to_local().zero_()
    with VolumeReader(uris, name) as reader:
        report = reader.load(state)
    for key, value in state.items():
        # As bits: some are no numbers.
        found, wanted = (each.contiguous().view(torch.uint8) for each in (value.to_local(), expected[key]))
        assert torch.equal(found, wanted), f"{key} on rank {rank.rank} of {rank.world}"
    return sum(value.nbytes for value in expected.values()), report.job_read_bytes, report.job_unique_bytes


def save_and_restore(name: str, bytes: int) -> dict[str, Any]:
    model = scaled(MODELS[name], bytes)
    size = f"mem:{max(32, 2 * bytes // MIB)}MiB"
    with serving(NQN, size, size) as target:
        uris = [target.uri(nsid) for nsid in (1, 2)]
        Volume.create(uris).close()
        by_rank = run(8, save, (uris, name, model))
        results = {world: run(world, restore, (uris, name, model)) for world in (8, 4)}
    read = {world: found[0][1] / found[0][2] for world, found in results.items()}
    assert all(amplification < 1.05 for amplification in read.values()), read
    assert all(found[0][2] == model.bytes for found in results.values()), "every byte of it is there once"
    return {"model": name, "parameters": model.bytes // 14, "bytes": model.bytes, "by_rank": by_rank, "read": read}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--mib", type=int, default=64)
    given = parser.parse_args()
    for name in given.model or MODELS:
        print(json.dumps(save_and_restore(name, given.mib * MIB)), flush=True)


if __name__ == "__main__":
    main()
