"""Sizes and rates as options of commands."""

from __future__ import annotations


def parse_size(option: str, text: str) -> int:
    """Bytes of a size as people write it (`64MiB`); `UsageError` names the option."""
    from headrace.errors import UsageError
    from headrace.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None


def parse_rate(option: str, text: str) -> int:
    """Bytes a second (`2GB/s`, and `2GB`, for there is no other rate here)."""
    from headrace.errors import UsageError
    from headrace.units import parse_bytes

    try:
        return parse_bytes(text.strip().removesuffix("/s"))
    except ValueError:
        raise UsageError(option, expected="a rate such as 500MB/s or 2GiB/s", found=repr(text)[:80]) from None
