"""torchdata's StatefulDataLoader on both kinds of datasets: exact in mid-epoch, with workers that read ahead."""

from __future__ import annotations

from itertools import islice
from typing import Any

import pytest
import torch
from torch.nn.parallel import DistributedDataParallel
from torchdata.stateful_dataloader import StatefulDataLoader

from headrace.torch import OrderSampler, TokenIterable
from headrace.volume import Volume
from tests.frameworks.cases.job import (
    BATCH,
    SAVE_EVERY,
    Job,
    Order,
    as_torchrun,
    hashes,
    killed_and_resumed,
    tiny_gpt,
    watched,
)
from tests.torch.crew import Rank


def _workers(count: int) -> dict[str, Any]:
    # The ranks come from a fork server, which their own processes would take for theirs.
    return {"num_workers": count, "multiprocessing_context": "fork" if count else None}


def _map_style(job: Job, volume: Volume, rank: int, world: int, workers: int) -> StatefulDataLoader:
    data = job.dataset(volume)
    sampler = OrderSampler(data, global_batch=BATCH, rank=rank, world=world)
    return StatefulDataLoader(data, batch_size=sampler.rows, sampler=sampler, **_workers(workers))


def _iterable(job: Job, volume: Volume, rank: int, world: int, workers: int) -> StatefulDataLoader:
    data = TokenIterable(job.dataset(volume), global_batch=BATCH, rank=rank, world=world)
    return StatefulDataLoader(data, batch_size=None, **_workers(workers))


def train(rank: Rank, job: Job) -> int:
    """Plain PyTorch; the checkpoint is a file of rank 0."""
    as_torchrun(rank)
    path = job.folder / "checkpoint"
    with job.volume() as volume:
        batches = _map_style(job, volume, rank.rank, rank.world, workers=2)
        model: Any = watched(tiny_gpt(), rank, job)
        step = 0
        if job.resume:
            saved = torch.load(path)
            model.load_state_dict(saved["model"])
            batches.load_state_dict(saved["loader"])
            step = saved["step"]
        if rank.world > 1:
            model = DistributedDataParallel(model)
        optimizer = torch.optim.SGD(model.parameters(), lr=1e-3)
        begun = step
        while step < job.steps:
            for batch in batches:
                model(input_ids=batch, labels=batch).loss.backward()
                optimizer.step()
                optimizer.zero_grad()
                step += 1
                if step % SAVE_EVERY == 0 and rank.rank == 0 and not job.resume:
                    state = {"model": model.module.state_dict(), "loader": batches.state_dict(), "step": step}
                    torch.save(state, path.with_suffix(".new"))
                    path.with_suffix(".new").replace(path)
                if step == job.steps:
                    break
    return begun


def test_ranks_with_workers_are_killed_and_go_on(job: Job, order: Order) -> None:
    killed_and_resumed(job, train, order, world=3)


@pytest.mark.parametrize("workers", [0, 2])
@pytest.mark.parametrize("make", [_map_style, _iterable])
def test_every_step_resumes(job: Job, order: Order, make: Any, workers: int) -> None:
    """Also from the end of an epoch; what workers have read ahead is not counted."""
    with Volume.open(job.uri) as volume:
        running = make(job, volume, 1, 2, workers)
        steps = order.epoch // BATCH
        states, seen = [running.state_dict()], []
        for batch in islice(running, steps):
            seen.append(hashes(batch))
            states.append(running.state_dict())

        def expected(step: int) -> list[str]:
            first = step * BATCH + BATCH // 2
            return order.rows[first : first + BATCH // 2]

        assert seen == [expected(step) for step in range(steps)]
        for step in (0, 1, steps // 2, steps - 2, steps) if workers else range(steps + 1):
            again = make(job, volume, 1, 2, workers)
            again.load_state_dict(states[step])
            assert [hashes(batch) for batch in islice(again, 2)] == [expected(step), expected(step + 1)][
                : steps - step if make is _map_style and step == steps - 1 else 2
            ], step
