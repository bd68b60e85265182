"""On which file system a folder lies, from `/proc/self/mountinfo`."""

from __future__ import annotations

import os
import re
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


UNKNOWN = Mount(kind="unknown", source="unknown", point="", options="")


def mount_of(path: str) -> Mount:
    """`UNKNOWN` where the kernel does not tell."""
    try:
        text = Path("/proc/self/mountinfo").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return UNKNOWN
    real = os.path.realpath(path)
    best = UNKNOWN
    for line in text.splitlines():
        head, _, tail = line.partition(" - ")
        before, after = head.split(" "), tail.split(" ")
        if len(before) < 6 or len(after) < 3:
            continue
        point = _unescape(before[4])
        inside = real == point or real.startswith(point.rstrip("/") + "/")
        # The last one at a place is what is seen there.
        if inside and len(point) >= len(best.point):
            best = Mount(kind=after[0], source=_unescape(after[1]), point=point, options=f"{before[5]},{after[2]}")
    return best


def _unescape(text: str) -> str:
    """Spaces and others as procfs writes them; nothing in it steers a terminal."""
    plain = re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)
    return "".join(one if one.isprintable() else "�" for one in plain)
