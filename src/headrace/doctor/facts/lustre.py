"""What the client of Lustre is told to have under way, as its own files show it: nothing of the servers is asked."""

from __future__ import annotations

import re
from dataclasses import dataclass

from headrace.doctor.machine import Machine

#: Where releases have had it.
_BASES = ("/sys/fs/lustre", "/proc/fs/lustre")
_TARGETS_MAX = 4096


@dataclass(frozen=True, kw_only=True)
class LustreClient:
    """Of one file system. `None`: this release does not say."""

    name: str
    #: Object storage targets.
    targets: int
    #: The least of all of them.
    rpcs_in_flight: int | None
    pages_per_rpc: int | None
    #: MiB.
    read_ahead: int | None
    read_ahead_file: int | None
    #: Where the least was read.
    place: str


def read_lustre(machine: Machine) -> tuple[LustreClient, ...]:
    for base in _BASES:
        targets: dict[str, list[str]] = {}
        for one in machine.names(f"{base}/osc")[:_TARGETS_MAX]:
            match = re.match(r"(.{1,64}?)-OST[0-9a-f]{4}-osc", one)
            if match:
                targets.setdefault(match[1], []).append(f"{base}/osc/{one}")
        if targets:
            return tuple(_client(machine, base, name, folders) for name, folders in targets.items())
    return ()


def _client(machine: Machine, base: str, name: str, folders: list[str]) -> LustreClient:
    def least(what: str) -> int | None:
        values = [machine.number(f"{folder}/{what}") for folder in folders]
        return min((value for value in values if value is not None and value > 0), default=None)

    above = next((one for one in machine.names(f"{base}/llite") if one.startswith(f"{name}-")), None)
    ahead = [
        machine.number(f"{base}/llite/{above}/{what}") if above else None
        for what in ("max_read_ahead_mb", "max_read_ahead_per_file_mb")
    ]
    return LustreClient(
        name=name, targets=len(folders), rpcs_in_flight=least("max_rpcs_in_flight"),
        pages_per_rpc=least("max_pages_per_rpc"), read_ahead=ahead[0], read_ahead_file=ahead[1], place=f"{base}/osc",
    )  # fmt: skip
