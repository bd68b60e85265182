"""Accelerate: the loader as it is, which `prepare` leaves alone, and the map-style dataset, which it deals out."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from accelerate import Accelerator
from torch.utils.data import DataLoader

from headrace.errors import UsageError
from headrace.torch import OrderSampler, TokenIterable
from tests.frameworks.cases.job import (
    BATCH,
    SAVE_EVERY,
    Job,
    Order,
    as_torchrun,
    killed_and_resumed,
    tiny_gpt,
    watched,
)
from tests.torch import crew
from tests.torch.crew import Rank


def _newest(folder: Path) -> Path:
    return max(folder.glob("step-*"), key=lambda path: int(path.name.partition("-")[2]))


def _train(rank: Rank, job: Job, accelerator: Accelerator, model: Any, optimizer: Any, batches: Any, step: int) -> None:
    for batch in batches:
        model_input = batch["input_ids"] if isinstance(batch, dict) else batch
        accelerator.backward(model(input_ids=model_input, labels=model_input).loss)
        optimizer.step()
        optimizer.zero_grad()
        step += 1
        if step % SAVE_EVERY == 0 and not job.resume:
            accelerator.save_state(str(job.folder / "saving"))
            accelerator.wait_for_everyone()
            if rank.rank == 0:
                (job.folder / "saving").replace(job.folder / f"step-{step}")
            accelerator.wait_for_everyone()
        if step == job.steps:
            return


def as_it_is(rank: Rank, job: Job) -> int:
    as_torchrun(rank)
    accelerator = Accelerator(cpu=True)
    with job.volume() as volume, job.loader(volume) as loader:
        model = watched(tiny_gpt(), rank, job)
        model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters()), loader)
        assert prepared is loader
        accelerator.register_for_checkpointing(loader)
        if job.resume:
            accelerator.load_state(str(_newest(job.folder)))
        step = loader.consumed // BATCH
        _train(rank, job, accelerator, model, optimizer, loader, step)
    return step


def dealt_out(rank: Rank, job: Job) -> int:
    as_torchrun(rank)
    accelerator = Accelerator(cpu=True)
    with job.volume() as volume:
        model = watched(tiny_gpt(), rank, job)
        data = DataLoader(job.dataset(volume), batch_size=BATCH // rank.world, drop_last=True)
        model, optimizer, prepared = accelerator.prepare(model, torch.optim.SGD(model.parameters()), data)
        step = 0
        if job.resume:
            newest = _newest(job.folder)
            accelerator.load_state(str(newest))
            step = int(newest.name.partition("-")[2])
        begun = step
        while step < job.steps:
            epoch, within = divmod(step, len(prepared))
            prepared.set_epoch(epoch)
            rest = accelerator.skip_first_batches(prepared, within)
            _train(rank, job, accelerator, model, optimizer, rest, step)
            step = min(job.steps, (epoch + 1) * len(prepared))
    return begun


def twice(rank: Rank, job: Job) -> list[str]:
    """What is said where both sides deal out."""
    as_torchrun(rank)
    accelerator = Accelerator(cpu=True)
    said = []
    with job.volume() as volume:
        data = job.dataset(volume)
        sampler = OrderSampler(data, global_batch=BATCH)
        for each in (
            DataLoader(data, batch_size=sampler.rows, sampler=sampler, drop_last=True),
            DataLoader(TokenIterable(job.dataset(volume), global_batch=BATCH), batch_size=1),
        ):
            for dispatch in (False, True):
                accelerator.dataloader_config.dispatch_batches = dispatch
                prepared = accelerator.prepare(each)
                if dispatch and rank.rank:
                    continue  # Where one rank reads for all, the others would wait for it.
                with pytest.raises(UsageError) as caught:
                    next(iter(prepared))
                said.append(str(caught.value))
    return said


def test_accelerate_takes_the_loader_as_it_is(job: Job, order: Order) -> None:
    killed_and_resumed(job, as_it_is, order, world=3)


def test_accelerate_deals_out_the_dataset(job: Job, order: Order) -> None:
    killed_and_resumed(job, dealt_out, order, world=3, place=order.with_short_ends)


def test_accelerate_and_a_sampler_that_both_deal_out(job: Job) -> None:
    for said in crew.run(2, twice, job):
        assert all("deal that out once more" in each or "deals it out once more" in each for each in said)
