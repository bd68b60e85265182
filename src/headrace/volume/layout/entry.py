"""Objects as commits and snapshots have them."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.errors import VolumeDamaged
from headrace.volume.layout.base import COLUMN, RUN, U32, Rows, align_up

# ---- entries of COMMIT and SNAPSHOT payloads -------------------------------------------------------------------------
#
# payload:  0 entry_count 4 | 4 reserved 4 | 8 commit sequence 8 (SNAPSHOT: of the last commit in it) | 16 entries
#
# entry:    0  entry_bytes (multiple of 8)        4 | 12 run_count (data)         4 | 32 length_bytes   8
#           4  operation: 1 put, 2 delete         1 | 16 column_count (data)      4 | 40 birth          8
#           5  log2 of checksum_block_bytes       1 | 20 run_count (table)        4 | 48 sequence       8
#           6  log2 of table page; 0: inline      1 | 24 column_count (table)     4 | 56 created (ns)   8
#           7  flags                              1 | 28 root_count               4 | 64 runs 16 each, data then table
#           8  name_bytes                         2 |                               |    columns 16 each, same
#          10  reserved                           2 |                               |    roots 4 each; name; zeros

PAYLOAD_HEAD = struct.Struct("<I4xQ")
_ENTRY = struct.Struct("<IBBBBH2xIIIIIQQQQ")
assert PAYLOAD_HEAD.size == 16 and _ENTRY.size == 64
PUT = 1
DELETE = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """An object as the log has it, or (`operation` DELETE) its end.

    `runs`, `columns`: RUN[r], COLUMN[c] of the data; `table_*`: of the checksum table, empty where it is inline.
    `roots`: uint32: the checksums themselves (inline), or those of the table's pages.
    """

    name: str
    operation: int
    length_bytes: int
    birth: int
    sequence: int
    created_ns: int
    checksum_block_bytes: int
    table_page_bytes: int
    runs: Rows
    columns: Rows
    table_runs: Rows
    table_columns: Rows
    roots: U32

    @property
    def encoded_bytes(self) -> int:
        """What `encode` gives, in bytes."""
        rows = len(self.runs) + len(self.columns) + len(self.table_runs) + len(self.table_columns)
        return align_up(_ENTRY.size + 16 * rows + 4 * len(self.roots) + len(self.name.encode()), 8)

    @property
    def stored_bytes(self) -> int:
        """Space on the members, in bytes: every run is rounded up once, at its last unit."""
        return sum(align_up(run[0]) for run in (*self.runs.tolist(), *self.table_runs.tolist()))

    def encode(self) -> bytes:
        name = self.name.encode()
        body = (
            self.runs.tobytes() + self.table_runs.tobytes() + self.columns.tobytes() + self.table_columns.tobytes()
            + self.roots.astype("<u4").tobytes() + name
        )  # fmt: skip
        total = align_up(_ENTRY.size + len(body), 8)
        head = _ENTRY.pack(
            total, self.operation, self.checksum_block_bytes.bit_length() - 1,
            self.table_page_bytes.bit_length() - 1 if self.table_page_bytes else 0, 0, len(name),
            len(self.runs), len(self.columns), len(self.table_runs), len(self.table_columns), len(self.roots),
            self.length_bytes, self.birth, self.sequence, self.created_ns,
        )  # fmt: skip
        return (head + body).ljust(total, b"\0")


def decode_entries(payload: bytes, where: str) -> tuple[int, list[Entry]]:
    """Commit sequence and entries of a COMMIT or SNAPSHOT payload. Raises VolumeDamaged: never reads beyond the
    payload.
    """
    try:
        count, sequence = PAYLOAD_HEAD.unpack_from(payload)
        entries = []
        position = PAYLOAD_HEAD.size
        for _ in range(count):
            entry, position = _decode_entry(payload, position)
            entries.append(entry)
    except (struct.error, ValueError) as error:
        raise VolumeDamaged("a record of the log makes no sense", where=where, found=str(error)) from error
    return sequence, entries


def _decode_entry(payload: bytes, start: int) -> tuple[Entry, int]:
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
    name = payload[position : position + name_bytes].decode()
    entry = Entry(
        name=name, operation=operation, length_bytes=length, birth=birth, sequence=sequence, created_ns=created,
        checksum_block_bytes=1 << log2_block, table_page_bytes=1 << log2_page if log2_page else 0,
        runs=data_runs, columns=data_columns, table_runs=more_runs, table_columns=more_columns, roots=root_array,
    )  # fmt: skip
    return entry, start + total


def number_entry(entry: bytes, sequence: int) -> bytes:
    """An encoded entry with its sequence filled in."""
    return entry[:48] + struct.pack("<Q", sequence) + entry[56:]


def encode_entries(entries: list[bytes], commit_sequence: int) -> bytes:
    """The payload of encoded entries."""
    return PAYLOAD_HEAD.pack(len(entries), commit_sequence) + b"".join(entries)
