"""How the paths of headrace's devices were since they were looked at before: which one was slow, to which target."""

from __future__ import annotations

import contextlib
import math
from collections.abc import Iterable
from typing import Any

from headrace.device import BlockDevice, PathInfo, paths_of
from headrace.errors import HeadraceError

#: Paths that are told of a window: the slowest.
MOST = 4


class PathWindows:
    def __init__(self) -> None:
        #: By address of the device and portal.
        self._last: dict[tuple[str, str], PathInfo] = {}

    def since(self, devices: Iterable[BlockDevice]) -> list[dict[str, Any]]:
        """Of each path that answered, or should have, since the last call: the slowest ones first."""
        found = []
        for device in devices:
            with contextlib.suppress(HeadraceError):
                for path in paths_of(device):
                    key = (device.uri, path.portal)
                    found.append(_between(device.uri, self._last.get(key), path))
                    self._last[key] = path
        told = [each for each in found if each is not None]
        return sorted(told, key=lambda each: (each["usable"], -each["p99_s"]))[:MOST]


def _between(device: str, last: PathInfo | None, now: PathInfo) -> dict[str, Any] | None:
    before = dict(last.latency.buckets) if last is not None else {}
    counts = {top: count - before.get(top, 0) for top, count in now.latency.buckets}
    counts = {top: count for top, count in sorted(counts.items()) if count > 0}
    total = sum(counts.values())
    quiet = not total and now.usable and not now.under_way
    if last is None or quiet:
        # What was before the first look is not of this window.
        return None
    wanted, seen, p99 = math.ceil(0.99 * total), 0, 0.0
    for top, count in counts.items():
        seen, p99 = seen + count, top * 1e-9
        if seen >= wanted:
            break
    return {
        "device": device,
        "path": now.portal,
        "p99_s": p99,
        "commands": total,
        "read_bytes": now.read_bytes - last.read_bytes,
        "written_bytes": now.written_bytes - last.written_bytes,
        "errors": now.errors - last.errors,
        "losses": now.losses - last.losses,
        "under_way": now.under_way,
        "usable": now.usable,
        "slow": now.slow,
    }
