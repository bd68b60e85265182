"""A stage on its medium: looked at by anybody, held by one process at a time.

Who holds it has a lock of the kernel's on it, which ends with the process, however that ends. Readers need none: what
they find is verified.
"""

from __future__ import annotations

import errno
import hashlib
import os
import secrets
from dataclasses import replace
from pathlib import Path
from typing import Any
from urllib.parse import quote

import numpy as np
import numpy.typing as npt

from headrace.device import (
    BlockAddress,
    FileAddress,
    FileLock,
    NativeDevice,
    crc32c,
    lock_file,
    open_device,
    parse_address,
)
from headrace.errors import DeviceError, NotAVolume, UsageError, VolumeDamaged, VolumeError
from headrace.units import format_bytes
from headrace.volume.layout import align_up
from headrace.volume.media.foreign import foreign_signature
from headrace.volume.media.members import read_superblock
from headrace.volume.stage.layout import HEAD_BYTES, MAGIC, MAKING, Facts, Head
from headrace.volume.stage.plan import Plan

Bools = npt.NDArray[np.bool_]

#: Of files that are stages, in a folder.
SUFFIX = ".stage"
_PAGE = 4096
_BEING_MADE = MAKING.ljust(HEAD_BYTES, b"\0")


def address_of(where: str | os.PathLike[str], volume_id: str, dataset: str) -> FileAddress | BlockAddress:
    """Where the stage of a dataset is: a file of its own in a folder, or a file or block device that is named itself.

    `where`: a path is a folder; `file:/PATH` a file, `/dev/NAME` or `block:/PATH` a block device. UsageError.
    """
    text = os.fspath(where)
    if names_itself(text):
        address = parse_address(text)
        assert isinstance(address, FileAddress | BlockAddress)
        return address
    if not text or "\0" in text or "://" in text:
        raise UsageError(
            "no place for a stage", expected="a folder, file:/PATH or /dev/NAME", found=repr(text),
            next_step="a copy in another volume is made with `headrace volume cp`" if "://" in text else None,
        )  # fmt: skip
    digest = hashlib.blake2b(f"{volume_id}/{dataset}".encode(), digest_size=6).hexdigest()
    return FileAddress(path=str(Path(text).absolute() / f"{quote(dataset, safe='')[:100]}.{digest}{SUFFIX}"))


def names_itself(text: str) -> bool:
    """It is a file or a device, not a folder. (Folders of memory are below /dev, too.)"""
    return text.startswith(("file:", "block:")) or (text.startswith("/dev/") and not text.startswith("/dev/shm"))


def stages_in(where: str | os.PathLike[str]) -> list[str]:
    """Addresses of the stages of a folder, or the one that is named."""
    text = os.fspath(where)
    if names_itself(text):
        return [address_of(text, "", "").uri]
    try:
        names = sorted(name for name in os.listdir(text) if name.endswith(SUFFIX))  # noqa: PTH208
    except OSError as error:
        raise UsageError("no folder of stages", where=text, found=error.strerror) from error
    return [FileAddress(path=str(Path(text).absolute() / name)).uri for name in names]


def _read_facts(device: NativeDevice) -> tuple[Head, Facts] | None:
    """None where there is no stage, or one that is being made. VolumeDamaged, VolumeTooNew."""
    where = device.uri
    if device.size_bytes < 2 * HEAD_BYTES:
        return None
    head = _read_head(device)
    if head is None:
        return None
    size = align_up(head.facts_bytes)
    if HEAD_BYTES + size > device.size_bytes:
        raise VolumeDamaged("a stage was cut off", where=where, found=f"{device.size_bytes} bytes")
    buffer = np.empty(size, np.uint8)
    device.read_into(HEAD_BYTES, buffer)
    data = buffer[: head.facts_bytes].tobytes()
    if crc32c(data) != head.facts_crc:
        if _read_head(device) != head:
            return None
        raise VolumeDamaged("what a stage says of itself does not match its checksum", where=where)
    return head, Facts.decode(data, head, where)


def _read_head(device: NativeDevice) -> Head | None:
    buffer = np.empty(HEAD_BYTES, np.uint8)
    device.read_into(0, buffer)
    return Head.decode(buffer.tobytes(), device.uri)


def _read_map(device: NativeDevice, facts: Facts) -> Bools:
    buffer = np.empty(facts.map_bytes, np.uint8)
    if facts.base > device.size_bytes:
        raise VolumeDamaged("a stage was cut off", where=device.uri, found=f"{device.size_bytes} bytes")
    device.read_into(facts.map_at, buffer)
    return np.unpackbits(buffer, count=facts.chunk_count, bitorder="little").astype(np.bool_)


class Stage:
    """A stage, to be looked at and read from."""

    def __init__(self, device: NativeDevice, head: Head, facts: Facts, identity: tuple[int, int] | None) -> None:
        self.device = device
        self.facts = facts
        self._head = head
        self._identity = identity

    @classmethod
    def open(cls, uri: str) -> Stage | None:
        """None where there is none (yet). VolumeDamaged, VolumeTooNew, DeviceError, UsageError."""
        address = parse_address(uri)
        identity: tuple[int, int] | None = None
        if isinstance(address, FileAddress):
            try:
                if Path(address.path).stat().st_size < 2 * HEAD_BYTES:
                    return None
                identity = _identity(address, make=False)
            except (FileNotFoundError, NotADirectoryError):
                return None
            except OSError as error:
                raise DeviceError("the stage cannot be looked at", where=uri, found=error.strerror) from error
        device = open_device(uri, read_only=True)
        try:
            found = _read_facts(device)
        except BaseException:
            device.close()
            raise
        if found is None:
            device.close()
            return None
        return cls(device, *found, identity)

    def there(self) -> Bools | None:
        """Which chunks are there; None where this stage has become another one, is to have more, or is gone. Errors as
        of `open`."""
        if _read_head(self.device) != self._head:
            return None
        address = parse_address(self.device.uri)
        if isinstance(address, FileAddress) and _identity(address, make=False) != self._identity:
            return None
        return _read_map(self.device, self.facts)

    def close(self) -> None:
        self.device.close()

    def __enter__(self) -> Stage:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class Held:
    """A stage that nobody else can change. Made by `hold`. Not thread-safe, but for `write`."""

    def __init__(self, address: FileAddress | BlockAddress, lock: FileLock) -> None:
        self.address = address
        self._lock = lock
        self._device: NativeDevice | None = None
        #: What it is the stage of, once it is laid out.
        self.facts: Facts | None = None
        #: Chunks that are there.
        self.there: Bools = np.zeros(0, np.bool_)

    @property
    def uri(self) -> str:
        return self.address.uri

    def __enter__(self) -> Held:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def close(self) -> None:
        if self._device is not None:
            self._device.close()
            self._device = None
        if self.facts is None and isinstance(self.address, FileAddress):
            # Nothing came of it: what `hold` made is taken away.
            path = Path(self.address.path)
            if path.exists() and not path.stat().st_size:
                path.unlink()
        self._lock.release()

    @property
    def device(self) -> NativeDevice:
        assert self._device is not None
        return self._device

    def room(self, most_bytes: int | None) -> tuple[int, int | None]:
        """Bytes that the stage may take, with those that it has, and where its medium ends, if it has an end."""
        end: int | None = None
        if isinstance(self.address, FileAddress):
            file = Path(self.address.path)
            system = os.statvfs(file.parent)
            room = system.f_bavail * system.f_frsize + file.stat().st_blocks * 512
        else:
            with open_device(self.uri, read_only=True) as device:
                room = end = device.size_bytes
        return room if most_bytes is None else min(room, most_bytes), end

    def lay_out(self, plan: Plan, *, force: bool, sole: bool = False) -> None:
        """Make this the stage of the plan: what is there already stays, if it is of the same blobs. UsageError where
        the medium holds something else, unless `force`; also the stage of another dataset, where its place has this
        `sole` one (in a folder each dataset has a file by its name). DeviceError."""
        try:
            self._lay_out(plan, force, sole)
        except OSError as error:
            raise DeviceError(
                "the stage cannot be made", where=self.uri, found=error.strerror,
                next_step=f"it needs a file of {format_bytes(plan.facts.size_bytes)}: use a file system that has such, "
                "or a block device" if error.errno == errno.EFBIG else None,
            ) from error  # fmt: skip

    def _lay_out(self, plan: Plan, force: bool, sole: bool) -> None:
        found = self._look(force)
        if found is not None and sole and not force:
            refuse_another(found, plan, self.uri)
        told = plan.facts.encode()
        if found is not None and found.same_places(plan.facts) and HEAD_BYTES + len(told) <= found.map_at:
            facts = replace(plan.facts, map_at=found.map_at, nonce=found.nonce)
            before = self._open(facts.size_bytes)
            self.there = _read_map(self.device, facts)
            if before < facts.size_bytes:
                # Cut short by somebody: what was behind is not there any more.
                self.there &= facts.base + plan.ends <= before
                self._write_map(range(facts.map_bytes // _PAGE), facts)
            if told != found.encode():
                # Cut off in the middle this is no stage, and made anew.
                self._write_facts(facts)
        else:
            facts = replace(plan.facts, nonce=secrets.token_bytes(16))
            self._clear(facts.size_bytes)
            self._open(facts.size_bytes)
            self.there = np.zeros(facts.chunk_count, np.bool_)
            self._write_map(range(facts.map_bytes // _PAGE), facts)
            self._write_facts(facts)
        self.facts = facts

    def _look(self, force: bool) -> Facts | None:
        """What is there; None: nothing, or nothing that can be used. UsageError: it is something else."""
        foreign: str | None = None
        if isinstance(self.address, FileAddress):
            with Path(self.address.path).open("rb") as file:
                head = file.read(HEAD_BYTES)
                size = file.seek(0, os.SEEK_END)
            if not head or (_is_ours(head) and size < 2 * HEAD_BYTES):
                return None
            foreign = None if _is_ours(head) else "a file of something else"
        if foreign is None:
            with open_device(self.uri, read_only=True) as device:
                buffer = np.empty(HEAD_BYTES, np.uint8)
                device.read_into(0, buffer)
                if _is_ours(buffer.tobytes()):
                    try:
                        found = _read_facts(device)
                    except VolumeDamaged:
                        found = None
                    return None if found is None else found[1]
                foreign = _held_by(device)
        if foreign is not None and not force:
            raise UsageError(
                "there is something else where the stage is to be", where=self.uri, found=foreign,
                next_step="choose another place, or destroy what it holds with force=True (--force)",
            )  # fmt: skip
        return None

    def _is_one(self) -> bool:
        """A stage, one that is being made, or a file that nothing came of."""
        if isinstance(self.address, FileAddress):
            with Path(self.address.path).open("rb") as file:
                head = file.read(HEAD_BYTES)
            return not head or _is_ours(head)
        with open_device(self.uri, read_only=True) as device:
            buffer = np.empty(HEAD_BYTES, np.uint8)
            device.read_into(0, buffer)
        return _is_ours(buffer.tobytes())

    def _clear(self, size_bytes: int) -> None:
        # The head first: what is cut and made longer again reads as zeros, which no reader takes for its bytes.
        if isinstance(self.address, FileAddress):
            with Path(self.address.path).open("r+b") as file:
                file.write(_BEING_MADE)
                file.flush()
                os.fsync(file.fileno())
                file.truncate(HEAD_BYTES)
                file.truncate(align_up(size_bytes))
                os.fsync(file.fileno())
            return
        with open_device(self.uri) as device:
            device.write(0, _BEING_MADE, fua=True)

    def _open(self, size_bytes: int) -> int:
        """To be written to; a file at its whole length. Returns which length it had."""
        self._device = open_device(self.uri)
        before = self._device.size_bytes
        if isinstance(self.address, FileAddress) and before < size_bytes:
            self._device.close()
            os.truncate(self.address.path, align_up(size_bytes))
            self._device = open_device(self.uri)
        return before

    def _write_facts(self, facts: Facts) -> None:
        data = facts.encode()
        self.device.write(0, _BEING_MADE, fua=True)
        self.device.write(HEAD_BYTES, data.ljust(align_up(len(data)), b"\0"))
        self.device.flush()
        self.device.write(0, Head.of(data, facts.map_at, facts.nonce).encode(), fua=True)

    def _write_map(self, pages: Any, facts: Facts) -> None:
        bits = np.packbits(self.there, bitorder="little")
        packed = np.zeros(facts.map_bytes, np.uint8)
        packed[: len(bits)] = bits
        for page in pages:
            part = packed[page * _PAGE : (page + 1) * _PAGE]
            self.device.write(facts.map_at + page * _PAGE, part.tobytes(), fua=True)

    def write(self, place: int, data: npt.NDArray[np.uint8]) -> None:
        """Bytes behind the map, whole pages of them. From any thread."""
        assert self.facts is not None
        self.device.write(self.facts.base + place, data)

    def flush(self) -> None:
        self.device.flush()

    def mark(self, chunks: list[int], there: bool = True) -> None:
        """These chunks are there (their bytes are durable), or are not any more."""
        assert self.facts is not None
        self.there[chunks] = there
        self._write_map(sorted({chunk // 8 // _PAGE for chunk in chunks}), self.facts)

    def drop(self) -> None:
        """There is no stage any more. A file is removed; readers that have it open lose nothing by that. UsageError
        where it is something else."""
        if not self._is_one():
            raise UsageError(
                "this is no stage", where=self.uri, expected="one, or an empty file",
                next_step="what else it is, is not taken away here",
            )  # fmt: skip
        if isinstance(self.address, FileAddress):
            Path(self.address.path).unlink(missing_ok=True)
        else:
            with open_device(self.uri) as device:
                device.write(0, bytes(HEAD_BYTES), fua=True)


def refuse_another(found: Facts, plan: Plan, where: str) -> None:
    """UsageError where this is the stage of another dataset than the plan's."""
    if (found.volume_id, found.dataset) == (plan.facts.volume_id, plan.facts.dataset):
        return
    raise UsageError(
        "the stage of another dataset is there", where=where,
        expected=f"one of {plan.facts.dataset!r} of volume {plan.facts.volume!r} ({plan.facts.volume_id}), or none",
        found=f"that of {found.dataset!r} of volume {found.volume!r} ({found.volume_id})",
        next_step="name a folder, in which each dataset has a file, or another place; take that one away (--drop); "
        "or replace it with force=True (--force)",
    )  # fmt: skip


def _is_ours(head: bytes) -> bool:
    return head.startswith((MAGIC, MAKING))


def _held_by(device: NativeDevice) -> str | None:
    """What the device holds, in words; None: nothing that is known."""
    try:
        return f"the volume {read_superblock(device)[0].name!r}"
    except NotAVolume:
        return foreign_signature(device)
    except VolumeError as error:
        return str(error)


def hold(address: FileAddress | BlockAddress) -> Held | None:
    """The stage, for one who changes it; None where somebody else has it. A file is made where there is none, and its
    folder. DeviceError, UsageError."""
    for _ in range(16):
        before = _identity(address, make=True)
        try:
            lock = lock_file(address.uri)
        except DeviceError:
            if _identity(address, make=False) == before:
                raise
            continue  # It was dropped between the two.
        if lock is None:
            return None
        # It may have been dropped between the two, and then this is the lock of nothing.
        if before is not None and _identity(address, make=False) == before:
            return Held(address, lock)
        lock.release()
    raise DeviceError("the stage comes and goes", where=address.uri)


def _identity(address: FileAddress | BlockAddress, *, make: bool) -> tuple[int, int] | None:
    path = Path(address.path)
    try:
        if make and isinstance(address, FileAddress):
            path.parent.mkdir(exist_ok=True)
            path.touch()
        found = path.stat()
    except FileNotFoundError:
        if make:
            raise UsageError("no place for a stage", where=address.uri, found="no such folder") from None
        return None
    except OSError as error:
        raise DeviceError("no stage can be made here", where=address.uri, found=error.strerror) from error
    return found.st_dev, found.st_ino
