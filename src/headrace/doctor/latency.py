"""How long single reads took."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Latency:
    """Of single reads of 4 KiB (or one block, where that is larger), one at a time. Seconds."""

    count: int
    p50_s: float
    p99_s: float
    max_s: float
