"""Tokens of a volume as a map-style dataset, for loaders and frameworks that want one.

    dataset = TokenDataset(volume, "corpus", sequence_length=1024, seed=1)
    dataset[0]                                # int64 [1025]: the first sample of the global order

Index i is place i of the global order, not sample i of the data: whoever reads it in sequence has it shuffled, and the
parts that a framework deals out to its ranks are parts of one global order. `TokenLoader` needs neither worker
processes nor a sampler; use that where you may choose.
"""

from __future__ import annotations

import operator
from collections.abc import Mapping, Sequence
from typing import Any, Literal, TypeAlias

import numpy as np
import torch
import torch.utils.data

from headrace.dataset.feed.chosen import Chosen
from headrace.dataset.feed.feed import Feed, FeedBatch, FeedOptions
from headrace.dataset.feed.ring import no_memory
from headrace.dataset.order.mixture import Mixture
from headrace.dataset.tokens.samples import WINDOWS
from headrace.dataset.tokens.segments import IGNORED
from headrace.errors import UsageError
from headrace.torch.feed.loader import open_sources
from headrace.volume import Volume

Form: TypeAlias = Literal["tokens", "causal"]


class TokenDataset(torch.utils.data.Dataset[Any]):
    """`len()` samples an epoch; index `i` is place `epoch * len() + i` of the global order, in any epoch.

    `form`: "tokens": int64[sequence_length + 1], inputs and targets in one. "causal": what causal models of
    `transformers` take, `{"input_ids", "labels"}` of int64[sequence_length + 1] (the model shifts by itself), and for
    packed and padded samples `position_ids`, from 0 in every document, and -100 in labels for what is no target.

    A batch of indices (`__getitems__`, which `DataLoader` uses) is one read. It may be pickled and forked: worker
    processes open the volume's devices by themselves. Other options are those of `TokenLoader` and `DocumentLoader`.
    """

    def __init__(
        self,
        volume: Volume,
        data: str | Mixture,
        *,
        sequence_length: int,
        seed: int = 0,
        samples: str | Mapping[str, str] = WINDOWS,
        form: Form = "tokens",
        pad_id: int | None = None,
        verify: bool = True,
        stall_timeout_s: float = 300.0,
        stage: str | None = None,
    ) -> None:
        if form not in ("tokens", "causal"):
            raise UsageError("unknown form of samples", expected="tokens or causal", found=repr(form))
        sources = open_sources(volume, data, samples, sequence_length)
        shares = data.shares([each.sample_count for each in sources.values()]) if isinstance(data, Mixture) else [1]
        options = FeedOptions(sequence_length=sequence_length, global_batch=1, seed=seed, verify=verify, stage=stage)
        # It checks them, and knows order and padding; it is never begun.
        feed = Feed(sources, options, shares=shares, buffers=no_memory, pad_id=pad_id)
        self.sources = feed.sources
        self.order = feed.order
        self.form: Form = form
        self.epoch = 0
        self._told = any(each.kind != WINDOWS for each in self.sources.values())
        self._chosen = Chosen(
            feed.sources, feed.order, pad_id=feed.pad_id, verify=verify, stall_timeout_s=stall_timeout_s
        )
        #: Rows of a batch, where a sampler of ours says which they are.
        self._rows: int | None = None

    def __len__(self) -> int:
        return sum(each.sample_count for each in self.sources.values())

    def set_epoch(self, epoch: int) -> None:
        """Index 0 is the first sample of this epoch from now on. Frameworks call it."""
        if epoch < 0:
            raise UsageError("epoch is negative", expected="0 or more", found=str(epoch))
        self.epoch = int(epoch)

    def __getitem__(self, index: int) -> Any:
        """The sample at one place. `IndexError` for a negative one."""
        return self._read([operator.index(index)])[0]

    def __getitems__(self, indices: Sequence[int]) -> list[Any]:
        """The samples at these places, read at once."""
        if self._rows is not None:
            self._check(indices)
        return self._read(indices)

    def submit(self, positions: Sequence[int]) -> Any:
        """Start to read places of the global order; `items` of its `wait()` are the samples."""
        return self._chosen.submit(positions)

    def items(self, batch: FeedBatch) -> list[Any]:
        """The rows of a batch in the form of this dataset."""
        batched = self.batch(batch)
        if isinstance(batched, torch.Tensor):
            return list(batched.unbind())
        return [dict(zip(batched, row, strict=True)) for row in zip(*batched.values(), strict=True)]

    def batch(self, batch: FeedBatch) -> Any:
        """All rows of a batch in one: a tensor, or a dictionary of them."""
        tokens = torch.from_numpy(batch.tokens.astype(np.int64))
        if self.form == "tokens":
            return tokens
        if not self._told:
            return {"input_ids": tokens, "labels": tokens.clone()}
        segments = batch.segments()
        places = np.arange(tokens.shape[1])
        begins = np.maximum.accumulate(np.where(segments.begins, places, 0), axis=1)
        return {
            "input_ids": tokens,
            "labels": tokens.masked_fill(torch.from_numpy(segments.begins | segments.padding), IGNORED),
            "position_ids": torch.from_numpy(places - begins),
        }

    def _read(self, indices: Sequence[int]) -> list[Any]:
        if not len(indices):
            return []
        if min(indices) < 0:
            raise IndexError(f"index {min(indices)} of a dataset that begins at 0")
        first = self.epoch * len(self)
        return self.items(self._chosen.submit([first + int(index) for index in indices]).wait())

    def _check(self, indices: Sequence[int]) -> None:
        if len(indices) != self._rows or list(indices) != list(range(indices[0], indices[0] + len(indices))):
            raise UsageError(
                "a batch is not the one that the sampler gave: something between them deals it out once more",
                expected=f"{self._rows} places one after another",
                found=f"{len(indices)}: {', '.join(map(str, indices[:6]))}{', ...' if len(indices) > 6 else ''}",
                next_step="let either the framework deal out the samples, without OrderSampler, or the sampler "
                "(batch_size of the DataLoader: rows of one rank; Lightning: use_distributed_sampler=False)",
            )
