"""A small file of a user, read whole: a plain one, and no longer than it may be; and what it says, as TOML."""

from __future__ import annotations

import os
import re
import stat
import sys
from pathlib import Path
from typing import Any

from headrace.errors import UsageError

if sys.version_info >= (3, 11):
    import tomllib
else:
    import tomli as tomllib

#: Parts of a key, `a.b.c`. Python's reader takes time by their square.
_PARTS_MAX = 100


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


def read_toml(raw: bytes, *, where: str, next_step: str) -> dict[str, Any]:
    """UsageError says what is wrong with it."""
    try:
        text = raw.decode()
        # Blanks around its dots belong to a key, too. Dots in a row are an ornament.
        keys = re.split(r"[=\[\]{},\n#]", text.replace(" ", "").replace("\t", ""))
        if any(len(re.findall(r"[^.]\.", key)) > _PARTS_MAX for key in keys if len(key) > _PARTS_MAX):
            raise UsageError("a key of too many parts", where=where, expected=f"at most {_PARTS_MAX}")
        tree: dict[str, Any] = tomllib.loads(text)
        return tree
    except UnicodeDecodeError as error:
        line = raw[: error.start].count(b"\n") + 1
        raise UsageError("not UTF-8", where=f"{where}, line {line}") from None
    except tomllib.TOMLDecodeError as error:
        raise UsageError(f"not TOML: {' '.join(str(error).split())}", where=where, next_step=next_step) from None
    except (RecursionError, ValueError):
        # What Python's reader does not call a mistake of the file.
        raise UsageError(
            "not TOML that can be read", where=where, next_step=next_step,
            expected="tables in tables to a sensible depth, and numbers of at most 4300 digits",
        ) from None  # fmt: skip
