"""What an object may be called, and in which blocks it may be checked."""

from __future__ import annotations

import operator

from headrace.errors import UsageError
from headrace.volume.layout import ALIGN, MAX_NAME_BYTES


def check_name(name: str) -> None:
    """UTF-8, 1..1024 bytes, parts separated by "/", none empty, no NUL. Raises UsageError."""
    try:
        size = len(name.encode())
    except UnicodeEncodeError:
        size = 0
    if not 1 <= size <= MAX_NAME_BYTES or "\0" in name or "" in name.split("/"):
        raise UsageError(
            "not a name for an object",
            expected=f'1 to {MAX_NAME_BYTES} bytes of UTF-8, parts separated by "/", none empty, no NUL',
            found=repr(name[:80]),
        )


def check_length(length_bytes: int) -> int:
    """A whole number, 0 or more. Raises UsageError: a float would end up in the sums of free space."""
    try:
        length = operator.index(length_bytes)
    except TypeError:
        length = -1
    if length < 0:
        raise UsageError("the length of an object", expected="a whole number, 0 or more", found=repr(length_bytes))
    return length


def check_checksum_block(checksum_block_bytes: int, stripe_bytes: int) -> None:
    """A power of two, from 4096 to the stripe unit. Raises UsageError."""
    size = checksum_block_bytes
    if not ALIGN <= size <= min(stripe_bytes, 1 << 24) or size & (size - 1):
        raise UsageError(
            "checksum_block_bytes", expected=f"a power of two from {ALIGN} to {stripe_bytes}", found=str(size)
        )
