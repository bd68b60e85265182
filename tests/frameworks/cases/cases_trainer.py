"""`transformers.Trainer`: on the map-style dataset, which it deals out and skips in by itself, and on the loader."""

from __future__ import annotations

from typing import Any

import pytest
from transformers import Trainer, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from headrace.errors import DatasetError, UsageError
from headrace.torch import DocumentLoader, Epochs, TokenLoader, causal, feed_trainer
from headrace.volume import Volume
from tests.frameworks.cases.job import (
    BATCH,
    LENGTH,
    SAVE_EVERY,
    SEED,
    Job,
    Order,
    as_torchrun,
    killed_and_resumed,
    tiny_gpt,
    watched,
)
from tests.torch.crew import Rank


def _arguments(job: Job, world: int, **options: Any) -> TrainingArguments:
    return TrainingArguments(
        output_dir=str(job.folder / "trainer"), max_steps=job.steps, save_steps=SAVE_EVERY, use_cpu=True,
        per_device_train_batch_size=BATCH // world // job.accumulation, gradient_accumulation_steps=job.accumulation,
        logging_strategy="no", report_to="none", disable_tqdm=True, dataloader_drop_last=True, **options,
    )  # fmt: skip


def _train(trainer: Trainer, job: Job) -> int:
    """The step from which it went on."""
    begun = 0
    if job.resume:
        checkpoint = get_last_checkpoint(trainer.args.output_dir)
        begun = int(checkpoint.rpartition("-")[2])
    trainer.train(resume_from_checkpoint=job.resume or None)
    assert trainer.state.global_step == job.steps
    return begun


def dealt_out(rank: Rank, job: Job) -> int:
    as_torchrun(rank)
    with job.volume() as volume:
        arguments = _arguments(job, rank.world, train_sampling_strategy="sequential")
        data = job.dataset(volume, form="causal")
        return _train(Trainer(model=watched(tiny_gpt(), rank, job), args=arguments, train_dataset=data), job)


def from_the_loader(rank: Rank, job: Job) -> int:
    as_torchrun(rank)
    with job.volume() as volume, job.loader(volume) as loader:
        trainer = Trainer(model=watched(tiny_gpt(), rank, job), args=_arguments(job, rank.world))
        feed_trainer(trainer, Epochs(loader, form=causal))
        return _train(trainer, job)


def test_trainer_deals_out_the_dataset(job: Job, order: Order) -> None:
    killed_and_resumed(job, dealt_out, order, world=1, accumulation=2, place=order.with_short_ends)


def test_trainer_goes_on_with_the_loader(job: Job, order: Order) -> None:
    killed_and_resumed(job, from_the_loader, order, world=3)


def test_trainer_and_loader_that_do_not_fit(job: Job) -> None:
    options: dict[str, Any] = {"sequence_length": LENGTH, "seed": SEED, "rank": 0, "world": 1}
    with Volume.open(job.uri) as volume:
        trainer = Trainer(model=tiny_gpt(), args=_arguments(job, 1))
        loader = TokenLoader(volume, "corpus", global_batch=6, **options)
        with loader, pytest.raises(UsageError, match="another per_device_train_batch_size"):
            feed_trainer(trainer, Epochs(loader))
        # A checkpoint of a trainer that had no loader.
        data = job.dataset(volume, form="causal")
        arguments = _arguments(job, 1, train_sampling_strategy="sequential")
        arguments.max_steps = SAVE_EVERY
        Trainer(model=tiny_gpt(), args=arguments, train_dataset=data).train()
        with TokenLoader(volume, "corpus", global_batch=BATCH, **options) as loader:
            feed_trainer(trainer, Epochs(loader, form=causal))
            with pytest.raises(DatasetError, match="no state of the loader"):
                trainer.train(resume_from_checkpoint=True)


def test_documents_lose_what_the_document_loader_says(job: Job) -> None:
    """Labels that are shifted already are not shifted again."""
    import torch

    options: dict[str, Any] = {"sequence_length": LENGTH, "global_batch": BATCH, "seed": SEED, "rank": 0, "world": 1}
    model = tiny_gpt().eval()
    with Volume.open(job.uri) as volume, DocumentLoader(volume, "corpus", **options) as loader, torch.no_grad():
        batch = next(loader)
        got = model(**causal(batch)).loss
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert torch.allclose(got, wanted)
