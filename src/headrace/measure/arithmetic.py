"""The arithmetic of accelerator time. Pure functions; seconds, bytes, tokens, and a price only where one is given."""

from __future__ import annotations

from headrace.errors import UsageError


def gpu_seconds(stall_s: float, ranks: int) -> float:
    """A step ends for everybody when it ends for the slowest: every rank pays for the longest stall."""
    return stall_s * ranks


def dollars(gpu_s: float, gpu_hour_price: float) -> float:
    """What `gpu_s` accelerator seconds cost at a price in dollars an accelerator hour."""
    if gpu_hour_price < 0:
        raise UsageError("gpu_hour_price", expected="a price >= 0", found=str(gpu_hour_price))
    return gpu_s / 3600.0 * gpu_hour_price


def feed_demand_bytes_per_s(tokens: int, token_bytes: int, seconds: float) -> float:
    """Bytes a second that the token stream has to deliver for this throughput."""
    return 0.0 if seconds <= 0 else tokens * token_bytes / seconds
