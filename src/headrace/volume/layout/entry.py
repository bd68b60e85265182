"""What the catalogue holds: objects, as slices of blobs, and blobs. And how a commit says what changes in it.

The catalogue is an ordered map from keys to values, both bytes:

    "n" + name, UTF-8                  an object
    "b" + birth, u64 big-endian        a blob that does not lie in the value of an object

A **blob** is an allocation: where its bytes are, and their checksums. It is what takes space, what is shared, and what
a checksum's identity names (its `birth`). An **object** is a name for some bytes of blobs, one slice after another.
Most objects are one whole blob, which then lies in the object's own value. Many small objects put at once are slices of
one blob; an object that was composed of parts of others has slices of theirs.
"""

from __future__ import annotations

import struct
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import numpy as np

from headrace.errors import VolumeDamaged
from headrace.volume.layout.base import COLUMN, RUN, U32, Rows, align_up

OBJECT_KEY = b"n"
BLOB_KEY = b"b"


def object_key(name: str) -> bytes:
    """Any text has one; a name that is not UTF-8 has one that no object has."""
    return OBJECT_KEY + name.encode("utf-8", "surrogatepass")


def name_of(key: bytes) -> str:
    """The object's name. VolumeDamaged where the key is not one of an object."""
    try:
        if key[:1] != OBJECT_KEY:
            raise ValueError(f"key {key[:80]!r}")
        return key[1:].decode()
    except ValueError as error:
        raise VolumeDamaged("an object has a name that is none", found=str(error)) from error


def blob_key(birth: int) -> bytes:
    return BLOB_KEY + struct.pack(">Q", birth)


# ---- blob ------------------------------------------------------------------------------------------------------------
#
#    0  birth                          8 | 20  root_count            4 | 40  runs 16 each: data, then table
#    8  length_bytes                   8 | 24  run_count (data)      4 |     columns 16 each: likewise
#   16  log2 of the checksum block     1 | 28  column_count (data)   4 |     roots 4 each
#   17  log2 of a table page; 0: none  1 | 32  run_count (table)     4 |
#   18  copies of the table but one    1 | 36  column_count (table)  4 |
#   19  reserved                       1 |
#
# Where byte 18 is 1 the table stands twice: the first half of its runs, with their columns, is copy A, the rest copy B.

_BLOB = struct.Struct("<QQBBBxIIIII")
BLOB_BYTES = 40
assert _BLOB.size == BLOB_BYTES


@dataclass(frozen=True, kw_only=True, eq=False)
class Blob:
    """An allocation with its checksums.

    `runs`, `columns`: RUN[r], COLUMN[c] of the data; `table_*`: of all copies of the checksum table, empty where there
    is none.
    `roots`: uint32: the checksums themselves, or those of the table's pages (`table_page_bytes` > 0).
    """

    birth: int
    length_bytes: int
    checksum_block_bytes: int
    table_page_bytes: int
    runs: Rows
    columns: Rows
    table_runs: Rows
    table_columns: Rows
    roots: U32
    table_copies: int = 1

    @property
    def tables(self) -> list[tuple[Rows, Rows]]:
        """Runs and columns of each copy of the checksum table; none where it lies here."""
        if not self.table_page_bytes:
            return []
        half = len(self.table_runs) // self.table_copies
        columns = int(self.table_runs["width"][:half].sum())
        rows = [(self.table_runs[:half], self.table_columns[:columns])]
        if self.table_copies > 1:
            rows.append((self.table_runs[half:], self.table_columns[columns:]))
        return rows

    @property
    def encoded_bytes(self) -> int:
        """What `encode` gives, in bytes."""
        rows = len(self.runs) + len(self.columns) + len(self.table_runs) + len(self.table_columns)
        return BLOB_BYTES + 16 * rows + 4 * len(self.roots)

    @property
    def stored_bytes(self) -> int:
        """Space on the members, in bytes: every run is rounded up once, at its last unit."""
        return sum(align_up(run[0]) for run in (*self.runs.tolist(), *self.table_runs.tolist()))

    def encode(self) -> bytes:
        head = _BLOB.pack(
            self.birth, self.length_bytes, self.checksum_block_bytes.bit_length() - 1,
            self.table_page_bytes.bit_length() - 1 if self.table_page_bytes else 0, self.table_copies - 1,
            len(self.roots), len(self.runs), len(self.columns), len(self.table_runs), len(self.table_columns),
        )  # fmt: skip
        return (
            head + self.runs.tobytes() + self.table_runs.tobytes() + self.columns.tobytes()
            + self.table_columns.tobytes() + self.roots.astype("<u4").tobytes()
        )  # fmt: skip

    @classmethod
    def decode(cls, data: bytes, start: int = 0) -> Blob:
        """From `data[start:]`, all of it. ValueError or struct.error where it makes no sense."""
        birth, length, log2_block, log2_page, more, roots, *counts = _BLOB.unpack_from(data, start)
        if len(data) - start != BLOB_BYTES + 16 * sum(counts) + 4 * roots:
            raise ValueError(f"a blob of {len(data) - start} bytes with {counts} rows and {roots} roots")
        if not 12 <= log2_block <= 24 or log2_page > 24:
            raise ValueError(f"blocks of 2^{log2_block}, pages of 2^{log2_page}")
        runs, columns, table_runs, table_columns = counts
        if more > 1 or (more and (table_runs % 2 or not log2_page)):
            raise ValueError(f"{more} more copies of a checksum table with {table_runs} runs")
        position = start + BLOB_BYTES

        def rows(dtype: Any, count: int) -> Any:
            nonlocal position
            array = np.frombuffer(data, dtype, count, position)
            position += array.nbytes
            return array

        data_runs, more_runs = rows(RUN, runs), rows(RUN, table_runs)
        data_columns, more_columns = rows(COLUMN, columns), rows(COLUMN, table_columns)
        return cls(
            birth=birth, length_bytes=length, checksum_block_bytes=1 << log2_block,
            table_page_bytes=1 << log2_page if log2_page else 0, runs=data_runs, columns=data_columns,
            table_runs=more_runs, table_columns=more_columns, roots=rows("<u4", roots), table_copies=1 + more,
        )  # fmt: skip


def decode_blob(value: bytes, birth: int) -> Blob:
    """The value of the key of blob `birth`. VolumeDamaged."""
    try:
        blob = Blob.decode(value)
        if blob.birth != birth:
            raise ValueError(f"it says that it is blob {blob.birth:#x}")
    except (struct.error, ValueError) as error:
        raise VolumeDamaged("a blob makes no sense", where=f"blob {birth:#x}", found=str(error)) from error
    return blob


# ---- object ----------------------------------------------------------------------------------------------------------
#
#    0  flags; 1: inline   4 | 16  created (ns)    8 | 32  inline: the blob, all of which is the object
#    4  slice_count        4 | 24  length_bytes    8 |     else: slices 24 each: birth 8, start in the blob 8, length 8
#    8  sequence           8 |                       |

_OBJECT = struct.Struct("<IIQQQ")
OBJECT_BYTES = 32
assert _OBJECT.size == OBJECT_BYTES
INLINE = 1

#: One row a slice: bytes `start` to `start + length` of blob `birth`.
SLICE = np.dtype([("birth", "<u8"), ("start", "<u8"), ("length", "<u8")])
assert SLICE.itemsize == 24
NO_SLICES: Rows = np.zeros(0, SLICE)


class ObjectHead(NamedTuple):
    """What is at the same place of every object's value."""

    flags: int
    slice_count: int
    sequence: int
    created_ns: int
    length_bytes: int

    @classmethod
    def decode(cls, value: bytes, name: str) -> ObjectHead:
        """VolumeDamaged."""
        try:
            return cls(*_OBJECT.unpack_from(value))
        except struct.error as error:
            raise _no_sense(name, error) from error


@dataclass(frozen=True, kw_only=True, eq=False)
class ObjectValue:
    """An object: either one whole blob of its own, or slices of blobs that have keys."""

    sequence: int
    created_ns: int
    length_bytes: int
    #: SLICE[n].
    slices: Rows = field(default_factory=lambda: NO_SLICES)
    blob: Blob | None = None

    def encode(self) -> bytes:
        flags = 0 if self.blob is None else INLINE
        head = _OBJECT.pack(flags, len(self.slices), self.sequence, self.created_ns, self.length_bytes)
        return head + (self.slices.tobytes() if self.blob is None else self.blob.encode())

    @classmethod
    def decode(cls, value: bytes, name: str) -> ObjectValue:
        """VolumeDamaged where the value contradicts itself."""
        try:
            flags, count, sequence, created, length = _OBJECT.unpack_from(value)
            blob, slices = None, NO_SLICES
            if flags == INLINE:
                blob = Blob.decode(value, OBJECT_BYTES)
                if count or blob.length_bytes != length:
                    raise ValueError(f"{length} bytes, {count} slices, in a blob of {blob.length_bytes} bytes")
            elif flags:
                raise ValueError(f"flags {flags:#x}")
            else:
                if len(value) != OBJECT_BYTES + SLICE.itemsize * count:
                    raise ValueError(f"{count} slices in {len(value)} bytes")
                slices = np.frombuffer(value, SLICE, count, OBJECT_BYTES)
                # In Python's numbers: a sum of hostile ones does not wrap round.
                if sum(slices["length"].tolist()) != length or not all(slices["length"].tolist()):
                    raise ValueError(f"slices of {slices['length'].tolist()[:8]} for {length} bytes")
        except (struct.error, ValueError) as error:
            raise _no_sense(name, error) from error
        return cls(sequence=sequence, created_ns=created, length_bytes=length, slices=slices, blob=blob)


def peek_slices(value: bytes, name: str) -> bytes:
    """The rows of an object's slices, as they lie there; empty where it is inline. VolumeDamaged."""
    head = ObjectHead.decode(value, name)
    if head.flags & INLINE:
        return b""
    if len(value) != OBJECT_BYTES + SLICE.itemsize * head.slice_count:
        raise _no_sense(name, ValueError(f"{head.slice_count} slices in {len(value)} bytes"))
    return value[OBJECT_BYTES:]


def peek_blob(value: bytes) -> tuple[int, int, int]:
    """(birth, checksum block, space on the members) of an inline object, without its arrays: what a listing says."""
    try:
        birth, _, log2_block, _, _, _, runs, _, table_runs, _ = _BLOB.unpack_from(value, OBJECT_BYTES)
        if 16 * (runs + table_runs) > len(value) - OBJECT_BYTES - BLOB_BYTES:
            raise ValueError(f"{runs} and {table_runs} runs in {len(value)} bytes")
        lengths = struct.unpack_from("<" + "Q8x" * (runs + table_runs), value, OBJECT_BYTES + BLOB_BYTES)
    except (struct.error, ValueError) as error:
        raise VolumeDamaged("an object's entry makes no sense", found=str(error)) from error
    return birth, 1 << log2_block, sum(map(align_up, lengths))


def _no_sense(name: str, error: Exception) -> VolumeDamaged:
    return VolumeDamaged("an object's entry makes no sense", where=f"object {name!r}", found=str(error))


# ---- payload of COMMIT and SNAPSHOT ----------------------------------------------------------------------------------
#
#    0  operation_count  4 |  8  sequence (SNAPSHOT: of the last commit in it)  8 | 24  used_bytes then  8
#    4  reserved         4 | 16  object_count after it                          8 | 32  operations
#
# operation, a multiple of 8 bytes:
#    0  value_bytes  4 | 4  key_bytes  2 | 6  kind: 1 put, 2 delete, 3 adopt  1 | 7  reserved  1 | 8  value, key, zeros

_PAYLOAD = struct.Struct("<I4xQQQ")
PAYLOAD_BYTES = 32
_OPERATION = struct.Struct("<IHBx")
assert _PAYLOAD.size == PAYLOAD_BYTES and _OPERATION.size == 8
PUT = 1
DELETE = 2
#: The value is the root of a table, which has all that this commit changes and all that is recent; it stands alone.
ADOPT = 3


class Operation(NamedTuple):
    """One change of the catalogue. A DELETE has no value."""

    kind: int
    key: bytes
    value: bytes

    @property
    def encoded_bytes(self) -> int:
        return align_up(_OPERATION.size + len(self.value) + len(self.key), 8)

    def encode(self) -> bytes:
        head = _OPERATION.pack(len(self.value), len(self.key), self.kind)
        return (head + self.value + self.key).ljust(self.encoded_bytes, b"\0")


class Totals(NamedTuple):
    """What the catalogue adds up to: so that nobody needs to read all of it to know."""

    object_count: int
    #: Space of all blobs with their checksum tables.
    used_bytes: int


def payload_bytes(count: int, key_and_value_bytes: int) -> int:
    """At least what a payload of so many operations takes."""
    return PAYLOAD_BYTES + 15 * count + key_and_value_bytes


def encode_operations(operations: Iterable[Operation], sequence: int, totals: Totals) -> bytes:
    """A payload. The operations take effect in their order."""
    encoded = [operation.encode() for operation in operations]
    return _PAYLOAD.pack(len(encoded), sequence, *totals) + b"".join(encoded)


def decode_operations(payload: bytes, where: str) -> tuple[int, Totals, list[Operation]]:
    """Sequence, totals and operations. Raises VolumeDamaged: never reads beyond the payload."""
    try:
        count, sequence, objects, used = _PAYLOAD.unpack_from(payload)
        operations = []
        position = PAYLOAD_BYTES
        for _ in range(count):
            value_bytes, key_bytes, kind = _OPERATION.unpack_from(payload, position)
            total = align_up(_OPERATION.size + value_bytes + key_bytes, 8)
            if position + total > len(payload) or kind not in (PUT, DELETE, ADOPT):
                raise ValueError(f"operation {kind} of {total} bytes at {position} of {len(payload)}")
            start = position + _OPERATION.size
            middle = start + value_bytes
            operations.append(Operation(kind, payload[middle : middle + key_bytes], payload[start:middle]))
            position += total
    except (struct.error, ValueError) as error:
        raise VolumeDamaged("a record of the log makes no sense", where=where, found=str(error)) from error
    return sequence, Totals(objects, used), operations
