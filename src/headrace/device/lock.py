"""Who writes to a file or block device, among the processes of one machine: a lock that ends with its holder.

An "open file description" lock (`F_OFD_SETLK`, Linux): unlike POSIX locks it is kept until *this* opening of the file
is closed, whatever else the process opens and closes, and two openings in one process exclude each other. A process
that is forked has the same opening: so the holder unlocks, and does not only close.
"""

from __future__ import annotations

import errno
import fcntl
import os
import struct
from contextlib import suppress

from headrace.device.address import BlockAddress, FileAddress, parse_address
from headrace.errors import DeviceError, UsageError

#: struct flock: l_type, l_whence, l_start, l_len, l_pid.
_FLOCK = "hhqqi"
#: The byte that is locked: far behind every byte of a volume, so that it disturbs nobody's own locks.
_PLACE = (1 << 62) + 0x68656164


class FileLock:
    """Held from `lock_file` until `release`, or until the process ends."""

    def __init__(self, descriptor: int) -> None:
        self._descriptor: int | None = descriptor
        self._process = os.getpid()

    def release(self) -> None:
        descriptor, self._descriptor = self._descriptor, None
        if descriptor is None:
            return
        if self._process == os.getpid():
            with suppress(OSError):
                _set(descriptor, fcntl.F_UNLCK)
        os.close(descriptor)


def _set(descriptor: int, kind: int) -> None:
    fcntl.fcntl(descriptor, fcntl.F_OFD_SETLK, struct.pack(_FLOCK, kind, os.SEEK_SET, _PLACE, 1, 0))


def lock_file(uri: str) -> FileLock | None:
    """Lock a `file:` or `block:` device for its one writer; None where somebody else has it.

    DeviceError where the file system cannot lock; UsageError where this is neither.
    """
    address = parse_address(uri)
    if not isinstance(address, FileAddress | BlockAddress):
        raise UsageError("only files and block devices are locked", where=uri)
    try:
        descriptor = os.open(address.path, os.O_RDWR | os.O_CLOEXEC)
    except OSError as error:
        raise DeviceError("the file cannot be opened for its lock", where=uri, found=error.strerror) from error
    try:
        _set(descriptor, fcntl.F_WRLCK)
    except OSError as error:
        os.close(descriptor)
        if error.errno in (errno.EAGAIN, errno.EACCES):
            return None
        raise DeviceError("the file system cannot lock files", where=uri, found=error.strerror) from error
    return FileLock(descriptor)
