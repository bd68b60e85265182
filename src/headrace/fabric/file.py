"""A small file of a user, read whole: a plain one, and no longer than it may be."""

from __future__ import annotations

import os
import stat
from pathlib import Path

from headrace.errors import UsageError


def read_plain_file(path: str | Path, *, most_bytes: int) -> bytes:
    """UsageError where it is a pipe or a device (which could wait for ever, or never end), longer, or not readable."""
    where = str(path)
    try:
        # Not waiting: a pipe would have nobody at its other end.
        descriptor = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
        with os.fdopen(descriptor, "rb") as file:
            if not stat.S_ISREG(os.fstat(descriptor).st_mode):
                raise UsageError("not a plain file", where=where, expected="a file, no pipe and no device")
            raw = file.read(most_bytes + 1)
    except OSError as error:
        raise UsageError(f"cannot read it: {error.strerror}", where=where) from None
    except ValueError:
        raise UsageError("not a path", found=repr(where)) from None
    if len(raw) > most_bytes:
        raise UsageError("too long for what it should be", where=where, expected=f"at most {most_bytes} bytes")
    return raw
