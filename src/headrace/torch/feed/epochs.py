"""A loader in epochs of one length, for frameworks that want it: Lightning as it is, `Trainer` by `feed_trainer`.

Epochs(TokenLoader(volume, "corpus", sequence_length=1024, global_batch=32, seed=1))
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any, Generic, TypeVar

import torch

from headrace.errors import UsageError
from headrace.torch.feed.ordered import Ordered

Batch = TypeVar("Batch")


class Epochs(Generic[Batch]):
    """Iterations of `len()` batches over a loader that goes on for ever, of tokens or of records; one that begins
    within an epoch, because a state was loaded or the last one was broken off, has what is left of it.

    An epoch is `sample_count // global_batch` steps; what is over is not left out, the next one goes on behind it. The
    length is known, so that no framework has to read ahead to see the end, and the state counts what was handed out.
    It is handed on as it is: no framework deals it out again. `form`: what becomes of each batch (`causal`, say).
    """

    def __init__(self, loader: Ordered, form: Callable[[Any], Batch] | None = None) -> None:
        self.loader = loader
        self._form = form
        options = loader.options
        self._batches = loader.sample_count // options.global_batch * options.accumulation
        if not self._batches:
            found = f"{options.global_batch} a step"
            raise UsageError("an epoch has not one step", expected=f"at most {loader.sample_count}", found=found)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        done = self.loader.consumed // self.loader.options.joint_batch % self._batches
        for _ in range(self._batches - done):
            try:
                batch = next(self.loader)
            except StopIteration:
                return
            yield batch if self._form is None else self._form(batch)

    def state_dict(self) -> dict[str, int | str]:
        return self.loader.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.loader.load_state_dict(state)


def causal(batch: Any) -> dict[str, torch.Tensor]:
    """A batch of `TokenLoader` or `DocumentLoader` as causal models of `transformers` take it, which shift labels by
    themselves unless they get them shifted."""
    if isinstance(batch, torch.Tensor):
        return {"input_ids": batch, "labels": batch}
    labels = batch["labels"]
    return {
        "input_ids": batch["input_ids"],
        "labels": labels,
        "shift_labels": labels,
        "position_ids": batch["position_ids"],
    }
