"""Records of a dataset in a volume: found by number or key, read in batches, straight into one buffer.

    records = Records.open(volume, "images")
    batch = records.submit([17, 4, 2100], kinds=("jpg", "cls"))      # the native engine reads them all at once
    for record in batch.wait():
        record["jpg"]                                                # a memoryview into the batch's buffer

What has to be known of a record is read when it is asked for, a few rows of the index for each: nothing is held that
grows with the dataset.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataset.records.index import (
    HASHED,
    HEADER_BYTES,
    KIND_BYTES,
    MOST_KEY_BYTES,
    RECORD,
    RecordHeader,
    Rows,
    decode_header,
    decode_kinds,
    hash_key,
)  # fmt: skip
from headrace.dataset.records.lookup import RecordLookup, RecordPlaces
from headrace.dataset.records.memory import KeptMemory
from headrace.errors import DatasetError, HeadraceError, UsageError
from headrace.units import GIB, format_bytes
from headrace.volume import ObjectInfo, Volume, VolumeTransfer
from headrace.volume.stage.read import Near

I64 = npt.NDArray[np.int64]

#: Hashes that are looked through for one key.
_MOST_IN_BUCKET = 1 << 16


class Records:
    """The records of one dataset. Holds nothing but a few numbers, unless `hold_index` is asked for; threads may share
    it."""

    def __init__(self, volume: Volume, data: ObjectInfo, index: ObjectInfo, header: RecordHeader, kinds: list[str]):
        self.volume = volume
        self._data, self._index, self.header = data, index, header
        #: What fields are called: suffixes of files, `"jpg"`.
        self.kinds = kinds
        #: The tables of records and fields, where they were asked for (`hold_index`), and their read.
        self._held: tuple[npt.NDArray[np.uint8], VolumeTransfer] | None = None
        #: Where it is staged: bytes are read from there as far as they are there.
        self.near: Near | None = None

    @classmethod
    def open(cls, volume: Volume, name: str, *, stage: str | None = None) -> Records:
        """The dataset `name`: reads the head of its index. ObjectNotFound; DatasetError where it is none of records.

        `stage`: where it is staged, or will be (`headrace.dataset.stage`).
        """
        data, index = volume.stat(f"{name}.records"), volume.stat(f"{name}.records.idx")
        head = volume.read(index.name, 0, min(HEADER_BYTES, index.length_bytes))
        header = decode_header(head, index.length_bytes, data.length_bytes, index.name)
        kinds = decode_kinds(volume.read(index.name, HEADER_BYTES, KIND_BYTES * header.kinds), index.name)
        records = cls(volume, data, index, header, kinds)
        records.near = None if stage is None else Near(volume, stage, name)
        return records

    @property
    def _reads(self) -> Volume | Near:
        return self.volume if self.near is None else self.near

    def __len__(self) -> int:
        return self.header.records

    @property
    def name(self) -> str:
        """Of the object that holds their bytes."""
        return self._data.name

    def called(self, record: int) -> str:
        """What a record is called in messages."""
        return f"record {record} of {self.name}"

    @property
    def identity(self) -> str:
        """What only these very records have: the volume and, in it, the allocation."""
        return f"{self.volume.id}/{self.name}#{self._data.sequence}"

    @property
    def size_bytes(self) -> int:
        """Of all fields."""
        return self._data.length_bytes

    def find(self, key: str | bytes) -> int | None:
        """The number of the record of this key; None where there is none. Two small reads, and one of the key."""
        wanted = os.fsencode(key) if isinstance(key, str) else key
        header, value = self.header, hash_key(wanted)
        bucket = value >> (64 - header.bucket_bits) if header.bucket_bits else 0
        low, high = self._rows(header.buckets_at, np.dtype("<u8"), [bucket], 2)[0].tolist()
        if not low <= high <= header.records or high - low > _MOST_IN_BUCKET:
            raise self._wrong(f"bucket {bucket}")
        hashed = self._rows(header.hashed_at, HASHED, [low], high - low)[0]
        candidates = hashed["record"][hashed["hash"] == value].tolist()
        if candidates and max(candidates) >= header.records:
            raise self._wrong(f"bucket {bucket}")
        for record, found in zip(candidates, self._keys(candidates), strict=True):
            if found == wanted:
                return int(record)
        return None

    def keys(self, records: npt.ArrayLike) -> list[str]:
        """The keys of these records."""
        return [os.fsdecode(key) for key in self._keys(self._checked(records))]

    def _keys(self, records: npt.ArrayLike) -> list[bytes]:
        begins = self._rows(self.header.records_at, RECORD, records, 2)["key"].astype(np.int64)
        lengths = begins[:, 1] - begins[:, 0]
        if len(begins) and (lengths.min() < 0 or lengths.max() > MOST_KEY_BYTES or begins.min() < 0):
            raise self._wrong("a key")
        places = np.cumsum(lengths) - lengths
        buffer = np.empty(int(lengths.sum()), np.uint8)
        if int(begins.max(initial=0)) > self.header.key_bytes:
            raise self._wrong("a key")
        self._reads.submit_read(self._index, self.header.keys_at + begins[:, 0], lengths, [buffer], places).wait()
        letters = buffer.tobytes()
        return [
            letters[place : place + length] for place, length in zip(places.tolist(), lengths.tolist(), strict=True)
        ]

    def submit(
        self,
        records: npt.ArrayLike,
        kinds: Sequence[str] | None = None,
        *,
        most_bytes: int = 4 * GIB,
        verify: bool = True,
    ) -> RecordBatch:
        """Start to read these records, in any order, as often as wanted; of each the fields of these kinds (None: all).

        UsageError: a number that no record has, or a kind that none has. DatasetError: together they are longer than
        `most_bytes`, which is looked at before memory is taken.
        """
        (places,) = self.submit_locate([records], kinds).wait()
        return self.submit_places(places, most_bytes=most_bytes, verify=verify)

    def hold_index(self, most_bytes: int) -> int:
        """Start to read the whole of what look-ups ask of the index, where it is no longer than `most_bytes`: some 40
        bytes a record. When it is here, look-ups read nothing. Returns how many bytes are held."""
        begin, end = self.header.records_at, self.header.buckets_at
        if self._held is None:
            if end - begin > most_bytes:
                return 0
            buffer = np.empty(end - begin, np.uint8)
            self._held = (buffer, self._reads.submit_read(self._index, [begin], [len(buffer)], [buffer], [0]))
        return end - begin

    def submit_locate(self, batches: Sequence[npt.ArrayLike], kinds: Sequence[str] | None = None) -> RecordLookup:
        """Start to find out where the fields of these records lie: two reads of the index for all batches together.
        UsageError as of `submit`."""
        return RecordLookup(self, [self._checked(batch) for batch in batches], self._kinds_of(kinds))

    def submit_places(
        self,
        places: RecordPlaces,
        *,
        most_bytes: int = 4 * GIB,
        verify: bool = True,
        memory: KeptMemory | None = None,
    ) -> RecordBatch:
        """Start to read what a look-up has found, into this memory (None: new). DatasetError as of `submit`."""
        total = places.total_bytes
        if total > most_bytes:
            raise DatasetError(
                "the batch is too long", where=self._data.name, expected=f"at most {format_bytes(most_bytes)}",
                found=format_bytes(total), next_step="read fewer records at a time",
            )  # fmt: skip
        buffer = np.empty(total, np.uint8) if memory is None else memory.take(total)
        begins = np.cumsum(places.lengths) - places.lengths
        transfer = self._reads.submit_read(self._data, places.offsets, places.lengths, [buffer], begins, verify=verify)
        names = [self.kinds[kind] for kind in places.kinds.tolist()]
        return RecordBatch(transfer, buffer, places.count, places.owner, names, begins, places.lengths)

    def read(self, records: npt.ArrayLike, kinds: Sequence[str] | None = None) -> list[dict[str, memoryview]]:
        """These records, each as its fields by kind. The convenience of `submit`."""
        return self.submit(records, kinds).wait()

    def __getitem__(self, record: int) -> dict[str, memoryview]:
        return self.read([record])[0]

    def __getitems__(self, records: Sequence[int]) -> list[dict[str, memoryview]]:
        """What PyTorch's DataLoader asks for a batch with."""
        return self.read(records)

    def check_kinds(self, kinds: Sequence[str] | None) -> None:
        """UsageError: a kind that no record has."""
        self._kinds_of(kinds)

    def _kinds_of(self, kinds: Sequence[str] | None) -> npt.NDArray[np.uint32] | None:
        if kinds is None:
            return None
        for kind in kinds:
            if kind not in self.kinds:
                found = ", ".join(self.kinds[:16])
                raise UsageError(f"no record has a field {kind!r}", where=self._data.name, found=found)
        return np.array(sorted({self.kinds.index(kind) for kind in kinds}), np.uint32)

    def describe(self) -> str:
        """One line for people."""
        return f"{len(self):,} records of {', '.join(self.kinds[:16]) or 'no kind'}, {format_bytes(self.size_bytes)}"

    def _checked(self, records: npt.ArrayLike) -> I64:
        numbers = np.atleast_1d(np.asarray(records))
        if numbers.size == 0:
            numbers = numbers.astype(np.int64)
        if numbers.ndim != 1 or numbers.dtype.kind not in "iu":
            raise UsageError("records are asked for by whole numbers", found=f"{numbers.dtype}[{numbers.ndim}]")
        if numbers.size and not 0 <= int(numbers.min()) <= int(numbers.max()) < len(self):
            raise UsageError(
                "there is no such record", where=self._data.name, expected=f"0 to {len(self) - 1}",
                found=f"{int(numbers.min())} to {int(numbers.max())}",
            )  # fmt: skip
        return numbers.astype(np.int64)

    def _rows(self, at: int, kind: np.dtype[Any], rows: npt.ArrayLike, count: int) -> Rows:
        """`count` rows of a table from each of these on: kind[n, count]."""
        found, transfer = self._submit_rows(at, kind, rows, count)
        if transfer is not None:
            transfer.wait()
        return found

    def _submit_rows(
        self, at: int, kind: np.dtype[Any], rows: npt.ArrayLike, count: int
    ) -> tuple[Rows, VolumeTransfer | None]:
        """As `_rows`, under way; None: they are there."""
        starts = np.asarray(rows, np.int64)
        if (table := self._table(at, kind)) is not None:
            return table[starts[:, None] + np.arange(count)], None
        found = np.empty((len(starts), count), kind)
        if not found.nbytes:
            return found, None
        each = count * kind.itemsize
        places = np.arange(len(starts), dtype=np.int64) * each
        lengths = np.full(len(starts), each, np.int64)
        buffer = found.reshape(-1).view(np.uint8)
        return found, self._reads.submit_read(self._index, at + starts * kind.itemsize, lengths, [buffer], places)

    def _table(self, at: int, kind: np.dtype[Any]) -> Rows | None:
        """The whole table that begins there, where it is in memory."""
        if self._held is None or at not in (self.header.records_at, self.header.fields_at):
            return None
        buffer, transfer = self._held
        if not transfer.done():
            return None
        try:
            transfer.wait(0)
        except HeadraceError:
            # Who asks for a row of it is told what is wrong.
            return None
        end = self.header.fields_at if at == self.header.records_at else self.header.buckets_at
        begin = self.header.records_at
        return buffer[at - begin : end - begin].view(kind)

    def _wrong(self, what: str) -> DatasetError:
        return DatasetError(f"an index of records is wrong about {what}", where=self._index.name)


class RecordBatch:
    """Records under way. Made by `Records.submit`."""

    def __init__(
        self, transfer: VolumeTransfer, buffer: npt.NDArray[np.uint8], count: int, owner: I64, names: list[str],
        places: I64, lengths: I64,
    ) -> None:  # fmt: skip
        self._transfer = transfer
        #: The bytes of all fields, one after another: uint8[bytes]. The transfer's until it is done.
        self.buffer = buffer
        self._count, self._owner, self._names = count, owner, names
        self._places, self._lengths = places, lengths

    def done(self) -> bool:
        """All bytes have arrived, or it failed; never blocks."""
        return self._transfer.done()

    def waiting(self) -> str | None:
        """As of `VolumeTransfer`."""
        return self._transfer.waiting()

    def wait(self, timeout_s: float | None = None) -> list[dict[str, memoryview]]:
        """The records, each as its fields by kind: views of `buffer`. Errors are those of `VolumeTransfer.wait`."""
        self._transfer.wait(timeout_s)
        result: list[dict[str, memoryview]] = [{} for _ in range(self._count)]
        whole = self.buffer.data
        for owner, name, place, length in self._fields():
            result[owner][name] = whole[place : place + length]
        return result

    def _fields(self) -> Iterator[tuple[int, str, int, int]]:
        return zip(self._owner.tolist(), self._names, self._places.tolist(), self._lengths.tolist(), strict=True)
