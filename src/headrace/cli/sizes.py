"""Sizes as options of commands."""

from __future__ import annotations


def parse_size(option: str, text: str) -> int:
    """Bytes of a size as people write it (`64MiB`); `UsageError` names the option."""
    from headrace.errors import UsageError
    from headrace.units import parse_bytes

    try:
        return parse_bytes(text)
    except ValueError as error:
        raise UsageError(f"{option}: {error}") from None
