"""Batches ahead of time: a fixed ring of buffers that the native engine fills in the order of the samples.

Nothing runs here between two calls: no thread, no worker process. A call takes the oldest buffer, and released buffers
are handed straight to the engine for the batches that no buffer has yet. Memory is the ring, whatever the data.

    positions     [ consumed ............................................................ ) of the global order
    handed out --^  | in flight: up to `prefetch` |  planned: where the samples of |  next to plan
                    | batches, oldest first       |  as many more batches lie      |

A request to the engine costs the same for one small batch and for some of them: they are read in groups (`flight`). A
group that fails is read again batch by batch, so that each has its own end, at its turn.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any, NoReturn

import numpy as np
import numpy.typing as npt

from headrace.dataset.feed.flight import Flight, group_size
from headrace.dataset.feed.options import FeedMetrics as FeedMetrics
from headrace.dataset.feed.options import FeedOptions as FeedOptions
from headrace.dataset.feed.ring import Ring, check_memory, no_memory
from headrace.dataset.feed.stretch import FeedBatch as FeedBatch
from headrace.dataset.feed.stretch import Stretch
from headrace.dataset.order.mixture import GlobalOrder
from headrace.dataset.order.state import LoaderState, current_state
from headrace.dataset.order.steps import Place
from headrace.dataset.tokens.samples import WINDOWS, Samples, WindowSamples, end_of, ends_of
from headrace.dataset.tokens.stream import TokenStream
from headrace.device import BlockDevice, troubled_paths
from headrace.errors import DatasetError, DeviceTimeout, HeadraceError, UsageError
from headrace.volume import VolumeTransfer, hunger
from headrace.volume.data import patience
from headrace.volume.stage.read import Near

I64 = npt.NDArray[np.int64]

#: Seconds that look-ups for later batches may take: what takes longer is done when it is needed.
_AHEAD_S = 1.0


class Feed:
    """Batches of samples, in order, for one rank. Not for several threads at once.

    `sources`: the samples of each dataset, by name, all of one length and dtype. `shares`: samples of each in a window
    of the mixture, in the same order. `buffers`: where batches are read to, `dtype[n, local_batch, sequence_length +
    1]` (pinned, say), new memory at each call; made here, for `options.prefetch` batches, where that is not told.
    `pad_id`: the token of places that no document fills; None takes the end of a document where it is known, else 0.
    """

    def __init__(
        self,
        sources: Mapping[str, Samples],
        options: FeedOptions,
        *,
        shares: Sequence[int] = (1,),
        buffers: Callable[[], npt.NDArray[Any]] | None = None,
        pad_id: int | None = None,
    ) -> None:
        # By name: the order of samples does not depend on the order in which datasets are told.
        names = sorted(sources)
        by_name = dict(zip(sources, shares, strict=True))
        self.sources = {name: sources[name] for name in names}
        self._samples = list(self.sources.values())
        _check_alike(self.sources, options)
        self.options = options
        if options.stage is not None:
            for samples in self._samples:
                samples.stream.near = Near(samples.stream.volume, options.stage, samples.stream.name)
        self.dtype: np.dtype[Any] = self._samples[0].stream.dtype
        self.order = GlobalOrder(
            {name: samples.sample_count for name, samples in self.sources.items()},
            [by_name[name] for name in names],
            options.seed,
        )
        self.where = ", ".join(names)
        self._ends = ends_of(self._samples)
        # Before anything is made for each row of a batch.
        count = options.prefetch if buffers is None else 1
        row_bytes = (options.sequence_length + 1) * self.dtype.itemsize
        check_memory(count, options.local_batch, row_bytes)
        self._group = group_size(options.local_batch * row_bytes, options.prefetch)
        #: Where samples lie is arithmetic: it is reckoned for as many batches as their order is.
        self._reckoned = all(each.kind == WINDOWS for each in self._samples)
        self.pad_id = max(0, *map(end_of, self._samples)) if pad_id is None else pad_id
        if not 0 <= self.pad_id <= np.iinfo(self.dtype).max:
            expected = f"0 to {np.iinfo(self.dtype).max}"
            raise UsageError("pad_id is out of range", expected=expected, found=str(self.pad_id))
        self._buffers = buffers
        self.place = Place(self.order, options, self.where)
        self._joint = options.joint_batch
        self._closed = False
        self._process = os.getpid()
        self._batches = self._tokens = 0
        self._start_over()
        self._wait_s = self._last_wait_s = self._longest_wait_s = 0.0
        hunger.join(self)

    @property
    def consumed(self) -> int:
        """Samples handed out, over all ranks."""
        return self.place.consumed

    @property
    def end(self) -> int | None:
        """Position behind the last whole batch; None where there is no end."""
        return self.place.end

    @property
    def ring_bytes(self) -> int:
        """Memory of all buffers."""
        return self._ring.nbytes

    @property
    def tells_documents(self) -> bool:
        """It is known where documents begin, in every row."""
        known = zip(self._samples, self._ends.tolist(), strict=True)
        return all(samples.kind != WINDOWS or end >= 0 for samples, end in known)

    def begin(self) -> None:
        """Start to read ahead. From here on no state can be loaded."""
        self._usable()
        if self._torn:
            self._start_over()
        self.place.begun = True
        self._fill()

    def acquire(self) -> FeedBatch | None:
        """The next batch, lent until `release`; None behind the last one.

        `DeviceTimeout`: it did not come within `stall_timeout_s`; the batch stays the next one. Any other error of the
        volume: that read failed; another call reads the same batch again. Nothing is ever left out.
        """
        free = len(self._free)
        if free >= self._group or free >= self._in_flight or self._torn:
            self.begin()
        else:
            self._usable()
        if not self._flights:
            if not self._planned:
                return None
            if not self._free:
                raise UsageError("every buffer is lent", next_step="release one before the next batch")
        if self._flights and self._flights[0].arrived:
            self._last_wait_s = 0.0
        else:
            self._arrive()
        flight = self._flights[0]
        stretch, slot, at = flight.stretch, flight.slots[flight.taken], flight.first + flight.taken
        flight.taken += 1
        if flight.taken == len(flight.slots):
            self._flights.popleft()
        self._in_flight -= 1
        self._lent.add(slot)
        self.place.consumed += self._joint
        self._batches += 1
        self._tokens += stretch.token_counts[at]
        tokens = self._ring.tokens[slot]
        if stretch.used is not None:
            stretch.pad(at, tokens, self.pad_id)
        return FeedBatch(slot, tokens, stretch, at)

    @property
    def counted(self) -> tuple[int, int, int]:
        """What was handed out: samples of all ranks, batches, tokens."""
        return self.place.consumed, self._batches, self._tokens

    def back_to(self, counted: tuple[int, int, int]) -> None:
        """What was acquired since was not handed on after all: the batch behind `counted` is the next one again, and
        is read again. Also where a call was interrupted in the middle of anything (Ctrl-C)."""
        self._torn = True
        self.place.consumed, self._batches, self._tokens = counted

    def release(self, batch: FeedBatch) -> None:
        """Give a buffer back; the engine fills it again at once. `UsageError`: it was given back already."""
        if self._closed:
            return
        if batch.slot not in self._lent:
            raise UsageError("the batch was released already", where=f"position {batch.position}")
        self._lent.remove(batch.slot)
        self._free.append(batch.slot)
        free = len(self._free)
        if free >= self._group or free >= self._in_flight:
            self._fill()

    def state(self) -> LoaderState:
        """Counts what was handed out, not what was read ahead."""
        return self._state_at(self.place.consumed)

    def load_state(self, saved: LoaderState) -> None:
        """Go on where `saved` stands, in O(1). `DatasetError`: it does not fit, or the feed has begun."""
        self._usable()
        self.place.load(saved, self._state_at(saved.consumed))

    def skip(self, batches: int) -> None:
        """Leave out the next `batches`, in O(1), before the first one is read."""
        self._usable()
        self.place.skip(batches)

    @property
    def name(self) -> str:
        """Of its datasets."""
        return self.where

    @property
    def devices(self) -> list[BlockDevice]:
        """All that it reads from, each once."""
        devices = {id(device): device for each in self._samples for device in each.stream.volume.devices}
        return list(devices.values())

    @property
    def waited(self) -> tuple[float, float, int]:
        """Seconds that steps waited for reads, and for batches in all (here the same: nothing is decoded), and bytes
        handed out: costs nothing to ask."""
        return self._wait_s, self._wait_s, self._tokens * self.dtype.itemsize

    def metrics(self) -> FeedMetrics:
        """Of now; other threads may ask, too."""
        # They change while somebody else asks.
        flights = list(self._flights)
        return FeedMetrics(
            batches=self._batches,
            samples=self._batches * self.options.local_batch,
            token_bytes=self._tokens * self.dtype.itemsize,
            wait_s=self._wait_s,
            last_wait_s=self._last_wait_s,
            longest_wait_s=self._longest_wait_s,
            fetch_wait_s=self._wait_s,
            ready=sum(len(flight) for flight in flights if flight.done()),
            in_flight=sum(map(len, flights)),
            ring_bytes=self.ring_bytes,
            stage_bytes=sum(each.stream.near.served_bytes for each in self._samples if each.stream.near is not None),
        )

    def batches_ahead(self) -> list[bool]:
        # They change while somebody else asks.
        return [ready for flight in list(self._flights) for ready in [flight.done()] * len(flight)]

    def describe(self) -> dict[str, Any]:
        """Of each dataset: the addresses of its volume, and of its stage how much is there, and which share came from
        it (`headrace.volume.stage.read.Near.describe`); None where none was asked for."""
        return {
            name: {"volume": samples.stream.volume.uris, "stage": near and near.describe()}
            for name, samples in self.sources.items()
            for near in [samples.stream.near]
        }

    def close(self) -> None:
        """Forget what is in flight: the engine lets go of each buffer when its read ends. Safe to call again."""
        self._closed = True
        hunger.leave(self)
        self._flights.clear()
        self._planned.clear()
        self._free.clear()
        self._in_flight = 0

    def _start_over(self) -> None:
        """Nothing is read, nothing is lent. In new memory: an interrupted call may have left reads into the old one
        that nobody knows of."""
        rows, width = self.options.local_batch, self.options.sequence_length + 1
        # What can be given back is, before as much is asked for again.
        self._ring = Ring.of(no_memory(), rows, width)
        self._ring = (
            Ring.make(self.options.prefetch, rows, width, self.dtype)
            if self._buffers is None
            else Ring.of(self._buffers(), rows, width)
        )
        self._free = deque(range(len(self._ring)))
        #: Being read, and behind them those of which it is being found out where they lie.
        self._flights: deque[Flight] = deque()
        self._planned: deque[Stretch] = deque()
        #: Batches in flight, and all that were asked for, planned and read.
        self._in_flight = self._plans = self._reads = 0
        #: Slots that the caller has.
        self._lent: set[int] = set()
        #: Sources and samples of the batches that are planned next, and the position of the first.
        self._order: Iterator[tuple[I64, I64]] | None = None
        self._coming: tuple[I64, I64] | None = None
        self._ahead = 0
        #: It has to start over before anything else.
        self._torn = False

    def _usable(self) -> None:
        if self._closed:
            raise UsageError("the loader is closed", where=self.where)
        if os.getpid() != self._process:
            # Connections and the engine's threads do not survive a fork; a read would wait for ever.
            raise UsageError(
                "the loader was made in another process",
                where=self.where,
                next_step="open volume and loader in the process that uses them",
            )

    def _state_at(self, consumed: int) -> LoaderState:
        return current_state(
            self.sources, self.order, global_batch=self.options.global_batch, consumed=consumed,
            steps_from=self.place.steps_from,
        )  # fmt: skip

    def _fill(self) -> None:
        """Ask for what there is room for. Raises no error of the volume: what is wrong is kept for the batch's turn."""
        patience.by(time.monotonic() + _AHEAD_S, self._fill_now)

    def _fill_now(self) -> None:
        while self._plans - self._reads < self.options.prefetch:
            stretch = self._plan()
            if stretch is None:
                break
            self._planned.append(stretch)
            self._read_planned()
        self._read_planned()

    def _plan(self) -> Stretch | None:
        """Find out where the next samples lie; None behind the last one."""
        if self._order is None:
            self._order, self._ahead = self.place.stretches(), self.place.consumed
        if self._coming is None:
            self._coming = next(self._order, None)
            if self._coming is None:
                return None
        sources, samples = self._coming
        count = len(samples) if self._reckoned else min(len(samples), self._together(self._plans))
        stretch = Stretch(self._samples, self._ends, self._ahead, self._joint, sources[:count], samples[:count])
        stretch.plan()
        self._coming = (sources[count:], samples[count:]) if count < len(samples) else None
        self._ahead += count * self._joint
        self._plans += count
        return stretch

    def _together(self, before: int) -> int:
        """Batches that are asked for at once, behind so many: few at first, so that the first one comes early."""
        return min(self._group, max(1, before))

    def _read_planned(self) -> None:
        """Buffers that are free go to the batches of which it is known where they lie, in order."""
        while self._free and self._planned:
            stretch = self._planned[0]
            if not stretch.parts:
                if not stretch.ready():
                    return
                try:
                    stretch.find()
                except HeadraceError as error:
                    stretch.error = error
                    return
            first, free = stretch.begun, len(self._free)
            count = min(self._together(self._reads), stretch.count - first)
            if free < count and free < self._in_flight:
                return  # The caller gives back more in time.
            slots = [self._free.popleft() for _ in range(min(free, count))]
            stretch.begun += len(slots)
            if stretch.begun == stretch.count:
                self._planned.popleft()
            self._in_flight += len(slots)
            self._reads += len(slots)
            flight = Flight(stretch, first, slots)
            self._flights.append(flight)
            self._submit(flight)

    def _arrive(self) -> None:
        """Wait until the first batch has its tokens. What is wrong with it is raised, and the next call tries again."""
        started = time.monotonic()
        try:
            end_s = started + self.options.stall_timeout_s
            patience.by(end_s, self._arrive_until, end_s)
        finally:
            self._last_wait_s = time.monotonic() - started
            self._wait_s += self._last_wait_s
            self._longest_wait_s = max(self._longest_wait_s, self._last_wait_s)

    def _arrive_until(self, end_s: float) -> None:
        if not self._flights:
            self._locate(end_s)
            self._read_planned()
        while True:
            flight = self._flights[0]
            if flight.arrived:
                return
            if flight.failed or isinstance(flight.error, DeviceTimeout):
                # What had to be looked up for it took too long then; now it is waited for. What could be asked for
                # by then still reads, into these very slots.
                try:
                    self._wait(flight.transfers, end_s)
                except HeadraceError:
                    if not flight.done():
                        raise
                self._submit(flight)
            wrong = flight.error
            try:
                # Also where one of them could not be made: memory is free again only when the others have ended.
                self._wait(flight.transfers, end_s)
            except HeadraceError as error:
                if isinstance(error, DeviceTimeout) and not flight.done():
                    raise
                wrong = wrong or error
            if wrong is None:
                flight.arrived, flight.transfers = True, []
                return
            if len(flight.slots) == 1:
                flight.failed = True
                self._raise(wrong)
            alone = flight.alone()
            for each in alone:
                self._submit(each)
            self._flights.popleft()
            self._flights.extendleft(reversed(alone))

    def _locate(self, end_s: float) -> None:
        """Wait until it is known where the first planned batch lies."""
        while True:
            stretch = self._planned[0]
            if stretch.parts:
                return
            if stretch.failed or isinstance(stretch.error, DeviceTimeout):
                stretch.plan()
            wrong = stretch.error
            if wrong is None:
                try:
                    self._wait(stretch.transfers, end_s)
                    stretch.find()
                except HeadraceError as error:
                    if isinstance(error, DeviceTimeout) and not stretch.ready():
                        raise
                    wrong = error
            if wrong is None:
                return
            if stretch.count == 1:
                stretch.failed = True
                self._raise(wrong)
            alone = stretch.alone()
            self._planned.popleft()
            self._planned.extendleft(reversed(alone))

    def _wait(self, transfers: Sequence[VolumeTransfer], end_s: float) -> None:
        """For all of them, also where one fails: the buffer is free again only when they have ended."""
        failed: HeadraceError | None = None
        for transfer in transfers:
            try:
                transfer.wait(max(0.0, end_s - time.monotonic()))
            except HeadraceError as error:
                if isinstance(error, DeviceTimeout) and not transfer.done():
                    raise self._stalled(transfer.waiting()) from error
                failed = failed or error
        if failed is not None:
            raise failed

    def _submit(self, flight: Flight) -> None:
        """Start to read. What is wrong is kept until it is the batch's turn."""
        flight.transfers, flight.error, flight.failed = [], None, False
        first, last = flight.first, flight.first + len(flight.slots)
        slots = np.array(flight.slots, np.int64)
        try:
            for part in flight.stretch.parts:
                here = slice(part.bounds[first], part.bounds[last])
                if here.start == here.stop:
                    continue
                # Pieces of one row lie side by side: what is read around one would overwrite the next.
                room_bytes = self._ring.room_bytes if part.alone else 0
                flight.transfers.append(
                    self._samples[part.source].stream.submit_pieces(
                        part.starts[here], part.lengths[here], self._ring.memory,
                        self._ring.places(slots[part.batches[here] - first], part.rows[here], part.places[here]),
                        verify=self.options.verify, room_bytes=room_bytes,
                    )
                )  # fmt: skip
        except HeadraceError as error:
            flight.error = error

    def _raise(self, error: HeadraceError) -> NoReturn:
        if isinstance(error, DeviceTimeout):
            raise self._stalled(error.where) from error
        raise error

    def _stalled(self, where: str | None) -> DeviceTimeout:
        ready = sum(len(flight) for flight in self._flights if flight.done())
        trouble = [said for device in self.devices for said in troubled_paths(device)]
        return DeviceTimeout(
            "a batch did not come in time",
            where=where or self.where,
            expected=f"within {self.options.stall_timeout_s:g} s",
            found=", ".join([f"{self._in_flight} batches in flight, {ready} of them ready", *trouble]),
            next_step="look at the target and the path to it; the next call waits for the same batch again",
        )


class WindowFeed(Feed):
    """Of contiguous windows of one stream."""

    def __init__(self, stream: TokenStream, options: FeedOptions) -> None:
        super().__init__({stream.name: WindowSamples(stream, options.sequence_length)}, options)


def _check_alike(sources: Mapping[str, Samples], options: FeedOptions) -> None:
    """Samples of several datasets must mean the same: one length, one type, one vocabulary."""
    for what, told in (
        ("sequence_length", {name: str(each.sequence_length) for name, each in sources.items()}),
        ("dtype", {name: each.stream.dtype.name for name, each in sources.items()}),
        (
            "tokenizer",
            {n: each.stream.manifest.tokenizer_sha256 for n, each in sources.items() if each.stream.manifest},
        ),
    ):
        if len(set(told.values())) > 1:
            raise DatasetError(
                f"the datasets of the mixture have not the same {what}",
                found=", ".join(f"{name} {value}" for name, value in told.items()),
            )
    length = next(iter(sources.values())).sequence_length
    if length != options.sequence_length:
        raise UsageError("samples of another length", expected=str(options.sequence_length), found=str(length))
