"""Which places of the global order this rank gets, for `DataLoader` and `StatefulDataLoader`.

    sampler = OrderSampler(dataset, global_batch=32)            # rank and world of the process group
    loader = StatefulDataLoader(dataset, batch_size=sampler.rows, sampler=sampler, num_workers=2)

A framework that deals out samples by itself (`Trainer`, Accelerate) wants none: it reads the dataset in sequence.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, TypedDict

import torch.utils.data

from headrace.dataset.feed.feed import Feed, FeedOptions
from headrace.dataset.feed.ring import no_memory
from headrace.dataset.order.state import LoaderState, current_state
from headrace.errors import UsageError
from headrace.torch.feed.dataset import TokenDataset
from headrace.torch.feed.parallel import data_rank

if TYPE_CHECKING:
    from typing_extensions import Unpack

#: Modules that deal out to ranks what they iterate over.
_DEALERS = (
    "accelerate.data_loader",
    "lightning_fabric.utilities.distributed",
    "lightning.fabric.utilities.distributed",
)


class StepsOptions(TypedDict, total=False):
    """`headrace.dataset.FeedOptions` says what each means."""

    accumulation: int
    allow_global_batch_change: bool


class LayoutOptions(StepsOptions, total=False):
    """What sampler and iterable take. `rank`, `world`: of the process group where they are left out."""

    rank: int | None
    world: int | None


class Layout:
    """Steps of `global_batch` samples, a rank's part of them, and states: what sampler and iterable share."""

    def __init__(
        self,
        dataset: TokenDataset,
        *,
        global_batch: int,
        rank: int | None = None,
        world: int | None = None,
        **steps: Unpack[StepsOptions],
    ) -> None:
        rank, world = data_rank(rank, world)
        self.options = FeedOptions(
            sequence_length=next(iter(dataset.sources.values())).sequence_length,
            global_batch=global_batch,
            rank=rank,
            world=world,
            seed=dataset.order.seed,
            **steps,
        )
        self.dataset = dataset
        #: Steps an epoch: `len` of what frameworks iterate over must be whole. What is over is not left out: the next
        #: epoch goes on behind this one.
        self.steps = len(dataset) // global_batch
        if not self.steps:
            raise UsageError("an epoch has not one step", expected=f"at most {len(dataset)}", found=str(global_batch))
        self.steps_from = 0

    @property
    def epoch_samples(self) -> int:
        return self.steps * self.options.global_batch

    def end_of_epoch(self, consumed: int) -> int:
        """Of the epoch that goes on behind `consumed`, in whole batches: behind a change of the global batch these, and
        so the epochs, do not begin at multiples of theirs any more, and nothing is left out for that."""
        return (consumed // self.epoch_samples + 1) * self.epoch_samples + consumed % self.options.joint_batch

    def state(self, consumed: int) -> dict[str, int | str]:
        state = current_state(
            self.dataset.sources,
            self.dataset.order,
            global_batch=self.options.global_batch,
            consumed=consumed,
            steps_from=self.steps_from,
        )
        return state.to_dict()

    def load(self, state: dict[str, Any]) -> int:
        """`consumed` of a state of this or any other loader of headrace. `DatasetError` says what differs."""
        shares = self.dataset.order.shares
        feed = Feed(self.dataset.sources, self.options, shares=shares, buffers=no_memory)
        feed.load_state(LoaderState.from_dict(state))
        self.steps_from = feed.state().steps_from
        return feed.consumed


class OrderSampler(torch.utils.data.Sampler[int]):
    """Places of the global order for one rank, `rows` for each batch, one epoch an iteration, for a `DataLoader` with
    `batch_size=sampler.rows`.

    Batch k of all ranks together is `[k * rows * world, (k + 1) * rows * world)`, and rank r has the r-th equal part,
    as with `TokenLoader`, whose states are the same. An epoch is `len(dataset) // global_batch` steps; the next one
    goes on where it ended, also where the global batch was changed within it. An iteration that was broken off begins
    again.

    Under `StatefulDataLoader` the state of the loader is exact, in O(1), and may be resumed with another world. With a
    plain `DataLoader`, which reads ahead and does not say how far, `state_after(batches)` counts from the begin of the
    iteration. `load_state_dict`: before the iteration.
    """

    def __init__(self, dataset: TokenDataset, *, global_batch: int, **layout: Unpack[LayoutOptions]) -> None:
        self._layout = Layout(dataset, global_batch=global_batch, **layout)
        #: Where the next iteration begins, and where the last one did.
        self._consumed = self._begun = 0
        #: For the data set's own check.
        dataset._rows = self.rows

    @property
    def rows(self) -> int:
        """Samples of a batch of this rank."""
        return self._layout.options.local_batch

    def __len__(self) -> int:
        return self._layout.steps * self._layout.options.accumulation * self.rows

    def __iter__(self) -> _Places:
        if self._layout.options.world > 1:
            refuse_dealers("OrderSampler", "use the dataset without a sampler, and let the framework deal it out")
        self._begun = self._consumed
        return _Places(self, self._consumed)

    def set_epoch(self, epoch: int) -> None:
        """Begin this epoch, unless the next iteration stands within it already. They are counted in steps of this
        global batch, also where a state of another one was loaded: the number may then be another."""
        if self._consumed // self._layout.epoch_samples != epoch:
            self._consumed = self._begun = epoch * self._layout.epoch_samples

    def state_after(self, batches: int) -> dict[str, int | str]:
        """Where the loader stands when it handed out `batches` since the last iteration began, which may have read
        ahead, to its end, by now."""
        return self._layout.state(self._begun + batches * self._layout.options.joint_batch)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._consumed = self._begun = self._layout.load(state)


class _Places(Iterator[int]):
    """An iteration. `StatefulDataLoader` asks it for its state."""

    def __init__(self, sampler: OrderSampler, consumed: int) -> None:
        self._sampler = sampler
        self._begin(consumed)

    def _begin(self, consumed: int) -> None:
        layout = self._sampler._layout
        self._consumed = consumed
        self._end = layout.end_of_epoch(consumed)
        self._row = 0

    def __next__(self) -> int:
        options = self._sampler._layout.options
        if self._consumed + options.joint_batch > self._end:
            self._sampler._consumed = self._end
            raise StopIteration
        place = self._consumed + options.rank * options.local_batch + self._row
        self._row += 1
        if self._row == options.local_batch:
            self._consumed += options.joint_batch
            self._row = 0
        return place

    def state_dict(self) -> dict[str, int | str]:
        return self._sampler._layout.state(self._consumed)

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self._sampler.load_state_dict(state)
        self._begin(self._sampler._consumed)


def refuse_dealers(what: str, advice: str) -> None:
    """`UsageError` where the caller is iterated over by something that deals out to the ranks what it gets: each rank
    would have a part of its part."""
    frame = sys._getframe(1)
    while frame.f_back is not None:
        frame = frame.f_back
        if frame.f_globals.get("__name__") in _DEALERS and type(frame.f_locals.get("self")).__name__ in _DEALING:
            raise UsageError(
                f"{what} gives this rank its part already, and {type(frame.f_locals['self']).__name__} of "
                f"{frame.f_globals['__name__'].partition('.')[0]} would deal that out once more",
                next_step=advice,
            )


#: Of these modules, the classes that do.
_DEALING = ("BatchSamplerShard", "IterableDatasetShard", "DataLoaderDispatcher", "DistributedSamplerWrapper")
