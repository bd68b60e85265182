"""A volume as an fsspec file system."""

from __future__ import annotations

import io
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from fsspec.callbacks import DEFAULT_CALLBACK, Callback
from fsspec.spec import AbstractFileSystem
from fsspec.transaction import Transaction as FsspecTransaction

from headrace.errors import HeadraceError, ObjectNotFound, UsageError
from headrace.filesystem.files import BLOCK_BYTES, ReadFile, WriteFile
from headrace.filesystem.paths import PROTOCOL, as_os_errors, directory_entry, file_entry, object_name
from headrace.filesystem.writing import Writing, replace
from headrace.settings import VOLUME, volume_addresses
from headrace.volume import ObjectInfo, Session, Volume

#: Local files are read and written in pieces of this many bytes.
_PIECE_BYTES = 16 << 20

Entry = dict[str, Any]


class _AllOrNothing(FsspecTransaction):  # type: ignore[misc]  # fsspec has no types
    """`with fs.transaction`: one commit for all that is written, moved and removed in the block."""

    def start(self) -> None:
        super().start()
        self.fs.writing.open_common()

    def complete(self, commit: bool = True) -> None:
        fs, files = self.fs, list(self.files)
        try:
            with as_os_errors():
                unfinished = [file.path for file in files if not file.closed]
                if commit and unfinished:
                    raise UsageError("a file of the transaction is still open", where=unfinished[0])
                fs.writing.end_common(commit=commit)
        finally:
            fs.writing.end_common(commit=False)
            # Files belong to the common transaction: nothing is left to do for each.
            self.files.clear()
            super().complete(commit)


class HeadraceFileSystem(AbstractFileSystem):  # type: ignore[misc]
    """Objects of one volume as files. Directories are there while an object is in them; making one does nothing.

    `volume`: addresses of all members, a list or one text with commas; without it, `HEADRACE_VOLUME`. `session`: write
    through this one, whose volume is used; else the first write opens one with `session_options` (arguments of
    `Volume.session`) and holds it until `close()`, so that no other job writes meanwhile; file systems of one process
    and volume share it. `verify=False` waives
    checksums when reading.

    Files cannot be changed or appended to (`io.UnsupportedOperation`), only replaced; a new file is seen by others once
    it is closed, whole. `mv` and `rm` of any number of paths are one commit, `mv` and `cp` move no data. `with
    fs.transaction:` makes one commit of everything in it.
    """

    protocol: ClassVar[str] = PROTOCOL
    root_marker: ClassVar[str] = ""
    transaction_type: ClassVar[type] = _AllOrNothing

    def __init__(
        self,
        volume: str | Sequence[str] | None = None,
        *,
        session: Session | None = None,
        session_options: dict[str, Any] | None = None,
        verify: bool = True,
        **storage_options: Any,
    ) -> None:
        super().__init__(volume=volume, session=session, session_options=session_options, **storage_options)
        named = volume if volume is None or isinstance(volume, str) else ",".join(volume)
        self._addresses = None if session is not None else named or _default_volume()
        self.verify = verify
        self._reader: Volume | None = None
        self.writing = Writing(self._addresses, session, session_options or {})

    @classmethod
    def _strip_protocol(cls, path: Any) -> Any:
        if isinstance(path, (list, tuple)):
            return [cls._strip_protocol(one) for one in path]
        return object_name(os.fspath(path))

    @property
    def volume(self) -> Volume:
        """What is read; opened at the first use. It sees what this file system has committed."""
        written = self.writing.volume
        if written is not None:
            return written
        if self._reader is None:
            assert self._addresses is not None
            self._reader = Volume.open(self._addresses)
        return self._reader

    def close(self) -> None:
        """Give up the session, so that others may write, and all connections. The next use opens them again."""
        reader, self._reader = self._reader, None
        try:
            self.writing.close()
        finally:
            if reader is not None:
                reader.close()

    # ---- what there is ----

    def _object(self, name: str) -> ObjectInfo | None:
        volume = self.volume
        volume.refresh()
        try:
            return volume.stat(name) if name else None
        except ObjectNotFound:
            return None

    def _below(self, name: str) -> list[ObjectInfo]:
        """All objects in a directory and its directories."""
        volume = self.volume
        volume.refresh()
        return volume.list(name + "/" if name else "")

    def _is_directory(self, name: str) -> bool:
        return not name or self.volume.any(name + "/")

    def info(self, path: str, **kwargs: Any) -> Entry:
        name = object_name(path)
        found = self._object(name)
        if found is not None:
            return file_entry(found)
        if self._is_directory(name):
            return directory_entry(name)
        raise FileNotFoundError(f"there is no object {name!r} and none below it in {self.volume!r}")

    def exists(self, path: str, **kwargs: Any) -> bool:
        try:
            self.info(path)
        except FileNotFoundError:
            return False
        return True

    def ls(self, path: str, detail: bool = True, **kwargs: Any) -> list[Any]:
        name = object_name(path)
        entries: dict[str, Entry] = {}
        start = len(name) + 1 if name else 0
        for info in self._below(name):
            first, slash, _ = info.name[start:].partition("/")
            child = info.name[:start] + first
            # An object and a directory of the same name: the object is shown, `find` shows what is below.
            if not slash or child not in entries:
                entries[child] = directory_entry(child) if slash else file_entry(info)
        if not entries:
            entries[name] = self.info(path)
        return list(entries.values()) if detail else list(entries)

    def find(
        self, path: str, maxdepth: int | None = None, withdirs: bool = False, detail: bool = False, **kwargs: Any
    ) -> Any:
        if maxdepth is not None or withdirs:
            return super().find(path, maxdepth=maxdepth, withdirs=withdirs, detail=detail, **kwargs)
        name = object_name(path)
        found = self._object(name)
        files = {info.name: file_entry(info) for info in ([] if found is None else [found]) + self._below(name)}
        return files if detail else list(files)

    def created(self, path: str) -> Any:
        return self._file(path)["created"]

    def modified(self, path: str) -> Any:
        """Objects never change: when this one was committed under the name; of a directory: when something in it was
        last."""
        entry = self.info(path)
        if entry["type"] == "directory":
            below = self._below(entry["name"])
            return file_entry(max(below, key=lambda info: info.created_s))["created"] if below else None
        return entry["created"]

    def ukey(self, path: str) -> str:
        """Changes whenever the bytes of this name do."""
        entry = self._file(path)
        return f"{self.volume.id}-{entry['sequence']}-{entry['name']}"

    checksum = ukey

    def _file(self, path: str) -> Entry:
        entry = self.info(path)
        if entry["type"] != "file":
            raise IsADirectoryError(f"{entry['name']!r} is a directory")
        return entry

    # ---- reading ----

    def _stat(self, path: str) -> ObjectInfo:
        name = object_name(path)
        found = self._object(name)
        if found is None:
            with as_os_errors():
                raise ObjectNotFound(f"there is no object {name!r} in {self.volume!r}")
        return found

    def cat_file(self, path: str, start: int | None = None, end: int | None = None, **kwargs: Any) -> bytes:
        (data,) = self.cat_ranges([path], [start], [end], on_error="raise")
        return bytes(data)

    def cat_ranges(
        self,
        paths: list[str],
        starts: Any,
        ends: Any,
        max_gap: int | None = None,
        on_error: str = "return",
        **kwargs: Any,
    ) -> list[Any]:
        """Ranges of many files, all under way at once, each verified. `max_gap` means nothing here."""
        count = len(paths)
        starts = list(starts) if isinstance(starts, (Sequence, np.ndarray)) else [starts] * count
        ends = list(ends) if isinstance(ends, (Sequence, np.ndarray)) else [ends] * count
        if not len(starts) == len(ends) == count:
            raise ValueError(f"{count} paths, {len(starts)} starts and {len(ends)} ends")
        results: list[Any] = [b""] * count
        groups: dict[str, list[int]] = {}
        for index, path in enumerate(paths):
            groups.setdefault(object_name(path), []).append(index)
        under_way = []
        self.volume.refresh()
        for name, indices in groups.items():
            try:
                with as_os_errors():
                    info = self.volume.stat(name)
                    bounds = [_bounds(starts[i], ends[i], info.length_bytes) for i in indices]
                    offsets = np.array([low for low, _ in bounds], np.int64)
                    lengths = np.array([high - low for low, high in bounds], np.int64)
                    places = np.concatenate([np.zeros(1, np.int64), np.cumsum(lengths)])
                    buffer = np.empty(int(places[-1]), np.uint8)
                    transfer = self.volume.submit_read(
                        info, offsets, lengths, [buffer], places[:-1], verify=self.verify
                    )
            except (OSError, HeadraceError) as error:
                _failed(results, indices, error, on_error)
                continue
            under_way.append((indices, places, buffer, transfer))
        for indices, places, buffer, transfer in under_way:
            try:
                with as_os_errors():
                    transfer.wait()
            except (OSError, HeadraceError) as error:
                _failed(results, indices, error, on_error)
                continue
            for index, low, high in zip(indices, places, places[1:], strict=False):
                results[index] = buffer[low:high].tobytes()
        return results

    def get_file(
        self, rpath: str, lpath: Any, callback: Callback = DEFAULT_CALLBACK, outfile: Any = None, **kwargs: Any
    ) -> None:
        """One object into a local file, in pieces, the next being read while one is written."""
        if self.isdir(rpath):
            Path(lpath).mkdir(parents=True, exist_ok=True)
            return
        info = self._stat(rpath)
        callback.set_size(info.length_bytes)
        if outfile is None:
            Path(lpath).parent.mkdir(parents=True, exist_ok=True)
        with as_os_errors():
            target = outfile if outfile is not None else Path(lpath).open("wb")  # noqa: SIM115
            try:
                for piece in self._pieces(info):
                    target.write(piece)
                    callback.relative_update(len(piece))
            finally:
                if outfile is None:
                    target.close()

    def _pieces(self, info: ObjectInfo) -> Iterator[Any]:
        buffers = [np.empty(min(_PIECE_BYTES, info.length_bytes), np.uint8) for _ in range(2)]
        under_way: list[Any] = []
        for number, start in enumerate(range(0, info.length_bytes, _PIECE_BYTES)):
            length = min(_PIECE_BYTES, info.length_bytes - start)
            part = buffers[number % 2][:length]
            under_way.append((part, self.volume.submit_read(info, [start], [length], [part], [0], verify=self.verify)))
            if len(under_way) == 2:
                part, transfer = under_way.pop(0)
                transfer.wait()
                yield part
        for part, transfer in under_way:
            transfer.wait()
            yield part

    # ---- files ----

    def _open(
        self,
        path: str,
        mode: str = "rb",
        block_size: Any = None,
        autocommit: bool = True,
        cache_options: Any = None,
        **kwargs: Any,
    ) -> Any:
        block = BLOCK_BYTES if block_size is None or isinstance(block_size, str) else block_size
        name = object_name(path)
        if mode == "rb":
            kwargs.pop("size", None)
            return ReadFile(
                self, name, self.volume, self._stat(name), block_size=block, cache_options=cache_options, **kwargs
            )
        if mode not in ("wb", "xb"):
            raise io.UnsupportedOperation(
                f"mode {mode!r} of {name!r}: objects never change; write a new one (wb), which may replace this"
            )
        if mode == "xb" and self._object(name) is not None:
            raise FileExistsError(f"there is an object {name!r}")
        return WriteFile(self, name, mode, autocommit=autocommit, block_size=block, **kwargs)

    def pipe_file(self, path: str, value: Any, mode: str = "overwrite", **kwargs: Any) -> None:
        name = object_name(path)
        with as_os_errors(), self.writing.one_commit() as transaction:
            if mode != "create":
                replace(transaction, name)
            transaction.put(name, value)

    def pipe(self, path: Any, value: Any = None, **kwargs: Any) -> None:
        """Many at once are one commit."""
        with as_os_errors(), self.writing.one_commit():
            super().pipe(path, value, **kwargs)

    def put_file(
        self, lpath: Any, rpath: str, callback: Callback = DEFAULT_CALLBACK, mode: str = "overwrite", **kwargs: Any
    ) -> None:
        """One local file into an object, in pieces. A directory is nothing that could be put."""
        if Path(lpath).is_dir():
            return
        name = object_name(rpath)
        with Path(lpath).open("rb") as file, as_os_errors(), self.writing.one_commit() as transaction:
            size = os.fstat(file.fileno()).st_size
            callback.set_size(size)
            if mode != "create":
                replace(transaction, name)
            transaction.write_stream(name, _read_pieces(file, callback), length_bytes=size)

    def put(self, lpath: Any, rpath: Any, *args: Any, **kwargs: Any) -> None:
        """Many at once are one commit."""
        with as_os_errors(), self.writing.one_commit():
            super().put(lpath, rpath, *args, **kwargs)

    def touch(self, path: str, truncate: bool = True, **kwargs: Any) -> None:
        """An empty object, replacing what was there; `truncate=False` does nothing where there is one."""
        if truncate or self._object(object_name(path)) is None:
            self.pipe_file(path, b"")

    # ---- names ----

    def mkdir(self, path: str, create_parents: bool = True, **kwargs: Any) -> None:
        """Nothing: a directory is there while an object is in it."""

    def makedirs(self, path: str, exist_ok: bool = False) -> None:
        """Nothing, as `mkdir`."""

    def rmdir(self, path: str) -> None:
        """Nothing: the last object of a directory took it along. OSError where there are any."""
        name = object_name(path)
        self.volume.refresh()
        if self.volume.any(name + "/" if name else ""):
            raise OSError(f"the directory {name!r} is not empty")

    def _selected(self, name: str, recursive: bool) -> list[str]:
        if self._object(name) is not None:
            return [name]
        below = [info.name for info in self._below(name)]
        if not below:
            raise FileNotFoundError(f"there is no object {name!r} and none below it in {self.volume!r}")
        if not recursive:
            raise IsADirectoryError(f"{name!r} is a directory; recursive=True means all that is in it")
        return below

    def rm_file(self, path: str) -> None:
        self.rm(path)

    def rm(self, path: Any, recursive: bool = False, maxdepth: int | None = None) -> None:
        """All of them in one commit."""
        paths = [path] if isinstance(path, (str, os.PathLike)) else list(path)
        names: dict[str, None] = {}
        for one in paths:
            name = object_name(os.fspath(one))
            if maxdepth is not None or any(char in name for char in "*?["):
                found = self.expand_path(name, recursive=recursive, maxdepth=maxdepth)
                names.update(dict.fromkeys(match for match in found if self._object(match) is not None))
            else:
                names.update(dict.fromkeys(self._selected(name, recursive)))
        with as_os_errors(), self.writing.one_commit() as transaction:
            for name in names:
                transaction.delete(name)

    _rm = rm_file

    def _moves(self, path1: str, path2: str) -> list[tuple[str, str]]:
        old, new = object_name(path1), object_name(path2)
        names = self._selected(old, recursive=True)
        if names == [old]:
            if path2.endswith("/") or (self._object(new) is None and self._is_directory(new)):
                new = f"{new}/{old.rpartition('/')[2]}".lstrip("/")
            return [(old, new)]
        if new == old or new.startswith(old + "/"):
            raise OSError(f"{old!r} cannot become a part of itself, {new!r}")
        return [(name, f"{new}/{name[len(old) :].lstrip('/')}".lstrip("/")) for name in names]

    def mv(self, path1: str, path2: str, recursive: bool = False, maxdepth: int | None = None, **kwargs: Any) -> None:
        """An object, or all that is below a directory, under another name: one commit, and no data move."""
        # As `mv` of every system: a directory moves with what is in it, asked or not.
        moves = [(old, new) for old, new in self._moves(path1, path2) if old != new]
        with as_os_errors(), self.writing.one_commit() as transaction:
            for old, new in moves:
                replace(transaction, new)
                transaction.rename(old, new)

    def cp_file(self, path1: str, path2: str, **kwargs: Any) -> None:
        """Another object of the same bytes, which are shared: no data are read or written."""
        old, new = object_name(path1), object_name(path2)
        if old == new:
            return
        info = self._stat(old)
        with as_os_errors(), self.writing.one_commit() as transaction:
            replace(transaction, new)
            transaction.compose(new, [(info, 0, info.length_bytes)])

    def copy(self, path1: Any, path2: Any, *args: Any, **kwargs: Any) -> None:
        """Many at once are one commit."""
        with as_os_errors(), self.writing.one_commit():
            super().copy(path1, path2, *args, **kwargs)


def _default_volume() -> str:
    text = volume_addresses()
    if text is None:
        raise UsageError(
            "no volume is named",
            expected="addresses of its members, separated by commas",
            next_step=f'give volume="..." (as one of storage_options), or set {VOLUME}',
        )
    return text


def _bounds(start: int | None, end: int | None, size: int) -> tuple[int, int]:
    """As slices have it: negative counts from the end, and what is beyond the end is not there."""
    low, high, _ = slice(start, end).indices(size)
    return low, max(low, high)


def _failed(results: list[Any], indices: list[int], error: Exception, on_error: str) -> None:
    if on_error != "return":
        raise error
    for index in indices:
        results[index] = error


def _read_pieces(file: io.BufferedReader, callback: Callback) -> Iterator[Any]:
    piece = memoryview(bytearray(_PIECE_BYTES))
    while count := file.readinto(piece):
        yield piece[:count]
        callback.relative_update(count)
