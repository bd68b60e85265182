"""`transformers.Trainer`: on the map-style dataset, which it deals out and skips in by itself, and on the loader; with
checkpoints of its own, and in the volume."""

from __future__ import annotations

from contextlib import nullcontext
from typing import Any

import pytest
import torch
from transformers import Trainer, TrainerCallback, TrainingArguments
from transformers.trainer_utils import get_last_checkpoint

from headrace.checkpoint import list_checkpoints
from headrace.errors import DatasetError, ObjectNotFound, UsageError
from headrace.measure import Watch
from headrace.measure.watch.join import attribute
from headrace.measure.watch.record import files_of
from headrace.torch import (
    DocumentLoader,
    Epochs,
    TokenLoader,
    VolumeReader,
    WriterOptions,
    causal,
    checkpoint_trainer,
    feed_trainer,
)
from headrace.torch.watching import watch_trainer
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
    killed_in_save_and_resumed,
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


class _Begun(TrainerCallback):
    step = -1

    def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
        self.step = state.global_step


def into_the_volume(rank: Rank, job: Job) -> int:
    """Fed by the loader, and with checkpoints in the volume: no file of it is on a disk."""
    as_torchrun(rank)
    with job.volume() as volume, job.loader(volume) as loader:
        arguments = _arguments(job, rank.world, save_total_limit=2, learning_rate=1e-2)
        begun = _Begun()
        trainer = Trainer(model=watched(tiny_gpt(), rank, job), args=arguments, callbacks=[begun])
        feed_trainer(trainer, Epochs(loader, form=causal))
        checkpoint_trainer(trainer, job.uri, "whole" if job.phase == "whole" else "trainer")
        trainer.train(resume_from_checkpoint=job.resume or "latest")
        assert trainer.state.global_step == job.steps
        assert not list(job.folder.glob("**/*.safetensors")) and not list(job.folder.glob("**/*.pt"))
        return begun.step


def test_trainer_deals_out_the_dataset(job: Job, order: Order) -> None:
    killed_and_resumed(job, dealt_out, order, world=1, accumulation=2, place=order.with_short_ends)


def test_trainer_saves_into_the_volume_and_goes_on_from_there(job: Job, order: Order) -> None:
    killed_in_save_and_resumed(job, into_the_volume, order, world=3, commit=2)
    with Volume.open(job.uri) as volume:
        # `save_total_limit`: the last ones, of which Trainer saves one at the end.
        assert [each.step for each in list_checkpoints(volume, "trainer")] == [18, 20]


def trainer_of(
    job: Job, data: Any, steps: int, metrics: dict[int, float], run: str = "best", limit: int = 1
) -> Trainer:
    """It evaluates to `metrics` behind each step, saves every second one, and keeps the best."""
    arguments = TrainingArguments(
        output_dir=str(job.folder / run), max_steps=steps, save_steps=2, eval_strategy="steps", eval_steps=1,
        load_best_model_at_end=True, metric_for_best_model="loss", greater_is_better=False, save_total_limit=limit,
        use_cpu=True, per_device_train_batch_size=BATCH, report_to="none", disable_tqdm=True, learning_rate=1e-2,
        train_sampling_strategy="sequential", dataloader_drop_last=True,
    )  # fmt: skip
    trainer = Trainer(model=tiny_gpt(), args=arguments, train_dataset=data, eval_dataset=data)
    trainer.evaluate = lambda *_, **__: {"eval_loss": metrics[trainer.state.global_step]}
    checkpoint_trainer(trainer, job.uri, run)
    return trainer


def test_the_best_model_stays_and_is_loaded(job: Job) -> None:
    """Also where `save_total_limit` is long past it, and training went on from another step."""
    # A better one that was not saved is none.
    metrics = {1: 6.0, 2: 5.0, 3: 4.0, 4: 3.0, 5: 4.0, 6: 4.0, 7: 1.0, 8: 3.5}

    with Volume.open(job.uri) as volume:
        data = job.dataset(volume, form="causal")
        trainer_of(job, data, 6, metrics).train()
        trainer = trainer_of(job, data, 8, metrics)
        trainer.train(resume_from_checkpoint="checkpoint-6")
        assert trainer.state.best_model_checkpoint == "best/step-00000004" and trainer.state.best_metric == 1.0
        assert [(each.step, each.pinned) for each in list_checkpoints(volume, "best")] == [(4, True), (8, False)]
        with VolumeReader(volume, "best/step-4") as reader:
            expected = {"model": tiny_gpt().state_dict()}
            reader.load(expected)
        assert all(torch.equal(expected["model"][name], it) for name, it in trainer.model.state_dict().items())
        with pytest.raises(ObjectNotFound, match="no committed checkpoint"):
            trainer_of(job, data, 8, metrics).train(resume_from_checkpoint="checkpoint-6")


def test_training_goes_back_behind_the_best_model(job: Job, caplog: pytest.LogCaptureFixture) -> None:
    """What was the best then is gone; what was since is another one now, and not in the way of it."""
    metrics = dict.fromkeys(range(1, 13), 5.0) | {4: 3.0, 8: 1.0}
    with Volume.open(job.uri) as volume:
        data = job.dataset(volume, form="causal")
        for steps, back, committed in ((12, None, [6, 8, 10, 12]), (8, "checkpoint-6", [6, 10, 12, 8])):
            trainer = trainer_of(job, data, steps, metrics, run="back", limit=4)
            trainer.train(resume_from_checkpoint=back)
            found = list_checkpoints(volume, "back")
            assert [each.step for each in found] == committed
            assert [each.step for each in found if each.pinned] == ([] if back else [8])
            metrics[8] = 5.0
        assert trainer.state.best_model_checkpoint is None
    said = [each.getMessage() for each in caplog.records if each.name == "headrace"]
    assert any("back/step-00000004 was the best, and is not there any more" in each for each in said)
    assert any("restoring step 6 of back, behind which others were committed" in each for each in said)


def test_a_trainer_that_saves_otherwise_is_refused(job: Job) -> None:
    for options, said in (({"save_only_model": True}, "save_only_model"), ({"save_total_limit": 2}, "keep_last")):
        trainer = Trainer(model=tiny_gpt(), args=_arguments(job, 1, **options))
        with pytest.raises(UsageError, match=said):
            checkpoint_trainer(trainer, job.uri, "refused", options=WriterOptions(keep_last=3))
    trainer = Trainer(model=tiny_gpt(), args=_arguments(job, 1))
    checkpoint_trainer(trainer, job.uri, "refused")
    with pytest.raises(UsageError, match="resume_from_checkpoint"):
        trainer.train(resume_from_checkpoint="elsewhere")
    with pytest.raises(ObjectNotFound, match="no committed checkpoint"):
        trainer.train(resume_from_checkpoint=True)


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
    options: dict[str, Any] = {"sequence_length": LENGTH, "global_batch": BATCH, "seed": SEED, "rank": 0, "world": 1}
    model = tiny_gpt().eval()
    with Volume.open(job.uri) as volume, DocumentLoader(volume, "corpus", **options) as loader, torch.no_grad():
        batch = next(loader)
        got = model(**causal(batch)).loss
        logits = model(input_ids=batch["input_ids"], position_ids=batch["position_ids"]).logits
        wanted = torch.nn.functional.cross_entropy(logits.flatten(0, 1), batch["labels"].flatten())
    assert torch.allclose(got, wanted)


def test_a_watched_trainer_says_what_its_steps_waited_for(job: Job) -> None:
    with job.volume() as volume, job.loader(volume) as loader, Watch(job.folder / "watch", device=None) as watch:
        trainer = Trainer(model=tiny_gpt(), args=_arguments(job, 1))
        feed_trainer(trainer, Epochs(loader, form=causal))
        checkpoint_trainer(trainer, job.uri, "watched")
        watch_trainer(trainer, watch, loader)
        trainer.train()
    assert [step.step for step in watch.steps] == list(range(1, job.steps + 1))
    # On a busy machine a step may have done nothing but wait for a CPU.
    assert all(step["compute"] + step["starved"] > 0 for step in watch.steps)
    saved = {step.step for step in watch.steps if step["checkpoint"] > 0}
    assert saved and saved <= {*range(SAVE_EVERY, job.steps + 1, SAVE_EVERY), job.steps}
    assert sum(step.bytes for step in watch.steps) == job.steps * BATCH * (LENGTH + 1) * 2
    assert all(step["blocked"] == 0 for step in watch.steps), "a loader of headrace tells"
    assert attribute(files_of([job.folder / "watch"])).steps == job.steps


def test_a_step_that_failed_is_none_to_a_watched_trainer(job: Job) -> None:
    """What `auto_find_batch_size` catches, and what its caller does: training begins again."""
    model, calls = tiny_gpt(), 0

    def fails(*_: Any) -> None:
        nonlocal calls
        calls += 1
        if calls in (3, 6):
            raise RuntimeError("CUDA out of memory." if calls == 3 else "another error")

    model.register_forward_pre_hook(fails)
    with job.volume() as volume, Watch(device=None) as watch:
        for _ in range(2):
            arguments = _arguments(job, 1, auto_find_batch_size=True, save_strategy="no")
            arguments.max_steps = 4
            trainer = Trainer(model=model, args=arguments, train_dataset=job.dataset(volume, form="causal"))
            watch_trainer(trainer, watch)
            with pytest.raises(RuntimeError, match="another") if calls == 0 else nullcontext():
                trainer.train()
    # Two, the third one failed; two, the third one failed; four.
    assert [step.step for step in watch.steps] == list(range(1, 9))
    assert calls == 10 and trainer.state.global_step == 4
    for step in watch.steps:
        assert step["compute"] + step["starved"] > 0 and step.wall_s == pytest.approx(sum(step.spent.values()))
