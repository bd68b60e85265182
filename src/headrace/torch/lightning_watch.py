"""Lightning's `Trainer` under `headrace.measure.Watch`.

    Trainer(callbacks=[WatchCallback(watch, loader)], ...).fit(model, Epochs(loader))

Lightning calls nothing before it fetches a batch, but it tells its profiler: that is where this callback listens, and
whichever profiler the trainer has goes on as it was.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace.torch.lightning import Callback

if TYPE_CHECKING:
    from headrace.measure import Watch

_FETCHES = "[_TrainingEpochLoop].train_dataloader_next"


class WatchCallback(Callback):  # type: ignore[misc]
    """Data wait, copies to the device, computing (with its exchanges), checkpoints. `loader`: the one of headrace that
    feeds it, so that reads and preparation are told apart. Validation and logging are "other"."""

    def __init__(self, watch: Watch, loader: Any = None) -> None:
        self._watch = watch
        self._source = watch.source(loader)
        self._open: dict[str, Any] = {}
        #: Batches of the step that runs, and how many make one.
        self._batches = 0
        self._per_step = 1
        self._profiler: Any = None

    def on_train_start(self, trainer: Any, pl_module: Any) -> None:
        self._per_step = trainer.accumulate_grad_batches
        self._watch.drop_step()
        self._watch.begin_step(max(self._watch.next_step, trainer.global_step + 1))
        self._source.begin()
        self._batches = 0
        self._profiler = profiler = trainer.profiler
        start, stop = profiler.start, profiler.stop

        def started(action: str) -> None:
            start(action)
            self._started(action)

        def stopped(action: str) -> None:
            self._stopped(action)
            stop(action)

        profiler.start, profiler.stop = started, stopped

    def on_train_batch_start(self, trainer: Any, pl_module: Any, batch: Any, batch_idx: int) -> None:
        self._batches += 1

    def on_train_epoch_end(self, trainer: Any, pl_module: Any) -> None:
        self._end()

    def on_train_end(self, trainer: Any, pl_module: Any) -> None:
        if self._let_go():
            self._end()

    def on_exception(self, trainer: Any, pl_module: Any, exception: BaseException) -> None:
        if self._let_go():
            # Whoever catches it trains again from before this step.
            self._watch.drop_step()

    def _let_go(self) -> bool:
        """Whether training was watched until now."""
        if self._profiler is None:
            return False
        # The methods of its class again.
        del self._profiler.start, self._profiler.stop
        self._profiler = None
        while self._open:
            self._open.popitem()[1].__exit__(None, None, None)
        return True

    def _end(self) -> None:
        self._watch.end_step(drop=not self._batches)
        self._batches = 0

    def _started(self, action: str) -> None:
        watch = self._watch
        if action == _FETCHES:
            if self._batches >= self._per_step or not watch.in_step:
                watch.begin_step()
                self._batches = 0
            part = watch.waiting(self._source)
        elif action == "run_training_batch":
            part = watch.compute()
        elif action == "save_checkpoint":
            part = watch.checkpoint()
        elif action.startswith("[Strategy]") and action.endswith(".batch_to_device"):
            part = watch.copy()
        else:
            return
        if action not in self._open:
            part.__enter__()
            self._open[action] = part

    def _stopped(self, action: str) -> None:
        part = self._open.pop(action, None)
        if part is not None:
            part.__exit__(None, None, None)
