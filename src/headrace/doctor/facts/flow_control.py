"""What keeps RoCE from losing packets: pauses by priority (PFC), global pauses, and marks of congestion (ECN)."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.doctor.machine import Machine

_COUNTERS_MAX = 64


@dataclass(frozen=True, kw_only=True)
class FlowControl:
    """Of one network interface. `None`: nothing here says it."""

    #: Priorities with PFC on (`dcb pfc show`).
    pfc: tuple[int, ...] | None
    #: Global pauses are received and sent (`ethtool -a`).
    pause: bool | None
    #: Priorities that answer marks (mlx5's own files).
    ecn: tuple[int, ...] | None
    #: Of `ethtool -S`: pauses that moved, by name.
    pauses: Mapping[str, int]


def read_flow_control(machine: Machine, interface: str) -> FlowControl:
    shown = machine.command(f"dcb-pfc-{interface}", "dcb", "pfc", "show", "dev", interface) or ""
    line = re.search(r"prio-pfc((?:\s+\d:(?:on|off)){1,8})", shown)
    pfc = None if line is None else tuple(int(one) for one in re.findall(r"(\d):on", line[1]))
    said = machine.command(f"ethtool-a-{interface}", "ethtool", "-a", interface) or ""
    pauses = re.findall(r"^(?:RX|TX):\s+(on|off)\b", said, re.M)
    counted = machine.command(f"ethtool-S-{interface}", "ethtool", "-S", interface) or ""
    moved = re.findall(r"^\s*([rt]x_\w{0,40}pause\w{0,40}):\s*(\d{1,19})\s*$", counted, re.M)
    return FlowControl(
        pfc=pfc,
        pause=None if len(pauses) < 2 else "on" in pauses,
        ecn=_ecn(machine, f"/sys/class/net/{interface}/ecn"),
        pauses={name: int(value) for name, value in moved[:_COUNTERS_MAX] if int(value)},
    )


def _ecn(machine: Machine, base: str) -> tuple[int, ...] | None:
    """That both the one who is told (`roce_np`) and the one who slows down (`roce_rp`) do."""
    sides = []
    for side in ("roce_np", "roce_rp"):
        names = [one for one in machine.names(f"{base}/{side}/enable") if re.fullmatch(r"[0-7]", one)]
        if not names:
            return None
        sides.append({int(one) for one in names if machine.number(f"{base}/{side}/enable/{one}") == 1})
    return tuple(sorted(sides[0] & sides[1]))
