"""Paths and errors as fsspec has them, names and errors as the volume has them."""

from __future__ import annotations

import errno
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from typing import Any

from headrace.errors import ObjectExists, ObjectNotFound, VolumeFull
from headrace.volume import ObjectInfo

PROTOCOL = "headrace"


def object_name(path: str) -> str:
    """The name of the object that a path or URL means; "" is the volume itself."""
    scheme = PROTOCOL + "://"
    return (path[len(scheme) :] if path.startswith(scheme) else path).strip("/")


def file_entry(info: ObjectInfo) -> dict[str, Any]:
    """What `info` and `ls` say of an object. `sequence` changes whenever the bytes of this name do; `birth` is 0 where
    others may share them.
    """
    return {
        "name": info.name,
        "size": info.length_bytes,
        "type": "file",
        "created": datetime.fromtimestamp(info.created_s, timezone.utc),
        "birth": info.birth,
        "sequence": info.sequence,
    }


def directory_entry(name: str) -> dict[str, Any]:
    return {"name": name, "size": 0, "type": "directory"}


@contextmanager
def as_os_errors() -> Iterator[None]:
    """Callers of file systems look for these three; every other error of headrace says more than an errno would."""
    try:
        yield
    except ObjectNotFound as error:
        raise FileNotFoundError(errno.ENOENT, str(error)) from error
    except ObjectExists as error:
        raise FileExistsError(errno.EEXIST, str(error)) from error
    except VolumeFull as error:
        raise OSError(errno.ENOSPC, str(error)) from error
