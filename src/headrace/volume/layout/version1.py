"""Entries as version 1 had them, for reading: each becomes the operation that says the same today."""

from __future__ import annotations

import struct
from typing import Any

import numpy as np

from headrace.errors import VolumeDamaged
from headrace.volume.layout.base import COLUMN, RUN, align_up
from headrace.volume.layout.entry import DELETE, PUT, Blob, ObjectValue, Operation, object_key

# payload:  0 entry_count 4 | 4 reserved 4 | 8 commit sequence 8 (SNAPSHOT: of the last commit in it) | 16 entries
#
# entry:    0  entry_bytes (multiple of 8)        4 | 12 run_count (data)         4 | 32 length_bytes   8
#           4  operation: 1 put, 2 delete         1 | 16 column_count (data)      4 | 40 birth          8
#           5  log2 of checksum_block_bytes       1 | 20 run_count (table)        4 | 48 sequence       8
#           6  log2 of table page; 0: inline      1 | 24 column_count (table)     4 | 56 created (ns)   8
#           7  flags                              1 | 28 root_count               4 | 64 runs 16 each, data then table
#           8  name_bytes                         2 |                               |    columns 16 each, same
#          10  reserved                           2 |                               |    roots 4 each; name; zeros

_HEAD = struct.Struct("<I4xQ")
_ENTRY = struct.Struct("<IBBBBH2xIIIIIQQQQ")
assert _HEAD.size == 16 and _ENTRY.size == 64


def decode_version1(payload: bytes, where: str) -> tuple[int, list[Operation]]:
    """Commit sequence and changes of a COMMIT or SNAPSHOT payload. Raises VolumeDamaged."""
    try:
        count, sequence = _HEAD.unpack_from(payload)
        operations = []
        position = _HEAD.size
        for _ in range(count):
            operation, position = _decode_entry(payload, position)
            operations.append(operation)
    except (struct.error, ValueError) as error:
        raise VolumeDamaged("a record of the log makes no sense", where=where, found=str(error)) from error
    return sequence, operations


def _decode_entry(payload: bytes, start: int) -> tuple[Operation, int]:
    (
        total, operation, log2_block, log2_page, _flags, name_bytes, runs, columns, table_runs, table_columns, roots,
        length, birth, sequence, created,
    ) = _ENTRY.unpack_from(payload, start)  # fmt: skip
    need = _ENTRY.size + 16 * (runs + columns + table_runs + table_columns) + 4 * roots + name_bytes
    if total != align_up(need, 8) or start + total > len(payload) or not 12 <= log2_block <= 24 or log2_page > 40:
        raise ValueError(f"entry of {total} bytes at {start} of {len(payload)}")
    position = start + _ENTRY.size

    def rows(dtype: Any, count: int) -> Any:
        nonlocal position
        array = np.frombuffer(payload, dtype, count, position)
        position += array.nbytes
        return array

    data_runs, more_runs = rows(RUN, runs), rows(RUN, table_runs)
    data_columns, more_columns = rows(COLUMN, columns), rows(COLUMN, table_columns)
    root_array = rows("<u4", roots)
    key = object_key(payload[position : position + name_bytes].decode())
    if operation == DELETE:
        return Operation(DELETE, key, b""), start + total
    blob = Blob(
        birth=birth, length_bytes=length, checksum_block_bytes=1 << log2_block,
        table_page_bytes=1 << log2_page if log2_page else 0,
        runs=data_runs, columns=data_columns, table_runs=more_runs, table_columns=more_columns, roots=root_array,
    )  # fmt: skip
    value = ObjectValue(sequence=sequence, created_ns=created, length_bytes=length, blob=blob)
    return Operation(PUT, key, value.encode()), start + total
