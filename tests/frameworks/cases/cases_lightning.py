"""Lightning: a loader in epochs, whose state its checkpoints keep, on a local disk and in the volume."""

from __future__ import annotations

import os
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import fsspec.config
import pytest
import pytorch_lightning as lightning
import torch
from pytorch_lightning.callbacks import ModelCheckpoint
from torch.utils.data import DataLoader

from headrace.checkpoint import CheckpointId, list_checkpoints
from headrace.checkpoint.retention import pin, unpin
from headrace.errors import CheckpointFailed, ObjectNotFound, UsageError, VolumeFull
from headrace.measure import Watch
from headrace.torch import Epochs, OrderSampler
from headrace.torch.lightning import VolumeCheckpointIO, VolumeModelCheckpoint
from headrace.torch.lightning_watch import WatchCallback
from headrace.volume import Volume
from tests.frameworks.cases.job import (
    BATCH,
    SAVE_EVERY,
    Job,
    Order,
    as_torchrun,
    killed_and_resumed,
    killed_in_save_and_resumed,
    tiny_gpt,
    watched,
)
from tests.torch import crew
from tests.torch.crew import Rank


class Model(lightning.LightningModule):
    def __init__(self, model: torch.nn.Module) -> None:
        super().__init__()
        self.model = model
        self.begun = -1

    def on_train_start(self) -> None:
        self.begun = self.trainer.global_step

    def training_step(self, batch: torch.Tensor, index: int) -> Any:
        return self.model(input_ids=batch, labels=batch).loss

    def configure_optimizers(self) -> Any:
        return torch.optim.AdamW(self.parameters(), lr=1e-3)


def _trainer(rank: Rank, job: Job, saves: ModelCheckpoint | None = None, **options: Any) -> lightning.Trainer:
    saves = saves or ModelCheckpoint(
        dirpath=job.folder / "lightning", every_n_train_steps=SAVE_EVERY, save_top_k=-1, filename="{step}"
    )  # fmt: skip
    return lightning.Trainer(
        accelerator="cpu", devices=rank.world, strategy="ddp" if rank.world > 1 else "auto", max_steps=job.steps,
        callbacks=[saves], logger=False, enable_progress_bar=False, enable_model_summary=False, barebones=False,
        accumulate_grad_batches=job.accumulation, default_root_dir=job.folder, **options,
    )  # fmt: skip


def _newest(folder: Path) -> Path:
    return max(folder.glob("lightning/*.ckpt"), key=lambda path: int(path.stem.partition("=")[2]))


def fit(rank: Rank, job: Job) -> int:
    as_torchrun(rank)
    warnings.simplefilter("ignore")
    with job.volume() as volume, job.loader(volume) as loader:
        model = Model(watched(tiny_gpt(), rank, job))
        newest = _newest(job.folder) if job.resume else None
        _trainer(rank, job).fit(model, Epochs(loader), ckpt_path=newest, weights_only=False)
        assert loader.consumed == job.steps * BATCH
    return model.begun


def into_the_volume(rank: Rank, job: Job) -> int:
    """As `fit`, with checkpoints in the volume: rank 0 saves, all find the last one there and load it together."""
    as_torchrun(rank)
    warnings.simplefilter("ignore")
    run = "whole" if job.phase == "whole" else "job"
    with job.volume() as volume, job.loader(volume) as loader:
        model = Model(watched(tiny_gpt(), rank, job))
        io = VolumeCheckpointIO(job.uri)
        saves = VolumeModelCheckpoint(
            dirpath=f"headrace://lightning/{run}", every_n_train_steps=SAVE_EVERY, filename="{step}", save_last=True,
            monitor="step", mode="max", save_top_k=2,
        )  # fmt: skip
        trainer = _trainer(rank, job, saves, plugins=[io])
        trainer.fit(model, Epochs(loader), ckpt_path="last" if job.resume else None, weights_only=False)
        assert loader.consumed == job.steps * BATCH
    assert not list(job.folder.glob("**/*.ckpt"))
    return model.begun


def twice(rank: Rank, job: Job) -> str:
    as_torchrun(rank)
    with job.volume() as volume:
        data = job.dataset(volume)
        sampler = OrderSampler(data, global_batch=BATCH)
        batches = DataLoader(data, batch_size=sampler.rows, sampler=sampler)
        with pytest.raises(UsageError) as caught:
            _trainer(rank, job).fit(Model(tiny_gpt()), batches)
    os.environ.pop("TORCHELASTIC_RUN_ID")
    return str(caught.value)


def test_lightning_saves_into_the_volume_and_goes_on_from_there(job: Job, order: Order) -> None:
    # Of each step two are saved; the third commit is that of the second step, by its name.
    killed_in_save_and_resumed(job, into_the_volume, order, world=3, commit=3)
    with Volume.open(job.uri) as volume:
        found = [str(each.id) for each in list_checkpoints(volume) if each.id.run.startswith("lightning/job/")]
    names = [("last.ckpt", 18), ("step=15.ckpt", 15), ("step=18.ckpt", 18)]
    assert found == [f"lightning/job/{name}/step-{step:08d}" for name, step in names]


def _fit_tiny(job: Job, name: str, steps: int, plugins: list[Any], **options: Any) -> lightning.Trainer:
    class Tiny(lightning.LightningModule):
        def __init__(self) -> None:
            super().__init__()
            self.layer = torch.nn.Linear(4, 4)

        def training_step(self, batch: torch.Tensor, index: int) -> torch.Tensor:
            return self.layer(batch).sum()

        def configure_optimizers(self) -> Any:
            return torch.optim.AdamW(self.parameters())

    asked: dict[str, Any] = {"monitor": "step", "mode": "max", "save_top_k": 1, "save_last": True, **options}
    saves = VolumeModelCheckpoint(dirpath=f"headrace://{name}", every_n_train_steps=2, filename="{step}", **asked)
    trainer = _trainer(Rank(0, 1, None), replace(job, steps=steps), saves, plugins=plugins)  # type: ignore[arg-type]
    batches = DataLoader(torch.ones(8, 4), batch_size=1)
    trainer.fit(Tiny(), batches, ckpt_path="last", weights_only=False)
    return trainer


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("way", ["files", "asynchronous"])
def test_one_device_saves_and_goes_on(job: Job, monkeypatch: pytest.MonkeyPatch, way: str) -> None:
    """As files by Lightning's own writer, and behind training by ours: the last and the best one remain."""
    monkeypatch.setattr(fsspec.config, "conf", {})
    monkeypatch.setenv("HEADRACE_VOLUME", job.uri)
    plugins = [] if way == "files" else [VolumeCheckpointIO(job.uri, asynchronous=True)]
    assert _fit_tiny(job, way, 4, plugins).ckpt_path is None
    assert _fit_tiny(job, way, 8, plugins).ckpt_path == f"headrace://{way}/last.ckpt"
    files = fsspec.filesystem("headrace")
    assert files.ls(way, detail=False) == [f"{way}/last.ckpt", f"{way}/step=8.ckpt"]
    files.close()
    if way == "asynchronous":
        with pytest.raises(UsageError, match="no symbolic links"):
            _fit_tiny(job, way, 10, plugins, save_last="link")
        other = "file:elsewhere"
        with pytest.raises(UsageError, match="another volume in this process"):
            VolumeCheckpointIO(other)


def test_what_fails_behind_training_is_told_and_nothing_is_removed(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(fsspec.config, "conf", {})
    io = VolumeCheckpointIO(job.uri, asynchronous=True)
    state = {"global_step": 1, "state_dict": {"w": torch.ones(3)}}
    io.save_checkpoint(state, "headrace://behind/1.ckpt")
    state["state_dict"]["w"].zero_()
    too_large = torch.empty(1, dtype=torch.uint8).expand(64 << 20)
    io.save_checkpoint({"global_step": 2, "w": too_large}, "headrace://behind/2.ckpt")
    io.remove_checkpoint("headrace://behind/1.ckpt")
    with pytest.raises(VolumeFull):
        io.teardown()
    assert torch.equal(io.load_checkpoint("headrace://behind/1.ckpt")["state_dict"]["w"], torch.ones(3))
    io.remove_checkpoint("headrace://behind/1.ckpt")
    io.teardown()
    with pytest.raises(ObjectNotFound):
        io.load_checkpoint("headrace://behind/1.ckpt")
    for path, said in (("/tmp/1.ckpt", "saves into a volume"), (Path("headrace://a/1.ckpt"), "does not save by")):
        with pytest.raises(UsageError, match=said):
            io.save_checkpoint(state, path)


def test_what_was_saved_last_is_loaded_whatever_its_step(job: Job, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also beside a later one that is pinned, and stays."""
    monkeypatch.setattr(fsspec.config, "conf", {})
    io, path = VolumeCheckpointIO(job.uri), "headrace://pinned/last.ckpt"
    later = CheckpointId("pinned/last.ckpt", 18)
    for step in (18, 6, 18, 6, 7):
        if step == 6:
            pin(io._attachment.session(), later)
        io.save_checkpoint({"global_step": step, "w": torch.full((3,), float(step))}, path)
        assert io.load_checkpoint(path)["global_step"] == step
        if step == 6:
            with pytest.raises(CheckpointFailed, match=r"step-00000018 is pinned"):
                io.save_checkpoint({"global_step": 18}, path)
            unpin(io._attachment.session(), later)
    io.remove_checkpoint(path)
    io.teardown()


def test_lightning_with_accumulation_on_one_rank(job: Job, order: Order) -> None:
    killed_and_resumed(job, fit, order, world=1, accumulation=2)


def test_a_sampler_that_lightning_would_deal_out_again(job: Job) -> None:
    assert all("deal that out once more" in said for said in crew.run(2, twice, job))


def test_a_watched_lightning_says_what_its_steps_waited_for(job: Job) -> None:
    warnings.simplefilter("ignore")
    job = replace(job, accumulation=2)

    class Fails(Model):
        def training_step(self, batch: torch.Tensor, index: int) -> Any:
            if index == 1:
                raise RuntimeError("out of memory")
            return super().training_step(batch, index)

    with job.volume() as volume, job.loader(volume) as loader, Watch(device=None) as watch:
        callback = WatchCallback(watch, loader)
        saves = ModelCheckpoint(
            dirpath=job.folder / "watched", every_n_train_steps=SAVE_EVERY, save_top_k=-1, filename="{step}"
        )  # fmt: skip

        def train(model: Model) -> None:
            trainer = lightning.Trainer(
                accelerator="cpu", devices=1, max_steps=job.steps, callbacks=[callback, saves], logger=False,
                enable_progress_bar=False, enable_model_summary=False, accumulate_grad_batches=2,
                default_root_dir=job.folder,
            )  # fmt: skip
            try:
                trainer.fit(model, Epochs(loader))
            finally:
                # Whoever looked at the trainer's profiler before looks at it again.
                assert "start" not in vars(trainer.profiler)

        with pytest.raises(RuntimeError, match="out of memory"):
            train(Fails(tiny_gpt()))
        # A step that failed is none.
        assert watch.next_step == 1
        train(Model(tiny_gpt()))
    assert [step.step for step in watch.steps] == list(range(1, job.steps + 1))
    assert all(step["compute"] + step["starved"] > 0 for step in watch.steps)
    saved = {step.step for step in watch.steps if step["checkpoint"] > 0}
    assert saved and saved <= set(range(SAVE_EVERY, job.steps + 1, SAVE_EVERY))
    assert sum(step.bytes for step in watch.steps) >= (job.steps - 2) * BATCH * 33 * 2
    assert all(step["blocked"] == 0 for step in watch.steps)
