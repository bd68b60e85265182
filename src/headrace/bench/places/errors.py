"""What the operating system says of files, as errors of headrace."""

from __future__ import annotations

import errno

from headrace.errors import DeviceError, HeadraceError, UsageError


def said(error: OSError, path: str, *, direct: bool = False) -> HeadraceError:
    """One line, with what to do about it. `direct`: it was tried past the page cache."""
    if direct and error.errno == errno.EINVAL:
        return UsageError(
            "this file system has no way past the page cache (O_DIRECT)", where=path, next_step="give --cache dropped"
        )
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        return DeviceError(
            "no space left" if error.errno == errno.ENOSPC else "the quota is used up", where=path,
            next_step="give another folder, or less to write (--size, --scale)",
        )  # fmt: skip
    if error.errno in (errno.EACCES, errno.EPERM, errno.EROFS):
        return UsageError(error.strerror or str(error), where=path, next_step="give a folder that may be written to")
    return DeviceError(error.strerror or str(error), where=path)
