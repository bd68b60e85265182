"""Median, percentiles, shares. Pure; no numpy, so that a report costs no import."""

from __future__ import annotations

from collections.abc import Sequence

from headrace.errors import UsageError


def quantile(values: Sequence[float], q: float) -> float:
    """The q-quantile (0..1), linear between neighbours (Hyndman and Fan's type 7, as numpy). Raises on no values."""
    if not values:
        raise UsageError("quantile of nothing", expected="at least one value")
    if not 0.0 <= q <= 1.0:
        raise UsageError("quantile", expected="q from 0 to 1", found=str(q))
    ordered = sorted(values)
    place = q * (len(ordered) - 1)
    low = int(place)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (ordered[high] - ordered[low]) * (place - low)


def median(values: Sequence[float]) -> float:
    return quantile(values, 0.5)


def p50(values: Sequence[float]) -> float:
    return quantile(values, 0.50)


def p99(values: Sequence[float]) -> float:
    return quantile(values, 0.99)


def share(part: float, whole: float) -> float:
    """part / whole from 0 to 1; 0 where there is no whole."""
    return 0.0 if whole <= 0 else min(1.0, max(0.0, part / whole))
