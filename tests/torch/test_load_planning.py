"""What a rank plans to load is what torch plans, whichever way its tensors are laid out."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch.distributed.checkpoint import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    TensorProperties,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.testing._internal.distributed.fake_pg import FakeStore

from headrace.torch.load import planning
from headrace.torch.load.planning import create_local_plan

SHAPES = ((13, 8), (13, 8), (6, 5), (2,), (13, 8))


@pytest.fixture(params=[0, 3, 7])
def rank(request: pytest.FixtureRequest) -> Iterator[int]:
    """One of eight, of which there is no other."""
    dist.init_process_group("fake", store=FakeStore(), rank=request.param, world_size=8)
    yield request.param
    dist.destroy_process_group()


def state_of() -> dict[str, Any]:
    whole, square = init_device_mesh("cpu", (8,)), init_device_mesh("cpu", (2, 4))
    layouts: list[tuple[Any, list[Any]]] = [
        (whole, [Shard(0)]),
        (square, [Shard(0), Shard(0)]),
        (square, [Replicate(), Shard(0)]),
        (square, [Replicate(), Replicate()]),
    ]
    state: dict[str, Any] = {"plain": torch.zeros(4, 3), "note": "x", "deeper": {"plain": torch.zeros(5)}}
    for layout, (mesh, placements) in enumerate(layouts):
        for number, shape in enumerate(SHAPES):
            state[f"{layout}.{number}"] = sharded(mesh, placements, shape)
    state["columns"] = sharded(whole, [Shard(1)], (13, 8))
    # Of some ranks only.
    state["part"] = sharded(init_device_mesh("cpu", (4,)), [Shard(0)], (13, 8)) if dist.get_rank() < 4 else state["0.0"]
    return state


def sharded(mesh: Any, placements: list[Any], shape: tuple[int, ...]) -> DTensor:
    local = torch.zeros(1)
    stride = torch.empty(shape).stride()
    return DTensor.from_local(local, mesh, placements, run_check=False, shape=torch.Size(shape), stride=stride)


def saved(planner: DefaultLoadPlanner) -> Metadata:
    """As three ranks saved it, row by row; every other tensor by one."""
    entries: dict[str, Any] = {}
    for number, (name, value) in enumerate(planner.state_dict.items()):
        if not isinstance(value, torch.Tensor):
            entries[name] = BytesStorageMetadata()
            continue
        rows = torch.arange(value.shape[0]).chunk(1 if number % 2 else 3)
        chunks = [
            ChunkStorageMetadata(
                offsets=torch.Size((int(part[0]), *[0] * (value.dim() - 1))),
                sizes=torch.Size((len(part), *value.shape[1:])),
            )
            for part in rows
        ]
        entries[name] = TensorStorageMetadata(TensorProperties(value.dtype), value.shape, chunks)
    return Metadata(entries)


def planner_of(state: dict[str, Any], **options: bool) -> DefaultLoadPlanner:
    planner = DefaultLoadPlanner(**options)
    planner.set_up_planner(state, Metadata({}), False)
    planner.metadata = saved(planner)
    return planner


def test_a_plan_is_that_of_torch(rank: int, monkeypatch: pytest.MonkeyPatch) -> None:
    planner = planner_of(state_of())
    asked: list[str] = []

    def counted(name: str, *arguments: Any) -> Any:
        asked.append(name)
        return create_read_items_for_chunk_list(name, *arguments)

    monkeypatch.setattr(planning, "create_read_items_for_chunk_list", counted)
    plan = create_local_plan(planner)
    theirs = planner.create_local_plan()
    assert plan == theirs and len(plan.items) > 20
    # By which torch finds the chunk; it does not compare them.
    hints = [[(one.dest_index.index, one.storage_index.index) for one in found.items] for found in (plan, theirs)]
    assert hints[0] == hints[1]
    assert len(asked) <= 18, "those that are alike, and were saved alike, are looked up once"


def test_what_torch_refuses_is_refused_and_what_it_leaves_out_left_out(rank: int) -> None:
    planner = planner_of(state_of())
    assert planner.metadata is not None
    entries = planner.metadata.state_dict_metadata
    entry = entries.pop("0.1")
    with pytest.raises(RuntimeError, match=r"Missing key .*0\.1"):
        create_local_plan(planner)
    planner.allow_partial_load = True
    assert create_local_plan(planner) == planner.create_local_plan()
    # More in the checkpoint than is wanted.
    entries["0.1"] = entry
    del planner.state_dict["0.1"]
    assert create_local_plan(planner) == planner.create_local_plan()
    planner.state_dict["0.1"] = sharded(init_device_mesh("cpu", (8,)), [Shard(0)], (8, 13))
    with pytest.raises(ValueError, match=r"Size mismatch .*0\.1"):
        create_local_plan(planner)
    planner.state_dict["0.1"] = sharded(init_device_mesh("cpu", (8,)), [Partial()], SHAPES[1])
    with pytest.raises(ValueError, match="partial"):
        create_local_plan(planner)
