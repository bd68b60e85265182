"""Latencies that can be put together again: counts in buckets that are 2 % wide, whatever their size.

As in HdrHistogram, but with bounds that are powers: bucket k holds seconds from 2^(k/32) to 2^((k+1)/32).
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping

import numpy as np
import numpy.typing as npt

#: Of an octave: 2^(1/32) is 2.2 % more.
PER_OCTAVE = 32
#: From a nanosecond to three hours; what is beyond counts at the edge.
LEAST, MOST = -30 * PER_OCTAVE, 14 * PER_OCTAVE


def counted(seconds: npt.NDArray[np.float64]) -> dict[int, int]:
    """float64[n] -> how many in which bucket."""
    if not len(seconds):
        return {}
    places = np.floor(np.log2(np.maximum(seconds, 1e-12)) * PER_OCTAVE).astype(np.int64)
    numbers, counts = np.unique(np.clip(places, LEAST, MOST), return_counts=True)
    return {int(number): int(count) for number, count in zip(numbers, counts, strict=True)}


def added(histograms: Iterable[Mapping[int, int]]) -> dict[int, int]:
    total: dict[int, int] = {}
    for one in histograms:
        for number, count in one.items():
            total[number] = total.get(number, 0) + count
    return dict(sorted(total.items()))


def quantile(histogram: Mapping[int, int], q: float) -> float:
    """Seconds below which this share lies, within 1.1 %; 0 of nothing."""
    left = q * sum(histogram.values())
    for number, count in sorted(histogram.items()):
        left -= count
        if left <= 0:
            return float(2.0 ** ((number + 0.5) / PER_OCTAVE))
    return 0.0
