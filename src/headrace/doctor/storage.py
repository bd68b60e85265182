"""Which storage there is, which of it was asked for, and what it hangs from."""

from __future__ import annotations

import os
import re
import stat
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path, PurePosixPath

from headrace.device import BlockAddress, FileAddress, MemoryAddress, NvmeTcpAddress, parse_address
from headrace.doctor.facts import Facts
from headrace.doctor.facts.block import Disk
from headrace.doctor.facts.mounts import MEMORY, Mount, mount_of, read_mounts
from headrace.doctor.machine import Machine
from headrace.doctor.verdict import FABRIC, LOCAL, NETWORK_FS, UNKNOWN, Verdict, verdict_of_disk, verdict_of_mount
from headrace.errors import UsageError

_PARTS_MAX = 40


@dataclass(frozen=True, kw_only=True)
class Storage:
    """One thing that holds data."""

    #: `/dev/nvme0n1`, `/mnt/data`, `nvme+tcp://...`.
    name: str
    #: "disk", "mount", "target", "memory".
    kind: str
    verdict: Verdict
    #: Where it is mounted.
    mounted: tuple[str, ...] = ()
    size_bytes: int | None = None
    #: Names of everything that it hangs from, itself included: disks, controllers, interfaces, RDMA devices, mounts.
    parts: frozenset[str] = frozenset()
    #: Only of targets.
    address: NvmeTcpAddress | None = None
    #: Disks that it is made of: of a RAID or a logical volume those below it.
    devices: int = 1
    #: Where on it somebody pointed: files below are those that are meant.
    path: str | None = None

    @property
    def meant(self) -> str:
        """The verdict's word; of an address, also of one where nobody was seen, what would be there."""
        return self.verdict.word if self.address is None else FABRIC


def all_storage(facts: Facts) -> list[Storage]:
    """Every disk that is no part of another one, and every network file system."""
    parts = {name for disk in facts.disks for name in disk.below}
    found = [of_disk(facts, disk) for disk in facts.disks if disk.name not in parts]
    return found + [of_mount(facts, mount) for mount in seen(facts.mounts) if mount.network]


def seen(mounts: Sequence[Mount]) -> list[Mount]:
    """Without those that a later one at the same place hides."""
    return list({mount.point: mount for mount in mounts}.values())


def named_storage(machine: Machine, facts: Facts, names: Sequence[str]) -> list[Storage]:
    """What was asked for: paths, disks, addresses. UsageError where there is no such thing."""
    found: dict[str, Storage] = {}
    for name in names:
        one = _named(machine, facts, name)
        found.setdefault(one.name, one)
    return list(found.values())


def of_disk(facts: Facts, disk: Disk) -> Storage:
    numbers = {disk.number, *(number for _, number in disk.partitions)}
    # What lies on top of it is where it is mounted, too.
    above = [other for other in facts.disks if disk.name in _below(facts, other)]
    numbers |= {number for other in above for number in (other.number, *(one for _, one in other.partitions))}
    mounted = [mount for mount in seen(facts.mounts) if mount.number in numbers]
    points = tuple(dict.fromkeys(mount.point for mount in mounted))
    return Storage(
        name=f"/dev/{disk.name}",
        kind="disk",
        verdict=verdict_of_disk(facts, disk),
        mounted=points,
        size_bytes=disk.size_bytes,
        parts=frozenset({disk.name, *points, *_below(facts, disk), *_controllers(facts, disk)}),
        devices=_devices(facts, disk),
    )


def of_mount(facts: Facts, mount: Mount) -> Storage:
    disk = facts.disk_of_number(mount.number)
    parts = {mount.point}
    if mount.network:
        way = facts.network.way_to(mount.options.get("addr"), mount.options.get("clientaddr"))
        parts |= _around(facts, way)
    elif disk is not None:
        parts |= {disk.name, *_below(facts, disk), *_controllers(facts, disk)}
    return Storage(
        name=mount.point, kind="mount", verdict=verdict_of_mount(facts, mount), mounted=(mount.point,),
        parts=frozenset(parts), size_bytes=disk.size_bytes if disk is not None and not mount.network else None,
        devices=_devices(facts, disk) if disk is not None and not mount.network else 1,
    )  # fmt: skip


def of_target(facts: Facts, address: NvmeTcpAddress) -> Storage:
    parts = {address.uri}
    for portal in address.portals:
        parts |= _around(facts, facts.network.way_to(portal.host, address.options.host_traddr))
    return Storage(
        name=address.uri, kind="target", address=address, parts=frozenset(parts),
        verdict=Verdict(word=UNKNOWN, why="an address of NVMe/TCP; nobody connected to it"),
    )  # fmt: skip


def _named(machine: Machine, facts: Facts, name: str) -> Storage:
    if not name or "\0" in name:
        raise UsageError("not a name", expected="a path, a device or an address", found=repr(name))
    if re.match(r"[a-z+]+:", name):
        address = parse_address(name)
        if isinstance(address, NvmeTcpAddress):
            return of_target(facts, address)
        if isinstance(address, MemoryAddress):
            verdict = Verdict(word=LOCAL, why="memory of a process", ephemeral=True)
            return Storage(name=address.uri, kind="memory", verdict=verdict, parts=frozenset({address.uri}))
        assert isinstance(address, BlockAddress | FileAddress)
        name = address.path
    path = name if name.startswith("/") else f"/dev/{name}" if facts.disk(name) else os.path.abspath(name)  # noqa: PTH100
    path = _resolve(machine, facts, path)
    disk = _disk(machine, facts, path)
    if disk is not None:
        return of_disk(facts, disk)
    # Also of an image, or of the kernel's own: a path in there is not on what lies below.
    mount = mount_of(path, read_mounts(machine, everything=True))
    if path.startswith("/dev/") and (mount is None or mount.kind not in MEMORY):
        raise UsageError(
            "no such disk", where=name, expected="a block device, a path, or an address as nvme+tcp://HOST:PORT/NQN",
            next_step="`headrace doctor` without names lists what there is",
        )  # fmt: skip
    if mount is None:
        raise UsageError("on no file system that is mounted here", where=name)
    return replace(of_mount(facts, mount), path=path)


def _resolve(machine: Machine, facts: Facts, path: str) -> str:
    """Links followed, as far as no network file system has to be asked for them. UsageError: it is not there."""
    if not machine.live:
        return path
    todo = list(reversed(PurePosixPath(path).parts[1:]))
    done, links = "/", 0
    while todo:
        part = todo.pop()
        if part == "..":
            done = str(PurePosixPath(done).parent)
            continue
        here = str(PurePosixPath(done) / part)
        mount = mount_of(here, facts.mounts)
        if mount is not None and mount.network:
            done = here
            continue
        try:
            status = os.lstat(here)
            target = str(Path(here).readlink()) if stat.S_ISLNK(status.st_mode) else None
        except (OSError, ValueError) as error:
            raise UsageError(
                "cannot look there", where=path, found=getattr(error, "strerror", None) or str(error)
            ) from None
        if target is None:
            done = here
            continue
        links += 1
        if links > _PARTS_MAX:
            raise UsageError("too many links", where=path)
        if target.startswith("/"):
            done = "/"
        todo += reversed(PurePosixPath(target).parts[1:] if target.startswith("/") else PurePosixPath(target).parts)
    return done


def _disk(machine: Machine, facts: Facts, path: str) -> Disk | None:
    if not path.startswith("/dev/"):
        return None
    name = path.removeprefix("/dev/")
    for disk in facts.disks:
        if name == disk.name or (disk.mapped and name == f"mapper/{disk.mapped}"):
            return disk
        if any(name == part for part, _ in disk.partitions):
            return disk
    if machine.live:
        try:
            found = Path(path).stat()
        except OSError:
            return None
        if stat.S_ISBLK(found.st_mode):
            return facts.disk_of_number(f"{os.major(found.st_rdev)}:{os.minor(found.st_rdev)}")
    return None


def _below(facts: Facts, disk: Disk, depth: int = 0) -> set[str]:
    found: set[str] = set()
    for name in disk.below if depth < 8 else ():
        whole = facts.disk(name) or next(
            (one for one in facts.disks if any(name == part for part, _ in one.partitions)), None
        )
        found.add(whole.name if whole else name)
        if whole is not None:
            found |= _below(facts, whole, depth + 1)
    return found


def _devices(facts: Facts, disk: Disk) -> int:
    """At the bottom of what a disk is made of."""
    whole = [facts.disk(name) for name in _below(facts, disk)]
    return max(1, sum(one is not None and not one.below for one in whole))


def _controllers(facts: Facts, disk: Disk) -> set[str]:
    names = {disk.name, *_below(facts, disk)}
    found: set[str] = set()
    for namespace in facts.nvme.namespaces:
        if namespace.name not in names:
            continue
        for controller in facts.nvme.controllers_of(namespace):
            found.add(controller.name)
            if controller.fabrics:
                found |= _around(facts, interface_of(facts, controller.name))
    return found


def interface_of(facts: Facts, name: str) -> str | None:
    """The network interface by which a controller of a fabric is reached."""
    controller = next((one for one in facts.nvme.controllers if one.name == name), None)
    if controller is None or controller.transport not in ("tcp", "rdma"):
        return None
    source = controller.part("host_traddr") or controller.part("src_addr")
    return controller.part("host_iface") or facts.network.way_to(controller.part("traddr"), source)


def link_of(facts: Facts, storage: Storage) -> tuple[float | None, str]:
    """B/s of the interfaces by which it is reached, together, and their names; `None` where one does not say it, or it
    is reached by none."""
    if storage.verdict.word not in (FABRIC, NETWORK_FS):
        return None, ""
    used = [one for one in facts.network.interfaces if one.name in storage.parts and one.name != "lo"]
    below = {name for one in used for name in one.members}
    speeds = {one.name: one.speed_mbps for one in used if one.name not in below}
    known = [speed for speed in speeds.values() if speed]
    if not known or len(known) < len(speeds):
        return None, ""
    return sum(known) * 1e6 / 8, ", ".join(speeds)


def _around(facts: Facts, interface: str | None) -> set[str]:
    """An interface, what it is made of (bonds), and the RDMA devices on it."""
    if interface is None:
        return set()
    found = facts.network.interface(interface)
    names = {interface, *(found.members if found else ())}
    return names | {device.name for name in names if (device := facts.rdma.device_of(name)) is not None}
