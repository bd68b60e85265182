"""RDMA devices: their ports, and what they count."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from headrace.doctor.machine import Machine

_DEVICES_MAX = 128
_GIDS_MAX = 64
#: Of `counters` and `hw_counters`: what should not move. Names differ between drivers; those of mlx5, bnxt, irdma, rxe.
TROUBLE = (
    "symbol_error", "link_error_recovery", "link_downed", "port_rcv_errors", "port_rcv_remote_physical_errors",
    "port_xmit_discards", "local_link_integrity_errors", "excessive_buffer_overrun_errors", "VL15_dropped",
    "out_of_sequence", "packet_seq_err", "local_ack_timeout_err", "rnr_nak_retry_err", "rx_icrc_encapsulated",
    "implied_nak_seq_err", "out_of_buffer", "roce_adp_retrans", "roce_adp_retrans_to", "to_retransmits",
    "seq_err_naks_rcvd", "rnr_naks_rcvd", "retry_exceeded_err", "retry_rnr_exceeded_err", "completer_retry_err",
    "roce_slow_restart", "max_retry_exceeded",
)  # fmt: skip
#: Marks of congestion, and answers to them: that they move is what ECN is for.
CONGESTION = ("np_ecn_marked_roce_packets", "np_cnp_sent", "rp_cnp_handled", "ecn_marked_pkts", "rcvd_cnp_pkts")


@dataclass(frozen=True, kw_only=True)
class Port:
    device: str
    number: int
    #: "ACTIVE", "DOWN", "INIT", "ARMED".
    state: str | None
    #: "LinkUp", "Disabled", "Polling".
    physical: str | None
    #: "InfiniBand" or "Ethernet".
    link_layer: str | None
    #: Gigabits a second, and lanes.
    rate_gbps: float | None
    lanes: int | None
    #: Kinds of its GIDs: "RoCE v2", "IB/RoCE v1".
    gid_types: tuple[str, ...]
    interfaces: tuple[str, ...]
    #: Both, of `TROUBLE` and `CONGESTION`, that are there.
    counters: Mapping[str, int]

    @property
    def name(self) -> str:
        return f"{self.device}/{self.number}"


@dataclass(frozen=True, kw_only=True)
class RdmaDevice:
    name: str
    #: "rxe" and "siw" are software.
    driver: str | None
    firmware: str | None
    numa_node: int | None
    ports: tuple[Port, ...]

    @property
    def software(self) -> bool:
        return self.driver in ("rxe", "siw")


@dataclass(frozen=True, kw_only=True)
class Rdma:
    devices: tuple[RdmaDevice, ...]

    def device_of(self, interface: str | None) -> RdmaDevice | None:
        """The one whose packets go through a network interface."""
        for device in self.devices:
            if any(interface in port.interfaces for port in device.ports):
                return device
        return None


def read_rdma(machine: Machine) -> Rdma:
    base = "/sys/class/infiniband"
    return Rdma(devices=tuple(_device(machine, f"{base}/{name}", name) for name in machine.names(base)[:_DEVICES_MAX]))


def _device(machine: Machine, base: str, name: str) -> RdmaDevice:
    node = machine.number(f"{base}/device/numa_node")
    driver = machine.real(f"{base}/device/driver")
    kind = driver.rpartition("/")[2] if driver else None
    parent = machine.word(f"{base}/parent")
    if parent is not None or (kind is None and re.match(r"rxe|siw", name)):
        # rxe says on which interface it stands; siw has the interface's device.
        kind = "rxe" if parent is not None else name[:3]
    numbers = [int(one) for one in machine.names(f"{base}/ports") if re.fullmatch(r"\d{1,3}", one)]
    above = machine.names(f"{base}/device/net")
    return RdmaDevice(
        name=name,
        driver=kind,
        firmware=machine.word(f"{base}/fw_ver"),
        numa_node=node if node is not None and node >= 0 else None,
        ports=tuple(_port(machine, name, number, [parent] if parent else above) for number in numbers),
    )


def _port(machine: Machine, device: str, number: int, interfaces: list[str]) -> Port:
    base = f"/sys/class/infiniband/{device}/ports/{number}"
    rate = re.match(r"(\d{1,6}(?:\.\d)?) Gb/sec \((\d{1,2})X", machine.word(f"{base}/rate") or "")
    gids = machine.names(f"{base}/gid_attrs/types")[:_GIDS_MAX]
    kinds = {machine.word(f"{base}/gid_attrs/types/{one}") for one in gids}
    devices = {machine.word(f"{base}/gid_attrs/ndevs/{one}") for one in gids}
    counters: dict[str, int] = {}
    for folder in ("counters", "hw_counters"):
        there = set(machine.names(f"{base}/{folder}"))
        for name in (*TROUBLE, *CONGESTION):
            value = machine.number(f"{base}/{folder}/{name}") if name in there else None
            if value is not None:
                counters[name] = value
    return Port(
        device=device,
        number=number,
        state=_after_colon(machine.word(f"{base}/state")),
        physical=_after_colon(machine.word(f"{base}/phys_state")),
        link_layer=machine.word(f"{base}/link_layer"),
        rate_gbps=float(rate[1]) if rate else None,
        lanes=int(rate[2]) if rate else None,
        gid_types=tuple(sorted(kind for kind in kinds if kind)),
        interfaces=tuple(dict.fromkeys([*interfaces, *sorted(one for one in devices if one)])),
        counters=counters,
    )


def _after_colon(text: str | None) -> str | None:
    """`4: ACTIVE` -> `ACTIVE`."""
    return text.partition(": ")[2] or None if text else None
