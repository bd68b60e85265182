"""`transformers.Trainer` on a loader of headrace: its checkpoints hold the loader's state, a resume skips at once.

    trainer = Trainer(model=model, args=arguments)
    feed_trainer(trainer, Epochs(TokenLoader(...), form=causal))
    trainer.train(resume_from_checkpoint=True)

(`TokenDataset` needs none of this: `Trainer` deals it out, and skips by counting indices.)
"""

from __future__ import annotations

from typing import Any

from headrace.errors import DatasetError, UsageError
from headrace.torch.feed.epochs import Epochs


def feed_trainer(trainer: Any, epochs: Epochs[Any]) -> None:
    """Let `trainer` train from these, before `train()`.

    The state goes into `trainer_state.json` of each checkpoint, and is loaded when one is resumed, with any number of
    ranks; `Trainer`'s own skipping, which would read what it skips, is switched off (`ignore_data_skip`). The fraction
    in `state.epoch` is then counted from the resume. `UsageError`: batch size or accumulation are not the trainer's.
    `DatasetError`, when training begins: the checkpoint has no state, or one that does not fit.
    """
    from transformers import TrainerCallback
    from transformers.trainer_callback import ExportableState

    options = epochs.loader.options
    for name, ours, theirs in (
        ("per_device_train_batch_size", options.local_batch, trainer.args.train_batch_size),
        ("gradient_accumulation_steps", options.accumulation, trainer.args.gradient_accumulation_steps),
        ("world_size", options.world, trainer.args.world_size),
    ):
        if ours != theirs:
            raise UsageError(f"the loader has another {name} than the trainer", expected=str(theirs), found=str(ours))

    # Of no module: Trainer makes callbacks of a checkpoint anew by their class alone, if asked to.
    class LoaderState(TrainerCallback, ExportableState):  # type: ignore[misc]
        def state(self) -> dict[str, Any]:
            return {"args": {}, "attributes": {"saved": epochs.state_dict()}}

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if not state.global_step:
                return
            kept = state.stateful_callbacks.get(LoaderState.__name__, {})
            saved = kept.get("attributes", {}).get("saved") if isinstance(kept, dict) else None
            if saved is None:
                raise DatasetError(
                    "the trainer's checkpoint has no state of the loader",
                    where=f"{args.output_dir}, step {state.global_step}",
                    expected="one that was saved by a trainer with feed_trainer",
                    next_step="go past what was seen with `loader.skip(batches)`, and train without resuming",
                )
            epochs.load_state_dict(saved)

    trainer.args.ignore_data_skip = True
    trainer.get_train_dataloader = lambda: epochs
    trainer.add_callback(LoaderState())
