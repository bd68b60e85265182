"""On which file system a folder lies, from `/proc/self/mountinfo`."""

from __future__ import annotations

import os
import re
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

#: Whose memory lies behind a file system, by its kind.
REMOTE = {
    "nfs": "the NFS server", "nfs4": "the NFS server", "cifs": "the SMB server", "smb3": "the SMB server",
    "lustre": "the Lustre servers", "ceph": "the Ceph cluster", "beegfs": "the BeeGFS servers", "wekafs": "WEKA",
    "gpfs": "the servers of Storage Scale", "glusterfs": "the Gluster servers", "9p": "the hypervisor",
    "virtiofs": "the hypervisor", "orangefs": "the OrangeFS servers", "afs": "the AFS server",
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Mount:
    kind: str
    source: str
    point: str
    options: str

    @property
    def remote(self) -> str:
        """Whose memory lies behind it; "": the drive's alone."""
        if self.kind.startswith("fuse."):
            return f"what stands behind {self.kind}"
        return REMOTE.get(self.kind, "")

    @property
    def waits(self) -> bool:
        """Who touches it may wait for somebody else, for ever."""
        return bool(self.remote) or self.kind in ("autofs", "fuse", "fuseblk")


#: As the kernel has it (path_resolution(7)).
_MOST_LINKS = 40

UNKNOWN = Mount(kind="unknown", source="unknown", point="", options="")


def mount_of(path: str) -> Mount:
    """`UNKNOWN` where the kernel does not tell."""
    return mount_at(os.path.realpath(path))


def mount_at(real: str, mounts: Sequence[Mount] | None = None) -> Mount:
    """Of a path without links, which is not touched."""
    best = UNKNOWN
    for mount in _mounts() if mounts is None else mounts:
        # The last one at a place is what is seen there.
        if _inside(real, mount.point) and len(mount.point) >= len(best.point):
            best = mount
    return best


def away(path: str) -> Mount | None:
    """On the way to a path, or below it: a file system whose server may be away, where whoever touches it waits for as
    long. None: there is none. No place on one is touched to find out."""
    mounts = _mounts()
    whole = path if path.startswith("/") else f"{Path.cwd()}/{path}"
    here, left, links = "/", [each for each in whole.split("/")[::-1] if each != "."], 0
    while True:
        mount = mount_at(here, mounts)
        if mount.waits:
            return mount
        if not left:
            break
        name = left.pop()
        if name in ("", ".."):
            here = str(Path(here).parent) if name else here
            continue
        place = f"{here.rstrip('/')}/{name}"
        link = ""
        if not mount_at(place, mounts).waits and links < _MOST_LINKS:
            with suppress(OSError, ValueError):
                link = str(Path(place).readlink())
        if not link:
            here = place
            continue
        links += 1
        here = "/" if link.startswith("/") else here
        left += [each for each in link.split("/")[::-1] if each != "."]
    return next((each for each in mounts if each.waits and _inside(each.point, here)), None)


def _inside(real: str, point: str) -> bool:
    return real == point or real.startswith(point.rstrip("/") + "/")


def _mounts() -> list[Mount]:
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return []
    found = []
    for line in text.splitlines():
        head, _, tail = line.partition(" - ")
        before, after = head.split(" "), tail.split(" ")
        if len(before) < 6 or len(after) < 3:
            continue
        found.append(
            Mount(
                kind=after[0], source=_unescape(after[1]), point=_unescape(before[4]), options=f"{before[5]},{after[2]}"
            )
        )
    return found


def _unescape(text: str) -> str:
    """Spaces and others as procfs writes them; nothing in it steers a terminal."""
    plain = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
    return "".join(one if one.isprintable() else "�" for one in plain)
