"""A folder on any file system: local, NFS, SMB, Lustre. What is written goes into a folder of its own, below it."""

from __future__ import annotations

import fcntl
import os
import secrets
import shutil
import stat
import tempfile
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import numpy as np

from headrace.accidents.peace import in_peace
from headrace.bench import cache as caches
from headrace.bench.cache import DIRECT, DROPPED, WARM
from headrace.bench.look import PREFIX
from headrace.bench.places import mounts
from headrace.bench.places.asking import asked
from headrace.bench.places.content import BLOCK, CHUNK
from headrace.bench.places.errors import said
from headrace.bench.places.files import FilesReader
from headrace.bench.places.filling import write_all
from headrace.bench.places.folder_room import FolderRoom, FolderWriter
from headrace.bench.places.protocol import Item, Shard, Tell
from headrace.errors import DeviceError, UsageError
from headrace.units import MIB, format_bytes

#: Into so many files goes what is written to be read.
_FILES = 16
#: A file system that takes longer to remove them hangs.
_REMOVE_S = 120.0
#: Others look whether a folder is locked for a moment only.
_LOOKS = 100
#: What a file system keeps free, at least.
_KEPT_FREE = 64 * MIB


class FolderPlace:
    """`existing`: the files that are there are read, and none is written to be read. A file: it alone, for reading.
    `whole`: each read opens its file and closes it."""

    kind = "folder"
    keeps = True

    def __init__(
        self, name: str, found: Mapping[str, Any], *, existing: bool = False, whole: bool = False, job: str = ""
    ) -> None:  # fmt: skip
        """`found`: what was `asked` of this place. `job`: of those that have it, too, the folders are no others'."""
        self.name = name
        if "error" in found:
            raise UsageError(
                "nothing to be measured is there", where=name, found=str(found["error"]),
                expected="a folder, a file, a block device, nvme+tcp://… or headrace://",
            )  # fmt: skip
        self._path = str(found["path"])
        self._file = stat.S_ISREG(found["mode"])
        if not self._file and not stat.S_ISDIR(found["mode"]):
            raise UsageError("neither a folder nor a file", where=name)
        self._existing = existing or self._file
        self.makes = not self._existing
        self._whole = whole
        self._job = f"{PREFIX}{job}-" if job else ""
        self.mount = mounts.mount_at(self._path)
        self.why_read_only = "a file is read, not written" if self._file else None
        if not self._file and not found["may_write"]:
            self.why_read_only = "this user may not write there"
        self.durable = "fsync of each file, then of its folder"
        self.size_bytes = int(found["free_bytes"])
        self._paths: list[str] = []
        self._items: list[Item] = []
        self._held_bytes = 0
        self._scratch: _Scratch | None = None

    @property
    def items(self) -> Sequence[Item]:
        return self._items

    def describe(self) -> Mapping[str, str]:
        said = {
            "file system": self.mount.kind, "mounted from": self.mount.source, "at": self.mount.point,
            "mount options": self.mount.options, "free": format_bytes(self.size_bytes),
        }  # fmt: skip
        others = self._others()
        if others:
            said["other runs"] = others
        return said

    def _others(self) -> str:
        """Folders of other runs, in words."""
        mine = "" if self._scratch is None else Path(self._scratch.path).name
        alive: list[str] = []
        left: list[str] = []
        unknown: list[str] = []
        for one in [] if self._file else sorted(Path(self._path).glob(f"{PREFIX}*")):
            if one.name != mine and not (self._job and one.name.startswith(self._job)):
                # Locks of folders do not go over every network.
                locked = None if self.mount.waits else _locked(str(one))
                (unknown if locked is None else alive if locked else left).append(one.name)
        words = {
            "of a run that goes on": alive, "left by a run that was killed, and may be removed": left,
            "of a run that goes on, or was killed and may be removed": unknown,
        }  # fmt: skip
        return "; ".join(f"{', '.join(names[:4])}: {text}" for text, names in words.items() if names)

    def plan(self, read_bytes: int, room_bytes: int) -> list[str]:
        lines = []
        if self._existing and read_bytes:
            count, found = self._look(read_bytes)
            lines.append(f"reads {format_bytes(found)} of {count} files that are there; none is changed")
            if self._holes() > caches.LITTLE:
                lines.append(
                    f"{self._holes():.0%} of that lies on no medium: holes, or compressed; read faster than data"
                )
        written = room_bytes + (0 if self._existing else read_bytes)
        if written:
            self._check_room(written)
            lines.append(f"writes {format_bytes(written)} at a time into {self.name}/{PREFIX}…, which it removes")
        return lines

    def _check_room(self, length: int) -> None:
        if self.why_read_only is not None:
            raise UsageError(
                self.why_read_only, where=self.name,
                next_step="give a folder that may be written to, or --existing and patterns that read",
            )  # fmt: skip
        self.size_bytes = _free_bytes(self._path)
        if length + _KEPT_FREE > self.size_bytes:
            raise UsageError(
                "too little space", where=self.name, expected=f"{format_bytes(length + _KEPT_FREE)} free",
                found=format_bytes(self.size_bytes),
                next_step="give another folder, or less to write (--size, --save, --scale)",
            )  # fmt: skip

    def prepare(self, total_bytes: int, *, tell: Tell) -> None:
        if self._items:
            return
        if self._existing:
            self._take(total_bytes)
            return
        self._check_room(total_bytes)
        each = max(BLOCK, total_bytes // _FILES // BLOCK * BLOCK)
        shards = [Shard(f"data/{number:02}", each) for number in range(min(_FILES, max(1, total_bytes // each)))]
        scratch = self._made()
        spec = {"folder": scratch.path, "shards": shards, "direct": False}
        write_all(lambda: FolderWriter(spec), [shard.length_bytes for shard in shards], tell)
        self._paths = [f"{scratch.path}/{shard.name}" for shard in shards]
        self._items = [Item(*shard) for shard in shards]

    def forget(self, cache: str) -> str:
        memory = self.mount.kind in caches.MEMORY
        if cache == WARM:
            if (caches.resident(self._paths) or 0.0) < 1 - caches.LITTLE:
                _read_through(self._paths)
        elif cache == DROPPED and not memory:
            caches.drop(self._paths)
        left = None if memory or cache == DIRECT else caches.resident(self._paths)
        return caches.state(cache, left=left, memory=memory, remote=self.mount.remote)

    def reader(self, *, depth: int, cache: str = DROPPED) -> FilesReader:
        return FilesReader(self._paths, self._items, depth=depth, cache=cache, whole=self._whole)

    @contextmanager
    def room(self, shards: Sequence[Shard], cache: str = DROPPED) -> Iterator[FolderRoom]:
        self._check_room(sum(shard.length_bytes for shard in shards))
        scratch = self._made()
        folder = tempfile.mkdtemp(prefix="room-", dir=scratch.path)
        try:
            yield FolderRoom(folder, shards, self.mount, cache)
        finally:
            shutil.rmtree(folder, ignore_errors=True)

    def close(self) -> None:
        if self._scratch is not None:
            self._scratch.remove()
            self._scratch = None

    def __enter__(self) -> FolderPlace:
        return self

    def __exit__(self, *_: object) -> None:
        try:
            self.close()
        except KeyboardInterrupt:
            # Before it was put off, or after it: where it has done its work it does nothing.
            self.close()
            raise

    # ---- files that are there ----

    def _take(self, total_bytes: int) -> None:
        found = asked(f"files:{total_bytes}", self._path, self.name)
        if "error" in found:
            raise DeviceError(str(found["error"]), where=self.name)
        self._paths = [path for path, _, _ in found["files"]]
        self._items = [Item(os.path.relpath(path, self._path), length) for path, length, _ in found["files"]]
        self._held_bytes = sum(held for _, _, held in found["files"])

    def _look(self, total_bytes: int) -> tuple[int, int]:
        if not self._items:
            self._take(total_bytes)
        if not self._items:
            raise UsageError("no files to be read are there", where=self.name, next_step="leave out --existing")
        return len(self._items), sum(item.length_bytes for item in self._items)

    def _holes(self) -> float:
        """The share of what is read for which the file system has no space."""
        total = sum(item.length_bytes for item in self._items)
        return 1 - self._held_bytes / total if total else 0.0

    def _made(self) -> _Scratch:
        if self._scratch is None:
            self._scratch = _Scratch(self._path, self._job or PREFIX)
            self._scratch.make()
        return self._scratch


class _Scratch:
    """The folder that all of a run is written into; locked, so that others see that it lives.

    It has its name before it is there: who is interrupted while it is made knows what to remove.
    """

    def __init__(self, below: str, prefix: str) -> None:
        self.path = f"{below}/{prefix}{secrets.token_hex(6)}"
        self._lock: int | None = None
        self._removed = self._given_up = False

    def make(self) -> None:
        try:
            os.mkdir(self.path, 0o700)  # noqa: PTH102
            self._lock = os.open(self.path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        except OSError as error:
            raise said(error, str(Path(self.path).parent)) from None
        with suppress(OSError):
            for _ in range(_LOOKS):
                try:
                    fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                    break
                except BlockingIOError:
                    # Somebody looks just now whether this run lives.
                    time.sleep(0.01)

    def remove(self) -> None:
        """All of it. A Ctrl-C while this runs is put off until nothing is left, or a file system that hangs has had its
        time."""
        if self._given_up:
            return
        with in_peace():
            thread = threading.Thread(target=self._remove, name="bench-remove", daemon=True)
            thread.start()
            thread.join(_REMOVE_S)
            if not self._removed:
                self._given_up = True
                raise DeviceError("what was written could not be removed", where=self.path, next_step="remove it")

    def _remove(self) -> None:
        lock, self._lock = self._lock, None
        if lock is not None:
            os.close(lock)
        # NFS keeps a file that somebody still has open under another name for a moment.
        for _ in range(20):
            shutil.rmtree(self.path, ignore_errors=True)
            if not os.path.lexists(self.path):
                self._removed = True
                return
            time.sleep(0.1)


def _locked(path: str) -> bool | None:
    """Whether its run lives; None where that cannot be asked: it is another user's."""
    try:
        file = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
    except OSError:
        return None
    try:
        fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return None
    finally:
        os.close(file)
    return False


def _read_through(paths: Sequence[str]) -> None:
    memory = np.empty(CHUNK, np.uint8)
    for path in paths:
        try:
            with Path(path).open("rb", buffering=0) as file:
                while file.readinto(memory.data):
                    pass
        except OSError as error:
            raise said(error, path) from None


def _free_bytes(path: str) -> int:
    try:
        found = os.statvfs(path)
    except OSError as error:
        raise said(error, path) from None
    return found.f_bavail * found.f_frsize
