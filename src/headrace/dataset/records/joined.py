"""Several datasets of records as one, numbered through: what a mixture reads.

    a.records  0 .. 99      ->   0 ..  99
    b.records  0 .. 49      -> 100 .. 149

A batch of them is one look-up and one read of each dataset that has a part of it, all under way at once.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

import numpy as np
import numpy.typing as npt

from headrace.dataset.records.lookup import RecordLookup, RecordPlaces
from headrace.dataset.records.memory import KeptMemory
from headrace.dataset.records.records import RecordBatch, Records
from headrace.errors import HeadraceError

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class JoinedPlaces:
    """Where the records of a batch lie: of each dataset its rows of the batch, and the places."""

    count: int
    parts: list[tuple[Records, I64, RecordPlaces]]

    @cached_property
    def total_bytes(self) -> int:
        return sum(places.total_bytes for _, _, places in self.parts)


class JoinedRecords:
    """What `RecordsAhead` asks of `Records`, for several. Threads may share it."""

    def __init__(self, datasets: Sequence[Records]) -> None:
        self.datasets = list(datasets)
        #: The number that the first record of each has here, and the number of all.
        self.begins: I64 = np.cumsum([0, *map(len, datasets)])

    def __len__(self) -> int:
        return int(self.begins[-1])

    @property
    def name(self) -> str:
        """Of the objects that hold their bytes."""
        return ", ".join(records.name for records in self.datasets)

    def called(self, record: int) -> str:
        """What a record is called in messages: by its own number."""
        source = int(self._source(np.array([record]))[0])
        return self.datasets[source].called(record - int(self.begins[source]))

    def hold_index(self, most_bytes: int) -> int:
        """As of `Records`, of the datasets in turn, as far as `most_bytes` goes for all of them together."""
        held = 0
        for records in self.datasets:
            held += records.hold_index(most_bytes - held)
        return held

    def submit_locate(self, batches: Sequence[npt.ArrayLike], kinds: Sequence[str] | None = None) -> JoinedLookup:
        """As of `Records`."""
        numbers = [np.atleast_1d(np.asarray(batch, np.int64)) for batch in batches]
        sources = [self._source(batch) for batch in numbers]
        lookups = []
        for source, records in enumerate(self.datasets):
            rows = [np.flatnonzero(of == source) for of in sources]
            if any(map(len, rows)):
                own = [batch[here] - self.begins[source] for batch, here in zip(numbers, rows, strict=True)]
                lookups.append((records, rows, records.submit_locate(own, kinds)))
        return JoinedLookup([len(batch) for batch in numbers], lookups)

    def submit_places(
        self, places: JoinedPlaces, *, verify: bool = True, memory: KeptMemory | None = None
    ) -> JoinedBatch:
        """As of `Records`."""
        parts = [
            (rows, records.submit_places(of_one, verify=verify, memory=memory))
            for records, rows, of_one in places.parts
            if len(rows)
        ]
        return JoinedBatch(places.count, parts)

    def _source(self, numbers: I64) -> I64:
        """Which dataset each is of; the last one also for numbers that are of none, which it refuses."""
        found = np.searchsorted(self.begins, numbers, side="right") - 1
        return np.clip(found, 0, len(self.datasets) - 1)


class JoinedLookup:
    """A look-up in each dataset, under way."""

    def __init__(self, counts: list[int], lookups: list[tuple[Records, list[I64], RecordLookup]]) -> None:
        self._counts, self._lookups = counts, lookups

    def done(self) -> bool:
        return all(lookup.done() for _, _, lookup in self._lookups)

    def waiting(self) -> str | None:
        return next((said for _, _, lookup in self._lookups if (said := lookup.waiting())), None)

    def wait(self, timeout_s: float | None = None) -> list[JoinedPlaces]:
        """As of `RecordLookup`."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        found = [
            (records, rows, lookup.wait(None if end is None else max(0.0, end - time.monotonic())))
            for records, rows, lookup in self._lookups
        ]
        return [
            JoinedPlaces(count=count, parts=[(records, rows[at], places[at]) for records, rows, places in found])
            for at, count in enumerate(self._counts)
        ]


class JoinedBatch:
    """A read of each dataset, under way."""

    def __init__(self, count: int, parts: list[tuple[I64, RecordBatch]]) -> None:
        self._count, self._parts = count, parts

    def done(self) -> bool:
        return all(batch.done() for _, batch in self._parts)

    def waiting(self) -> str | None:
        return next((said for _, batch in self._parts if (said := batch.waiting())), None)

    def wait(self, timeout_s: float | None = None) -> list[dict[str, memoryview]]:
        """As of `RecordBatch`. Where one fails, the others are waited for all the same."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        result: list[dict[str, memoryview]] = [{} for _ in range(self._count)]
        failed: HeadraceError | None = None
        for rows, batch in self._parts:
            try:
                found = batch.wait(None if end is None else max(0.0, end - time.monotonic()))
            except HeadraceError as error:
                failed = failed or error
                continue
            for row, record in zip(rows.tolist(), found, strict=True):
                result[row] = record
        if failed is not None:
            raise failed
        return result
