"""Touches one disk or one file system, in a process of its own, since the kernel may keep who touches it for ever.

    python -m headrace.doctor.touch disk /dev/nvme0n1
    python -m headrace.doctor.touch mount /mnt/data

prints one line of JSON. `touch` runs that, and goes on without it when its time is up.
"""

from __future__ import annotations

import json
import os
import struct
import sys
import time
from dataclasses import asdict, dataclass

from headrace.accidents.apart import ask_apart
from headrace.doctor.latency import Latency

#: What the slowest storage that is of any use takes, and a Python that starts.
TIMEOUT_S = 20.0
#: <linux/lustre/lustre_user.h>, LOV_USER_MAGIC_V1 and _V3: magic, pattern, object (16), stripe size, count, offset.
_LOV_MAGIC, _LOV_BYTES = (0x0BD10BD0, 0x0BD30BD0), 32


@dataclass(frozen=True, kw_only=True)
class Touch:
    """What came of it."""

    kind: str
    path: str
    #: "answered", "denied" (a right is missing), "failed", "silent" (nothing came within `TIMEOUT_S`), "left out"
    #: (there were too many), "not asked" (the process that was to ask came to nothing, or could not name it).
    outcome: str
    error: str | None = None
    #: Of a disk.
    engine: str | None = None
    fence: str | None = None
    latency: Latency | None = None
    #: Of a file system: what asking for its size took, its size, and what is free for this user.
    asked_s: float | None = None
    size_bytes: int | None = None
    free_bytes: int | None = None
    #: Of Lustre: over how many targets a new file there is laid out, -1: all; 0: as the file system has it.
    stripes: int | None = None


def touch(kind: str, path: str, *, timeout_s: float = TIMEOUT_S) -> Touch:
    """`kind`: "disk" or "mount"."""
    outcome, said, error = ask_apart("headrace.doctor.touch", kind, path, timeout_s=timeout_s)
    if said is None:
        return Touch(kind=kind, path=path, outcome=outcome, error=error)
    try:
        if said.get("latency") is not None:
            said["latency"] = Latency(**said["latency"])
        return Touch(**said)
    except TypeError:
        # That says nothing of the storage.
        return Touch(kind=kind, path=path, outcome="not asked", error="it said something else")


def touch_disk(path: str) -> Touch:
    """In this process, which waits for as long as the kernel does."""
    from headrace.device import BlockAddress, NativeDevice, open_device
    from headrace.doctor.probe import measure_latency
    from headrace.errors import HeadraceError
    from headrace.volume.writing.fence import kind_of

    try:
        os.close(os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC))
    except PermissionError:
        return Touch(kind="disk", path=path, outcome="denied", error="no right to read it")
    except OSError as error:
        return Touch(kind="disk", path=path, outcome="failed", error=error.strerror)
    try:
        device = open_device(BlockAddress(path=path).uri, read_only=True)
    except HeadraceError as error:
        return Touch(kind="disk", path=path, outcome="failed", error=str(error))
    assert isinstance(device, NativeDevice)
    try:
        latency, failure = measure_latency(device)
        return Touch(
            kind="disk", path=path, outcome="failed" if failure else "answered", error=failure, latency=latency,
            engine=str(device.describe().get("engine")), fence=kind_of(device), size_bytes=device.size_bytes,
        )  # fmt: skip
    except HeadraceError as error:
        return Touch(kind="disk", path=path, outcome="failed", error=str(error))
    finally:
        device.close()


def touch_mount(path: str) -> Touch:
    """In this process, which waits for as long as the kernel does."""
    begun = time.perf_counter()
    try:
        found = os.statvfs(path)
    except PermissionError as error:
        return Touch(kind="mount", path=path, outcome="denied", error=error.strerror)
    except FileNotFoundError:
        # A mount that is there has a place: this is one that another hides, or whose name is no UTF-8.
        return Touch(kind="mount", path=path, outcome="not asked", error="by its name it cannot be reached")
    except OSError as error:
        return Touch(kind="mount", path=path, outcome="failed", error=error.strerror)
    return Touch(
        kind="mount", path=path, outcome="answered", asked_s=time.perf_counter() - begun,
        size_bytes=found.f_blocks * found.f_frsize,
        # Of one that is read only, none is wanted: images are full.
        free_bytes=None if found.f_flag & os.ST_RDONLY else found.f_bavail * found.f_frsize,
        stripes=_stripes(path),
    )  # fmt: skip


def _stripes(path: str) -> int | None:
    """Of Lustre's `struct lov_user_md`, which no other file system has. A layout in parts (PFL) is as many."""
    try:
        raw = os.getxattr(path, "lustre.lov")
    except OSError:
        return None
    if len(raw) < _LOV_BYTES:
        return None
    magic, count = struct.unpack_from("<I", raw)[0], struct.unpack_from("<h", raw, 28)[0]
    return int(count) if magic in _LOV_MAGIC else None


if __name__ == "__main__":
    print(json.dumps(asdict({"disk": touch_disk, "mount": touch_mount}[sys.argv[1]](sys.argv[2]))))
