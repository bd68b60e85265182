"""Where the files of a corpus lie: paths of this machine, and URLs that fsspec knows (`s3://`, `gs://`, `hf://`, ...).

What a remote file system raises can be anything at all; here it becomes a `DatasetError` that names the file.
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, cast

from headrace.errors import CorpusUnreadable, DatasetError, HeadraceError

#: What to do where bytes could not be had.
AGAIN = "see that it can be read, and ingest again"


class Found(NamedTuple):
    """A file: `name` is its path below the folder that was asked for, `stamp` changes when its content does."""

    location: str
    name: str
    size_bytes: int
    stamp: str


def is_url(location: str) -> bool:
    """A path of this machine never looks like one: `pathlib` makes one slash of two."""
    return "://" in location


def own_to_a_process(location: str) -> bool:
    """Files that no other process can see."""
    return location.startswith("memory://") or "::memory://" in location


def reason(error: BaseException) -> str:
    """What the operating system or a library says, in one line, without number and path."""
    said = getattr(error, "strerror", None) or str(error).partition("\n")[0]
    return str(said) or type(error).__name__


def open_binary(location: str) -> BinaryIO:
    """To be read from the start; OSError where it cannot be."""
    if not is_url(location):
        return Path(location).open("rb")
    with _remote(location):
        files, path = _file_system(location)
        return cast(BinaryIO, files.open(path, "rb"))


def is_folder(location: str) -> bool | None:
    """True for a folder, False for a file, None where there is nothing."""
    if not is_url(location):
        here = Path(location)
        return True if here.is_dir() else False if here.is_file() else None
    with _remote(location):
        files, path = _file_system(location)
        return True if files.isdir(path) else False if files.isfile(path) else None


def one(location: str) -> Found:
    """A single file."""
    if not is_url(location):
        return _local(Path(location), Path(location).name)
    with _remote(location):
        files, path = _file_system(location)
        return _found(location, location.rpartition("/")[2], files.info(path))


def exists(location: str) -> bool:
    return is_folder(location) is not None


def below(folder: str, without: tuple[str, ...] = ()) -> list[Found]:
    """Files below a folder in the byte order of their names; hidden ones and links to folders are left out, and so are
    folders called as one of `without`."""
    found = list(_below_url(folder) if is_url(folder) else _below_path(Path(folder), without))
    found.sort(key=lambda each: os.fsencode(each.name))
    return found


def look(location: str) -> tuple[bool, list[Found]]:
    """Is it a folder, and the files that it has, or is. DatasetError where there is nothing, or it cannot be read."""
    try:
        folder = is_folder(location)
        if folder is None:
            raise DatasetError("there is no such corpus", where=location, expected="a folder or a file")
        return folder, below(location) if folder else [one(location)]
    except OSError as error:
        raise DatasetError("the corpus cannot be read", where=location, found=reason(error)) from error


def _below_path(root: Path, without: tuple[str, ...]) -> Iterator[Found]:
    def stop(error: OSError) -> None:
        raise DatasetError("a folder of the corpus cannot be read", where=str(error.filename), found=reason(error))

    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        for name in names:
            path = Path(folder, name)
            if not name.startswith(".") and path.is_file():
                yield _local(path, path.relative_to(root).as_posix())


def _local(path: Path, name: str) -> Found:
    try:
        said = path.stat()
    except OSError as error:
        raise DatasetError("a file of the corpus cannot be read", where=str(path), found=reason(error)) from error
    return Found(str(path), name, said.st_size, str(said.st_mtime_ns))


def _below_url(folder: str) -> Iterator[Found]:
    if "::" in folder:
        raise DatasetError("a folder behind a chain of URLs", where=folder, expected="a file, or a folder by one URL")
    with _remote(folder):
        files, root = _file_system(folder)
        listed: dict[str, dict[str, Any]] = files.find(root, detail=True)
        for path, said in listed.items():
            name = path[len(root) :].lstrip("/")
            if said.get("type", "file") == "file" and not any(part.startswith(".") for part in name.split("/")):
                yield _found(files.unstrip_protocol(path), name, said)


def _found(location: str, name: str, said: dict[str, Any]) -> Found:
    size = said.get("size")
    if not isinstance(size, int) or size < 0:
        raise DatasetError("the file system does not say how long a file is", where=location)
    stamps = (said.get(key) for key in ("ETag", "etag", "mtime", "LastModified", "last_modified", "updated", "created"))
    return Found(location, name, size, str(next((stamp for stamp in stamps if stamp), "")))


def _file_system(url: str) -> tuple[Any, str]:
    try:
        import fsspec.core
    except ImportError:
        raise DatasetError("URLs need fsspec", where=url, next_step="pip install 'headrace[fsspec]'") from None
    files, path = fsspec.core.url_to_fs(url)
    return files, path


@contextmanager
def _remote(location: str) -> Iterator[None]:
    """Each file system has exceptions of its own."""
    try:
        yield
    except (HeadraceError, OSError):
        raise
    except Exception as error:
        said = reason(error)
        raise CorpusUnreadable("the URL cannot be read", where=location, found=said, next_step=AGAIN) from error
