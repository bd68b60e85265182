"""A block device, or a namespace over NVMe/TCP: read as it is; written only as scratch, between what may not be there.

Nothing of a device is written before `--scratch` was given, and then only where nothing is found that anybody knows: no
member of a volume, no file system, no partition table, no reservation of another host. The first and the last MiB stay
as they are.
"""

from __future__ import annotations

import os
import random
import secrets
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import numpy as np

from headrace.bench import cache as caches
from headrace.bench.cache import DROPPED, READ_BEFORE, THROUGH, WARM
from headrace.bench.places import mounts
from headrace.bench.places.content import CHUNK
from headrace.bench.places.device_io import DeviceReader, DeviceRoom, DeviceWriter
from headrace.bench.places.filling import write_all
from headrace.bench.places.mark import Mark
from headrace.bench.places.memory import ALIGN
from headrace.bench.places.protocol import Item, Shard, Tell
from headrace.device import BlockAddress, FileAddress, MemoryAddress, NativeDevice, open_device, parse_address
from headrace.errors import HeadraceError, NotAVolume, UsageError, VolumeDamaged, VolumeTooNew
from headrace.units import MIB, format_bytes
from headrace.volume.create import MIN_STRIPE, check
from headrace.volume.media.foreign import foreign_signature
from headrace.volume.media.members import read_superblock

#: At both ends of a device, never written: what is not known here lies there, mostly.
_MARGIN = MIB
#: Where it is looked at whether a region holds anything.
_LOOKS = 64
_KINDS: dict[type, str] = {BlockAddress: "block device", FileAddress: "file as a device", MemoryAddress: "memory"}


class DevicePlace:
    """`scratch`: it may be written to."""

    def __init__(self, uri: str, *, name: str | None = None, scratch: bool = False) -> None:
        self.name = name or uri
        address = parse_address(uri)
        if isinstance(address, MemoryAddress):
            raise UsageError(
                "a mem: device is another one for each who opens it",
                where=uri,
                expected="a path that others reach, too",
            )
        self.kind = _KINDS.get(type(address), "namespace")
        #: A file, whose bytes the page cache of this machine may have.
        self._path = address.path if isinstance(address, FileAddress) else ""
        self.keeps = bool(self._path)
        self._through = _through(address.path) if isinstance(address, BlockAddress) else ""
        self._scratch = self.makes = scratch
        self._device = open_device(uri, read_only=not scratch)
        try:
            self.size_bytes = self._device.size_bytes
            self.holds = _holds(self._device)
            self._mark = Mark(self._device, _MARGIN, self.name)
            if scratch:
                self._device.check_writable()
                self._refuse()
                if self._has_room:
                    self._mark.refuse()
        except BaseException:
            self._device.close()
            raise
        self.why_read_only = None if scratch else "a device is written only where that is asked for"
        self.durable = "a flush of the device" if self._device.volatile_cache else "each write: no volatile cache"
        self._items: list[Item] = []
        self._warm = False
        self._read_bytes = 0
        self._base = 0
        #: Up to here the scratch region is taken: the mark comes first.
        self._end = _MARGIN + ALIGN
        self._written_to = _MARGIN

    def _refuse(self) -> None:
        """UsageError where it holds what is known, whatever was said of scratch."""
        try:
            check([self._device], name="", stripe_bytes=MIN_STRIPE, force=False)
        except UsageError as error:
            raise UsageError(
                error.what, where=self.name, found=self.holds or error.found, expected="a device that holds nothing",
                next_step="give another one; what is there must be wiped by whoever knows that it is not needed",
            ) from None  # fmt: skip

    @property
    def items(self) -> Sequence[Item]:
        return self._items

    def describe(self) -> Mapping[str, str]:
        said = self._device.describe()
        keys = (
            "transport",
            "engine",
            "model",
            "queues",
            "header_digest",
            "data_digest",
            "block_bytes",
            "volatile_cache",
        )
        found = {key.replace("_", " "): str(said[key]) for key in keys if key in said}
        kernel = said.get("kernel", {})
        for key, text in (("name", kernel.get("name")), ("subsystem", kernel.get("subsysnqn"))):
            if text:
                found[key] = str(text)
        found["size"] = format_bytes(self.size_bytes)
        if self.holds:
            found["holds"] = self.holds
        return found

    def plan(self, read_bytes: int, room_bytes: int) -> list[str]:
        if not self._scratch:
            self._check_scratch(room_bytes)
            holds = f", which holds {self.holds}" if self.holds else ""
            lines = [
                f"reads {self.name}{holds}; writes nothing",
                "blocks that were never written may be answered without a medium: faster than data would be",
            ]
            other = self._mark.living() if self._has_room else ""
            if other:
                lines.append(f"another run of headrace bench writes there ({other}): both measure less than there is")
            return lines
        total = self._whole(read_bytes) + self._whole(room_bytes)
        self._room_for(total)
        lines = [f"OVERWRITES bytes {_MARGIN} to {self._end + total} of {self.name}"]
        used = _used(self._device, self._end, total)
        if used:
            lines.append(f"{used} of {_LOOKS} places there are not zero: somebody's data, or an earlier run's")
        else:
            lines.append(f"{_LOOKS} places there, by chance, are zero: it looks empty")
        return lines

    def _check_scratch(self, length: int) -> None:
        if length and not self._scratch:
            raise UsageError(
                self.why_read_only or "", where=self.name,
                next_step="give --scratch, where nothing that it holds is needed",
            )  # fmt: skip

    def prepare(self, total_bytes: int, *, tell: Tell) -> None:
        if self._items:
            return
        self._read_bytes = max(total_bytes, CHUNK)
        if not self._scratch:
            self._items = [Item("", self.size_bytes)]
            return
        shard = Shard("data", self._whole(total_bytes))
        self._begin(shard.length_bytes)
        self._base = self._take(shard.length_bytes)
        # In pieces, so that several threads write; of this run alone.
        salt = secrets.token_hex(4)
        each = max(CHUNK, shard.length_bytes // 16 // CHUNK * CHUNK)
        pieces = [
            Shard(f"{salt}/data/{at:x}", min(each, shard.length_bytes - at))
            for at in range(0, shard.length_bytes, each)
        ]
        offsets = [self._base + at for at in range(0, shard.length_bytes, each)]
        spec = {"uri": self._device.uri, "shards": pieces, "offsets": offsets, "mark": self._mark.sign}
        write_all(lambda: DeviceWriter(spec), [piece.length_bytes for piece in pieces], tell)
        self._items = [Item("scratch", shard.length_bytes)]

    def forget(self, cache: str) -> str:
        self._mark.check()
        if self._path and cache != WARM:
            caches.drop([self._path])
        if cache == WARM and not self._warm:
            self._warm = True
            if not self._scratch:
                # Not all of a device that may be large: what is read from then on is what was read before.
                self._items = [Item("", min(self.size_bytes, self._read_bytes))]
            reader = self.reader(depth=4)
            try:
                for index, item in enumerate(self._items):
                    for at in range(0, item.length_bytes, CHUNK):
                        reader.read(index, at, min(CHUNK, item.length_bytes - at))
            finally:
                reader.close()
        return self._state(cache)

    def _state(self, cache: str) -> str:
        if self._path:
            mount = mounts.mount_of(self._path)
            memory = mount.kind in caches.MEMORY
            # Whatever was asked for: files as devices are read through it.
            how = WARM if cache == WARM else DROPPED
            left = None if memory else caches.resident([self._path])
            return caches.state(how, left=left, memory=memory, remote=mount.remote)
        said = f"{READ_BEFORE}; " if cache == WARM else ""
        if self._through:
            return f"{said}{THROUGH}: {self._through}, and it cannot be dropped from here"
        where = "the target and its drives have" if self.kind == "namespace" else "the drive has"
        return f"{said}no cache on this machine; what {where} in memory cannot be controlled from here"

    def reader(self, *, depth: int, cache: str = DROPPED) -> DeviceReader:
        return DeviceReader(open_device(self._device.uri, read_only=True), self._base, self._items)

    @contextmanager
    def room(self, shards: Sequence[Shard], cache: str = DROPPED) -> Iterator[DeviceRoom]:
        self._check_scratch(1)
        before, offsets = self._end, []
        lengths = [self._whole(shard.length_bytes) for shard in shards]
        self._begin(sum(lengths))
        for length in lengths:
            offsets.append(self._take(length))
        try:
            # Of this room alone: bytes of an earlier one, or of another run on this device, are not taken for its own.
            salt = secrets.token_hex(4)
            named = [Shard(f"{salt}/{shard.name}", shard.length_bytes) for shard in shards]
            yield DeviceRoom(
                self._device.uri, named, offsets, self._mark.sign,
                lambda: self._state(WARM) if cache == WARM else self.forget(cache),
            )  # fmt: skip
        finally:
            self._end = before

    def close(self) -> None:
        try:
            if self._mark.written:
                # Nobody needs it any more; where the device cannot be told so, it stays written. So it does where
                # somebody has made something of the device meanwhile.
                with suppress(HeadraceError):
                    if self._mark.end():
                        self._refuse()
                        self._mark.erase()
                        self._device.deallocate(_MARGIN, max(self._written_to - _MARGIN, ALIGN))
        finally:
            self._device.close()

    def __enter__(self) -> DevicePlace:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    @property
    def _has_room(self) -> bool:
        """For a mark, between what is never written."""
        return self.size_bytes >= 2 * _MARGIN + ALIGN

    def _whole(self, length: int) -> int:
        return -(-length // ALIGN) * ALIGN

    def _room_for(self, length: int) -> None:
        free = (self.size_bytes - _MARGIN) // ALIGN * ALIGN - self._end
        if length > free:
            raise UsageError(
                "too little space", where=self.name, expected=f"{format_bytes(length)} between its first and last MiB",
                found=format_bytes(max(0, free)), next_step="give a larger one, or less to write (--size, --scale)",
            )  # fmt: skip

    def _begin(self, length: int) -> None:
        """Before each round that writes: it may be long ago that this was looked at, where somebody was asked whether
        it may be, or the process was stopped; and somebody may have made something of the device meanwhile."""
        self._mark.check()
        self._room_for(length)
        self._refuse()
        if not self._mark.kept:
            self._mark.put()

    def _take(self, length: int) -> int:
        at, self._end = self._end, self._end + length
        self._written_to = max(self._written_to, self._end)
        return at


def _through(path: str) -> str:
    """What of this kernel keeps bytes behind a block device; "": nothing that is known."""
    try:
        number = os.stat(path).st_rdev  # noqa: PTH116
        place = Path(f"/sys/dev/block/{os.major(number)}:{os.minor(number)}").resolve()
        # Of a partition, its disk.
        disk = place.parent if (place / "partition").exists() else place
        if (disk / "loop").is_dir():
            direct = (disk / "loop/dio").read_text().strip() == "1"
            return "" if direct else f"{disk.name} is a file's (losetup --direct-io=on reads past it)"
    except OSError:
        return ""
    return f"{disk.name} is memory" if disk.name.startswith(("ram", "zram")) else ""


def _holds(device: NativeDevice) -> str | None:
    """What is on it, in words; None: nothing that is known."""
    try:
        superblock = read_superblock(device)[0]
        return f"a member of the volume {superblock.name or superblock.volume_id.hex()}"
    except NotAVolume:
        return foreign_signature(device) if device.size_bytes >= ALIGN else None
    except (VolumeDamaged, VolumeTooNew) as error:
        return f"a member of a volume ({error.what})"


def _used(device: NativeDevice, start: int, length: int) -> int:
    """At how many of some places something else than zeros is."""
    buffer = np.empty(ALIGN, np.uint8)
    chance = random.Random(0)
    used = 0
    for _ in range(_LOOKS if length >= ALIGN else 0):
        device.read_into(start + chance.randrange(length // ALIGN) * ALIGN, buffer)
        used += bool(buffer.any())
    return used
