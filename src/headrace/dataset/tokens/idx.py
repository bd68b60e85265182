"""The index of a token stream: Megatron's `.idx`, which says where each document lies in the `.bin`.

    offset  bytes
         0      9  "MMIDIDX\\0\\0"
         9      8  version, u64: 1
        17      1  dtype of the tokens: 8 uint16, 4 int32 (the others of the format are no tokens)
        18      8  sequence count S, u64
        26      8  document count D, u64: entries of the document index, one more than there are documents
        34     4S  tokens of each sequence, i32
    34+ 4S     8S  byte offset of each sequence in the .bin, i64
    34+12S     8D  document index, i64: document d is sequences [index[d], index[d + 1])

Little-endian. headrace writes one sequence a document, so the document index is 0, 1, ..., S. Files with the optional
trailing array of modes (one i8 a sequence, multimodal) are read and the modes ignored.

Source: the reader and writer of NVIDIA/Megatron-LM, `megatron/core/datasets/indexed_dataset.py`.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import DatasetError

MAGIC = b"MMIDIDX\x00\x00"
VERSION = 1
HEADER_BYTES = 34
_FIELDS = struct.Struct("<QBQQ")
assert len(MAGIC) + _FIELDS.size == HEADER_BYTES

#: Codes of the format that tokens can have.
DTYPES: dict[int, np.dtype[Any]] = {8: np.dtype("<u2"), 4: np.dtype("<i4")}
#: The other codes, for messages.
_NOT_TOKENS = {1: "uint8", 2: "int8", 3: "int16", 5: "int64", 6: "float64", 7: "float32"}
#: A sequence's length is an i32.
MAX_SEQUENCE_TOKENS = (1 << 31) - 1

I32 = npt.NDArray[np.int32]
I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class IndexHeader:
    """The first 34 bytes."""

    dtype: np.dtype[Any]
    sequence_count: int
    #: Entries of the document index: documents + 1.
    document_entries: int

    @property
    def length_bytes(self) -> int:
        """Of the whole file, without modes."""
        return HEADER_BYTES + 12 * self.sequence_count + 8 * self.document_entries

    @property
    def document_count(self) -> int:
        return self.document_entries - 1


@dataclass(frozen=True, kw_only=True)
class Index:
    """A whole, checked index."""

    dtype: np.dtype[Any]
    #: int32[S], tokens.
    lengths: I32
    #: int64[S], bytes.
    pointers: I64
    #: int64[D].
    documents: I64

    @property
    def token_count(self) -> int:
        return int(self.lengths.sum(dtype=np.int64))

    def document_starts(self) -> I64:
        """Where each document begins, and where the last one ends: int64[documents + 1], tokens."""
        ends = np.concatenate([np.zeros(1, np.int64), np.cumsum(self.lengths, dtype=np.int64)])
        return np.asarray(ends[self.documents], np.int64)


def encode_idx(dtype: np.dtype[Any], lengths: I32, block_items: int = 1 << 18) -> Iterator[bytes]:
    """The bytes of an index with one sequence a document, in blocks: only the lengths are in memory, 4 bytes each."""

    def blocks() -> Iterator[I32]:
        for start in range(0, len(lengths), block_items):
            yield lengths[start : start + block_items]

    return encode_idx_blocks(dtype, len(lengths), blocks, block_items)


def encode_idx_blocks(
    dtype: np.dtype[Any], count: int, blocks: Callable[[], Iterable[I32]], block_items: int = 1 << 18
) -> Iterator[bytes]:
    """The same of lengths that come in blocks, twice: nothing that grows with the data is in memory."""
    code = next(code for code, known in DTYPES.items() if known == dtype)
    yield MAGIC + _FIELDS.pack(VERSION, code, count, count + 1)
    for lengths in blocks():
        yield lengths.astype("<i4").tobytes()
    behind = 0
    for lengths in blocks():
        if len(lengths):
            ends = behind + np.cumsum(lengths, dtype=np.int64) * dtype.itemsize
            yield np.concatenate([[behind], ends[:-1]]).astype("<i8").tobytes()
            behind = int(ends[-1])
    for start in range(0, count + 1, block_items):
        yield np.arange(start, min(start + block_items, count + 1), dtype="<i8").tobytes()


def parse_idx_header(data: bytes | memoryview, length_bytes: int, where: str) -> IndexHeader:
    """The header in the first bytes of an index of `length_bytes`. `DatasetError` where it cannot be one."""
    if length_bytes < HEADER_BYTES or len(data) < HEADER_BYTES:
        raise _wrong("is too short", where, f"{HEADER_BYTES} bytes or more", f"{min(length_bytes, len(data))}")
    if bytes(data[: len(MAGIC)]) != MAGIC:
        raise _wrong("does not begin as one", where, repr(MAGIC), repr(bytes(data[: len(MAGIC)])))
    version, code, sequences, entries = _FIELDS.unpack_from(data, len(MAGIC))
    if version != VERSION:
        raise _wrong("has another version", where, str(VERSION), str(version))
    if code not in DTYPES:
        found = f"{code} ({_NOT_TOKENS.get(code, 'unknown')})"
        raise _wrong("has no tokens", where, "dtype code 8 (uint16) or 4 (int32)", found)
    header = IndexHeader(dtype=DTYPES[code], sequence_count=sequences, document_entries=entries)
    # Before anything is made of these counts: they must fill the file exactly.
    if length_bytes not in (header.length_bytes, header.length_bytes + sequences):
        counts = f"{sequences} sequences and {entries} document entries"
        raise _wrong(f"has a wrong size for {counts}", where, f"{header.length_bytes} bytes", str(length_bytes))
    if entries < 1:
        raise _wrong("has no document index", where, "1 entry or more", "0")
    return header


def parse_idx(data: bytes | memoryview, where: str, bin_bytes: int | None = None) -> Index:
    """The whole index, checked: every number is consistent with every other, and with `bin_bytes`, the `.bin`'s length.

    The arrays are views of `data` (read-only where it is). `DatasetError` says what is wrong.
    """
    header = parse_idx_header(data, len(data), where)
    count = header.sequence_count
    lengths: I32 = np.frombuffer(data, "<i4", count, HEADER_BYTES)
    pointers: I64 = np.frombuffer(data, "<i8", count, HEADER_BYTES + 4 * count)
    documents: I64 = np.frombuffer(data, "<i8", header.document_entries, HEADER_BYTES + 12 * count)
    check = IndexCheck(header, where)
    check.sequences(lengths, pointers)
    check.documents(documents)
    check.end(bin_bytes)
    return Index(dtype=header.dtype, lengths=lengths, pointers=pointers, documents=documents)


class IndexCheck:
    """Holds the numbers of an index against each other, as they come, in blocks of any size: first all sequences, then
    the document index. `DatasetError` says what is wrong."""

    def __init__(self, header: IndexHeader, where: str) -> None:
        self._header, self._where = header, where
        self._sequences = self._entries = 0
        #: Bytes of the tokens of all sequences so far.
        self._bytes = 0
        self._last = 0

    def sequences(self, lengths: I32, pointers: I64) -> None:
        """The next ones."""
        if not len(lengths):
            return
        if int(lengths.min()) < 0:
            place = int(np.argmin(lengths))
            where = f"{self._where}, sequence {self._sequences + place}"
            raise _wrong("has a negative length", where, "0 or more", str(int(lengths[place])))
        ends = self._bytes + np.cumsum(lengths, dtype=np.int64) * self._header.dtype.itemsize
        expected = np.concatenate([np.array([self._bytes], np.int64), ends[:-1]])
        wrong = np.flatnonzero(pointers != expected)
        if wrong.size:
            place = int(wrong[0])
            where = f"{self._where}, sequence {self._sequences + place}"
            raise _wrong("has a wrong pointer", where, str(int(expected[place])), str(int(pointers[place])))
        self._bytes, self._sequences = int(ends[-1]), self._sequences + len(lengths)

    def documents(self, entries: I64) -> None:
        """The next entries of the document index."""
        if not len(entries):
            return
        rises = int(entries[0]) >= self._last and not bool(np.any(entries[1:] < entries[:-1]))
        if not rises or (self._entries == 0 and int(entries[0]) != 0):
            raise self._wrong_documents("others")
        self._last, self._entries = int(entries[-1]), self._entries + len(entries)

    def end(self, bin_bytes: int | None = None) -> None:
        """All of it was there. `bin_bytes`: length of the `.bin`."""
        if self._last != self._header.sequence_count:
            raise self._wrong_documents(f"its end {self._last}")
        if bin_bytes is not None and self._bytes != bin_bytes:
            raise _wrong("does not fit its .bin", self._where, f"{bin_bytes} bytes of tokens", str(self._bytes))

    def _wrong_documents(self, found: str) -> DatasetError:
        expected = f"entries that rise from 0 to {self._header.sequence_count}"
        return _wrong("has a wrong document index", self._where, expected, found)


def _wrong(what: str, where: str, expected: str, found: str) -> DatasetError:
    return DatasetError(f"the token index {what}", where=where, expected=expected, found=found)
