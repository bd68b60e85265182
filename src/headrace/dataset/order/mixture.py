"""The global order: which source, and which sample of it, stands at a place. Computed, never stored.

Several streams are mixed by whole *shares*: `shares[i]` of every `window = sum(shares)` samples come from source i. One
pattern of that length is repeated, so **any** window of that length, wherever it begins, has exactly those shares, and
place and sample are arithmetic both ways:

    place p  ->  source pattern[p % window], its sample number j = (p // window) * share + rank[p % window]
    source i, number j  ->  place (j // share) * window + (where the (j % share)-th of i stands in the pattern)

Number j of a source is place j % n of its epoch j // n, a permutation of its own (`sampler`): each
source goes round by itself, the small ones more often.

The pattern is as even as one can be: of n sources none is ever ahead or behind of its share by more than
1 - 1 / (2n - 2) samples, at any place (R. Tijdeman, "The chairman assignment problem", Discrete Math. 32, 1980).
"""

from __future__ import annotations

import hashlib
import heapq
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.dataset.order.sampler import ORDER, Sampler
from headrace.errors import UsageError

I64 = npt.NDArray[np.int64]

#: Name of the order of a mixture: that of its sources, and the pattern.
MIXED_ORDER = f"{ORDER}+tijdeman"
#: The pattern is in memory, 24 bytes a place.
MAX_WINDOW = 1 << 20
MAX_SOURCES = 4096


@dataclass(frozen=True, kw_only=True)
class Mixture:
    """Datasets, and how much of each.

    `weights`: name of the dataset -> its weight, any positive number; None: all by their number of samples. `window`:
    so many samples, wherever they begin, hold the shares exactly; weights are rounded to whole samples of it
    (`shares_of`).
    """

    weights: Mapping[str, float | None]
    window: int = 1000

    def __post_init__(self) -> None:
        if not 1 <= len(self.weights) <= MAX_SOURCES:
            raise UsageError("a mixture of no dataset, or too many", expected=f"1 to {MAX_SOURCES}")
        if isinstance(self.window, bool) or not isinstance(self.window, int) or not 1 <= self.window <= MAX_WINDOW:
            raise UsageError("window is out of range", expected=f"1 to {MAX_WINDOW}", found=repr(self.window))
        given = [weight for weight in self.weights.values() if weight is not None]
        if given and len(given) < len(self.weights):
            raise UsageError("weights are given for some datasets only", expected="all or none")
        for name, weight in self.weights.items():
            if weight is not None and not (isinstance(weight, (int, float)) and 0 < weight < math.inf):
                raise UsageError("a weight is out of range", where=name, expected="more than 0", found=repr(weight))

    def shares(self, sample_counts: Sequence[int]) -> list[int]:
        """Samples of each dataset in a window."""
        weights = [
            float(count if weight is None else weight)
            for weight, count in zip(self.weights.values(), sample_counts, strict=True)
        ]
        return shares_of(dict(zip(self.weights, weights, strict=True)), self.window)


def shares_of(weights: Mapping[str, float], window: int) -> list[int]:
    """Whole shares that add up to `window`, by largest remainder: each within one of its exact share.

    `UsageError` where one would have none: it would never be seen.
    """
    total = math.fsum(weights.values())
    exact = [weight / total * window for weight in weights.values()]
    shares = [math.floor(share) for share in exact]
    # The first by name of equal remainders: the same for the same weights, in whatever order they are told.
    names = list(weights)
    rest = sorted(range(len(exact)), key=lambda i: (shares[i] - exact[i], names[i]))
    for i in rest[: window - sum(shares)]:
        shares[i] += 1
    if not all(shares):
        name = names[shares.index(0)]
        raise UsageError(
            "a weight is too small for the window",
            where=name,
            expected=f"{1 / window:g} of the whole, or more",
            found=f"{weights[name] / total:g}",
            next_step="use a longer window",
        )
    return shares


def even_pattern(shares: Sequence[int]) -> I64:
    """Sources in the order of one window: int64[sum(shares)], each as often as its share says.

    The k-th sample of a source (from 1) must come at a place that leaves the source neither ahead nor behind by more
    than the bound: not before its release, and before its deadline. At each place, of those released, the earliest
    deadline is taken. Whole numbers throughout: the same on every machine.
    """
    window, sources = sum(shares), len(shares)
    if sources == 1:
        return np.zeros(window, np.int64)
    # All times `bound`: with b = 2n - 2 the deviation allowed is (b - 1) / b.
    bound = 2 * sources - 2

    def release(source: int, k: int) -> int:
        """First place at which k samples are not too many: (place + 1) * share >= (k - (b - 1) / b) * window."""
        return max(0, -(-(k * bound - bound + 1) * window // (bound * shares[source])) - 1)

    def deadline(source: int, k: int) -> int:
        """Last place where k - 1 samples before it are not too few: place * share <= (k - 1 + (b - 1) / b) * window"""
        return (k * bound - 1) * window // (bound * shares[source])

    waiting = [(release(source, 1), source, 1) for source in range(sources)]
    heapq.heapify(waiting)
    ready: list[tuple[int, int, int]] = []
    pattern = np.empty(window, np.int64)
    for place in range(window):
        while waiting and waiting[0][0] <= place:
            _, source, k = heapq.heappop(waiting)
            heapq.heappush(ready, (deadline(source, k), source, k))
        _, source, k = heapq.heappop(ready)
        pattern[place] = source
        if k < shares[source]:
            heapq.heappush(waiting, (release(source, k + 1), source, k + 1))
    return pattern


class GlobalOrder:
    """(source, sample) at every place of the global order, and back. O(window) memory; threads may share it.

    `names`: of the sources; with a single one `seed` is its sampler's own, else each has one of its own by its name.
    """

    def __init__(self, sample_counts: Mapping[str, int], shares: Sequence[int], seed: int) -> None:
        self.seed = seed
        self.shares = [int(share) for share in shares]
        self.window = sum(self.shares)
        alone = len(sample_counts) == 1
        self.name = ORDER if alone else MIXED_ORDER
        if not 0 <= seed < 1 << 64:
            raise UsageError("seed is out of range", expected="0 to 2^64 - 1", found=str(seed))
        self.samplers = [
            Sampler(count, seed if alone else _seed_of(seed, name)) for name, count in sample_counts.items()
        ]
        self._pattern = even_pattern(self.shares)
        self._shares = np.array(self.shares, np.int64)
        #: Place in the pattern -> how many of the same source are before it.
        self._rank = np.empty(self.window, np.int64)
        #: For each source its places in the pattern.
        self._stands = [np.flatnonzero(self._pattern == source) for source in range(len(self.shares))]
        for stands in self._stands:
            self._rank[stands] = np.arange(len(stands))

    def numbers(self, positions: npt.ArrayLike) -> tuple[I64, I64]:
        """Source, and number in that source over all its epochs, at these places: int64 of the same shape each."""
        places = np.asarray(positions, np.int64)
        turns, within = np.divmod(places, self.window)
        sources = self._pattern[within]
        return sources, turns * self._shares[sources] + self._rank[within]

    def at(self, positions: npt.ArrayLike) -> tuple[I64, I64]:
        """Source and sample at these places: int64 of the same shape each. `UsageError` for a negative one."""
        sources, numbers = self.numbers(positions)
        samples = np.empty_like(numbers)
        for source, sampler in enumerate(self.samplers):
            here = sources == source
            if here.any():
                samples[here] = sampler.at(numbers[here])
        return sources, samples

    def position(self, source: int, number: int) -> int:
        """Where number `number` of a source stands, counted over all its epochs."""
        turns, rank = divmod(number, self.shares[source])
        return turns * self.window + int(self._stands[source][rank])

    def counts(self, position: int) -> list[int]:
        """Samples of each source before this place."""
        turns, within = divmod(position, self.window)
        return [
            turns * share + int(np.searchsorted(stands, within))
            for share, stands in zip(self.shares, self._stands, strict=True)
        ]

    def end(self, epochs: int) -> int:
        """The first place before which every source was seen `epochs` times in full."""
        return 1 + max(
            self.position(source, epochs * sampler.sample_count - 1) for source, sampler in enumerate(self.samplers)
        )

    def digest(self, position: int, count: int) -> str:
        """Of the next `count` sources and samples, hex: what a state is checked by."""
        sources, samples = self.at(position + np.arange(count, dtype=np.int64))
        rows = np.stack([sources, samples]).astype("<i8")
        return hashlib.blake2b(rows.tobytes(), digest_size=16).hexdigest()


def _seed_of(seed: int, name: str) -> int:
    """Of a source in a mixture: another source does not change it."""
    digest = hashlib.blake2b(seed.to_bytes(8, "little") + name.encode(), digest_size=8, person=b"headrace-source")
    return int.from_bytes(digest.digest(), "little")
