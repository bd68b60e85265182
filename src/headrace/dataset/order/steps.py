"""What a rank gets of the global order: steps, batches of them, and where the end is."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.dataset.order.mixture import GlobalOrder
from headrace.dataset.order.state import MAX_CONSUMED, OrderState, check_state
from headrace.errors import DatasetError, UsageError

I64 = npt.NDArray[np.int64]

#: Places of the order that are computed in one go: one call of the sampler costs the same for 1 and for 500 of them.
_ORDER_PLACES = 2048


@dataclass(frozen=True, kw_only=True)
class StepOptions:
    """What one rank gets of a dataset, and how far ahead."""

    #: Samples a step over all ranks; a multiple of `world` times `accumulation`.
    global_batch: int
    #: Batches in which a rank gets its part of a step.
    accumulation: int = 1
    #: Rank and number of ranks that share the data. Batch k of a step is the k-th of its `accumulation` equal parts,
    #: and rank r has the r-th of the `world` equal parts of that.
    rank: int = 0
    world: int = 1
    #: Of the order: 0 to 2^64 - 1.
    seed: int = 0
    #: Batches that are read ahead.
    prefetch: int = 4
    #: Passes over the data, over each dataset of a mixture at the least; None goes on for ever. Batches run over the
    #: end of an epoch; the last, short one is left out.
    epochs: int | None = None
    #: Seconds that a batch may let the step wait. Longer than the devices' own loss_timeout, so that their more exact
    #: error comes first where a target is gone.
    stall_timeout_s: float = 300.0
    #: Verify the checksum of every block that is read.
    verify: bool = True
    #: Where the data are staged, or will be, on this node (`headrace.dataset.stage`): what is there by then comes from
    #: there, and the rest, and what is not good, from the volume.
    stage: str | None = None
    #: A state saved with another `global_batch` is accepted, and goes on at the same sample.
    allow_global_batch_change: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("global_batch", 1, 1 << 30),
            ("accumulation", 1, 1 << 30),
            ("world", 1, 1 << 30),
            ("rank", 0, self.world - 1),
            ("prefetch", 1, 1024),
        ):
            self._check(name, low, high)
        if self.global_batch % (self.world * self.accumulation):
            raise UsageError(
                "global_batch does not divide among the ranks",
                expected=f"a multiple of {self.world} ranks x {self.accumulation} batches a step",
                found=str(self.global_batch),
            )
        if self.epochs is not None and self.epochs < 1:
            raise UsageError("epochs is out of range", expected="1 or more, or None", found=str(self.epochs))
        if not self.stall_timeout_s > 0:
            raise UsageError("stall_timeout_s is out of range", expected="more than 0", found=str(self.stall_timeout_s))

    def _check(self, name: str, low: int, high: int) -> None:
        value = getattr(self, name)
        if not isinstance(value, int):
            raise UsageError(f"{name} is no whole number", expected=f"{low} to {high}", found=repr(value))
        if not low <= value <= high:
            raise UsageError(f"{name} is out of range", expected=f"{low} to {high}", found=str(value))

    @property
    def joint_batch(self) -> int:
        """Samples of one batch of all ranks."""
        return self.global_batch // self.accumulation

    @property
    def local_batch(self) -> int:
        """Samples of a batch of this rank."""
        return self.joint_batch // self.world


class Place:
    """Where a loader stands in the order. `where`: what it reads, for messages."""

    def __init__(self, order: GlobalOrder, options: StepOptions, where: str) -> None:
        self.order, self.options, self.where = order, options, where
        #: Samples handed out, over all ranks.
        self.consumed = 0
        #: Where steps are counted from.
        self.steps_from = 0
        #: Batches were read: it stays where it is.
        self.begun = False

    @property
    def end(self) -> int | None:
        """Position behind the last sample; None where there is no end."""
        return None if self.options.epochs is None else self.order.end(self.options.epochs)

    def load(self, saved: OrderState, ours: OrderState) -> None:
        """Go on where `saved` stands; `ours` is what this loader's state would be there. `DatasetError`: it does not
        fit, or comes too late."""
        if self.begun:
            raise DatasetError(
                "the loader's state comes too late",
                where=self.where,
                found="batches were read already",
                next_step="load it before the first batch, into a new loader",
            )
        options = self.options
        check_state(saved, ours, allow_global_batch_change=options.allow_global_batch_change)
        same = saved.global_batch == options.global_batch
        within = (saved.consumed - saved.steps_from) % saved.global_batch
        if same and within % options.joint_batch:
            raise DatasetError(
                "the loader's state was saved within a step, where no batch of this loader begins",
                where=self.where,
                expected=f"a multiple of {options.joint_batch} samples of the step",
                found=f"{within} of {saved.global_batch}",
                next_step="resume with the accumulation that it was saved with, or more",
            )
        self.consumed = saved.consumed
        self.steps_from = saved.steps_from if same else saved.consumed

    def skip(self, batches: int) -> None:
        """Leave out the next `batches`, before the first one is read."""
        behind = self.consumed + batches * self.options.joint_batch
        if batches < 0 or behind >= MAX_CONSUMED or self.begun:
            raise UsageError(
                "batches cannot be left out",
                where=self.where,
                expected=f"0 or more, up to sample {MAX_CONSUMED}, before the first batch",
                found=f"{batches}, batches were read already" if self.begun else str(batches),
            )
        self.consumed = behind

    def batches(self) -> Iterator[tuple[I64, I64]]:
        """From here on, sources and samples of this rank, int64[local_batch] each, without moving."""
        for sources, samples in self.stretches():
            yield from zip(sources, samples, strict=True)

    def stretches(self) -> Iterator[tuple[I64, I64]]:
        """The same of some batches at a time: int64[some, local_batch] each."""
        joint, local = self.options.joint_batch, self.options.local_batch
        # Within an epoch, more or less: each one is a permutation of its own.
        epoch = sum(sampler.sample_count for sampler in self.order.samplers)
        many = max(1, min(_ORDER_PLACES // local, epoch // joint))
        position, end = self.consumed, self.end
        while end is None or position + joint <= end:
            if end is not None:
                many = min(many, (end - position) // joint)
            rows = np.arange(many, dtype=np.int64)[:, None] * joint + np.arange(local, dtype=np.int64)
            yield self.order.at(position + self.options.rank * local + rows)
            position += many * joint
