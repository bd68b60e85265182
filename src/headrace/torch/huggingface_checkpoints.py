"""`transformers.Trainer` saves into a volume, and goes on from there: each checkpoint is one commit.

    trainer = Trainer(model=model, args=TrainingArguments(save_steps=500, save_total_limit=3, ...), ...)
    checkpoint_trainer(trainer, "nvme+tcp://...", "pretrain")
    trainer.train(resume_from_checkpoint=True)           # the latest committed one

When to save, and which is the best, stays Trainer's business. Model, optimizer, scheduler, scaler, random number
generators of every rank and `trainer_state.json` (with the position in the data, where `feed_trainer` feeds) are a
checkpoint of `Checkpointer`, `RUN/step-N`. What Trainer itself must find on a disk when it goes on, its state, lies in
a temporary folder meanwhile.

Of Trainer this takes the place of `train` and of six private methods; they are looked for when it is set up. Held
with transformers 5.23.
"""

from __future__ import annotations

import json
import logging
import os
import re
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace.checkpoint import CheckpointId
from headrace.errors import CheckpointFailed, ObjectNotFound, UsageError
from headrace.torch.job.checkpointer import Checkpointer
from headrace.torch.job.training_state import rng_state, set_rng_state
from headrace.torch.ranks.attachment import VolumeLike
from headrace.torch.save.options import WriterOptions

_log = logging.getLogger("headrace")
#: What somebody who looks at the pins of a volume reads.
_BEST = "best of the trainer"
_STATE = "trainer_state"
_NAMED = re.compile(r"(?:checkpoint|step)-([0-9]{1,15})/?\Z")


def checkpoint_trainer(
    trainer: Any,
    volume: VolumeLike,
    run: str,
    *,
    options: WriterOptions | None = None,
    certificate: str | os.PathLike[str] | None = None,
) -> None:
    """Let `trainer` save into `volume` as `RUN/step-N`, and resume from there. On every rank, before `train()`.

    `train(resume_from_checkpoint=True)` goes on from the step that was committed last, `"latest"` does so where there
    is one and else begins, `"checkpoint-500"` names one; a folder of Trainer's own on the local disk is read as before.
    Saves return when the state is copied; what one failed with comes with the next, or at the end. `save_total_limit`
    is `options.keep_last`; the best model, where `load_best_model_at_end` asks for it, is pinned and stays beside
    those. `certificate`: see `Checkpointer`.

    UsageError: this trainer saves in a way that is not this one (DeepSpeed, SageMaker, `save_only_model`, the Hub).
    """
    _Checkpoints(trainer, volume, run, options or WriterOptions(), certificate)


class _Checkpoints:
    def __init__(
        self,
        trainer: Any,
        volume: VolumeLike,
        run: str,
        options: WriterOptions,
        certificate: str | os.PathLike[str] | None,
    ) -> None:
        _refuse(trainer)
        limit = trainer.args.save_total_limit
        if limit is not None and limit > 0:
            if options.keep_last not in (None, limit):
                raise UsageError(
                    "keep_last and save_total_limit differ", expected=str(limit), found=str(options.keep_last)
                )
            options = replace(options, keep_last=limit)
        self._trainer = trainer
        self._volume = volume
        self._run = run
        self._options = options
        self._certificate = certificate
        self._open: Checkpointer | None = None
        #: The step that training goes on from.
        self._step: int | None = None
        self._rng: dict[str, Any] | None = None
        self._best: str | None = None
        self._pinned: int | None = None
        self._theirs: dict[str, Callable[..., Any]] = {}
        for name, ours in (
            ("train", self.train),
            ("_save_checkpoint", self._save),
            ("_load_from_checkpoint", self._load_model),
            ("_load_optimizer_and_scheduler", self._load),
            ("_load_scaler", self._load_scaler),
            ("_load_rng_state", self._load_rng),
            ("_load_best_model", self._load_best),
        ):
            theirs = getattr(trainer, name, None)
            if not callable(theirs):
                raise UsageError(
                    f"this Trainer has no {name}",
                    found=type(trainer).__module__,
                    next_step="use a version of transformers that docs/guides/frameworks.md names",
                )
            self._theirs[name] = theirs
            setattr(trainer, name, ours)
        trainer.add_callback(_callback(self))

    @property
    def checkpointer(self) -> Checkpointer:
        if self._open is None:
            raise UsageError("a trainer saves and loads within train()")
        return self._open

    def train(self, resume_from_checkpoint: Any = None, *args: Any, **options: Any) -> Any:
        with (
            Checkpointer(self._volume, self._run, options=self._options, certificate=self._certificate) as self._open,
            tempfile.TemporaryDirectory(prefix="headrace-trainer-") as folder,
        ):
            try:
                self._step, self._pinned = self._find(resume_from_checkpoint), None
                if self._step is not None:
                    if self._pins_best:
                        # Where training goes back, what became the best since would not be replaced while pinned.
                        self.checkpointer.let_go(_BEST, above=self._step)
                    resume_from_checkpoint = self._write_state(Path(folder), self._step)
                elif resume_from_checkpoint == "latest":
                    resume_from_checkpoint = None
                return self._theirs["train"](resume_from_checkpoint, *args, **options)
            finally:
                self._open = self._step = self._rng = None

    # ---- going on --------------------------------------------------------------------------------------------------

    def _find(self, wanted: Any) -> int | None:
        """The step to go on from; None: from none of the volume."""
        if wanted is None or wanted is False:
            return None
        if wanted is True or wanted == "latest":
            latest = self.checkpointer.latest()
            if latest is None and wanted is True:
                raise ObjectNotFound(f"there is no committed checkpoint of run {self._run!r}")
            return latest
        named = os.fspath(wanted)
        if (Path(named) / "trainer_state.json").is_file():
            return None
        match = _NAMED.search(named)
        if match is None:
            raise UsageError(
                "resume_from_checkpoint",
                expected='True, "latest", "checkpoint-N", or a folder of Trainer',
                found=repr(wanted),
            )
        return int(match[1])

    def _write_state(self, folder: Path, step: int) -> str:
        """Trainer's own state, where it looks for it: before it makes model and optimizer."""
        self.checkpointer.restore(step)
        try:
            state = json.loads(self.checkpointer.extra[_STATE])
            # Trainer takes the best one for lost where it is no folder.
            self._best, state["best_model_checkpoint"] = state["best_model_checkpoint"], None
        except (KeyError, TypeError, ValueError):
            raise CheckpointFailed(
                "this checkpoint was not saved by a Trainer", where=str(CheckpointId(self._run, step))
            ) from None
        checkpoint = folder / f"checkpoint-{step}"
        checkpoint.mkdir()
        (checkpoint / "trainer_state.json").write_text(json.dumps(state))
        return str(checkpoint)

    def name_best(self) -> None:
        """Where it is hidden from Trainer, which would look for a folder of this name."""
        if self._best is not None:
            self._trainer.state.best_model_checkpoint, self._best = self._best, None

    def _load_model(self, checkpoint: Any, *args: Any, **options: Any) -> None:
        if self._step is None:
            self._theirs["_load_from_checkpoint"](checkpoint, *args, **options)
        # Else it comes with the optimizer: one load, when both are what they will be trained as.

    def _load(self, checkpoint: Any) -> None:
        if self._step is None:
            self._theirs["_load_optimizer_and_scheduler"](checkpoint)
            return
        trainer = self._trainer
        self.checkpointer.restore(self._step, trainer.model, _optimizer(trainer), extra=_with_states(trainer))
        certificate = self.checkpointer.certificate
        # Trainer puts them back when it has skipped what was seen.
        restored = certificate is not None and certificate.rng.startswith("restored")
        self._rng = rng_state() if restored else None

    def _load_scaler(self, checkpoint: Any) -> None:
        if self._step is None:
            self._theirs["_load_scaler"](checkpoint)

    def _load_rng(self, checkpoint: Any) -> None:
        if self._step is None:
            self._theirs["_load_rng_state"](checkpoint)
        elif self._rng is not None:
            set_rng_state(self._rng)

    def _load_best(self) -> None:
        best = self._best_step()
        if best is None:
            self._theirs["_load_best_model"]()
            return
        self.checkpointer.restore(best, self._trainer.model)
        # What comes next would look for a folder of this name.
        self._best, self._trainer.state.best_model_checkpoint = self._trainer.state.best_model_checkpoint, None

    # ---- saving ----------------------------------------------------------------------------------------------------

    def _save(self, model: Any, trial: Any, *args: Any, **options: Any) -> None:
        trainer, state = self._trainer, self._trainer.state
        if trial is not None:
            raise UsageError("a search of hyperparameters has a run for each trial, which a volume has not")
        trainer.store_flos()
        if state.best_global_step == state.global_step:
            state.best_model_checkpoint = str(CheckpointId(self._run, state.global_step))
        self._keep_best()
        self.checkpointer.save(
            state.global_step,
            trainer.model,
            _optimizer(trainer),
            extra={**_with_states(trainer), _STATE: _state_of(trainer)},
        )

    def _keep_best(self) -> None:
        """Before the commit that would delete it."""
        state = self._trainer.state
        if not self._pins_best:
            return
        best = self._best_step()
        if best is not None and best not in (self._pinned, state.global_step):
            try:
                self.checkpointer.keep(best, _BEST)
            except ObjectNotFound:
                # A better one took its place, was left behind, and is gone.
                _log.warning("headrace: %s was the best, and is not there any more", state.best_model_checkpoint)
                state.best_metric = state.best_global_step = state.best_model_checkpoint = None
                return
            self._pinned = best

    @property
    def _pins_best(self) -> bool:
        return self._options.keep_last is not None and bool(self._trainer.args.load_best_model_at_end)

    def _best_step(self) -> int | None:
        """None: there is none, or it is in a folder of Trainer's own. One that was not saved is not the best."""
        run, _, step = str(self._trainer.state.best_model_checkpoint).rpartition("/")
        named = _NAMED.search(step)
        return int(named[1]) if named is not None and run == self._run else None


def _optimizer(trainer: Any) -> Any:
    """Accelerate's wrapper has no state of its own."""
    return getattr(trainer.optimizer, "optimizer", trainer.optimizer)


def _with_states(trainer: Any) -> dict[str, Any]:
    scaler = getattr(trainer.accelerator, "scaler", None)
    states = {"scheduler": trainer.lr_scheduler, "scaler": scaler}
    return {name: what for name, what in states.items() if what is not None}


def _state_of(trainer: Any) -> str:
    """What would be in `trainer_state.json`."""
    from transformers.trainer_callback import ExportableState

    kept = trainer.state.stateful_callbacks
    for callback in [*trainer.callback_handler.callbacks, trainer.control]:
        if isinstance(callback, ExportableState):
            name = type(callback).__name__
            if isinstance(kept.get(name), list):
                kept[name].append(callback.state())
            else:
                kept[name] = callback.state()
    with tempfile.TemporaryDirectory(prefix="headrace-trainer-") as folder:
        path = Path(folder) / "trainer_state.json"
        trainer.state.save_to_json(str(path))
        return path.read_text()


def _callback(checkpoints: _Checkpoints) -> Any:
    from transformers import TrainerCallback

    class VolumeCheckpoints(TrainerCallback):  # type: ignore[misc]
        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            checkpoints.name_best()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            # The restart certificate is complete when the first step behind a restore is.
            checkpoints.checkpointer.first_step()

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            checkpoints.name_best()

    return VolumeCheckpoints()


def _refuse(trainer: Any) -> None:
    args = trainer.args
    for name, there, instead in (
        ("DeepSpeed", getattr(trainer, "is_deepspeed_enabled", False), "DDP or FSDP2"),
        ("XLA's FSDP", getattr(trainer, "is_fsdp_xla_enabled", False), "DDP or FSDP2"),
        ("save_only_model", args.save_only_model, "headrace.torch.save_model behind training"),
        ("push_to_hub", args.push_to_hub, "trainer.push_to_hub() behind training"),
    ):
        if there:
            raise UsageError(f"{name} does not go with checkpoints in a volume", expected=instead, found=name)
