"""What is mounted where, from `/proc/self/mountinfo`: of network file systems nothing is touched."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.doctor.machine import Machine

#: File systems whose bytes come over a network, and what people call them.
NETWORK = {
    "nfs": "NFS", "nfs4": "NFS", "cifs": "SMB", "smb3": "SMB", "lustre": "Lustre", "ceph": "CephFS",
    "glusterfs": "GlusterFS", "fuse.glusterfs": "GlusterFS", "beegfs": "BeeGFS", "gpfs": "Storage Scale (GPFS)",
    "wekafs": "WEKA", "fuse.mfs": "MooseFS", "fuse.moosefs": "MooseFS", "orangefs": "OrangeFS", "afs": "AFS",
    "fuse.s3fs": "object storage (s3fs)", "fuse.gcsfuse": "object storage (gcsfuse)", "fuse.goofys": "object storage",
    "fuse.rclone": "object storage (rclone)", "fuse.mount-s3": "object storage (mountpoint-s3)",
    "fuse.blobfuse2": "object storage (blobfuse2)", "fuse.juicefs": "JuiceFS", "fuse.sshfs": "SSHFS", "vast": "VAST",
}  # fmt: skip
#: In memory, or no storage at all.
MEMORY = ("tmpfs", "ramfs", "hugetlbfs")
#: Shown by a hypervisor, from its own files.
SHARED = ("9p", "virtiofs", "vboxsf", "fuse.vmhgfs-fuse")
#: The kernel's own, which hold no data of anybody.
_PSEUDO = {
    "proc", "sysfs", "devtmpfs", "devpts", "cgroup", "cgroup2", "securityfs", "debugfs", "tracefs", "configfs", "bpf",
    "pstore", "mqueue", "autofs", "efivarfs", "fusectl", "binfmt_misc", "nsfs", "rpc_pipefs", "nfsd", "selinuxfs",
    "hugetlbfs", "fuse.lxcfs", "squashfs", "fuse.gvfsd-fuse", "fuse.portal",
}  # fmt: skip
_MOUNTS_MAX = 8192
_MOUNTINFO_MAX_BYTES = 16 << 20


@dataclass(frozen=True, kw_only=True)
class Mount:
    point: str
    #: Major and minor number of its device.
    number: str
    kind: str
    source: str
    #: Of the mount and of the file system together; an option without a value is "".
    options: Mapping[str, str]

    @property
    def network(self) -> bool:
        return self.kind in NETWORK

    def number_option(self, name: str) -> int | None:
        text = self.options.get(name, "")
        return int(text) if re.fullmatch(r"[0-9]{1,12}", text) else None


def read_mounts(machine: Machine, *, everything: bool = False) -> tuple[Mount, ...]:
    """Those that hold data, in the order in which they were made: the last one at a place is what is seen there.
    `everything`: also the kernel's own, and images."""
    found: list[Mount] = []
    for line in map(_printable, mountinfo(machine).splitlines()[:_MOUNTS_MAX]):
        head, _, tail = line.partition(" - ")
        before, after = head.split(" "), tail.split(" ")
        if len(before) < 6 or len(after) < 3 or not re.fullmatch(r"\d+:\d+", before[2]):
            continue
        if after[0] in _PSEUDO and not everything:
            continue
        options = dict(pair(text) for text in (*before[5].split(","), *after[2].split(",")))
        found.append(
            Mount(
                point=unescape(before[4]), number=before[2], kind=after[0], source=unescape(after[1]), options=options
            )
        )
    return tuple(found)


def mountinfo(machine: Machine) -> str:
    """A node of many containers has a page of it for each; names in it need not be UTF-8."""
    return machine.text("/proc/self/mountinfo", most=_MOUNTINFO_MAX_BYTES, errors="replace") or ""


def pair(text: str) -> tuple[str, str]:
    name, _, value = text.partition("=")
    return name, value


def unescape(text: str) -> str:
    """Spaces and others as procfs writes them: `\\040`."""
    return _printable(re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text))


def _printable(text: str) -> str:
    """Names go to a terminal: what would steer it is shown as not readable."""
    return "".join(one if one.isprintable() else "\ufffd" for one in text)


def mount_of(path: str, mounts: tuple[Mount, ...]) -> Mount | None:
    """On which an absolute path lies, by its words alone."""
    best: Mount | None = None
    for mount in mounts:
        inside = path == mount.point or path.startswith(mount.point.rstrip("/") + "/")
        if inside and (best is None or len(mount.point) >= len(best.point)):
            best = mount
    return best
