"""`torch-checkpointing` on a volume: a `Storage` of its own under its `CheckpointManager`.

    from headrace.torch.torch_checkpointing import VolumeStorageConfig
    from torch_checkpointing import CheckpointManager

    storage = VolumeStorageConfig("nvme+tcp://...")                  # on every rank, after init_process_group
    manager = CheckpointManager(CheckpointManager.Config(storage_config=storage))
    manager.save("pretrain/step-1000", {"model": model.state_dict(), "step": 1000})

It writes each rank's files into `pretrain/tmp_step-1000` and has rank 0 rename that folder. Here nothing is there
before: every file is durable when it is closed, none is visible, and the rename is the one commit of all of them. A
job that dies before it leaves nothing behind. Paths are names of objects; a leading `/` or `headrace://` may be there.

What a rank writes is not put together first: tensors go to the volume from the memory in which the manager holds them.
"""

from __future__ import annotations

import io
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path, PurePosixPath
from typing import Any, cast

from torch_checkpointing.storage.base_storage import ReadArgs, Storage, StorageConfig

from headrace.device.reference import as_bytes
from headrace.errors import UsageError
from headrace.filesystem.paths import as_os_errors, object_name
from headrace.settings import VOLUME, volume_addresses
from headrace.torch.ranks.attachment import Attachment
from headrace.torch.ranks.desk import Job
from headrace.torch.ranks.gathered import GatheredStream
from headrace.torch.ranks.scribe import Scribe
from headrace.volume import ObjectInfo, Volume

#: Shorter reads than this take as much with them: a tensor's description is read in pieces of some bytes.
_AHEAD_BYTES = 1 << 20


@dataclass
class VolumeStorageConfig(StorageConfig):  # type: ignore[misc]  # it has no types
    """Which volume, and who writes. Make it on every rank once torch.distributed is initialised: it notes there how the
    processes that save find one another."""

    #: Address of the volume, or of each member; "": `HEADRACE_VOLUME`.
    volume: str | Sequence[str] = ""
    #: Who writes: a restart under the same id takes over from a dead predecessor by itself.
    run_id: str = "torch-checkpointing"
    #: As `CheckpointWriterConfig.temp_dir_prefix`: a folder whose name begins so is one that is going to be renamed.
    temp_dir_prefix: str = "tmp_"
    #: Seconds that a rank waits for rank 0, which has the session, to say where it may write.
    deadline_s: float = 600.0
    #: Verify checksums when reading.
    verify: bool = True
    job: Job = field(default_factory=Job.here)

    def addresses(self) -> tuple[str, ...]:
        named: str | Sequence[str] | None = self.volume or volume_addresses()
        if not named:
            raise UsageError("no volume is named", next_step=f'give volume="..." or set {VOLUME}')
        return tuple(named.split(",")) if isinstance(named, str) else tuple(named)

    def create_storage(self) -> VolumeStorage:
        return VolumeStorage(self)


class VolumeStorage(Storage):  # type: ignore[misc]
    """Objects of a volume as `torch_checkpointing` wants them. Errors are `OSError`s where it looks for them, and
    HeadraceErrors else.

    Reading opens the volume. Writing begins the session in rank 0's process that writes; it ends with that process, or
    with `close`.
    """

    def __init__(self, config: VolumeStorageConfig) -> None:
        self._config = config
        self._addresses = config.addresses()
        self._reader = Attachment(self._addresses)
        #: Length in bytes of what this process has written and is not published, by group and name.
        self._written: dict[str, dict[str, int]] = {}

    def close(self) -> None:
        """Give up the session of this process, so that others may write. The next use opens everything again."""
        self._scribe().close()
        self._reader.renew()

    # ---- reading ----

    @property
    def mmap_fill_workers(self) -> int:
        """One: a read of a whole file is many requests by itself."""
        return 1

    def stream_read(self, path: Path, read_args: ReadArgs | None = None) -> io.RawIOBase:
        info = self._info(path)
        raw = _ReadStream(self._volume(), info, self._config.verify)
        if read_args is None or read_args.pre_read_full_file:
            with raw:
                return cast(io.RawIOBase, io.BytesIO(raw.readall()))
        return cast(io.RawIOBase, io.BufferedReader(raw, _AHEAD_BYTES))

    def exists(self, path: Path) -> bool:
        name = _name(path)
        return name in self._pending(name) or name in self._fresh() or self.isdir(path)

    def isdir(self, path: Path) -> bool:
        name = _name(path)
        return not name or self._fresh().any(f"{name}/") or any(p.startswith(f"{name}/") for p in self._pending(name))

    def getsize(self, path: Path) -> int:
        length = self._pending(_name(path)).get(_name(path))
        return self._info(path).length_bytes if length is None else length

    def ls(self, path: Path) -> list[str]:
        name = _name(path)
        start = len(name) + 1 if name else 0
        below = [info.name for info in self._fresh().list(f"{name}/" if name else "")]
        below += [one for one in self._pending(name) if one.startswith(f"{name}/")]
        if not below:
            raise FileNotFoundError(f"there is no folder {name!r}")
        return sorted({one[start:].partition("/")[0] for one in below})

    def remap_path(self, path: Path) -> str:
        return f"headrace://{_name(path)}"

    # ---- writing ----

    def stream_write(self, path: Path) -> io.IOBase:
        return self.get_write_stream(path, None)

    def get_write_stream(self, path: Path, data: object) -> io.IOBase:
        return GatheredStream(lambda parts: self.put(path, parts, parts.nbytes), data)

    def write(self, path: Path, data: Any) -> None:
        view = memoryview(data)
        self.put(path, view, view.nbytes)

    def put(self, path: Path, data: Any, length_bytes: int) -> None:
        """One file, in one piece or as `Parts`."""
        name, group = _name(path), self._group(path)
        with as_os_errors():
            final = name if group is None else self._final(name)
            self._scribe().write(final, data, group=group, vacant=group is not None)
        if group is not None:
            beside = group.rpartition("/")[0]
            for other in [one for one in self._written if one != group and one.rpartition("/")[0] == beside]:
                del self._written[other]
            self._written.setdefault(group, {})[name] = length_bytes

    def delete(self, path: Path) -> None:
        with as_os_errors():
            self._scribe().change(delete=[self._info(path).name])

    def mkdir(self, path: Path, recursive: bool = True) -> None:
        """Nothing: a folder is there when something is in it."""

    def rmdir(self, path: Path) -> None:
        """The folder with all that is in it, in one commit; one that is being written is given up."""
        name, group = _name(path), self._group(path)
        with as_os_errors():
            if group is not None:
                self._written.pop(group, None)
                self._scribe().give_up(group)
                return
            self._scribe().change(delete=[info.name for info in self._fresh().list(f"{name}/")])

    def rename(
        self, src_path: Path, dst_path: Path, is_directory: bool = False, background_cleanup: bool = False
    ) -> None:
        """The table of `Storage.rename`, each row of it one commit."""
        old, new = _name(src_path), _name(dst_path)
        group = self._group(src_path)
        if group is not None and self._final(old) == group:
            if new != group:
                raise OSError(f"{old!r} becomes {group!r}: its files were written under that name, not {new!r}")
            with as_os_errors():
                self._scribe().publish(group, vacant=True)
            self._written.pop(group, None)
            return
        volume = self._fresh()
        with as_os_errors():
            if old in volume:
                if volume.any(f"{new}/"):
                    raise IsADirectoryError(f"{new!r} is a folder: a file does not take its place")
                self._scribe().change(rename=[(old, new)])
                return
            below = [info.name for info in volume.list(f"{old}/")]
            if not below:
                raise FileNotFoundError(f"there is no {old!r} to rename")
            if new in volume or volume.any(f"{new}/"):
                raise FileExistsError(f"{new!r} is there already: delete it first, if it is not wanted any more")
            self._scribe().change(rename=[(one, new + one[len(old) :]) for one in below])

    # ---- where things are ----

    def _scribe(self) -> Scribe:
        return Scribe.of(self._addresses, self._config.run_id, self._config.job, self._config.deadline_s)

    def _volume(self) -> Volume:
        return self._scribe().volume or self._reader.open()

    def _fresh(self) -> Volume:
        volume = self._volume()
        volume.refresh()
        return volume

    def _info(self, path: Path) -> ObjectInfo:
        with as_os_errors():
            return self._fresh().stat(_name(path))

    def _split(self, name: str) -> tuple[str, str, str] | None:
        """What is before the last folder that is going to be renamed, its name then, and what is within it."""
        parts = PurePosixPath(name).parts
        prefix = self._config.temp_dir_prefix
        for at in reversed(range(len(parts))):
            if prefix and parts[at].startswith(prefix) and parts[at] != prefix:
                return "/".join(parts[:at]), parts[at][len(prefix) :], "/".join(parts[at + 1 :])
        return None

    def _group(self, path: Path) -> str | None:
        """The folder that this is going to be in, or to be; None where it is what it is."""
        split = self._split(_name(path))
        return None if split is None else f"{split[0]}/{split[1]}".lstrip("/")

    def _final(self, name: str) -> str:
        split = self._split(name)
        return name if split is None else "/".join(part for part in split if part)

    def _pending(self, name: str) -> Mapping[str, int]:
        """What is written within a folder that is going to be renamed, under its names of now. Rank 0 knows of all,
        others of their own."""
        group = self._group(Path(name))
        if group is None:
            return {}
        if self._config.job.rank:
            return self._written.get(group, {})
        split = self._split(name)
        assert split is not None
        before = "/".join(part for part in (split[0], self._config.temp_dir_prefix + split[1]) if part)
        there = {before + one[len(group) :]: length for one, length in self._scribe().pending(group).items()}
        # What this process wrote counts until it is renamed or removed here, also where it was given up meanwhile: its
        # `CheckpointWriter` renames only what `exists`, and says else that it is saved. The rename tells.
        return {**self._written.get(group, {}), **there}


def _name(path: Path) -> str:
    text = os.fspath(path)
    # As `Path` leaves it of a URL.
    name = object_name(text.replace("headrace:/", "", 1) if text.startswith("headrace:/") else text)
    return "" if name == "." else name


class _ReadStream(io.RawIOBase):
    """A committed object; what is read comes into the memory that it is read into, verified."""

    def __init__(self, volume: Volume, info: ObjectInfo, verify: bool) -> None:
        self._volume, self._found, self._verify = volume, info, verify
        self._at = 0

    def readable(self) -> bool:
        return True

    def seekable(self) -> bool:
        return True

    def tell(self) -> int:
        return self._at

    def seek(self, offset: int, whence: int = io.SEEK_SET) -> int:
        start = {io.SEEK_SET: 0, io.SEEK_CUR: self._at, io.SEEK_END: self._found.length_bytes}[whence]
        if start + offset < 0:
            raise OSError(22, f"seek to {start + offset}")
        self._at = start + offset
        return self._at

    def readinto(self, buffer: Any) -> int:
        length = max(0, min(memoryview(buffer).nbytes, self._found.length_bytes - self._at))
        if length:
            with as_os_errors():
                into = as_bytes(buffer)[:length]
                self._volume.submit_read(self._found, [self._at], [length], [into], [0], verify=self._verify).wait()
            self._at += length
        return length

    def readall(self) -> bytes:
        data = bytearray(max(0, self._found.length_bytes - self._at))
        self.readinto(data)
        return bytes(data)
