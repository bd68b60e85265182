"""Several real ranks save into one volume and other numbers of ranks load from it, bit for bit."""

from __future__ import annotations

import hashlib
import itertools
import time
from typing import Any

import numpy as np
import pytest

from headrace.volume import Volume
from tests.torch import layouts
from tests.torch.crew import Rank, run

#: A Llama of six megabytes, in the layout of ZeRO-3; shares of eight that are not equal.
LLAMA = layouts.scaled(layouts.MODELS["8b"], 6 << 20)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> list[str]:
    """A volume of two file members, by address."""
    folder = tmp_path_factory.mktemp("volume")
    uris = [f"file:{folder}/member{i}" for i in range(2)]
    Volume.create([f"{uri}?create=256MiB" for uri in uris]).close()
    return uris


def model_and_optimizer(kind: str, rank: Rank, seed: int) -> tuple[Any, Any]:
    """A small net of odd sizes, so that shards are uneven and some ranks have none; one step of AdamW taken."""
    import torch
    from torch import nn

    torch.manual_seed(seed)
    model: Any = nn.Sequential(nn.Embedding(13, 7), nn.Linear(7, 9), nn.LayerNorm(9), nn.Linear(9, 3, bias=False))
    model[3].to(torch.bfloat16)
    model[3].register_buffer("scale", torch.tensor(0.5 + seed))
    if kind == "fsdp":
        from torch.distributed.device_mesh import init_device_mesh
        from torch.distributed.fsdp import fully_shard

        mesh = init_device_mesh("cpu", (rank.world,))
        for layer in model:
            fully_shard(layer, mesh=mesh)
        fully_shard(model, mesh=mesh)
    elif kind == "ddp" and rank.world > 1:
        model = nn.parallel.DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01 * (seed + 1))
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * (seed + 1)
    optimizer.step()
    return model, optimizer


def state_of(model: Any, optimizer: Any, step: int) -> dict[str, Any]:
    from torch.distributed.checkpoint.state_dict import get_state_dict

    model_state, optimizer_state = get_state_dict(model, optimizer)
    return {
        "model": model_state,
        "optimizer": optimizer_state,
        "loader": {"consumed": step * 8, "seed": b"\x00\xff"},
        "step": step,
    }


def whole(state: dict[str, Any]) -> dict[str, Any]:
    """Every leaf, gathered: what two states must have in common, whatever their sharding."""
    import torch
    from torch.distributed.checkpoint._nested_dict import flatten_state_dict

    leaves: dict[str, Any] = {}
    for name, value in flatten_state_dict(state)[0].items():
        if isinstance(value, torch.Tensor):
            full = value.full_tensor() if hasattr(value, "full_tensor") else value
            flat = full.detach().contiguous().reshape(-1).view(torch.uint8).numpy()
            leaves[name] = (str(full.dtype), tuple(full.shape), hashlib.sha256(flat.tobytes()).hexdigest())
        else:
            leaves[name] = value
    return leaves


def save_both(rank: Rank, uris: list[str]) -> dict[str, Any]:
    from headrace.torch import VolumeWriter

    saved = {}
    for kind, seed in (("fsdp", 1), ("ddp", 2)):
        model, optimizer = model_and_optimizer(kind, rank, seed)
        state = state_of(model, optimizer, seed)
        saved[kind] = whole(state)
        with VolumeWriter(uris, kind, run_id=kind) as writer:
            report = writer.save(state, f"{kind}/step-{seed}")
            assert (report.ranks, report.rank, report.rewritten_bytes) == (rank.world, rank.rank, 0)
            assert (report.sequence is not None) == (rank.rank == 0)
            assert report.data_bytes > 0 or rank.rank > 1, "the first ranks have something to write"
    tensor_parallel(rank, uris, save=True)
    # Fewer elements than ranks, and nothing else: the last ranks have items that are empty.
    few = few_elements(rank)
    with VolumeWriter(uris, "few") as writer:
        writer.save(few, "few/step-1")
    return saved


def few_elements(rank: Rank) -> dict[str, Any]:
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Shard, distribute_tensor

    mesh = init_device_mesh("cpu", (rank.world,))
    return {"w": distribute_tensor(torch.arange(1.0, 3.0), mesh, [Shard(0)], src_data_rank=None)}


def tensor_parallel(rank: Rank, uris: list[str], *, save: bool) -> list[str]:
    """Saved with the columns on the ranks; loaded by rows, by other columns, and whole. Returns what is wrong."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import Replicate, Shard, distribute_tensor

    from headrace.torch import VolumeReader, VolumeWriter

    whole = torch.arange(37 * 20_003, dtype=torch.float32).view(37, 20_003)
    mesh = init_device_mesh("cpu", (rank.world,))
    if save:
        with VolumeWriter(uris, "tp") as writer:
            writer.save({"w": distribute_tensor(whole, mesh, [Shard(1)])}, "tp/step-0")
        return []
    wrong = []
    for placement in (Shard(0), Shard(1), Replicate()):
        state = {"w": distribute_tensor(torch.zeros_like(whole), mesh, [placement])}
        with VolumeReader(uris, "tp") as reader:
            reader.load(state)
        if not torch.equal(state["w"].full_tensor(), whole):
            wrong.append(str(placement))
    return wrong


def load_all(rank: Rank, argument: tuple[list[str], list[tuple[str, int, str]]]) -> dict[str, Any]:
    """Into a model of other values, sharded over this crew; then what it holds."""
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint.state_dict import set_state_dict

    from headrace.torch import VolumeReader

    uris, wanted = argument
    loaded = {}
    for number, (saved_as, step, kind) in enumerate(wanted):
        model, optimizer = model_and_optimizer(kind, rank, 7)
        state = state_of(model, optimizer, 0)
        before = whole(state)
        with VolumeReader(uris, f"{saved_as}/step-{step}") as reader:
            if (number + rank.world) % 4 == 2:
                # Every rank for itself, each way at one of the worlds.
                dcp.load(state, storage_reader=reader, no_dist=rank.world == 1)
            else:
                report = reader.load(state)
                assert report.ranks == rank.world
                assert report.job_unique_bytes <= report.job_read_bytes <= sum(reader._lengths), "nothing is read twice"
        set_state_dict(model, optimizer, model_state_dict=state["model"], optim_state_dict=state["optimizer"])
        again = state_of(model, optimizer, state["step"]) | {"loader": state["loader"]}
        loaded[f"{saved_as} as {kind}"] = whole(again)
        assert before != loaded[f"{saved_as} as {kind}"]
    if rank.world > 1:
        few = few_elements(rank)
        few["w"].to_local().zero_()
        with VolumeReader(uris, "few") as reader:
            reader.load(few)
        assert few["w"].full_tensor().tolist() == [1.0, 2.0]
    if rank.world == 8:
        layouts.save(rank, (uris, "8b", LLAMA))
    assert rank.world == 1 or tensor_parallel(rank, uris, save=False) == []
    return loaded


def test_saved_by_four_ranks_restored_by_one_two_three_and_eight(volume: list[str]) -> None:
    saved = run(4, save_both, volume)[0]
    assert saved["fsdp"] != saved["ddp"]
    wanted = [("fsdp", 1, "fsdp"), ("fsdp", 1, "ddp"), ("ddp", 2, "fsdp"), ("ddp", 2, "ddp")]
    for world in (1, 2, 3, 8):
        # FSDP over one rank is the plain model.
        kinds = [w for w in wanted if world > 1 or w[2] == "ddp"]
        for loaded in run(world, load_all, (volume, kinds)):
            for saved_as, _, kind in kinds:
                assert loaded[f"{saved_as} as {kind}"] == saved[saved_as]
    # As MLPerf Storage has it: eight ranks saved it, and had it back.
    for _, read, unique in run(4, layouts.restore, (volume, "8b", LLAMA)):
        assert unique == LLAMA.bytes <= read < 1.05 * unique


# ---- plan caching, asynchronous saves, parameters that change meanwhile ----------------------------------------------


def value(step: int, rank: int) -> np.ndarray:
    return np.random.default_rng([step, rank]).standard_normal(70_001).astype(np.float32)


#: Plan caching, in the background, DCP's collectives.
WAYS = list(itertools.product((False, True), repeat=3))


def run_of(*way: bool) -> str:
    return "five-" + "-".join(map(str, way))


def planner_of(caching: bool, collectives: bool) -> Any:
    """DCP caches plans by the name of the class, and those of ranks that plan apart are others."""
    from torch.distributed.checkpoint import DefaultSavePlanner

    class Apart(DefaultSavePlanner):
        pass

    return (DefaultSavePlanner if collectives else Apart)(enable_plan_caching=caching)


def five_saves(rank: Rank, argument: tuple[list[str], tuple[bool, bool, bool]]) -> list[dict[str, Any]]:
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from headrace.torch import VolumeWriter

    uris, (caching, background, collectives) = argument
    run_name = run_of(caching, background, collectives)
    mesh = init_device_mesh("cpu", (rank.world,))
    local = torch.zeros(70_001)
    state = {"w": DTensor.from_local(local, mesh, [Shard(0)]), "plain": torch.zeros(1000), "note": "x"}
    reports = []
    with VolumeWriter(uris, run_name) as writer:
        for step in range(5):
            local.copy_(torch.from_numpy(value(step, rank.rank)))
            state["plain"].fill_(step)
            state["note"] = f"step {step}"
            id, planner = f"{run_name}/step-{step}", planner_of(caching, collectives)
            theirs: dict[str, Any] = {
                "checkpoint_id": id, "storage_writer": writer, "planner": planner,
                "process_group": writer.process_group, "use_collectives": collectives,
            }  # fmt: skip
            future: Any = None
            if background:
                future = (
                    writer.async_save(state, id, planner=planner)
                    if collectives
                    else dcp.async_save(state, async_stager=writer.stager, **theirs)
                )
                # Training goes on: the saved bytes must be those of the moment of the call.
                until = time.monotonic() + 0.05
                while time.monotonic() < until or not future.done():
                    local.add_(1.0)
                    state["plain"].mul_(-3)
                    time.sleep(0.001)
                future.result()
            elif collectives:
                writer.save(state, id, planner=planner)
            else:
                dcp.save(state, **theirs)
            assert writer.last_save is not None
            reports.append(writer.last_save)
    return [vars(report) for report in reports]


def reshaped(rank: Rank, uris: list[str]) -> None:
    """Two saves of shards that are alike, of tensors that are not: each has a plan of its own."""
    import torch
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from headrace.torch import VolumeWriter

    mesh = init_device_mesh("cpu", (rank.world,))
    local = torch.full((4, 4), float(rank.rank))
    with VolumeWriter(uris, "reshaped") as writer:
        for dimension in range(2):
            writer.save({"w": DTensor.from_local(local, mesh, [Shard(dimension)])}, f"reshaped/step-{dimension}")


def saves_that_are_skipped(rank: Rank, uris: list[str]) -> list[bool]:
    """One after another without waiting, on a rank that is not as far as the other: they must agree."""
    import torch

    from headrace.torch import VolumeWriter, WriterOptions

    with VolumeWriter(uris, "busy", options=WriterOptions(when_busy="skip")) as writer:
        reports = []
        state = {"w": torch.zeros(1000), "mine": torch.full((50_000,), float(rank.rank))}
        for step in range(6):
            reports.append(writer.async_save(state, f"busy/step-{step}"))
            if step % 2 == rank.rank:
                reports[-1].result()
        return [report.result().skipped for report in reports]


def all_saves(rank: Rank, uris: list[str]) -> list[bool]:
    for way in WAYS:
        reports = five_saves(rank, (uris, way))
        assert len(reports) == 5
        assert all(r["write_seconds"] > 0 and r["object_bytes"] >= r["data_bytes"] > 0 for r in reports)
        # Written from where it was, or from the one copy.
        assert all(r["copied"] == {} and r["compared"] == way[1] for r in reports)
    reshaped(rank, uris)
    return saves_that_are_skipped(rank, uris)


@pytest.mark.timeout(120)
def test_five_saves_stay_bit_identical_with_and_without_plan_caching(volume: list[str]) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from headrace.checkpoint import list_checkpoints
    from headrace.torch import VolumeReader

    skipped, agreed = run(2, all_saves, volume)
    assert skipped == agreed and not skipped[0]
    with Volume.open(volume) as opened:
        written = [step for step, not_written in enumerate(skipped) if not not_written]
        assert [c.step for c in list_checkpoints(opened, "busy")] == written
        for dimension, halves in enumerate((torch.zeros(4, 4), torch.ones(4, 4)) for _ in range(2)):
            joined = torch.cat(halves, dimension)
            state = {"w": torch.full_like(joined, 7.0)}
            VolumeReader(opened, f"reshaped/step-{dimension}").load(state)
            assert torch.equal(state["w"], joined)
        for run_name in (run_of(*way) for way in WAYS):
            assert [c.step for c in list_checkpoints(opened, run_name)] == list(range(5))
            for step in range(5):
                state = {"w": torch.zeros(140_002), "plain": torch.zeros(1000), "note": ""}
                reader = VolumeReader(opened, f"{run_name}/step-{step}")
                dcp.load(state, storage_reader=reader, no_dist=True)
                assert np.array_equal(state["w"].numpy(), np.concatenate([value(step, 0), value(step, 1)]))
                assert bool((state["plain"] == step).all())
                assert state["note"] == f"step {step}"


#: Plan caching, DCP's collectives: the one process has one cache, of plans of one kind.
PROCESS_WAYS = [(False, True), (True, True), (False, False)]


def process_saves(rank: Rank, uris: list[str]) -> None:
    """DCP's checkpoint process: it opens the volume by address and holds the session."""
    import torch
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import DefaultSavePlanner
    from torch.distributed.checkpoint.state_dict_saver import AsyncCheckpointerType
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.tensor import DTensor, Shard

    from headrace.torch import VolumeWriter, WriterOptions

    mesh = init_device_mesh("cpu", (rank.world,))
    local = torch.zeros(70_001)
    state = {"w": DTensor.from_local(local, mesh, [Shard(0)]), "also": {"w": local[:7], "step": 3}}
    shared = WriterOptions(shared_copy=True)
    with VolumeWriter(uris, "process") as writer, VolumeWriter(uris, "process", options=shared) as other:
        # Torch's own stager, ours, and ours with its copy in shared memory from the beginning.
        stagers = (None, writer.stager, writer.stager, other.stager, other.stager)
        for number, (caching, collectives) in enumerate(PROCESS_WAYS):
            for step, stager in enumerate(stagers, 5 * number):
                local.copy_(torch.from_numpy(value(step, rank.rank)))
                future = dcp.async_save(
                    state,
                    checkpoint_id=f"process/step-{step}",
                    storage_writer=writer,
                    process_group=writer.process_group,
                    planner=DefaultSavePlanner(enable_plan_caching=caching),
                    async_stager=stager,
                    async_checkpointer_type=AsyncCheckpointerType.PROCESS,
                    use_collectives=collectives,
                )
                local.add_(1.0)
                future.result(timeout=200)
    from torch.distributed.checkpoint import _async_process_executor as executor

    executor._CHECKPOINT_PROCESS = None


@pytest.mark.timeout(600)
def test_saves_from_the_checkpoint_process(volume: list[str]) -> None:
    import torch
    import torch.distributed.checkpoint as dcp

    from headrace.torch import VolumeReader

    run(2, process_saves, volume)
    for step in range(5 * len(PROCESS_WAYS)):
        state = {"w": torch.zeros(140_002)}
        with VolumeReader(volume, f"process/step-{step}") as reader:
            dcp.load(state, storage_reader=reader, no_dist=True)
        assert np.array_equal(state["w"].numpy(), np.concatenate([value(step, 0), value(step, 1)]))
