"""How a pattern is run."""

from __future__ import annotations

import os
from dataclasses import dataclass

from headrace.bench.cache import CACHES, DROPPED
from headrace.errors import UsageError
from headrace.units import KIB, MIB, TIB, format_bytes

#: Flows that a run may have: each has connections or file handles, and threads.
MOST_FLOWS = 256
MOST_DEPTH = 256
#: A folder has a thread for each request that is under way.
MOST_UNDER_WAY = 4096
#: One request, or one sample.
MOST_REQUEST = 256 * MIB
MOST_RANKS = 256
MOST_SECONDS = 24 * 3600.0


@dataclass(frozen=True, kw_only=True)
class Options:
    """Of one round. What a pattern does not use, it does not look at."""

    #: Readers or writers at once, each with connections or file handles of its own.
    flows: int = 1
    #: Requests that each flow has under way.
    depth: int = 8
    #: Bytes of one request, of one sample; None: what the pattern is known for.
    request_bytes: int | None = None
    #: The round ends after so many seconds, or so many bytes moved, whichever comes first.
    seconds: float = 3.0
    budget_bytes: int = 1 * TIB
    #: Of the caches between this machine's reader and the medium: see `headrace.bench.cache`.
    cache: str = DROPPED
    #: Of all that is chosen by chance: the same seed reads the same samples in the same order.
    seed: int = 0
    #: Checkpoints: processes that save and restore, the layout's model, and the share of its sizes that is written.
    ranks: int = 2
    model: str = "8b"
    scale: float = 1.0

    def __post_init__(self) -> None:
        _within("flows", self.flows, 1, MOST_FLOWS)
        _within("depth", self.depth, 1, MOST_DEPTH)
        if self.request_bytes is not None:
            _within("request_bytes", self.request_bytes, 512, MOST_REQUEST)
        _within("seconds", self.seconds, 0.01, MOST_SECONDS)
        _within("budget_bytes", self.budget_bytes, 64 * KIB, 1 << 60)
        _within("ranks", self.ranks, 1, MOST_RANKS)
        _within("flows times depth", self.flows * self.depth, 1, MOST_UNDER_WAY)
        room = memory_bytes() // 2
        if self.flows * self.depth * (self.request_bytes or 0) > room:
            raise UsageError(
                "what is under way takes too much memory", expected=f"at most {format_bytes(room)}",
                found=f"{self.flows} flows with {self.depth} requests of {format_bytes(self.request_bytes or 0)}",
                next_step="give fewer flows, less depth or smaller samples",
            )  # fmt: skip
        if not 0 < self.scale <= 1:
            raise UsageError("scale", expected="a share from 0 to 1, as 0.01", found=str(self.scale))
        if self.cache not in CACHES:
            raise UsageError("cache", expected=", ".join(CACHES), found=repr(self.cache))


def memory_bytes() -> int:
    """Of this machine."""
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")


def _within(name: str, value: float, low: float, high: float) -> None:
    # Written so that a NaN is outside.
    if not low <= value <= high:
        raise UsageError(name, expected=f"{low:g} to {high:g}", found=f"{value:g}")
