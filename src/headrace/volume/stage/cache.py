"""What the kernel keeps of a medium in memory. Bytes that are read back out of that say nothing of the medium."""

from __future__ import annotations

import os
import time
from collections.abc import Iterable

from headrace.errors import DeviceError

#: Pages that somebody uses at that moment stay: asked again after these seconds.
_AGAIN_S = (0.02, 0.1, 0.5)


def forget(path: str, places: Iterable[int]) -> bool:
    """Have the kernel let go of what it keeps of a file or block device, all of which is durable. False where it has
    kept any of the bytes at these places, or does not say (a file system that is memory, say). DeviceError."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
    except OSError as error:
        raise DeviceError("the medium cannot be read", where=path, found=error.strerror) from error
    try:
        left = list(places)
        for pause_s in (0.0, *_AGAIN_S):
            time.sleep(pause_s)
            os.posix_fadvise(descriptor, 0, 0, os.POSIX_FADV_DONTNEED)
            left = [place for place in left if _kept(descriptor, place)]
            if not left:
                return True
        return False
    except OSError:
        return False
    finally:
        os.close(descriptor)


def _kept(descriptor: int, place: int) -> bool:
    """OSError where it is not known."""
    try:
        os.preadv(descriptor, [bytearray(1)], place, os.RWF_NOWAIT)
    except BlockingIOError:
        return False
    return True
