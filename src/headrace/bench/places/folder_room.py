"""Files that are written below a folder, read again, and forgotten."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from headrace.bench import cache as caches
from headrace.bench.cache import DIRECT, WARM
from headrace.bench.places import mounts
from headrace.bench.places.content import BLOCK, CHUNK, Content, number_of
from headrace.bench.places.errors import said
from headrace.bench.places.protocol import Shard
from headrace.errors import DeviceError


class FolderRoom:
    """Files below a folder."""

    def __init__(self, folder: str, shards: Sequence[Shard], mount: mounts.Mount, cache: str) -> None:
        self.shards = shards
        self._folder = folder
        self._mount = mount
        self._cache = cache

    def for_writer(self) -> dict[str, Any]:
        return {"kind": "folder", "folder": self._folder, "shards": [*self.shards], "direct": self._cache == DIRECT}

    def commit(self, proofs: Iterable[str]) -> None:
        """Each file is there by itself; that the names are durable, too, is what its folder's fsync was for."""

    def _paths(self) -> list[str]:
        return [f"{self._folder}/{shard.name}" for shard in self.shards]

    def forget(self) -> None:
        if self._mount.kind not in caches.MEMORY and self._cache != WARM:
            caches.drop(self._paths())

    def state(self) -> str:
        memory = self._mount.kind in caches.MEMORY
        left = None if memory or self._cache == DIRECT else caches.resident(self._paths())
        return caches.state(self._cache, left=left, memory=memory, remote=self._mount.remote)


class FolderWriter:
    """From `FolderRoom.for_writer`."""

    def __init__(self, spec: Mapping[str, Any]) -> None:
        self._folder = str(spec["folder"])
        self._shards = [Shard(str(name), int(length)) for name, length in spec["shards"]]
        self._direct = os.O_DIRECT if spec["direct"] else 0
        self._content = Content()
        self._memory = self._content.chunk()

    def save(self, shards: Sequence[int], seen: Callable[[int], None]) -> list[str]:
        folders = set()
        for index in shards:
            path = f"{self._folder}/{self._shards[index].name}"
            try:
                Path(path).parent.mkdir(parents=True, exist_ok=True)
                self._write(path, self._shards[index], seen)
            except OSError as error:
                raise said(error, path, direct=bool(self._direct)) from None
            folders.add(str(Path(path).parent))
        for folder in folders:
            _sync_folder(folder)
        return []

    def _write(self, path: str, shard: Shard, seen: Callable[[int], None]) -> None:
        number = number_of(path)
        # One that is saved again takes the place of the one before, as an old checkpoint's name is used again.
        with suppress(FileNotFoundError):
            os.unlink(path)  # noqa: PTH108
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC | self._direct, 0o600)
        try:
            for offset in range(0, shard.length_bytes, CHUNK):
                length = min(CHUNK, shard.length_bytes - offset)
                # Past the page cache whole blocks go; what is too much is cut off afterwards.
                view = self._memory.data[: -(-length // BLOCK) * BLOCK if self._direct else length]
                self._content.stamp(self._memory, number, offset)
                written = 0
                while written < len(view):
                    written += os.pwrite(file, view[written:], offset + written)
                seen(length)
            if self._direct and shard.length_bytes % BLOCK:
                os.ftruncate(file, shard.length_bytes)
            os.fsync(file)
        finally:
            os.close(file)

    def restore(self, shards: Sequence[int], seen: Callable[[int], None]) -> int:
        total = 0
        for index in shards:
            shard = self._shards[index]
            path = f"{self._folder}/{shard.name}"
            try:
                file = os.open(path, os.O_RDONLY | os.O_CLOEXEC | self._direct)
                try:
                    total += self._read(file, path, shard, seen)
                finally:
                    os.close(file)
            except OSError as error:
                raise said(error, path, direct=bool(self._direct)) from None
        return total

    def _read(self, file: int, path: str, shard: Shard, seen: Callable[[int], None]) -> int:
        number, offset = number_of(path), 0
        view = self._memory.data
        while offset < shard.length_bytes:
            wanted, got = min(CHUNK, shard.length_bytes - offset), 0
            while got < wanted:
                count = os.preadv(file, [view[got:]], offset + got)
                if not count:
                    raise DeviceError("a file is shorter than it was written", where=path, found=str(offset + got))
                got += count
            self._content.check(self._memory[:wanted], number, offset, path)
            offset += wanted
            seen(wanted)
        return offset

    def close(self) -> None:
        """Nothing stays open."""


def _sync_folder(folder: str) -> None:
    """Some file systems (SMB) have no fsync of folders."""
    with suppress(OSError):
        handle = os.open(folder, os.O_RDONLY | os.O_DIRECTORY | os.O_CLOEXEC)
        try:
            os.fsync(handle)
        finally:
            os.close(handle)
