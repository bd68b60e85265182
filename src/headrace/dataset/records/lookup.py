"""Where records lie: two reads of the index, one after the other, that nobody has to wait for.

rows of the records, one read  ->  rows of their fields, one read  ->  places, batch by batch
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.dataset.records.index import FIELD, RECORD, Rows
from headrace.errors import DatasetError
from headrace.volume import VolumeTransfer

if TYPE_CHECKING:
    from headrace.dataset.records.records import Records

I64 = npt.NDArray[np.int64]

#: Fields of all records that are looked up at a time.
_MOST_FIELDS = 1 << 22


@dataclass(frozen=True, kw_only=True)
class RecordPlaces:
    """Where the fields of some records lie, in the order of the records."""

    #: Records, with or without fields.
    count: int
    #: Of each field: which of the records, its kind, where it lies and how long it is, bytes.
    owner: I64
    kinds: npt.NDArray[np.uint32]
    offsets: I64
    lengths: I64

    @cached_property
    def total_bytes(self) -> int:
        # Not in 64 bits: that each is within the data says nothing of their sum.
        return sum(self.lengths.tolist())


class RecordLookup:
    """A look-up under way. Made by `Records.submit_locate`. Not for several threads at once."""

    def __init__(self, records: Records, batches: Sequence[I64], kinds: npt.NDArray[np.uint32] | None) -> None:
        self._records = records
        self._batches, self._kinds = batches, kinds
        numbers = np.concatenate([np.zeros(0, np.int64), *batches])
        self._rows: Rows
        self._transfer: VolumeTransfer | None
        self._rows, self._transfer = records._submit_rows(records.header.records_at, RECORD, numbers, 2)
        #: Of each field, the record that it belongs to, once that is known.
        self._owner: I64 | None = None

    def done(self) -> bool:
        """The places are there, or it failed; never blocks. What was read of the first table starts the second
        read."""
        while self._transfer is None or self._transfer.done():
            if self._owner is not None:
                return True
            try:
                self._advance(0)
            except Exception:
                return True  # `wait` says so.
        return False

    def waiting(self) -> str | None:
        """As of `VolumeTransfer`."""
        return None if self._transfer is None else self._transfer.waiting()

    def wait(self, timeout_s: float | None = None) -> list[RecordPlaces]:
        """The places of each batch. DeviceTimeout when `timeout_s` passes, and it goes on; other errors as of
        `VolumeTransfer.wait`; DatasetError where the index is wrong."""
        end = None if timeout_s is None else time.monotonic() + timeout_s
        while self._owner is None:
            self._advance(None if end is None else max(0.0, end - time.monotonic()))
        if self._transfer is not None:
            self._transfer.wait(None if end is None else max(0.0, end - time.monotonic()))
        return self._places(self._owner)

    def _advance(self, timeout_s: float | None) -> None:
        """From the rows of the records to those of their fields."""
        if self._transfer is not None:
            self._transfer.wait(timeout_s)
        records = self._records
        firsts = self._rows["first"].astype(np.int64)
        counts = firsts[:, 1] - firsts[:, 0]
        if len(counts) and (counts.min() < 0 or firsts.min() < 0 or firsts.max() > records.header.fields):
            raise records._wrong("a record")
        if int(counts.sum()) > _MOST_FIELDS:
            raise DatasetError(
                "the batch has too many fields", where=records.name, expected=f"at most {_MOST_FIELDS}",
                found=str(int(counts.sum())), next_step="read fewer records at a time",
            )  # fmt: skip
        owner = np.repeat(np.arange(len(counts)), counts)
        place = np.arange(len(owner)) - np.repeat(np.cumsum(counts) - counts, counts)
        self._rows, self._transfer = records._submit_rows(records.header.fields_at, FIELD, firsts[owner, 0] + place, 1)
        self._owner = owner

    def _places(self, owner: I64) -> list[RecordPlaces]:
        records = self._records
        fields = self._rows.reshape(len(owner))
        if self._kinds is not None:
            keep = np.isin(fields["kind"], self._kinds)
            owner, fields = owner[keep], fields[keep]
        size = np.uint64(records.size_bytes)
        outside = (fields["length"] > size) | (fields["offset"] > size - np.minimum(fields["length"], size))
        if outside.any() or (len(fields) and int(fields["kind"].max()) >= len(records.kinds)):
            raise records._wrong("a field")
        result = []
        begin = 0
        for batch in self._batches:
            low, high = np.searchsorted(owner, [begin, begin + len(batch)])
            rows = fields[low:high]
            result.append(
                RecordPlaces(
                    count=len(batch),
                    owner=owner[low:high] - begin,
                    kinds=rows["kind"],
                    offsets=rows["offset"].astype(np.int64),
                    lengths=rows["length"].astype(np.int64),
                )
            )
            begin += len(batch)
        return result
