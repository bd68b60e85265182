"""The catalogue as arrays: where each key and value lies in a piece of memory, and no Python object for any of them."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import chain

import numpy as np
import numpy.typing as npt

from headrace.errors import VolumeDamaged
from headrace.volume import layout
from headrace.volume.catalog.tables import Table
from headrace.volume.layout.table import DELETED, Node

I64 = npt.NDArray[np.int64]
#: Leaves of one piece together.
_PIECE_BYTES = 1 << 20


@dataclass(frozen=True, eq=False)
class Columns:
    """Some entries: key *i* is `data[key_start[i]:key_end[i]]`, its value likewise."""

    data: npt.NDArray[np.uint8]
    key_start: I64
    key_end: I64
    value_start: I64
    value_end: I64

    def __len__(self) -> int:
        return len(self.key_start)

    def key(self, index: int) -> bytes:
        return self.data[self.key_start[index] : self.key_end[index]].tobytes()

    def value(self, index: int) -> bytes:
        return self.data[self.value_start[index] : self.value_end[index]].tobytes()

    def name(self, index: int) -> str:
        return layout.name_of(self.key(index))

    def only(self, wanted: npt.NDArray[np.bool_]) -> Columns:
        return Columns(
            self.data, self.key_start[wanted], self.key_end[wanted], self.value_start[wanted], self.value_end[wanted]
        )


def columns_of(entries: Sequence[tuple[bytes, bytes]]) -> Columns:
    """Of entries that are Python objects."""
    sizes = np.array([(len(key), len(value)) for key, value in entries], np.int64).reshape(-1, 2)
    ends = np.cumsum(sizes.ravel()).reshape(-1, 2)
    starts = ends - sizes
    data = np.frombuffer(b"".join(part for entry in entries for part in entry), np.uint8)
    return Columns(data, starts[:, 0], ends[:, 0], starts[:, 1], ends[:, 1])


def columns_of_leaves(leaves: Sequence[Node]) -> tuple[Columns, npt.NDArray[np.bool_]]:
    """Of leaves, and which of their entries are deletions."""
    key_start, key_end, value_start, value_end, deleted = [], [], [], [], []
    base = 0
    for leaf in leaves:
        keys, values = leaf.ends()
        ends = (values % np.uint32(DELETED)).astype(np.int64) + (base + leaf.values_at)
        key_ends = keys.astype(np.int64) + (base + leaf.keys_at)
        key_end.append(key_ends)
        value_end.append(ends)
        key_start.append(np.concatenate(([base + leaf.keys_at], key_ends[:-1])))
        value_start.append(np.concatenate(([base + leaf.values_at], ends[:-1])))
        deleted.append(values >= DELETED)
        base += len(leaf.data)
        inside = key_ends[-1] <= base - len(leaf.data) + leaf.values_at and ends[-1] <= base
        if not inside or bool(np.any(key_end[-1] <= key_start[-1])) or bool(np.any(value_end[-1] < value_start[-1])):
            raise VolumeDamaged("a node of a table makes no sense", found="its entries contradict each other")
    data = np.frombuffer(b"".join(leaf.data for leaf in leaves), np.uint8)
    return (
        Columns(*(data, *map(np.concatenate, (key_start, key_end, value_start, value_end)))),
        np.concatenate(deleted),
    )


def live(tables: Sequence[Table], recent: dict[bytes, bytes | None]) -> Iterator[Columns]:
    """Every entry that is there, in no order: those of recent changes, and of each table those that nothing newer
    says anything of. `tables`: newest first."""
    if recent:
        yield columns_of([(key, value) for key, value in recent.items() if value is not None])
    newer = set(recent)
    for index, table in enumerate(tables):
        last = index == len(tables) - 1
        few = 16 * len(newer) < table.root.entry_count
        hidden = sorted(newer) if few else []
        for leaves in _pieces(table):
            columns, deleted = columns_of_leaves(leaves)
            if newer:
                if few and last:
                    wanted = ~deleted
                    wanted[_places(leaves, hidden)] = False
                else:
                    keys = list(chain.from_iterable(leaf.keys() for leaf in leaves))
                    wanted = ~deleted & np.array([key not in newer for key in keys], np.bool_)
                yield columns.only(wanted)
            else:
                yield columns.only(~deleted) if bool(deleted.any()) else columns
        if not last:
            for leaves in _pieces(table):
                for leaf in leaves:
                    newer.update(leaf.keys())


def _pieces(table: Table) -> Iterator[list[Node]]:
    leaves: list[Node] = []
    size = 0
    for leaf in table.leaves():
        leaves.append(leaf)
        size += len(leaf.data)
        if size >= _PIECE_BYTES:
            yield leaves
            leaves, size = [], 0
    if leaves:
        yield leaves


def _places(leaves: Sequence[Node], keys: Sequence[bytes]) -> list[int]:
    """Which entries of the leaves, counted through, have one of these keys."""
    result = []
    base = 0
    for leaf in leaves:
        first, last = leaf.key(0), leaf.key(leaf.count - 1)
        for key in keys[bisect_left(keys, first) :]:
            if key > last:
                break
            index = leaf.first_at_least(key)
            if leaf.key(index) == key:
                result.append(base + index)
        base += leaf.count
    return result
