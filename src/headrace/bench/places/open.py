"""From what a user names to a place."""

from __future__ import annotations

import stat
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from headrace.bench.places.asking import asked
from headrace.bench.places.device import DevicePlace
from headrace.bench.places.device_io import DeviceWriter
from headrace.bench.places.folder import FolderPlace
from headrace.bench.places.folder_room import FolderWriter
from headrace.bench.places.protocol import Place, Writer
from headrace.bench.places.volume import VolumePlace
from headrace.bench.places.volume_io import VolumeWriter
from headrace.errors import UsageError
from headrace.settings import check_text, volume_addresses
from headrace.volume.media.members import addresses

_VOLUME = "headrace://"
_DEVICES = ("nvme+tcp:", "block:", "file:", "mem:")


def open_place(
    name: str, *, scratch: bool = False, existing: bool = False, whole: bool = False, unfenced: bool = False,
    job: str = "",
) -> Place:  # fmt: skip
    """`headrace://` (the volume of HEADRACE_VOLUME) or `headrace://URI,URI…` (its members), `nvme+tcp://…`, a block
    device, a folder or a file.

    `scratch`: a device or a volume may be written to. `existing`: of a folder, the files that are there are read;
    `whole`: each is opened for a read, and closed after it. `job`: what several ranks that measure together have in
    common (letters and digits).
    Nothing is written here. UsageError where it cannot be measured so; what opening a device or volume raises.
    """
    check_text("the path", name)
    if not name.strip():
        raise UsageError("which path?", expected="a folder, a device, nvme+tcp://… or headrace://")
    if "\0" in name:
        raise UsageError("not a path", found=repr(name)[:80])
    # Asked once, and before it is touched: its server may be away.
    found = {} if name.startswith((_VOLUME, *_DEVICES)) else asked("place", name, name)
    block = stat.S_ISBLK(found.get("mode", 0))
    if whole and (not existing or block or not found):
        raise UsageError(
            "--whole-files", where=name, expected="a folder with --existing: files that are there, of a sample each"
        )
    if name.startswith(_VOLUME):
        where = name.removeprefix(_VOLUME) or volume_addresses()
        if not where:
            raise UsageError(
                "no volume was named", expected="headrace://URI,URI… with the address of each member",
                next_step="give them, or set HEADRACE_VOLUME",
            )  # fmt: skip
        return VolumePlace(name, addresses(where), scratch=scratch, unfenced=unfenced)
    if name.startswith(_DEVICES) or block:
        if existing:
            raise UsageError("--existing", where=name, expected="a folder: a device is read as it is without --scratch")
        uri = name if name.startswith(_DEVICES) else f"block:{quote(str(Path(name).absolute()))}"
        return DevicePlace(uri, name=name, scratch=scratch)
    if scratch:
        raise UsageError(
            "--scratch", where=name, expected="a device or a volume",
            next_step="leave it out: what is written to a folder goes into one of its own",
        )  # fmt: skip
    return FolderPlace(name, found, existing=existing, whole=whole, job=job)


def is_folder(name: str) -> bool:
    """Asked as `open_place` asks."""
    if name.startswith((_VOLUME, *_DEVICES)) or not name.strip() or "\0" in name:
        return False
    return stat.S_ISDIR(asked("place", name, name).get("mode", 0))


def open_writer(spec: Mapping[str, Any]) -> Writer:
    """In any process: from what `Room.for_writer` said."""
    kinds: dict[str, type[FolderWriter] | type[DeviceWriter] | type[VolumeWriter]] = {
        "folder": FolderWriter, "device": DeviceWriter, "volume": VolumeWriter,
    }  # fmt: skip
    return kinds[str(spec["kind"])](spec)
