"""Batches ahead of time: a fixed ring of buffers that the native engine fills in the order of the samples.

Nothing runs here between two calls: no thread, no worker process. A call takes the oldest buffer, and a released buffer
is handed straight to the engine for the batch that no buffer has yet. Memory is the ring, whatever the data.

    positions     [ consumed ......................................... ) of the global order, global_batch a step
    handed out --^  | in flight: up to `prefetch` batches, oldest first |  next to submit
"""

from __future__ import annotations

import contextlib
import os
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataset.sampler import I64, Sampler
from headrace.dataset.state import LoaderState, check_state, current_state
from headrace.dataset.stream import TokenStream
from headrace.errors import DatasetError, DeviceTimeout, HeadraceError, UsageError
from headrace.volume import VolumeTransfer

#: Places of the order that are computed in one go: one call of the sampler costs the same for 1 and for 500 of them.
_ORDER_PLACES = 2048


@dataclass(frozen=True, kw_only=True)
class FeedOptions:
    """What one rank gets of a dataset, and how far ahead."""

    #: Tokens a sample, without the one more that is the last target.
    sequence_length: int
    #: Samples a step over all ranks; a multiple of `world`.
    global_batch: int
    #: Rank and number of ranks that share the data: rank r gets samples [r, r + 1) * global_batch / world of each step.
    rank: int = 0
    world: int = 1
    #: Of the order: 0 to 2^64 - 1.
    seed: int = 0
    #: Batches that are read ahead, and with one batch each the memory that is held.
    prefetch: int = 4
    #: Passes over the data; None goes on for ever. Batches run over the end of an epoch; the last, short one is left
    #: out.
    epochs: int | None = None
    #: Seconds that a batch may let the step wait. Longer than the devices' own loss_timeout, so that their more exact
    #: error comes first where a target is gone.
    stall_timeout_s: float = 300.0
    #: Verify the checksum of every block that is read.
    verify: bool = True
    #: A state saved with another `global_batch` is accepted, and goes on at the same sample.
    allow_global_batch_change: bool = False

    def __post_init__(self) -> None:
        for name, low, high in (
            ("sequence_length", 1, 1 << 30),
            ("global_batch", 1, 1 << 30),
            ("world", 1, 1 << 30),
            ("rank", 0, self.world - 1),
            ("prefetch", 1, 1024),
        ):
            value = getattr(self, name)
            if not isinstance(value, int):
                raise UsageError(f"{name} is no whole number", expected=f"{low} to {high}", found=repr(value))
            if not low <= value <= high:
                raise UsageError(f"{name} is out of range", expected=f"{low} to {high}", found=str(value))
        if self.global_batch % self.world:
            raise UsageError(
                "global_batch does not divide among the ranks",
                expected=f"a multiple of {self.world}",
                found=str(self.global_batch),
            )
        if self.epochs is not None and self.epochs < 1:
            raise UsageError("epochs is out of range", expected="1 or more, or None", found=str(self.epochs))
        if not self.stall_timeout_s > 0:
            raise UsageError("stall_timeout_s is out of range", expected="more than 0", found=str(self.stall_timeout_s))

    @property
    def local_batch(self) -> int:
        """Samples a step of this rank."""
        return self.global_batch // self.world


@dataclass(frozen=True, kw_only=True)
class FeedMetrics:
    """Counters since the feed was made; times in seconds."""

    batches: int
    samples: int
    #: Bytes of tokens handed out (blocks read for them are a little more).
    token_bytes: int
    #: Waited for batches, all together, the last one, the longest one.
    wait_s: float
    last_wait_s: float
    longest_wait_s: float
    #: Batches that lie ready now, of those in flight.
    ready: int
    in_flight: int
    ring_bytes: int


@dataclass(frozen=True, kw_only=True)
class FeedBatch:
    """A buffer that was filled, lent until it is released."""

    slot: int
    #: dtype[local_batch, sequence_length + 1].
    tokens: npt.NDArray[Any]
    #: Numbers of the samples in the dataset: int64[local_batch].
    samples: I64
    #: Place of the first sample of the *global* batch in the global order.
    position: int


@dataclass
class _Flight:
    slot: int
    position: int
    samples: I64
    transfer: VolumeTransfer
    #: It ended with an error, which was raised: read again when it is asked for again.
    failed: bool = False


class WindowFeed:
    """Batches of windows of `stream`, in order, for one rank. Not for several threads at once.

    `buffers`: where batches are read to, `dtype[local_batch, sequence_length + 1]` each (pinned, say); made here where
    none are given. There are `options.prefetch` unless more are given.
    """

    def __init__(
        self, stream: TokenStream, options: FeedOptions, buffers: Sequence[npt.NDArray[Any]] | None = None
    ) -> None:
        self.stream = stream
        self.options = options
        self.sampler = Sampler(stream.sample_count(options.sequence_length), options.seed)
        shape = (options.local_batch, options.sequence_length + 1)
        if buffers is None:
            buffers = [np.empty(shape, stream.dtype) for _ in range(options.prefetch)]
        self._buffers = list(buffers)
        self._free = deque(range(len(self._buffers)))
        self._flights: deque[_Flight] = deque()
        #: Slots that the caller has.
        self._lent: set[int] = set()
        self._consumed = 0
        #: Position of the batch that is submitted next.
        self._ahead = 0
        self._begun = False
        self._closed = False
        self._process = os.getpid()
        self._order_start = 0
        self._order: I64 = np.zeros((0, options.local_batch), np.int64)
        self._batches = 0
        self._wait_s = self._last_wait_s = self._longest_wait_s = 0.0

    @property
    def consumed(self) -> int:
        """Samples handed out, over all ranks."""
        return self._consumed

    @property
    def end(self) -> int | None:
        """Position behind the last whole batch; None where there is no end."""
        if self.options.epochs is None:
            return None
        return self.sampler.sample_count * self.options.epochs

    @property
    def ring_bytes(self) -> int:
        """Memory of all buffers."""
        return sum(buffer.nbytes for buffer in self._buffers)

    def begin(self) -> None:
        """Start to read ahead. From here on no state can be loaded."""
        self._usable()
        self._begun = True
        self._fill()

    def acquire(self) -> FeedBatch | None:
        """The next batch, lent until `release`; None behind the last one.

        `DeviceTimeout`: it did not come within `stall_timeout_s`; the batch stays the next one. Any other error of the
        volume: that read failed; another call reads the same batch again. Nothing is ever left out.
        """
        self.begin()
        if not self._flights:
            if self._free:
                return None
            raise UsageError("every buffer is lent", next_step="release one before the next batch")
        flight = self._flights[0]
        started = time.monotonic()
        if flight.failed:
            flight.transfer = self._submit(flight.slot, flight.samples)
            flight.failed = False
        try:
            flight.transfer.wait(self.options.stall_timeout_s)
        except HeadraceError as error:
            if isinstance(error, DeviceTimeout) and not flight.transfer.done():
                raise self._stalled() from error
            flight.failed = True
            raise
        finally:
            self._last_wait_s = time.monotonic() - started
            self._wait_s += self._last_wait_s
            self._longest_wait_s = max(self._longest_wait_s, self._last_wait_s)
        self._flights.popleft()
        self._lent.add(flight.slot)
        self._consumed += self.options.global_batch
        self._batches += 1
        return FeedBatch(
            slot=flight.slot,
            tokens=self._buffers[flight.slot],
            samples=flight.samples,
            position=flight.position,
        )

    def release(self, batch: FeedBatch) -> None:
        """Give a buffer back; the engine fills it again at once. `UsageError`: it was given back already."""
        if self._closed:
            return
        if batch.slot not in self._lent:
            raise UsageError("the batch was released already", where=f"position {batch.position}")
        self._lent.remove(batch.slot)
        self._free.append(batch.slot)
        # What is wrong with a read that comes later must not cost the caller the batch in hand: the next `acquire`
        # submits again and raises what is then wrong.
        with contextlib.suppress(HeadraceError):
            self._fill()

    def state(self) -> LoaderState:
        """Counts what was handed out, not what was read ahead."""
        return self._state_at(self._consumed)

    def load_state(self, saved: LoaderState) -> None:
        """Go on where `saved` stands, in O(1). `DatasetError`: it does not fit, or the feed has begun."""
        self._usable()
        if self._begun:
            raise DatasetError(
                "the loader's state comes too late",
                where=self.stream.name,
                found="batches were read already",
                next_step="load it before the first batch, into a new loader",
            )
        allow = self.options.allow_global_batch_change
        check_state(saved, self._state_at(saved.consumed), allow_global_batch_change=allow)
        self._consumed = self._ahead = saved.consumed

    def metrics(self) -> FeedMetrics:
        batch = self.options.local_batch
        return FeedMetrics(
            batches=self._batches,
            samples=self._batches * batch,
            token_bytes=self._batches * batch * (self.options.sequence_length + 1) * self.stream.dtype.itemsize,
            wait_s=self._wait_s,
            last_wait_s=self._last_wait_s,
            longest_wait_s=self._longest_wait_s,
            ready=sum(flight.transfer.done() for flight in self._flights),
            in_flight=len(self._flights),
            ring_bytes=self.ring_bytes,
        )

    def close(self) -> None:
        """Forget what is in flight: the engine lets go of each buffer when its read ends. Safe to call again."""
        self._closed = True
        self._flights.clear()
        self._free.clear()

    def _usable(self) -> None:
        if self._closed:
            raise UsageError("the loader is closed", where=self.stream.name)
        if os.getpid() != self._process:
            # Connections and the engine's threads do not survive a fork; a read would wait for ever.
            raise UsageError(
                "the loader was made in another process",
                where=self.stream.name,
                next_step="open volume and loader in the process that uses them",
            )

    def _state_at(self, consumed: int) -> LoaderState:
        return current_state(
            self.stream,
            self.sampler,
            sequence_length=self.options.sequence_length,
            global_batch=self.options.global_batch,
            consumed=consumed,
        )

    def _fill(self) -> None:
        end = self.end
        while self._free and (end is None or self._ahead + self.options.global_batch <= end):
            samples = self._samples_at(self._ahead)
            slot = self._free[0]
            transfer = self._submit(slot, samples)
            self._free.popleft()
            self._flights.append(_Flight(slot, self._ahead, samples, transfer))
            self._ahead += self.options.global_batch

    def _submit(self, slot: int, samples: I64) -> VolumeTransfer:
        length = self.options.sequence_length
        starts = samples.astype(np.uint64) * np.uint64(length)
        return self.stream.submit_windows(starts, length + 1, self._buffers[slot], verify=self.options.verify)

    def _samples_at(self, position: int) -> I64:
        """This rank's samples of the global batch at `position`: int64[local_batch]."""
        batch, local = self.options.global_batch, self.options.local_batch
        row, odd = divmod(position - self._order_start, batch)
        if odd or not 0 <= row < len(self._order):
            # Within an epoch, more or less: each one is a permutation of its own.
            rows = max(1, min(_ORDER_PLACES // local, self.sampler.sample_count // batch))
            first = position + self.options.rank * local
            places = first + np.arange(rows, dtype=np.int64)[:, None] * batch + np.arange(local, dtype=np.int64)
            self._order = self.sampler.at(places)
            self._order_start = position
            row = 0
        samples: I64 = self._order[row]
        return samples

    def _stalled(self) -> DeviceTimeout:
        ready = sum(flight.transfer.done() for flight in self._flights)
        return DeviceTimeout(
            "a batch did not come in time",
            where=f"{self.stream.bin_info.name} on {', '.join(self.stream.volume.uris)}",
            expected=f"within {self.options.stall_timeout_s:g} s",
            found=f"{len(self._flights)} batches in flight, {ready} of them ready",
            next_step="look at the target and the path to it; the next call waits for the same batch again",
        )
