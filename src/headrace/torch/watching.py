"""Training loops of others under `headrace.measure.Watch`: what DDP hides in `backward`, and `transformers.Trainer`.

    see_collectives(watch, ddp_model)
    watch_trainer(trainer, watch, loader)

Lightning's is `headrace.torch.lightning_watch.WatchCallback`.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import torch
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import allreduce_hook

from headrace.errors import UsageError

if TYPE_CHECKING:
    from headrace.measure import Watch

#: Of gradients: process group and bucket -> future, as `register_comm_hook` wants it.
Hook = Callable[[Any, Any], torch.futures.Future[torch.Tensor]]


def see_collectives(
    watch: Watch, model: torch.nn.parallel.DistributedDataParallel, hook: Hook = allreduce_hook, state: Any = None
) -> None:
    """Tell what `backward` waits for gradients of others from what it computes, in `watch.compute()`.

    By DDP's communication hook, which `hook` is from now on (with `state`; the default is what DDP does without one):
    what comes between the last gradients that were ready and the last that were exchanged could be hidden behind
    nothing. FSDP has no such hook: there exchanges stay in `compute`.
    """
    if not isinstance(model, torch.nn.parallel.DistributedDataParallel):
        raise UsageError("see_collectives", expected="a model in DistributedDataParallel", found=type(model).__name__)

    def timed(given: Any, bucket: Any) -> Any:
        watch.gradients_ready()

        def done(finished: Any) -> Any:
            watch.gradients_exchanged()
            return finished.value()

        future: Any = hook(given, bucket)
        return future.then(done)

    # DDP looks at annotations, and does not read those that are text.
    model.register_comm_hook(state, lambda given, bucket: timed(given, bucket))


def watch_trainer(trainer: Any, watch: Watch, loader: Any = None) -> None:
    """Watch `trainer`, a `transformers.Trainer`, before `train()`: data wait, computing (with its exchanges), saves.

    `loader`: the one of headrace that feeds it, so that reads and preparation are told apart. What is logged and
    evaluated is "other". `UsageError`: this version of transformers does not fetch by `get_batch_samples`.
    """
    from transformers import TrainerCallback

    fetch = getattr(trainer, "get_batch_samples", None)
    if fetch is None:
        raise UsageError(
            "this Trainer has no get_batch_samples", expected="transformers 4.46 or newer",
            next_step="hand watch.loader(...) to a loop of your own",
        )  # fmt: skip
    source = watch.source(loader)

    def get_batch_samples(*arguments: Any, **options: Any) -> Any:
        watch.begin_step(max(watch.next_step, trainer.state.global_step + 1))
        with watch.waiting(source):
            found = fetch(*arguments, **options)
        if not found[0]:
            watch.end_step(drop=True)
        return found

    class Watched(TrainerCallback):  # type: ignore[misc]
        computing: Any = None
        saves_from = 0.0

        def on_train_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            # Also behind an error that somebody caught, as `auto_find_batch_size` does.
            watch.drop_step()
            self.computing = None

        def on_epoch_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            source.begin()

        def on_step_begin(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.computing = watch.compute()
            self.computing.__enter__()

        def on_step_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            if self.computing is not None:
                self.computing.__exit__(None, None, None)
                self.computing = None
            self.saves_from = watch.now()

        def on_log(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            self.saves_from = watch.now()

        on_evaluate = on_log

        def on_save(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            # Nothing is called when it begins; what Trainer does before it has its own end.
            watch.recast("checkpoint", watch.now() - self.saves_from)
            self.saves_from = watch.now()

        def on_train_end(self, args: Any, state: Any, control: Any, **others: Any) -> None:
            watch.end_step()

    trainer.get_batch_samples = get_batch_samples
    trainer.add_callback(Watched())
