"""Which bytes a flow reads, batch after batch: in order, or by chance. The same seed reads the same."""

from __future__ import annotations

from collections.abc import Iterator

import numpy as np

from headrace.bench.cache import DROPPED
from headrace.bench.patterns.options import Options
from headrace.bench.places.protocol import I64, Place, Ranges
from headrace.errors import UsageError

#: Batches that a flow has under way.
_BATCHES = 4
#: Samples of which the order is a permutation, so that none is read twice; of more, chance sees to that.
_PERMUTED = 1 << 22
#: Samples whose places are chosen at a time.
_CHOSEN = 4096


def split(depth: int) -> tuple[int, int]:
    """A depth as batches under way, and requests of each."""
    batches = min(_BATCHES, depth)
    return batches, max(1, depth // batches)


class Grid:
    """The items of a place as samples of `length` bytes, numbered through; an item that is shorter is one sample."""

    def __init__(self, place: Place, length: int) -> None:
        lengths = np.array([item.length_bytes for item in place.items], np.int64)
        if not len(lengths) or not lengths.any():
            raise UsageError("there is nothing to be read", where=place.name)
        self._lengths, self._length = lengths, length
        # The last one of an item may be shorter.
        self._counts = np.maximum(1, -(-lengths // length))
        self._ends = np.cumsum(self._counts)

    def __len__(self) -> int:
        return int(self._ends[-1])

    def ranges(self, numbers: I64) -> Ranges:
        item = np.searchsorted(self._ends, numbers, side="right").astype(np.int64)
        first = self._ends[item] - self._counts[item]
        offset = (numbers - first) * self._length
        return Ranges(item, offset, np.minimum(self._length, self._lengths[item] - offset))


def in_order(grid: Grid, options: Options, flow: int, *, again: bool) -> Iterator[Ranges]:
    """A flow's own stretch of the data, from its start to its end. `again`: round and round, from where the seed says,
    so that rounds of a large device do not all read what its own cache has from the first."""
    _, batch = split(options.depth)
    low = len(grid) * flow // options.flows
    high = max(low + 1, len(grid) * (flow + 1) // options.flows)
    begin = int(np.random.default_rng((options.seed, flow)).integers(low, high)) if again else low
    while True:
        for at in range(begin, high, batch):
            yield grid.ranges(np.arange(at, min(high, at + batch), dtype=np.int64))
        if not again:
            return
        for at in range(low, begin, batch):
            yield grid.ranges(np.arange(at, min(begin, at + batch), dtype=np.int64))


def by_chance(grid: Grid, options: Options, flow: int, batch: int, *, again: bool) -> Iterator[Ranges]:
    """Samples in an order that seed and flow decide. Not `again`: none twice, unless there are more of them than can be
    kept account of."""
    chance = np.random.default_rng((options.seed, options.flows))
    if len(grid) <= _PERMUTED:
        mine = chance.permutation(len(grid)).astype(np.int64)[flow :: options.flows]
        if not len(mine):
            mine = np.array([flow % len(grid)], np.int64)
        while True:
            for at in range(0, len(mine), batch):
                yield grid.ranges(mine[at : at + batch])
            if not again:
                return
    chance = np.random.default_rng((options.seed, options.flows, flow))
    while True:
        some = chance.integers(0, len(grid), max(batch, _CHOSEN // batch * batch)).astype(np.int64)
        for at in range(0, len(some), batch):
            yield grid.ranges(some[at : at + batch])


def read_again(place: Place, options: Options) -> bool:
    """May a byte be read twice in a round? Not where the second time would be from this machine's own memory."""
    return not (place.keeps and options.cache == DROPPED)
