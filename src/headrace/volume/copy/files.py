"""The end of a copy that is in a file system.

A file has its name when it is whole: small ones are written in one piece (and taken away again where that fails), large
ones under a temporary name beside it.
"""

from __future__ import annotations

import errno
import os
import secrets
import threading
from collections.abc import Mapping, Sequence
from contextlib import suppress
from typing import Any

import numpy as np

from headrace.device.reference import U8
from headrace.volume.copy.plan import Item

#: Small files that are open at a time in each thread: all of them are on their way from the disk while one is copied.
_AHEAD = 64
_READ = os.O_RDONLY | os.O_CLOEXEC | os.O_NOCTTY | os.O_NONBLOCK
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


class FileWriter:
    """One large file, under a temporary name until it is whole. Pieces may come from several threads at once."""

    def __init__(self, sink: FileSink, item: Item) -> None:
        self._item = item
        self._sink = sink
        self._temporary = f"{item.target}.{secrets.token_hex(4)}.partial"
        self._file = -1
        self._open = True
        try:
            self._file = os.open(self._temporary, _NEW, 0o666)
            # All space at once: a full disk is an error before the first byte.
            if item.length:
                try:
                    os.posix_fallocate(self._file, 0, item.length)
                except OSError as error:
                    if error.errno not in (errno.EOPNOTSUPP, errno.EINVAL, errno.ENOSYS):
                        raise
        except BaseException as error:
            self.abandon()
            if isinstance(error, OSError):
                raise ItemError(item, _why(error)) from error
            raise

    def write(self, offset: int, data: U8) -> None:
        view = data.data
        try:
            while view:
                count = os.pwrite(self._file, view, offset)
                offset, view = offset + count, view[count:]
        except OSError as error:
            raise ItemError(self._item, _why(error)) from error

    def finish(self, reader: Any) -> None:
        try:
            os.close(self._file)
            self._file = -1
            self._sink.name(self._item, self._temporary)
        except OSError as error:
            raise ItemError(self._item, _why(error)) from error
        self._open = False

    def abandon(self) -> None:
        if self._file >= 0:
            os.close(self._file)
            self._file = -1
        if self._open:
            self._open = False
            with suppress(OSError):
                os.unlink(self._temporary)  # noqa: PTH108


class FileSink:
    """New files. `replaced`: targets that may be there."""

    def __init__(self, replaced: set[str]) -> None:
        self._replaced = replaced
        self._folders: set[str] = set()
        self._lock = threading.Lock()

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

    def name(self, item: Item, temporary: str) -> None:
        """Give a whole file its name."""
        if item.target in self._replaced:
            os.replace(temporary, item.target)  # noqa: PTH105
            return
        # Unlike a rename, a link never takes the place of a file that came meanwhile.
        try:
            os.link(temporary, item.target)
        except OSError as error:
            if error.errno not in (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS):
                raise
            # A file system without hard links.
            if os.path.lexists(item.target):
                raise FileExistsError(errno.EEXIST, os.strerror(errno.EEXIST), item.target) from None
            os.rename(temporary, item.target)  # noqa: PTH104
            return
        os.unlink(temporary)  # noqa: PTH108

    def open(self, item: Item) -> FileWriter:
        self.prepare([item])
        return FileWriter(self, item)

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
        replace = item.target in self._replaced
        path = f"{item.target}.{secrets.token_hex(4)}.partial" if replace else item.target
        file = os.open(path, _NEW, 0o666)
        try:
            try:
                while data:
                    data = data[os.write(file, data) :]
            finally:
                os.close(file)
            if replace:
                os.replace(path, item.target)  # noqa: PTH105
        except BaseException:
            os.unlink(path)  # noqa: PTH108
            raise

    def commit(self) -> list[int]:
        return []

    def abort(self) -> None:
        """What is whole stays."""


class CompareSink:
    """Not a destination: what comes must be what the files hold. For `verify`. `files`: source of an item -> path."""

    def __init__(self, files: Mapping[str, str]) -> None:
        self._files = files

    def _of(self, item: Item) -> Item:
        return item._replace(what=self._files[item.source])

    def open(self, item: Item) -> _Comparison:
        return _Comparison(self._of(item))

    def write_pack(self, items: Sequence[Item], offsets: Sequence[int], buffer: U8) -> list[ItemError | None]:
        theirs = np.empty(len(buffer), np.uint8)
        result = FileSource().read_pack([self._of(item) for item in items], offsets, theirs)
        for place, (item, offset) in enumerate(zip(items, offsets, strict=True)):
            part = slice(offset, offset + item.length)
            if result[place] is None and not np.array_equal(theirs[part], buffer[part]):
                result[place] = ItemError(item, "what was written is not what the file holds now")
        return result

    def commit(self) -> list[int]:
        return []

    def abort(self) -> None:
        pass


class _Comparison:
    def __init__(self, item: Item) -> None:
        self._item = item
        self._reader = FileReader(item)

    def write(self, offset: int, data: U8) -> None:
        theirs = np.empty(len(data), np.uint8)
        self._reader.read_into(offset, theirs)
        if not np.array_equal(theirs, data):
            raise ItemError(self._item, "what was written is not what the file holds now")

    def finish(self, reader: Any) -> None:
        self._reader.check()
        self._reader.close()

    def abandon(self) -> None:
        self._reader.close()
