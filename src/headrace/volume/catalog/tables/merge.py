"""Several tables read as one: the newest that says something of a key is right.

Batch by batch: of the leaves that each table is at, the one that ends first bounds the batch; up to there all of them
are known. No more than one leaf of each table is held.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Callable, Iterator, Sequence

from headrace.errors import VolumeDamaged
from headrace.volume.catalog.tables.build import Builder
from headrace.volume.catalog.tables.table import Table
from headrace.volume.layout import ALIGN
from headrace.volume.layout.table import Node, Root

#: Keys ascending, and their values; None: deleted.
Batch = tuple[list[bytes], list[bytes | None]]


class _Cursor:
    """The entries of one source that were not taken yet."""

    def __init__(self, batches: Iterator[Batch]) -> None:
        self._batches = batches
        self.keys: list[bytes] = []
        self.values: list[bytes | None] = []
        self.next()

    def next(self) -> None:
        """The next batch that is not empty; none left: no keys."""
        for keys, values in self._batches:
            if keys:
                self.keys, self.values = keys, values
                return
        self.keys, self.values = [], []

    def take(self, bound: bytes) -> Batch:
        """All that is not behind `bound`."""
        if self.keys[-1] <= bound:
            taken = self.keys, self.values
            self.next()
            return taken
        cut = bisect_right(self.keys, bound)
        taken = self.keys[:cut], self.values[:cut]
        self.keys, self.values = self.keys[cut:], self.values[cut:]
        return taken


def batches(leaves: Iterator[Node], first: bytes = b"") -> Iterator[Batch]:
    """Keys and values of leaves, from `first` on."""
    for leaf in leaves:
        start = leaf.first_at_least(first) if first else 0
        first = b""
        yield leaf.keys(start), leaf.values(start)


def merged(sources: Sequence[Iterator[Batch]]) -> Iterator[Batch]:
    """The sources as one, deletions included. `sources`: newest first."""
    cursors = [cursor for cursor in map(_Cursor, sources) if cursor.keys]
    while len(cursors) > 1:
        bound = min(cursor.keys[-1] for cursor in cursors)
        found: dict[bytes, bytes | None] = {}
        for cursor in reversed(cursors):
            if cursor.keys[0] <= bound:
                found.update(zip(*cursor.take(bound), strict=True))
        if not found:
            # What is sorted always has something up to the bound; else this would go on for ever.
            raise VolumeDamaged("a table of the catalogue makes no sense", found="its keys do not ascend")
        keys = sorted(found)
        yield keys, [found[key] for key in keys]
        cursors = [cursor for cursor in cursors if cursor.keys]
    for cursor in cursors:
        while cursor.keys:
            yield cursor.keys, cursor.values
            cursor.next()


class Merge:
    """Tables that stand next to each other, on their way into one, step by step.

    `last`: no older table stands behind them, so deletions have nothing left to hide.
    """

    def __init__(self, tables: Sequence[Table], builder: Callable[[int], Builder], *, last: bool) -> None:
        """`builder`: of a table of at most so many bytes."""
        self.tables = list(tables)
        self.input_bytes = sum(table.root.blocks for table in tables) * ALIGN
        self.builder = builder(self.input_bytes)
        #: Bytes of work that it may do before the next commit pays for more.
        self.credit = 0
        #: What it came to, once it is done; None: nothing.
        self.root: Root | None = None
        self._last = last
        self._batches = merged([batches(table.leaves()) for table in tables])

    def step(self) -> bool:
        """About a leaf's worth; True where all of it is written but for `finish`."""
        batch = next(self._batches, None)
        if batch is None:
            return True
        keys, values = batch
        if self._last:
            kept = [(key, value) for key, value in zip(keys, values, strict=True) if value is not None]
            keys, values = [key for key, _ in kept], [value for _, value in kept]
        self.builder.extend(keys, values)
        return False
