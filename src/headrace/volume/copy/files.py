"""The end of a copy that is in a file system.

A file has its name when it is whole. Until then it has none (O_TMPFILE), so that a process that is killed leaves
nothing; where the file system cannot do that, it has a temporary one beside it, which a kill leaves behind.
"""

from __future__ import annotations

import errno
import os
import secrets
from collections.abc import Sequence
from contextlib import suppress
from typing import Any, ClassVar

from headrace.device.reference import U8
from headrace.volume.copy.plan import Item

#: Small files that are open at a time in each thread: all of them are on their way from the disk while one is copied.
_AHEAD = 64
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
_NAMELESS = os.O_WRONLY | os.O_TMPFILE | os.O_CLOEXEC
#: What says that a file system (or kernel) has no files without names; EISDIR: it took O_TMPFILE for O_DIRECTORY.
_NO_NAMELESS = (errno.EOPNOTSUPP, errno.EISDIR, errno.EINVAL, errno.ENOENT)
_NEW = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | os.O_NOFOLLOW


class ItemError(Exception):
    """One item cannot be copied; others can."""

    def __init__(self, item: Item, why: str) -> None:
        super().__init__(f"{item.source}: {why}")
        self.item = item
        self.why = why


def _why(error: OSError) -> str:
    return error.strerror or str(error)


def _fill(file: int, offset: int, view: memoryview) -> int:
    """Read until `view` is full or the file ends."""
    done = 0
    while done < len(view):
        count = os.preadv(file, [view[done:]], offset + done)
        if not count:
            break
        done += count
    return done


def _ask_for(item: Item) -> int | ItemError:
    """Open a small file, and have the kernel begin to read it."""
    try:
        file = os.open(item.what, _READ)
    except OSError as error:
        return ItemError(item, _why(error))
    with suppress(OSError):
        os.posix_fadvise(file, 0, item.length, os.POSIX_FADV_WILLNEED)
    return file


def _whole(file: int, item: Item, view: memoryview) -> ItemError | None:
    try:
        count = _fill(file, 0, view[: item.length])
        found = os.fstat(file).st_size
    except OSError as error:
        return ItemError(item, _why(error))
    if count < item.length or found != item.length:
        return ItemError(item, "changed its length while it was copied")
    return None


class FileReader:
    """One large file."""

    def __init__(self, item: Item) -> None:
        self._item = item
        try:
            self._file = os.open(item.what, _READ)
        except OSError as error:
            raise ItemError(item, _why(error)) from error

    def read_into(self, offset: int, buffer: U8) -> None:
        try:
            count = _fill(self._file, offset, buffer.data)
        except OSError as error:
            raise ItemError(self._item, _why(error)) from error
        if count < len(buffer):
            raise ItemError(self._item, "became shorter while it was copied")

    def check(self) -> None:
        """At the end: is it still as long as it was?"""
        if os.fstat(self._file).st_size != self._item.length:
            raise ItemError(self._item, "changed its length while it was copied")

    def close(self) -> None:
        os.close(self._file)


class FileSource:
    """Files, read into buffers."""

    def open(self, item: Item) -> FileReader:
        return FileReader(item)

    def read_pack(self, items: Sequence[Item], offsets: Sequence[int], buffer: U8) -> list[ItemError | None]:
        """Each whole file at its offset of the buffer; what went wrong with each."""
        view = buffer.data
        result: list[ItemError | None] = []
        for first in range(0, len(items), _AHEAD):
            files: list[int | ItemError] = []
            try:
                for item in items[first : first + _AHEAD]:
                    files.append(_ask_for(item))
                for file, item, offset in zip(files, items[first:], offsets[first:], strict=False):
                    result.append(file if isinstance(file, ItemError) else _whole(file, item, view[offset:]))
            finally:
                for file in files:
                    if not isinstance(file, ItemError):
                        os.close(file)
        return result


class NewFile:
    """A file on its way to its name. `name` gives it that, `drop` takes it away."""

    #: Folders whose file system has no files without names; "" where this process cannot name one later.
    _named_only: ClassVar[set[str]] = set() if os.path.isdir("/proc/self/fd") else {""}  # noqa: PTH112

    def __init__(self, target: str, *, replace: bool) -> None:
        self._target = target
        self._replace = replace
        self._folder = target.rpartition("/")[0] or ("/" if target.startswith("/") else ".")
        self._temporary = ""
        self.file = -1
        if not self._named_only.intersection((self._folder, "")):
            try:
                self.file = os.open(self._folder, _NAMELESS, 0o666)
                return
            except OSError as error:
                if error.errno not in _NO_NAMELESS:
                    raise
                self._named_only.add(self._folder)
        self._temporary = self._beside()
        self.file = os.open(self._temporary, _NEW, 0o666)

    def _beside(self) -> str:
        return f"{self._target}.{secrets.token_hex(4)}.partial"

    def name(self) -> None:
        """FileExistsError where something has come there meanwhile that is not to be replaced."""
        if not self._temporary and self._replace:
            # Only a rename replaces, and that needs a name to begin with.
            self._temporary = self._beside()
            self._link(self._temporary)
        elif not self._temporary:
            self._link(self._target)
        os.close(self.file)
        self.file = -1
        if self._temporary:
            self._move()

    def _link(self, name: str) -> None:
        # With a folder given it is linkat that is called, which follows the link; the path is absolute all the same.
        os.link(f"/proc/self/fd/{self.file}", name, src_dir_fd=self.file)

    def _move(self) -> None:
        if self._replace:
            os.replace(self._temporary, self._target)  # noqa: PTH105
            self._temporary = ""
            return
        # Unlike a rename, a link never takes the place of a file that came meanwhile.
        try:
            os.link(self._temporary, self._target)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # A file system without hard links.
            if os.path.lexists(self._target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), self._target) from None
            os.rename(self._temporary, self._target)  # noqa: PTH104
            self._temporary = ""

    def drop(self) -> None:
        """Also after `name`: what only helped is gone then."""
        if self.file >= 0:
            os.close(self.file)
            self.file = -1
        if self._temporary:
            with suppress(OSError):
                os.unlink(self._temporary)  # noqa: PTH108
            self._temporary = ""


class FileWriter:
    """One large file. Pieces may come from several threads at once."""

    def __init__(self, item: Item, *, replace: bool) -> None:
        self._item = item
        try:
            self._new = NewFile(item.target, replace=replace)
        except OSError as error:
            raise ItemError(item, _why(error)) from error
        try:
            # All space at once: a full disk is an error before the first byte.
            if item.length:
                os.posix_fallocate(self._new.file, 0, item.length)
        except BaseException as error:
            if isinstance(error, OSError) and error.errno in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                return
            self.abandon()
            if isinstance(error, OSError):
                raise ItemError(item, _why(error)) from error
            raise

    def write(self, offset: int, data: U8) -> None:
        view = data.data
        try:
            while view:
                count = os.pwrite(self._new.file, view, offset)
                offset, view = offset + count, view[count:]
        except OSError as error:
            raise ItemError(self._item, _why(error)) from error

    def finish(self, reader: Any) -> None:
        try:
            self._new.name()
        except OSError as error:
            raise ItemError(self._item, _why(error)) from error
        finally:
            self._new.drop()

    def abandon(self) -> None:
        self._new.drop()


class FileSink:
    """New files. `replaced`: targets that may be there."""

    def __init__(self, replaced: set[str]) -> None:
        self._replaced = replaced
        self._folders: set[str] = set()

    def prepare(self, items: Sequence[Item]) -> None:
        """Make the folders. ItemError."""
        for item in items:
            folder = item.target.rpartition("/")[0]
            if folder and folder not in self._folders:
                try:
                    os.makedirs(folder, exist_ok=True)  # noqa: PTH103
                except OSError as error:
                    raise ItemError(item, f"its folder {folder!r}: {_why(error)}") from error
                self._folders.add(folder)

    def open(self, item: Item) -> FileWriter:
        self.prepare([item])
        return FileWriter(item, replace=item.target in self._replaced)

    def write_pack(self, items: Sequence[Item], offsets: Sequence[int], buffer: U8) -> list[ItemError | None]:
        view = buffer.data
        result: list[ItemError | None] = []
        for item, offset in zip(items, offsets, strict=True):
            try:
                self.prepare([item])
                self._small(item, view[offset : offset + item.length])
            except ItemError as error:
                result.append(error)
            except OSError as error:
                result.append(ItemError(item, _why(error)))
            else:
                result.append(None)
        return result

    def _small(self, item: Item, data: memoryview) -> None:
        new = NewFile(item.target, replace=item.target in self._replaced)
        try:
            while data:
                data = data[os.write(new.file, data) :]
            new.name()
        finally:
            new.drop()

    def commit(self) -> list[int]:
        return []

    def abort(self) -> None:
        """What is whole stays."""
