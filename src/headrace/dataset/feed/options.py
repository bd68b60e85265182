"""What a feed of batches is asked for, and what it counts."""

from __future__ import annotations

from dataclasses import dataclass

from headrace.dataset.order.steps import StepOptions


@dataclass(frozen=True, kw_only=True)
class FeedOptions(StepOptions):
    """What one rank gets of a dataset of tokens. Memory is held for `prefetch` batches: at most this machine's."""

    #: Tokens a sample, without the one more that is the last target.
    sequence_length: int
    #: Batches that are read ahead, and the memory that is held: at most this machine's. Small ones are read in groups,
    #: a MiB with one request, of at most half of them: with 8 and more the reads of small batches cost least.
    prefetch: int = 4

    def __post_init__(self) -> None:
        self._check("sequence_length", 1, 1 << 30)
        super().__post_init__()


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
    #: Bytes that came from a stage, and not from the volume.
    stage_bytes: int = 0
    #: Of all waiting that for reads; the rest is for who decodes.
    fetch_wait_s: float = 0.0
