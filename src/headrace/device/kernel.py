"""What this machine's kernel says about its block devices, from sysfs and procfs.

A container sees its own mounts only, and perhaps no sysfs: what is not found here is not proven absent. The kernel's
own claim (O_EXCL), which the native engine asks for, is the proof; this page puts names to it.
"""

from __future__ import annotations

import os
import re
import stat
from contextlib import suppress
from pathlib import Path
from typing import Any
from uuid import UUID

_SYS = Path("/sys/dev/block")


def device_number(path: str) -> tuple[int, int] | None:
    """Major and minor number of a block device; `None`: it is none, or not there."""
    try:
        found = Path(path).stat()
    except OSError:
        return None
    return (os.major(found.st_rdev), os.minor(found.st_rdev)) if stat.S_ISBLK(found.st_mode) else None


def sysfs_of(path: str) -> Path | None:
    """The folder of a block device in sysfs, links followed."""
    number = device_number(path)
    if number is None:
        return None
    folder = _SYS / f"{number[0]}:{number[1]}"
    return folder.resolve() if folder.exists() else None


def partition_of(path: str) -> str | None:
    """The name of the disk that this is a partition of; `None`: it is no partition."""
    folder = sysfs_of(path)
    return folder.parent.name if folder is not None and (folder / "partition").exists() else None


_NVME = re.compile(r"nvme\d+(c\d+)?n\d+")


def nvme_of(path: str) -> Path | None:
    """The folder in sysfs of the whole NVMe namespace that this is, or that device-mapper maps it onto: then commands
    reach it, too. `None`: neither."""
    folder = sysfs_of(path)
    for _ in range(8):
        if folder is None or _NVME.fullmatch(folder.name):
            return folder
        below = sorted((folder / "slaves").glob("*")) if folder.name.startswith("dm-") else []
        # Several are the paths of one namespace, where the kernel's own multipath is off.
        same = {_text(found / "wwid") for found in below} if len(below) > 1 else {"one"}
        folder = below[0].resolve() if below and len(same) == 1 and same != {""} else None
    return None


def keeps_reservations(path: str) -> bool:
    """Whether the kernel has reservations for devices of this kind at all: NVMe, SCSI, and what is mapped onto them."""
    folder = sysfs_of(path)
    return folder is not None and bool(re.fullmatch(r"nvme\d+(c\d+)?n\d+|sd[a-z]+|dm-\d+", folder.name))


def hostid_of(path: str) -> UUID | None:
    """The host identifier with which the kernel connected an NVMe namespace; `None` where there is none to be seen."""
    folder = nvme_of(path)
    if folder is None:
        return None
    for place in (folder / "device" / "hostid", *sorted((folder / "device").glob("nvme*/hostid"))):
        with suppress(ValueError):
            return UUID(_text(place))
    return None


def about(path: str) -> dict[str, Any]:
    """What is behind the device, for `describe`: its name, and for NVMe the subsystem and each path with its state and
    the resets and reconnects that the kernel counted (`None`: this kernel counts none)."""
    folder = sysfs_of(path)
    if folder is None:
        return {}
    said: dict[str, Any] = {"name": folder.name, "partition_of": partition_of(path)}
    nvme = nvme_of(path)
    if nvme is not None:
        device = nvme / "device"
        controllers = [device] if (device / "address").exists() else sorted(device.glob("nvme*/address"))
        said["subsysnqn"] = _text(device / "subsysnqn")
        said["paths"] = [
            {
                "transport": _text(controller / "transport"),
                "address": _text(controller / "address"),
                "state": _text(controller / "state"),
                "reconnects": _count(controller / "diag" / "reconnect_count"),
                "resets": _count(controller / "diag" / "reset_count"),
            }
            for controller in (found if found is device else found.parent for found in controllers)
        ]
    return said


def users_of(path: str) -> list[str]:
    """Who has the device, one of its partitions, or the disk that it is a partition of: words for a message."""
    folder = sysfs_of(path)
    if folder is None:
        return []
    related = [folder]
    if (folder / "partition").exists():
        related.append(folder.parent)
    else:
        related += [child for child in folder.iterdir() if (child / "partition").exists()]
    names = {_text(member / "dev"): member.name for member in related}
    found: list[str] = []
    for member in related:
        holders = member / "holders"
        above = sorted(holders.iterdir()) if holders.is_dir() else []
        found += [f"{member.name} is part of /dev/{holder.name}{_dm_name(holder)}" for holder in above]
    with suppress(OSError):
        for line in Path("/proc/self/mountinfo").read_text().splitlines():
            words = line.split()
            if len(words) > 4 and words[2] in names:
                found.append(f"{names[words[2]]} is mounted at {_unescape(words[4])}")
    with suppress(OSError):
        for line in Path("/proc/swaps").read_text().splitlines()[1:]:
            number = device_number(_unescape(line.split()[0]))
            if number and (key := f"{number[0]}:{number[1]}") in names:
                found.append(f"{names[key]} is swap")
    return list(dict.fromkeys(found))


def _dm_name(folder: Path) -> str:
    name = _text(folder / "dm" / "name")
    return f" ({name})" if name else ""


def _text(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def _count(path: Path) -> int | None:
    text = _text(path)
    return int(text) if text.isdigit() else None


def _unescape(text: str) -> str:
    """Spaces and others as procfs writes them: `\\040`."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
