"""What is there, asked so that a mount whose server is away is told of, and not waited for."""

from __future__ import annotations

from typing import Any

from headrace.accidents.apart import ask_apart
from headrace.bench.look import look
from headrace.bench.places.mounts import away
from headrace.errors import DeviceError, DeviceTimeout

#: A file system that answers nothing for so long hangs; a Python starts in that time, too.
SILENT_S = 20.0


def asked(kind: str, path: str, name: str) -> dict[str, Any]:
    """`headrace.bench.look.look`, in a process of its own where a server may be away. `DeviceTimeout` after `SILENT_S`
    without a sign of life; `name`: as the user named it."""
    mount = away(path)
    if mount is None:
        return look(kind, path)
    outcome, said, why = ask_apart("headrace.bench.look", kind, path, timeout_s=SILENT_S)
    if said is not None:
        return said
    where = f"{mount.source} ({mount.kind}), mounted at {mount.point}"
    if outcome == "silent":
        raise DeviceTimeout(
            f"the file system gives nothing: {where}", where=name,
            found=f"{SILENT_S:.0f} s without an answer" + (f", looking through {why}" if why else ""),
            next_step="see whether its server can be reached; `headrace doctor` touches mounts, and waits for none",
        )  # fmt: skip
    raise DeviceError(f"what is there could not be asked: {where}", where=name, found=why)
