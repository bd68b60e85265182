"""Batches of records ahead of time, in the order of the samples, decoded on the way.

The order is that of tokens (`headrace.dataset.order`): a rank's numbers of the next batches go to `RecordsAhead`, which
has them read natively and decoded. Where the loader stands is a counter of its own, moved when a batch is handed out;
whatever happens in a call (an error, Ctrl-C at any line), the next one begins at it.

    order -> numbers of a batch -> located -> read natively -> decoded (threads or processes) -> handed out
             |<------------------- `prefetch` batches, `ahead_bytes` ------------------------>|   consumed
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.dataset.decoding.decoder import Decoder, Record
from headrace.dataset.decoding.processes import decoder_of, program_of
from headrace.dataset.feed.options import FeedMetrics
from headrace.dataset.order.mixture import GlobalOrder
from headrace.dataset.order.records import RecordState, record_state
from headrace.dataset.order.steps import Place, StepOptions
from headrace.dataset.records.ahead import AheadOptions, RecordsAhead
from headrace.dataset.records.joined import JoinedRecords
from headrace.dataset.records.records import Records
from headrace.device import BlockDevice
from headrace.errors import DatasetError, UsageError
from headrace.units import GIB, MIB
from headrace.volume.stage.read import Near

I64 = npt.NDArray[np.int64]
T = TypeVar("T")


@dataclass(frozen=True, kw_only=True)
class RecordFeedOptions(StepOptions):
    """What one rank gets of datasets of records, how far ahead, and who decodes."""

    #: No further batch is begun while as many bytes are ahead; one always is.
    ahead_bytes: int = 1 * GIB
    #: Of memory that nobody holds any more, kept for the next batches.
    kept_bytes: int = 256 * MIB
    #: Of the indexes that may stay in memory, so that nothing has to be looked up on the way: some 40 bytes a record.
    index_bytes: int = 32 * MIB
    #: That decode; 0: the thread that asks for the batch, when it does.
    threads: int = 0
    #: That decode, in place of threads: for functions that keep other threads from running. They must be able to import
    #: the function; what it gets is theirs until it returns, and what it gives must be picklable.
    processes: int = 0

    def __post_init__(self) -> None:
        super().__post_init__()
        self._check("ahead_bytes", 1, 1 << 50)
        self._check("kept_bytes", 0, 1 << 50)
        self._check("index_bytes", 0, 1 << 40)
        self._check("threads", 0, 1024)
        self._check("processes", 0, 1024)
        if self.threads and self.processes:
            raise UsageError("records are decoded by threads or by processes", expected="one of the two")


@dataclass(frozen=True, kw_only=True)
class RecordFeedBatch(Generic[T]):
    """What was made of the records of a batch, row by row."""

    items: list[T]
    #: Which of the datasets, in the order of their names, and numbers of the records in them: int64[local_batch].
    sources: I64
    samples: I64
    #: Place of the first record of the batch of all ranks in the global order.
    position: int


class RecordFeed(Generic[T]):
    """Batches of records, in order, for one rank. Not for several threads at once, but for `metrics`.

    `sources`: the records of each dataset, by name. `shares`: records of each in a window of the mixture, in the same
    order. `kinds`: the fields that are read; None: all. `decode`: of one record, its fields by kind, views of memory
    that lives as long as any of them; None: the fields themselves.
    """

    def __init__(
        self,
        sources: Mapping[str, Records],
        options: RecordFeedOptions,
        *,
        shares: Sequence[int] = (1,),
        kinds: Sequence[str] | None = None,
        decode: Callable[[Record], T] | None = None,
    ) -> None:
        # By name: the order of samples does not depend on the order in which datasets are told.
        names = sorted(sources)
        by_name = dict(zip(sources, shares, strict=True))
        self.sources = {name: sources[name] for name in names}
        self.options = options
        self.name = ", ".join(names)
        for name, records in self.sources.items():
            if not len(records):
                raise DatasetError("a dataset has no record", where=name)
            records.check_kinds(kinds)
            if options.stage is not None:
                records.near = Near(records.volume, options.stage, name)
        counts = {name: len(records) for name, records in self.sources.items()}
        self.order = GlobalOrder(counts, [by_name[name] for name in names], options.seed)
        self.place = Place(self.order, options, self.name)
        if decode is not None and options.processes:
            # What is wrong with it is told now.
            program_of(decode)
        self._kinds, self._decode = kinds, decode
        datasets = list(self.sources.values())
        self._records = JoinedRecords(datasets)
        #: Of one dataset there is nothing to be joined.
        self._reads = datasets[0] if len(datasets) == 1 else self._records
        self._decoder: Decoder[T] | None = None
        self._ahead: RecordsAhead[T] | None = None
        #: Sources and samples of the batches that are ahead.
        self._planned: deque[tuple[I64, I64]] = deque()
        #: It has to start over before anything else.
        self._torn = False
        self._closed = False
        self._process = os.getpid()
        self._batches = self._payload_bytes = 0
        self._wait_s = self._last_wait_s = self._longest_wait_s = self._fetch_wait_s = 0.0

    @property
    def consumed(self) -> int:
        """Records handed out, over all ranks."""
        return self.place.consumed

    def begin(self) -> None:
        """Start to read ahead. From here on no state can be loaded."""
        self._usable()
        self.place.begun = True
        if self._ahead is None or self._torn:
            iter(self._start())

    def acquire(self) -> RecordFeedBatch[T] | None:
        """The next batch; None behind the last one. Errors are those of `RecordsAhead`, and leave nothing out: the same
        batch is the next one."""
        counted, given = self.counted, None
        try:
            self.begin()
            assert self._ahead is not None
            given = self._ahead.counted
            return self._next(self._ahead)
        except BaseException as error:
            # After an error of a read or of `decode` what is ahead has kept the batch, and tries it again.
            if not isinstance(error, Exception) or self._ahead is None or self._ahead.counted != given:
                self.back_to(counted)
            raise

    @property
    def counted(self) -> tuple[int, int, int]:
        """What was handed out: records of all ranks, batches, bytes."""
        return self.place.consumed, self._batches, self._payload_bytes

    def back_to(self, counted: tuple[int, int, int]) -> None:
        """What was acquired since was not handed on after all: the batch behind `counted` is the next one again, and
        is read again. Also where a call was interrupted in the middle of anything (Ctrl-C)."""
        self._torn = True
        self.place.consumed, self._batches, self._payload_bytes = counted

    def state(self) -> RecordState:
        """Counts what was handed out, not what was read ahead."""
        return self._state_at(self.place.consumed, self.place.steps_from)

    def load_state(self, saved: RecordState) -> None:
        """Go on where `saved` stands, in O(1). `DatasetError`: it does not fit, or the feed has begun."""
        self._usable()
        self.place.load(saved, self._state_at(saved.consumed, self.place.steps_from))

    def skip(self, batches: int) -> None:
        """Leave out the next `batches`, in O(1), before the first one is read."""
        self._usable()
        self.place.skip(batches)

    @property
    def devices(self) -> list[BlockDevice]:
        """All that it reads from, each once."""
        return list({id(device): device for each in self.sources.values() for device in each.volume.devices}.values())

    @property
    def waited(self) -> tuple[float, float, int]:
        """Seconds that steps waited for reads, and for batches in all, and bytes handed out: costs nothing to ask."""
        return self._fetch_wait_s, self._wait_s, self._payload_bytes

    def metrics(self) -> FeedMetrics:
        """Of now; other threads may ask, too. `token_bytes` are those of the records' fields that were handed out, and
        `ring_bytes` those of the batches that are ahead, of what is kept for others, and of what is shared with
        processes that decode."""
        ahead, decoder = self._ahead, self._decoder
        now = None if ahead is None else ahead.metrics()
        return FeedMetrics(
            batches=self._batches,
            samples=self._batches * self.options.local_batch,
            token_bytes=self._payload_bytes,
            wait_s=self._wait_s,
            last_wait_s=self._last_wait_s,
            longest_wait_s=self._longest_wait_s,
            fetch_wait_s=self._fetch_wait_s,
            ready=now.ready if now else 0,
            in_flight=now.in_flight if now else 0,
            stage_bytes=sum(each.near.served_bytes for each in self.sources.values() if each.near is not None),
            ring_bytes=(now.ahead_bytes + now.kept_bytes if now else 0) + (decoder.held_bytes if decoder else 0),
        )

    def describe(self) -> dict[str, Any]:
        """Of each dataset: the addresses of its volume, and of its stage how much is there, and which share came from
        it (`headrace.volume.stage.read.Near.describe`); None where none was asked for."""
        return {
            name: {"volume": records.volume.uris, "stage": near and near.describe()}
            for name, records in self.sources.items()
            for near in [records.near]
        }

    def close(self) -> None:
        """Forget what is ahead, and end who decodes. Safe to call again."""
        self._closed = True
        ahead, self._ahead = self._ahead, None
        if ahead is not None:
            ahead.close()
        if self._decoder is not None:
            self._decoder.close()

    def _next(self, ahead: RecordsAhead[T]) -> RecordFeedBatch[T] | None:
        started, given = time.monotonic(), self._payload_bytes - ahead.counted[1]
        fetched = ahead.fetch_wait_s
        try:
            items = next(ahead, None)
        finally:
            self._last_wait_s = time.monotonic() - started
            self._wait_s += self._last_wait_s
            self._longest_wait_s = max(self._longest_wait_s, self._last_wait_s)
            self._fetch_wait_s += ahead.fetch_wait_s - fetched
        if items is None:
            return None
        sources, samples = self._planned.popleft()
        batch = RecordFeedBatch(items=items, sources=sources, samples=samples, position=self.place.consumed)
        self.place.consumed += self.options.joint_batch
        self._batches += 1
        self._payload_bytes = given + ahead.counted[1]
        return batch

    def _start(self) -> RecordsAhead[T]:
        """From where the loader stands. What an earlier start had ahead is forgotten."""
        options = self.options
        if self._ahead is not None:
            self._ahead.close()
        self._ahead = None
        if self._decoder is None:
            self._decoder = decoder_of(
                self._decode,
                threads=options.threads,
                processes=options.processes,
                patience_s=options.stall_timeout_s,
            )
        planned: deque[tuple[I64, I64]] = deque()
        ahead = RecordsAhead(
            self._reads,
            self._numbers(planned),
            kinds=self._kinds,
            decode=self._decode,
            decoder=self._decoder,
            options=AheadOptions(
                prefetch=options.prefetch,
                ahead_bytes=options.ahead_bytes,
                kept_bytes=options.kept_bytes,
                index_bytes=options.index_bytes,
                stall_timeout_s=options.stall_timeout_s,
                verify=options.verify,
            ),
        )
        self._planned, self._ahead, self._torn = planned, ahead, False
        return ahead

    def _numbers(self, planned: deque[tuple[I64, I64]]) -> Iterator[I64]:
        """Of the records of this rank, batch by batch, as they are read ahead."""
        begins = self._records.begins
        for sources, samples in self.place.batches():
            planned.append((sources, samples))
            yield begins[sources] + samples

    def _usable(self) -> None:
        if self._closed:
            raise UsageError("the loader is closed", where=self.name)
        if os.getpid() != self._process:
            # Connections and the engine's threads do not survive a fork; a read would wait for ever.
            raise UsageError(
                "the loader was made in another process",
                where=self.name,
                next_step="open volume and loader in the process that uses them",
            )

    def _state_at(self, consumed: int, steps_from: int) -> RecordState:
        return record_state(
            self.sources, self.order, global_batch=self.options.global_batch, consumed=consumed, steps_from=steps_from
        )
