"""A folder that has its name when it is whole: files are written in one beside it, made durable, and renamed at last.

A process that is killed in between leaves `.NAME.NODE.HEX.partial`, which nobody takes for a checkpoint. It is locked
while its process lives; whoever makes a folder of the same name next on this node finds out that nobody holds it, and
deletes it. On this node, until it is booted again: a lock of a folder on NFS is of its own node alone, and what another
one writes there looks as if nobody held it.
"""

from __future__ import annotations

import errno
import fcntl
import os
import re
import secrets
import shutil
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import BinaryIO

from headrace.errors import UsageError


@contextmanager
def new_folder(target: Path) -> Iterator[Path]:
    """Where to write what is to be `target`, which is not there before and whole afterwards; UsageError where it is.

    The folders above it must be there. OSError where the file system refuses, a full one too; then nothing stays.
    """
    target = Path(os.path.abspath(target))  # noqa: PTH100  (a link stays one)
    _refuse_existing(target)
    if not target.parent.is_dir():
        raise UsageError("the folder above is not there", where=str(target), next_step="make it first")
    _sweep(target)
    partial, lock = _begin(target)
    try:
        yield partial
        _sync_folders(partial)
        _refuse_existing(target)
        # Onto a folder that somebody made meanwhile this fails, unless that is empty.
        partial.rename(target)
        _sync(target.parent)
    except BaseException:
        shutil.rmtree(partial, ignore_errors=True)
        raise
    finally:
        os.close(lock)


@contextmanager
def new_file(path: Path) -> Iterator[BinaryIO]:
    """A file of such a folder, durable when it is closed."""
    with path.open("xb") as file:
        yield file
        file.flush()
        os.fsync(file.fileno())


def _refuse_existing(target: Path) -> None:
    if os.path.lexists(target):
        raise UsageError("this is there already", where=str(target), next_step="name a folder that is to be made")


def _begin(target: Path) -> tuple[Path, int]:
    while True:
        partial = target.parent / f".{target.name}.{_node()}.{secrets.token_hex(4)}.partial"
        partial.mkdir()
        try:
            lock = os.open(partial, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except FileNotFoundError:
            continue
        try:
            _locked(lock)
            # Until it was locked, somebody who swept could take it for left behind.
            if partial.is_dir() and partial.stat().st_ino == os.fstat(lock).st_ino:
                return partial, lock
        except BaseException:
            os.close(lock)
            raise
        os.close(lock)


def _sweep(target: Path) -> None:
    """What killed processes left of a folder of this name."""
    # Nothing that only looks like one: a folder of somebody's, or of a name that begins as this one does.
    ours = re.compile(rf"\.{re.escape(target.name)}\.{_node()}\.[0-9a-f]{{8}}\.partial")
    try:
        beside = list(target.parent.iterdir())
    except PermissionError:
        # One may be made there, and not looked for.
        return
    for left in [path for path in beside if ours.fullmatch(path.name)]:
        with suppress(OSError):
            lock = os.open(left, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC)
            try:
                if _locked(lock):
                    shutil.rmtree(left, ignore_errors=True)
            finally:
                os.close(lock)


def _node() -> str:
    """Eight hexadecimal digits of this kernel since its boot: containers on it have it in common, and no other node."""
    return Path("/proc/sys/kernel/random/boot_id").read_text()[:8]


def _locked(folder: int) -> bool:
    """Lock it; False where somebody else holds it. Where the file system has no locks nothing counts as left behind."""
    try:
        fcntl.flock(folder, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in (errno.EWOULDBLOCK, errno.EACCES, errno.ENOSYS, errno.EOPNOTSUPP, errno.ENOLCK):
            raise
        return False
    return True


def _sync_folders(folder: Path) -> None:
    for path, _, _ in os.walk(folder):
        _sync(Path(path))


def _sync(folder: Path) -> None:
    handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some file systems cannot sync a folder; they have nothing else to offer.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(handle)
