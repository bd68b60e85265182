"""What the ranks of suite `checkpoint` do. Each function runs in a rank's process and keeps what it needs in `held`."""

from __future__ import annotations

import hashlib
import math
import mmap
import os
import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.filesystem import FileSystemReader, FileSystemWriter
from torch.distributed.checkpoint.state_dict_loader import load as dcp_load
from torch.distributed.checkpoint.state_dict_saver import save as dcp_save
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Placement, Replicate, Shard

from headrace.device import Batch, flush_all, open_device, read_batch, write_batch
from headrace.torch import LoadReport, VolumeReader, VolumeWriter, WriterOptions
from headrace.units import MIB
from headrace.volume import Volume

held: dict[str, Any] = {}
RUN = "llama"
PIECE = MIB
#: Under way at a time in the bare loop.
DEPTH = 4


@dataclass(frozen=True, kw_only=True)
class Model:
    """As MLPerf Storage lays out a Llama: the model in 16 bits, its optimizer in 32 (main copy, both moments)."""

    hidden: int
    feed_forward: int
    layers: int
    vocabulary: int
    #: Of the key and value projections.
    key_value: int

    def parameters(self) -> dict[str, tuple[int, ...]]:
        h, f, kv = self.hidden, self.feed_forward, self.key_value
        layer = {
            "attention.q": (h, h), "attention.k": (kv, h), "attention.v": (kv, h), "attention.o": (h, h),
            "feed_forward.gate": (f, h), "feed_forward.up": (f, h), "feed_forward.down": (h, f),
            "attention_norm": (h,), "feed_forward_norm": (h,),
        }  # fmt: skip
        found = {f"layers.{n}.{name}": shape for n in range(self.layers) for name, shape in layer.items()}
        return {"embed": (self.vocabulary, h), **found, "norm": (h,), "head": (self.vocabulary, h)}

    @property
    def bytes(self) -> int:
        return 14 * sum(map(math.prod, self.parameters().values()))


def make(model: Model, layout: str) -> int:
    """The state of this rank, of random bits. `layout`: fsdp (sharded over all ranks), hsdp (over pairs of neighbours,
    with copies), ddp (on each rank whole). Returns its bytes."""
    world = dist.get_world_size()
    placements: Sequence[Placement]
    if layout == "hsdp":
        mesh, placements = init_device_mesh("cpu", (world // 2, 2)), [Replicate(), Shard(0)]
    else:
        mesh, placements = init_device_mesh("cpu", (world,)), [Shard(0)]
    chance = torch.Generator().manual_seed(1)
    state: dict[str, Any] = {}
    for name, shape in model.parameters().items():
        count = math.prod(shape)
        for key, dtype in (
            (f"model.{name}", torch.float16),
            *((f"optimizer.{kind}.{name}", torch.float32) for kind in ("main", "exp_avg", "exp_avg_sq")),
        ):
            whole = torch.randint(-32768, 32768, (count * dtype.itemsize // 2,), dtype=torch.int16, generator=chance)
            full = whole.view(dtype).view(shape)
            state[key] = full if layout == "ddp" else _shard(full, mesh, placements)
    held["state"], held["model"] = state, model
    held["digest"] = digest()
    return sum(_local(value).nbytes for value in state.values())


def _shard(full: torch.Tensor, mesh: Any, placements: Sequence[Placement]) -> DTensor:
    parts = torch.chunk(full, mesh.size(mesh.ndim - 1))
    at = mesh.get_local_rank(mesh.ndim - 1)
    local = parts[at].clone() if at < len(parts) else full[:0].clone()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=full.shape, stride=full.stride())


def _local(value: Any) -> torch.Tensor:
    tensor: torch.Tensor = value.to_local() if isinstance(value, DTensor) else value
    return tensor


def digest() -> str:
    found = hashlib.blake2b()
    for value in held["state"].values():
        found.update(_local(value).reshape(-1).view(torch.uint8).numpy().data)
    return found.hexdigest()


def forget() -> None:
    """Zeros where the state was: what a load brings back must be that."""
    for value in held["state"].values():
        _local(value).zero_()


def check() -> None:
    if digest() != held["digest"]:
        raise AssertionError("what was loaded is not what was saved")


# ---- ours ---------------------------------------------------------------------------------


def attach(uris: Sequence[str]) -> None:
    detach()
    held["writer"] = VolumeWriter(list(uris), RUN, options=WriterOptions(keep_last=1))
    held["reader"] = VolumeReader(list(uris), RUN)


def detach() -> None:
    for name in ("writer", "reader"):
        if name in held:
            held.pop(name).close()


def save(step: int) -> None:
    held["writer"].save(held["state"], f"{RUN}/step-{step}")


def load(verify: bool = True) -> dict[str, Any]:
    kept = Volume.submit_read
    if not verify:
        Volume.submit_read = partial_method(kept)  # type: ignore[method-assign]
    try:
        report: LoadReport = held["reader"].load(held["state"])
        return vars(report)
    finally:
        Volume.submit_read = kept  # type: ignore[method-assign]


def partial_method(read: Any) -> Any:
    def unverified(self: Volume, *arguments: Any, **options: Any) -> Any:
        return partial(read, self)(*arguments, **options, verify=False)

    return unverified


def load_once(uris: Sequence[str]) -> dict[str, Any]:
    """As a job that has just begun: nothing open, nothing known."""
    with VolumeReader(list(uris), RUN) as reader:
        return vars(reader.load(held["state"]))


# ---- the same bytes without a volume ---------------------------------------------------------------------------------


def attach_raw(uris: Sequence[str]) -> None:
    """Each rank has a part of its own of these namespaces, and writes what lies in one buffer already."""
    size = sum(_local(value).nbytes for value in held["state"].values())
    sizes: list[int] = [0] * dist.get_world_size()
    dist.all_gather_object(sizes, size)
    count = np.arange(-(-size // PIECE), dtype=np.uint64)
    begin = sum(-(-of // PIECE // len(uris) + 1) * PIECE for of in sizes[: dist.get_rank()])
    length = np.full(len(count), PIECE, np.uint64)
    held["raw"] = [open_device(uri) for uri in uris]
    held["batch"] = Batch(
        member=(count % np.uint64(len(uris))).astype(np.uint32),
        offset=count // np.uint64(len(uris)) * np.uint64(PIECE) + np.uint64(begin),
        length=length,
        buffer_offset=count * np.uint64(PIECE),
    )
    held["bytes"] = np.random.default_rng(dist.get_rank()).integers(0, 256, len(count) * PIECE, np.uint8)


def detach_raw() -> None:
    for device in held.pop("raw", []):
        device.close()
    held.pop("bytes", None)


def save_raw() -> None:
    write_batch(held["raw"], held["batch"], [held["bytes"]])
    flush_all(held["raw"])


def load_raw() -> None:
    read_batch(held["raw"], held["batch"], [held["bytes"]])


def bare(folder: str, write: bool) -> None:
    """A loop of preads or pwrites past the page cache, a few at a time, over a file of this rank, and a sync."""
    path = Path(folder) / f"bare-{dist.get_rank()}"
    size = -(-sum(_local(value).nbytes for value in held["state"].values()) // PIECE) * PIECE
    buffers = held.setdefault("aligned", [mmap.mmap(-1, PIECE) for _ in range(DEPTH)])
    flags = os.O_RDWR | os.O_CREAT | os.O_DIRECT
    file = os.open(path, flags, 0o600)
    move = os.pwritev if write else os.preadv

    def part(turn: int) -> None:
        for at in range(turn * PIECE, size, DEPTH * PIECE):
            if move(file, [buffers[turn]], at) != PIECE:
                raise OSError(f"{path}: a part of a piece")

    try:
        with ThreadPoolExecutor(DEPTH) as pool:
            list(pool.map(part, range(DEPTH)))
        if write:
            os.fdatasync(file)
    finally:
        os.close(file)


# ---- peers ---------------------------------------------------------------------------------


def save_dcp(folder: str, threads: int) -> None:
    writer = FileSystemWriter(folder, thread_count=threads, sync_files=False)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        dcp_save(held["state"], storage_writer=writer)


def load_dcp(folder: str) -> None:
    dcp_load(held["state"], storage_reader=FileSystemReader(folder))


def save_torch(folder: str) -> None:
    with (Path(folder) / f"torch-{dist.get_rank()}.pt").open("wb") as file:
        torch.save({name: _local(value) for name, value in held["state"].items()}, file)
        file.flush()
        os.fsync(file.fileno())


def load_torch(folder: str) -> None:
    loaded = torch.load(Path(folder) / f"torch-{dist.get_rank()}.pt", weights_only=True)
    for name, value in held["state"].items():
        _local(value).copy_(loaded[name])
