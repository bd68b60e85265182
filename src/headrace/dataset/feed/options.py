"""What a feed of batches is asked for, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.errors import UsageError


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """What one rank gets of a dataset, and how far ahead."""

    #: Tokens a sample, without the one more that is the last target.
    sequence_length: int
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
    #: Batches that are read ahead, and with one batch each the memory that is held: at most this machine's.
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
            ("sequence_length", 1, 1 << 30),
            ("global_batch", 1, 1 << 30),
            ("accumulation", 1, 1 << 30),
            ("world", 1, 1 << 30),
            ("rank", 0, self.world - 1),
            ("prefetch", 1, 1024),
        ):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise UsageError(f"{name} is no whole number", expected=f"{low} to {high}", found=repr(value))
            if not low <= value <= high:
                raise UsageError(f"{name} is out of range", expected=f"{low} to {high}", found=str(value))
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

    @property
    def joint_batch(self) -> int:
        """Samples of one batch of all ranks."""
        return self.global_batch // self.accumulation

    @property
    def local_batch(self) -> int:
        """Samples of a batch of this rank."""
        return self.joint_batch // self.world


@dataclass(frozen=True, kw_only=True)
class FeedMetrics:
    """Counters since the feed was made; times in seconds."""

    batches: int
    samples: int
    #: Bytes of tokens handed out, without padding (blocks read for them are a little more).
    token_bytes: int
    #: Waited for batches, all together, the last one, the longest one.
    wait_s: float
    last_wait_s: float
    longest_wait_s: float
    #: Batches that lie ready now, of those in flight.
    ready: int
    in_flight: int
    ring_bytes: int
