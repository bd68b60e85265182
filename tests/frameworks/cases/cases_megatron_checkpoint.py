"""megatron-core: `dist_checkpointing` of tensor-parallel layers, a replicated object and plain state, in a volume."""

from __future__ import annotations

import os
import signal
from typing import Any

import pytest
import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing, parallel_state
from megatron.core.dist_checkpointing.mapping import ShardedObject
from megatron.core.model_parallel_config import ModelParallelConfig
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear

from headrace.checkpoint import latest
from headrace.errors import CheckpointFailed, ObjectExists, ObjectNotFound
from headrace.torch.megatron_checkpoint import MegatronCheckpoints
from headrace.torch.save.one_save import OneSave
from headrace.volume import Volume
from tests.frameworks.cases.job import Job, as_torchrun
from tests.torch.crew import Crew, Rank

RUN = "megatron"
#: Of each layer: what 2 and 3 ranks can share.
WIDTH = 12


class _Model:
    """Two real tensor-parallel layers, each with an optimizer's moments, and state that is not sharded."""

    def __init__(self) -> None:
        parallel_state.initialize_model_parallel(tensor_model_parallel_size=dist.get_world_size())
        config = ModelParallelConfig(use_cpu_initialization=True, perform_initialization=False)
        options: dict[str, Any] = {
            "config": config, "init_method": torch.nn.init.zeros_, "bias": True, "skip_bias_add": False,
        }  # fmt: skip
        self.layers = {
            "column": ColumnParallelLinear(8, WIDTH, **options),
            "row": RowParallelLinear(WIDTH, 8, input_is_parallel=True, **options),
        }
        self.at: dict[str, Any] = {"step": 0, "sizes": [1, 2]}
        self.extra = torch.zeros(3)
        for name, tensor in self._tensors():
            whole = torch.arange(8 * WIDTH, dtype=torch.float32).view(-1, 8 if "column" in name else WIDTH)
            if "bias" in name:
                whole = whole.reshape(-1)[: WIDTH if "column" in name else 8]
            axis = tensor.shape != whole.shape
            part = whole.chunk(dist.get_world_size(), dim=int("row" in name))[dist.get_rank()] if axis else whole
            tensor.copy_(part)

    def _tensors(self) -> list[tuple[str, torch.Tensor]]:
        return [
            (f"{name}.{key}", tensor.detach())
            for name, layer in self.layers.items()
            for key, tensor in layer.named_parameters()
        ]

    def step(self) -> None:
        self.at["step"] += 1
        for tensor in [self.extra, *(tensor for _, tensor in self._tensors())]:
            tensor.mul_(0.75).add_(self.at["step"] / 3)

    def sharded(self) -> dict[str, Any]:
        found: dict[str, Any] = {}
        metadata = {"dp_cp_group": parallel_state.get_data_parallel_group(with_context_parallel=True)}
        for name, layer in self.layers.items():
            found |= layer.sharded_state_dict(prefix=f"{name}.", metadata=metadata)
        extra = ShardedObject("extra", self.extra, (1,), (0,), replica_id=dist.get_rank())
        return {"model": found, "extra": extra, **self.at}

    def load(self, state: dict[str, Any]) -> None:
        for name, tensor in self._tensors():
            tensor.copy_(state["model"][name])
        self.extra, self.at = state["extra"], {"step": state["step"], "sizes": state["sizes"]}

    def same(self, other: _Model) -> bool:
        pairs = zip(self._tensors(), other._tensors(), strict=True)
        return self.at == other.at and torch.equal(self.extra, other.extra) and all(
            torch.equal(mine, theirs) for (_, mine), (_, theirs) in pairs
        )  # fmt: skip


def killed_while_it_saves(rank: Rank, job: Job) -> None:
    as_torchrun(rank)
    model = _Model()
    commit = OneSave.commit

    def halt(*arguments: Any) -> Any:
        if model.at["step"] == 3:
            rank.say("halted")
            rank.hear()
        return commit(*arguments)

    OneSave.commit = halt  # type: ignore[method-assign]
    with MegatronCheckpoints(job.uri, RUN) as checkpoints:
        for step in (1, 2, 3):
            model.step()
            checkpoints.save(model.sharded(), step, content_metadata={"by": "a test"})


def goes_on(rank: Rank, job: Job) -> int:
    as_torchrun(rank)
    model, expected = _Model(), _Model.__new__(_Model)
    parallel_state.destroy_model_parallel()
    expected.__init__()  # type: ignore[misc]
    with MegatronCheckpoints(job.uri, RUN) as checkpoints:
        begun = checkpoints.latest()
        assert begun is not None
        for _ in range(begun):
            expected.step()
        loaded = checkpoints.load(model.sharded())
        assert loaded["content_metadata"] == {"by": "a test"}
        model.load(loaded)
        assert model.same(expected)
        for each in (model, expected):
            each.step()
        checkpoints.save(model.sharded(), model.at["step"])
        # On rank 0; the others hear that it failed there.
        with pytest.raises(CheckpointFailed if rank.rank else ObjectExists):
            checkpoints.save(model.sharded(), model.at["step"])
        with pytest.raises(ObjectNotFound):
            checkpoints.load(model.sharded(), 99)
        model.step()
        loaded, missing, unexpected = checkpoints.load(
            {name: value for name, value in model.sharded().items() if name != "extra"}, begun + 1, strict="return_all"
        )
        assert (missing, unexpected) == ({"extra"}, set())
        model.load({**loaded, "extra": expected.extra})
        assert model.same(expected)
        _commit_in_mid_load(checkpoints, model, expected)
    return begun


def _commit_in_mid_load(checkpoints: MegatronCheckpoints, model: _Model, expected: _Model) -> None:
    """Of the next step, between the small files and the tensors: what is loaded is all of one step."""
    load = dist_checkpointing.load

    def late(*args: Any, **options: Any) -> Any:
        later.step()
        checkpoints.save(later.sharded(), later.at["step"])
        return load(*args, **options)

    parallel_state.destroy_model_parallel()
    later = _Model()
    for _ in range(expected.at["step"]):
        later.step()
    dist_checkpointing.load = late
    try:
        model.load(checkpoints.load(model.sharded()))
    finally:
        dist_checkpointing.load = load
    assert later.at["step"] == expected.at["step"] + 1 and model.same(expected)


def test_two_ranks_are_killed_in_mid_save_and_three_go_on(job: Job) -> None:
    running = Crew(2, killed_while_it_saves, job)
    running.hear(0, "halted")
    for pid in running.pids:
        os.killpg(pid, signal.SIGKILL)
    running.join(dead=(0, 1))
    with Volume.open(job.uri) as volume:
        found = latest(volume, RUN)
        assert found is not None and found.step == 2
        assert not volume.any(f"{RUN}/step-3")
    assert Crew(3, goes_on, job).join() == [2] * 3
