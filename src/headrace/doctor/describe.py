"""Facts and measurements in words, for the text and the page alike."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from headrace.doctor.checks.gpu import direct_state
from headrace.doctor.examine import Examination
from headrace.doctor.facts.nvme import Controller
from headrace.doctor.storage import Storage, interface_of
from headrace.units import format_bytes, format_seconds

UNKNOWN = "unknown"
_IO_URING: dict[int | None, str] = {0: "not switched off", 1: "its group only", 2: "off"}


@dataclass(frozen=True, kw_only=True)
class Section:
    """A table more, of whoever puts the doctor's figures beside others."""

    heading: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def storage_rows(found: Examination) -> list[list[str]]:
    """name, verdict, size, where, why."""
    return [
        [
            one.name,
            one.verdict.word,
            format_bytes(one.size_bytes) if one.size_bytes is not None else "",
            ", ".join(one.mounted[:4]) if one.kind == "disk" else "",
            one.verdict.why
            + (" (gone when the instance stops)" if one.verdict.ephemeral and one.kind != "memory" else ""),
        ]
        for one in found.storage
    ]


def controllers_of(found: Examination) -> list[Controller]:
    """Those of a fabric that belong to what was asked for."""
    parts = {part for one in found.storage for part in one.parts}
    return [one for one in found.facts.nvme.controllers if one.fabrics and (one.name in parts or one.discovery)]


CONTROLLER_COLUMNS = (
    "controller", "transport", "address", "state", "queues", "keep alive", "loss", "I/O fails", "interface", "secured",
)  # fmt: skip


def controller_rows(found: Examination) -> list[list[str]]:
    rows = []
    for one in controllers_of(found):
        secured = [word for word, on in (("TLS", one.encrypted), ("DH-HMAC-CHAP", one.authenticates)) if on]
        port = one.part("trsvcid")
        rows.append(
            [
                one.name,
                one.transport or UNKNOWN,
                f"{one.part('traddr') or UNKNOWN}" + (f":{port}" if port else ""),
                one.state or UNKNOWN,
                f"{one.queues - 1} x {one.queue_size or '?'}" if one.queues else UNKNOWN,
                _seconds(one.keep_alive_s, "off"),
                _seconds(one.ctrl_loss_s, "never removed"),
                _seconds(one.fast_io_fail_s, "never"),
                interface_of(found.facts, one.name) or UNKNOWN,
                ", ".join(secured) or ("no" if one.authenticates is False else UNKNOWN),
            ]
        )
    return rows


def path_rows(found: Examination) -> list[list[str]]:
    """disk, path, ANA state."""
    parts = {part for one in found.storage for part in one.parts}
    return [
        [space.name, path.controller, path.ana or UNKNOWN]
        for space in found.facts.nvme.namespaces
        if space.name in parts and any(one.fabrics for one in found.facts.nvme.controllers_of(space))
        for path in space.paths
    ]


TARGET_COLUMNS = (
    "target", "model", "fence", "now", "session", "read p50", "p99", "round trip", "packet", "sent again",
)  # fmt: skip


def target_rows(found: Examination) -> list[list[str]]:
    rows = []
    for one in found.targets:
        if one.error is not None:
            rows.append([one.uri, one.error, *[""] * (len(TARGET_COLUMNS) - 2)])
            continue
        trips = [state.min_rtt_s for state in one.connections if state.min_rtt_s]
        trips = trips or [portal.connect_s for portal in one.portals if portal.connect_s]
        sent = sum(state.bytes_sent or 0 for state in one.connections)
        again = sum(state.bytes_retrans or 0 for state in one.connections)
        sizes = {portal.mtu.mtu for portal in one.portals if portal.mtu is not None and portal.mtu.full}
        rows.append(
            [
                one.uri,
                one.model or UNKNOWN,
                one.fence or UNKNOWN,
                one.fence_now or UNKNOWN,
                {True: "accepted", False: "refused", None: UNKNOWN}[one.session_accepted],
                format_seconds(one.latency.p50_s) if one.latency else UNKNOWN,
                format_seconds(one.latency.p99_s) if one.latency else UNKNOWN,
                format_seconds(min(trips)) if trips else UNKNOWN,
                f"{min(sizes)} arrives" if sizes else UNKNOWN,
                f"{again / sent:.2%}" if sent else UNKNOWN,
            ]
        )
    return rows


def touch_rows(found: Examination) -> list[list[str]]:
    """path, outcome, latency or time, engine, fence, free."""
    rows = []
    for one in found.touches:
        took = ""
        if one.latency is not None:
            took = f"{format_seconds(one.latency.p50_s)}, p99 {format_seconds(one.latency.p99_s)}"
        elif one.asked_s is not None:
            took = f"statvfs {format_seconds(one.asked_s)}"
        free = format_bytes(one.free_bytes) if one.free_bytes is not None else ""
        rows.append([one.path, one.outcome, took, one.engine or "", one.fence or "", free])
    return rows


def interface_rows(found: Examination) -> list[list[str]]:
    """name, state, MTU, speed, driver, queues, NUMA node, RDMA."""
    facts = found.facts
    rows = []
    for one in facts.network.interfaces:
        if not one.driver and not one.members and one.name not in _carrying(found.storage):
            continue
        rdma = facts.rdma.device_of(one.name)
        rows.append(
            [
                one.name,
                one.state or UNKNOWN,
                str(one.mtu or UNKNOWN),
                f"{one.speed_mbps / 1000:g} Gb/s" if one.speed_mbps else UNKNOWN,
                one.driver or UNKNOWN,
                str(one.queues or UNKNOWN),
                UNKNOWN if one.numa_node is None else str(one.numa_node),
                f"{rdma.name} ({rdma.driver or UNKNOWN})" if rdma else "",
            ]
        )
    return rows


def machine_facts(found: Examination) -> dict[str, str]:
    host, limits, gpus = found.facts.host, found.facts.limits, found.facts.gpus
    virtual = {True: "yes", False: "no", None: UNKNOWN}[host.virtual]
    vendor = " ".join(filter(None, (host.vendor, (host.product or "").removeprefix(f"{host.vendor} "))))
    facts = {
        "kernel": host.kernel or UNKNOWN,
        "machine": vendor or UNKNOWN,
        "hypervisor": virtual + (f", {host.provider}" if host.provider else ""),
        "container": host.container or "none to be seen",
        "processors": f"{host.cpus or UNKNOWN}, NUMA nodes: {host.numa_nodes or UNKNOWN}",
        "memory": (format_bytes(host.memory_bytes) if host.memory_bytes else UNKNOWN)
        + (f", cgroup allows {format_bytes(limits.memory_max_bytes)}" if limits.memory_max_bytes else ""),
        "host's name": host.identity.hostnqn or "none in /etc/nvme",
        "host's identifier": host.identity.hostid or "none in /etc/nvme",
        "open files": str(limits.files or "unlimited or unknown"),
        "locked memory": format_bytes(limits.memlock_bytes)
        if limits.memlock_bytes is not None
        else "unlimited or unknown",
        "io_uring": limits.io_uring or _IO_URING.get(limits.io_uring_disabled, UNKNOWN),
        "GPUs": str(len(gpus.gpus) or "none") + (f", driver {gpus.driver}" if gpus.driver else ""),
        "GPUDirect Storage": direct_state(gpus.direct),
    }
    if found.facts.nvme.native_multipath is not None:
        facts["kernel's multipath"] = "on" if found.facts.nvme.native_multipath else "off"
    return facts


def _carrying(storage: tuple[Storage, ...]) -> set[str]:
    return {part for one in storage for part in one.parts}


def _seconds(value: int | None, never: str) -> str:
    if value is None:
        return UNKNOWN
    return never if value == -1 or (value == 0 and never == "off") else f"{value} s"
