"""Tables of the catalogue: immutable, sorted, each verified from its root down.

A table is a static tree of nodes in data space, written bottom up, twice. A node is whole blocks of 4096 bytes, and
`place` is the index of its first block within the table. The checksum of a node stands with its place in the node
above, that of the top in the table's `Root`, and the `Root` in the log: so the chain of trust goes from a record of the
log to every key.
"""

from __future__ import annotations

import struct
from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from itertools import accumulate, pairwise
from typing import NamedTuple

import numpy as np

from headrace.device import crc32c
from headrace.errors import VolumeDamaged
from headrace.volume.layout.base import ALIGN, EXTENT, U32, Rows, align_up, place_seed

# ---- node ------------------------------------------------------------------------------------------------------------
#
#    0  magic "HRTN"        4 | 12  key_bytes    4 | 32  ends of the keys    4 each, from the start of the keys
#    4  level; 0: leaf      2 | 16  value_bytes  4 |     ends of the values  4 each; bit 31: deleted, has no value
#    6  reserved            2 | 20  reserved    12 |     keys, one after another, ascending
#    8  count, 1 or more    4 |                    |     values, one after another; zeros to a multiple of 4096
#
# The values of an inner node are children: place 8, blocks 4, crc 4. The key of a child is its first.

_NODE = struct.Struct("<4sHHIII12x")
NODE_BYTES = 32
assert _NODE.size == NODE_BYTES
_NODE_MAGIC = b"HRTN"
_CHILD = struct.Struct("<QII")
assert _CHILD.size == 16
_END = struct.Struct("<I")
_TWO_ENDS = struct.Struct("<II")
DELETED = 1 << 31
_ZEROS = bytes(ALIGN)
#: A single large value makes a node larger than others, up to this.
MAX_NODE_BYTES = 1 << 20
MAX_HEIGHT = 16


class Child(NamedTuple):
    """Where a node stands in its table, and its checksum."""

    place: int
    blocks: int
    crc: int


def node_bytes(count: int, key_bytes: int, value_bytes: int) -> int:
    """What a node of so many entries takes, in bytes."""
    return align_up(NODE_BYTES + 8 * count + key_bytes + value_bytes)


def encode_node(level: int, keys: Sequence[bytes], values: Sequence[bytes | None]) -> bytes:
    """A value of None: the key is deleted."""
    key_ends = list(accumulate(map(len, keys)))
    value_ends = list(accumulate(0 if value is None else len(value) for value in values))
    position = value_ends[-1]
    if None in values:
        value_ends = [
            end if value is not None else end | DELETED for end, value in zip(value_ends, values, strict=True)
        ]
    ends = np.array(key_ends + value_ends, "<u4").tobytes()
    return _joined(level, len(keys), ends, key_ends[-1], position, [*keys, *filter(None, values)])


def join_node(level: int, key_ends: U32, value_ends: U32, keys: bytes, values: bytes) -> bytes:
    """The same where keys lie one after another, and values too, with their ends ("<u4"), and nothing is deleted."""
    ends = key_ends.tobytes() + value_ends.tobytes()
    return _joined(level, len(key_ends), ends, len(keys), len(values), [keys, values])


def _joined(
    level: int, count: int, ends: bytes, key_bytes: int, value_bytes: int, keys_and_values: list[bytes]
) -> bytes:
    head = _NODE.pack(_NODE_MAGIC, level, 0, count, key_bytes, value_bytes)
    size = NODE_BYTES + len(ends) + key_bytes + value_bytes
    return b"".join([head, ends, *keys_and_values, _ZEROS[: -size % ALIGN]])


def encode_child(child: Child) -> bytes:
    return _CHILD.pack(*child)


def node_crc(data: bytes | memoryview, volume_id: bytes, birth: int, place: int) -> int:
    return crc32c(data, place_seed(volume_id, birth, place))


class Node:
    """A decoded node. Immutable. What it says is sliced out when it is asked for, always within `data`."""

    __slots__ = ("count", "data", "keys_at", "level", "values_at")

    def __init__(self, data: bytes) -> None:
        """ValueError where it is none."""
        if len(data) < ALIGN or data[:4] != _NODE_MAGIC:
            raise ValueError("no node")
        _, level, _, count, key_bytes, value_bytes = _NODE.unpack_from(data)
        self.level: int = level
        self.count: int = count
        self.data = data
        self.keys_at = NODE_BYTES + 8 * count
        self.values_at = self.keys_at + key_bytes
        if (
            count < 1
            or level >= MAX_HEIGHT
            or self.values_at + value_bytes > len(data)
            or (level and value_bytes != count * _CHILD.size)
        ):
            raise ValueError(f"node of level {level} with {count} entries of {key_bytes} and {value_bytes} bytes")

    def check(self) -> None:
        """ValueError where entries contradict each other: what a checker wants to know and a reader need not."""
        ends = np.frombuffer(self.data, "<u4", 2 * self.count, NODE_BYTES)
        keys, values = ends[: self.count], ends[self.count :] & np.uint32(DELETED - 1)
        _, _, _, _, key_bytes, value_bytes = _NODE.unpack_from(self.data)
        if (
            keys[-1] != key_bytes
            or values[-1] != value_bytes
            or bool(np.any(keys[1:] < keys[:-1]))
            or bool(np.any(values[1:] < values[:-1]))
            or (self.level and any(value is None or len(value) != _CHILD.size for value in self.values()))
        ):
            raise ValueError("its entries contradict each other")
        names = self.keys()
        if any(one >= other for one, other in pairwise(names)):
            raise ValueError("its keys do not ascend")

    def key(self, index: int) -> bytes:
        at = NODE_BYTES + 4 * index
        if index:
            start, end = _TWO_ENDS.unpack_from(self.data, at - 4)
        else:
            start, (end,) = 0, _END.unpack_from(self.data, at)
        return self.data[self.keys_at + start : self.keys_at + end]

    def value(self, index: int) -> bytes | None:
        """None: deleted."""
        at = NODE_BYTES + 4 * (self.count + index)
        (end,) = _END.unpack_from(self.data, at)
        if end & DELETED:
            return None
        start = _END.unpack_from(self.data, at - 4)[0] & (DELETED - 1) if index else 0
        return self.data[self.values_at + start : self.values_at + end]

    def child(self, index: int) -> Child:
        return Child(*_CHILD.unpack_from(self.data, self.values_at + index * _CHILD.size))

    def first_at_least(self, key: bytes) -> int:
        """Index of the first entry that is not before `key`; `count` where there is none."""
        return bisect_left(range(self.count), key, key=self.key)

    def child_of(self, key: bytes) -> int:
        """Index of the child that `key` would be in."""
        return max(0, bisect_right(range(self.count), key, key=self.key) - 1)

    def _slices(self, base: int, first: int, start: int, ends: U32) -> list[bytes]:
        """Of entries from `start` on, whose ends from `base` on are `ends[start:]`; `first` is the index of `ends`."""
        stops = (ends.astype(np.int64) + base).tolist()
        begin = base if not start else base + _END.unpack_from(self.data, first - 4)[0] % DELETED
        data = self.data
        return [data[low:high] for low, high in pairwise([begin, *stops])]

    def ends(self) -> tuple[U32, U32]:
        """Of the keys, from `keys_at` in `data`; of the values, from `values_at`, with their DELETED."""
        both = np.frombuffer(self.data, "<u4", 2 * self.count, NODE_BYTES)
        return both[: self.count], both[self.count :]

    def keys(self, start: int = 0) -> list[bytes]:
        at = NODE_BYTES + 4 * start
        return self._slices(self.keys_at, at, start, np.frombuffer(self.data, "<u4", self.count - start, at))

    def values(self, start: int = 0) -> list[bytes | None]:
        at = NODE_BYTES + 4 * (self.count + start)
        ends = np.frombuffer(self.data, "<u4", self.count - start, at)
        result: list[bytes | None] = [*self._slices(self.values_at, at, start, ends % np.uint32(DELETED))]
        for index in np.flatnonzero(ends >= DELETED).tolist():
            result[index] = None
        return result


# ---- root ------------------------------------------------------------------------------------------------------------
#
#    0  birth             8 | 32  blocks of the top node  4 | 48  extents of copy A  4 | 64  extents 24 each: A, then B
#    8  entry_count       8 | 36  crc of the top node     4 | 52  extents of copy B  4 |     (member 4, flags 4,
#   16  deleted_count     8 | 40  height                  2 | 56  blocks             8 |      offset 8, length 8)
#   24  place of the top  8 | 42  reserved                6 |                          |
#
# A copy is its extents, one after another; both are `blocks` long, and no node crosses from one extent into another.

_ROOT = struct.Struct("<QQQQIIH6xIIQ")
ROOT_BYTES = 64
assert _ROOT.size == ROOT_BYTES
TABLE_COPIES = 2


class Root(NamedTuple):
    """A table as the log knows it: what it is, where its copies are, and the checksum of its top node."""

    birth: int
    entry_count: int
    deleted_count: int
    top: Child
    height: int
    blocks: int
    #: EXTENT[n] of each copy.
    copies: tuple[Rows, Rows]

    @property
    def stored_bytes(self) -> int:
        """Space on the members, both copies together."""
        return TABLE_COPIES * self.blocks * ALIGN

    @property
    def encoded_bytes(self) -> int:
        return ROOT_BYTES + EXTENT.itemsize * sum(map(len, self.copies))

    def space(self) -> list[tuple[int, int, int]]:
        """(member, offset, bytes) of all that belongs to the table."""
        return [(member, offset, length) for rows in self.copies for member, _, offset, length in rows.tolist()]

    def encode(self) -> bytes:
        head = _ROOT.pack(
            self.birth, self.entry_count, self.deleted_count, *self.top, self.height, *map(len, self.copies),
            self.blocks,
        )  # fmt: skip
        return head + b"".join(rows.tobytes() for rows in self.copies)

    @classmethod
    def decode_from(cls, data: bytes, start: int) -> tuple[Root, int]:
        """The root at `start`, and where it ends. ValueError or struct.error where it makes no sense."""
        birth, entries, deleted, place, blocks, crc, height, rows_a, rows_b, total = _ROOT.unpack_from(data, start)
        position = start + ROOT_BYTES
        end = position + EXTENT.itemsize * (rows_a + rows_b)
        if end > len(data):
            raise ValueError(f"root of a table with {rows_a} and {rows_b} extents at {start} of {len(data)}")
        rows = np.frombuffer(data, EXTENT, rows_a + rows_b, position)
        copies = rows[:rows_a], rows[rows_a:]
        # In Python's numbers: a sum of hostile ones does not wrap round.
        if (
            any(sum(copy["length"].tolist()) != total * ALIGN for copy in copies)
            or bool(np.any(rows["length"] % ALIGN))
            or bool(np.any(rows["offset"] % ALIGN))
            or not 1 <= blocks <= MAX_NODE_BYTES // ALIGN
            or place + blocks > total
            or not 1 <= height <= MAX_HEIGHT
            or deleted > entries
        ):
            raise ValueError(f"root of table {birth:#x}: {height} levels, {total} blocks, top {blocks} at {place}")
        return cls(birth, entries, deleted, Child(place, blocks, crc), height, total, copies), end

    @classmethod
    def decode(cls, data: bytes, where: str) -> Root:
        """Exactly one. VolumeDamaged."""
        try:
            root, end = cls.decode_from(data, 0)
            if end != len(data):
                raise ValueError(f"{len(data) - end} bytes behind the root of a table")
        except (struct.error, ValueError) as error:
            raise VolumeDamaged("a record of the log makes no sense", where=where, found=str(error)) from error
        return root


# ---- payloads of TABLES and TABLES_CHANGED ---------------------------------------------------------------------------
#
# TABLES          0  table_count    4 | 4  reserved     4 | 8  sequence of the last commit  8 | 16  object_count  8
#                24  used_bytes     8 | 32  roots, newest table first
# TABLES_CHANGED  0  removed_count  4 | 4  added_count  4 | 8  births of the removed, newest first  8 each | roots

_TABLES = struct.Struct("<I4xQQQ")
_CHANGED = struct.Struct("<II")
assert _TABLES.size == 32 and _CHANGED.size == 8


class Tables(NamedTuple):
    """All tables of the catalogue at one moment, and what they and the entries beside them add up to."""

    sequence: int
    object_count: int
    used_bytes: int
    roots: list[Root]

    def encode(self) -> bytes:
        head = _TABLES.pack(len(self.roots), self.sequence, self.object_count, self.used_bytes)
        return head + b"".join(root.encode() for root in self.roots)

    @classmethod
    def decode(cls, payload: bytes, where: str) -> Tables:
        """VolumeDamaged."""
        try:
            count, sequence, objects, used = _TABLES.unpack_from(payload)
            return cls(sequence, objects, used, _decode_roots(payload, _TABLES.size, count))
        except (struct.error, ValueError) as error:
            raise VolumeDamaged("a record of the log makes no sense", where=where, found=str(error)) from error


class TablesChanged(NamedTuple):
    """Tables that stand next to each other are replaced by one with the same content, or by none: they had none."""

    removed: list[int]
    added: list[Root]

    def encode(self) -> bytes:
        head = _CHANGED.pack(len(self.removed), len(self.added))
        births = np.array(self.removed, "<u8").tobytes()
        return head + births + b"".join(root.encode() for root in self.added)

    @classmethod
    def decode(cls, payload: bytes, where: str) -> TablesChanged:
        """VolumeDamaged."""
        try:
            removed, added = _CHANGED.unpack_from(payload)
            births = np.frombuffer(payload, "<u8", removed, _CHANGED.size).tolist()
            return cls(births, _decode_roots(payload, _CHANGED.size + 8 * removed, added))
        except (struct.error, ValueError) as error:
            raise VolumeDamaged("a record of the log makes no sense", where=where, found=str(error)) from error


def _decode_roots(payload: bytes, position: int, count: int) -> list[Root]:
    roots = []
    for _ in range(count):
        root, position = Root.decode_from(payload, position)
        roots.append(root)
    if position != len(payload):
        raise ValueError(f"{len(payload) - position} bytes behind the roots of tables")
    return roots
