"""Interfaces, routes, and the TCP connections that carry storage, as the kernel counts them."""

from __future__ import annotations

import ipaddress
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass

from headrace.doctor.facts.flow_control import FlowControl, read_flow_control
from headrace.doctor.facts.interrupts import Interrupts, interrupts_of, read_table
from headrace.doctor.machine import Machine, number_of

#: Ports of storage: NVMe/TCP I/O and discovery, NFS, NFS over RDMA's and SMB's TCP, Lustre.
PORTS = (4420, 8009, 2049, 445, 988)
INTERFACES_MAX = 256
FLOWS_MAX = 4096
_QUEUES_MAX = 64
_COUNTERS = (
    "rx_packets", "tx_packets", "rx_errors", "tx_errors", "rx_dropped", "tx_dropped", "rx_crc_errors",
    "rx_missed_errors", "rx_fifo_errors", "rx_over_errors", "rx_bytes", "tx_bytes",
)  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Interface:
    name: str
    #: "up", "down", "unknown" (as loopback and some virtual ones).
    state: str | None
    mtu: int | None
    speed_mbps: int | None
    driver: str | None
    numa_node: int | None
    #: Receive queues.
    queues: int | None
    carrier_changes: int | None
    counters: Mapping[str, int]
    #: Of `ethtool -k`, what carries load: "tcp-segmentation-offload" and others; `None`: no ethtool.
    offloads: Mapping[str, bool] | None
    #: Of a bond, bridge or team.
    members: tuple[str, ...]
    #: `ethtool -g`: entries of the receive ring, and how many it could have; `None`: it does not say.
    ring: tuple[int, int] | None
    #: Packets are handed on to other processors (RPS) from its only or from some queue.
    spreads: bool
    interrupts: Interrupts | None
    #: Only of those that carry RDMA.
    flow_control: FlowControl | None


@dataclass(frozen=True, kw_only=True)
class Route:
    network: ipaddress.IPv4Network | ipaddress.IPv6Network
    interface: str
    #: To the neighbours themselves, without a gateway.
    direct: bool
    metric: int


@dataclass(frozen=True, kw_only=True)
class Flow:
    """One TCP connection. `None`: `ss` did not say."""

    local: str
    peer: str
    port: int
    rtt_ms: float | None
    cwnd: int | None
    mss: int | None
    path_mtu: int | None
    bytes_sent: int | None
    bytes_retrans: int | None
    bytes_received: int | None
    #: Segments sent again since the beginning.
    retrans: int | None
    #: Bits a second.
    delivery_rate: float | None
    #: Milliseconds for which the peer's window, or our own buffer, held it up; and of all in which it was busy.
    window_limited_ms: int | None
    buffer_limited_ms: int | None
    busy_ms: int | None


@dataclass(frozen=True, kw_only=True)
class Network:
    interfaces: tuple[Interface, ...]
    routes: tuple[Route, ...]
    #: `None`: there is no `ss` to ask.
    flows: tuple[Flow, ...] | None
    congestion: str | None
    #: Largest receive and send buffer of a TCP connection.
    receive_max_bytes: int | None
    send_max_bytes: int | None
    #: `tcp_mtu_probing`: 0 off, 1 where a black hole is suspected, 2 always.
    mtu_probing: int | None

    def interface(self, name: str | None) -> Interface | None:
        return next((one for one in self.interfaces if one.name == name), None)

    def way_to(self, address: str | None, source: str | None = None) -> str | None:
        """The interface by which an address is reached, by the main routing table; with a `source`, the one that has
        it as a neighbour: hosts of several rails route by it."""
        return self._by(source, direct=True) or self._by(address, direct=False)

    def _by(self, text: str | None, *, direct: bool) -> str | None:
        try:
            address = ipaddress.ip_address((text or "").partition("%")[0])
        except ValueError:
            return None
        if address.is_loopback:
            return "lo"
        fitting = [
            route for route in self.routes if address in route.network and route.direct >= direct
            and not (direct and route.network.prefixlen == 0)
        ]  # fmt: skip
        return max(fitting, key=lambda route: (route.network.prefixlen, -route.metric)).interface if fitting else None


def read_network(machine: Machine, ports: Iterable[int]) -> Network:
    """`ports`: of targets that are connected, beside the usual ones."""
    base = "/sys/class/net"
    names = [name for name in machine.names(base) if machine.exists(f"{base}/{name}/mtu")]
    table = read_table(machine)
    return Network(
        interfaces=tuple(_interface(machine, name, table) for name in names[:INTERFACES_MAX]),
        routes=(*_routes4(machine), *_routes6(machine)),
        flows=_flows(machine, sorted({*PORTS, *ports})[:64]),
        congestion=machine.word("/proc/sys/net/ipv4/tcp_congestion_control"),
        receive_max_bytes=_third(machine, "/proc/sys/net/ipv4/tcp_rmem"),
        send_max_bytes=_third(machine, "/proc/sys/net/ipv4/tcp_wmem"),
        mtu_probing=machine.number("/proc/sys/net/ipv4/tcp_mtu_probing"),
    )


def _interface(machine: Machine, name: str, table: Mapping[int, Mapping[int, int]]) -> Interface:
    base = f"/sys/class/net/{name}"
    speed, node = machine.number(f"{base}/speed"), machine.number(f"{base}/device/numa_node")
    physical = machine.exists(f"{base}/device")
    counters = {one: machine.number(f"{base}/statistics/{one}") for one in _COUNTERS}
    driver = machine.real(f"{base}/device/driver")
    queues = [one for one in machine.names(f"{base}/queues") if one.startswith("rx-")]
    spread = (machine.word(f"{base}/queues/{one}/rps_cpus") for one in queues[:_QUEUES_MAX])
    return Interface(
        name=name,
        state=machine.word(f"{base}/operstate"),
        mtu=machine.number(f"{base}/mtu"),
        # -1, or 2^32 - 1: it does not know.
        speed_mbps=speed if speed is not None and 0 < speed < 1 << 31 else None,
        driver=driver.rpartition("/")[2] if driver else None,
        numa_node=node if node is not None and node >= 0 else None,
        queues=len(queues) or None,
        carrier_changes=machine.number(f"{base}/carrier_changes"),
        counters={key: value for key, value in counters.items() if value is not None},
        offloads=_offloads(machine, name) if physical else None,
        members=tuple(
            one.removeprefix("lower_") for one in machine.names(base) if one.startswith("lower_") and not physical
        ),
        ring=_ring(machine, name) if physical else None,
        # A mask of processors, as 00000000,0000000f.
        spreads=any((one or "0").strip("0,") for one in spread),
        interrupts=interrupts_of(machine, f"{base}/device", table) if physical else None,
        flow_control=read_flow_control(machine, name) if machine.names(f"{base}/device/infiniband") else None,
    )


def _ring(machine: Machine, name: str) -> tuple[int, int] | None:
    """First come what it could have, then what it has."""
    text = machine.command(f"ethtool-g-{name}", "ethtool", "-g", name) or ""
    sizes = re.findall(r"^RX:\s+(\d{1,7})$", text, re.M)
    return (int(sizes[1]), int(sizes[0])) if len(sizes) >= 2 else None


def _offloads(machine: Machine, name: str) -> dict[str, bool] | None:
    text = machine.command(f"ethtool-k-{name}", "ethtool", "-k", name)
    if text is None:
        return None
    wanted = "tcp-segmentation-offload|generic-receive-offload|generic-segmentation-offload"
    return {key: on == "on" for key, on in re.findall(rf"^({wanted}): (on|off)\b", text, re.M)}


def _routes4(machine: Machine) -> list[Route]:
    found = []
    for line in (machine.text("/proc/net/route") or "").splitlines()[1:4096]:
        words = line.split()
        if len(words) < 8 or not all(re.fullmatch(r"[0-9A-F]{8}", words[at]) for at in (1, 2, 7)):
            continue
        # As the machine has them in memory; every machine that Linux trains on is little-endian.
        network, gateway, mask = (int.from_bytes(bytes.fromhex(words[at]), "little") for at in (1, 2, 7))
        try:
            where = ipaddress.IPv4Network((network, str(ipaddress.IPv4Address(mask))), strict=False)
        except ValueError:
            continue
        found.append(Route(network=where, interface=words[0], direct=gateway == 0, metric=number_of(words[6]) or 0))
    return found


def _routes6(machine: Machine) -> list[Route]:
    found = []
    for line in (machine.text("/proc/net/ipv6_route") or "").splitlines()[:4096]:
        words = line.split()
        hexadecimal = r"[0-9a-f]{32}"
        if len(words) != 10 or not all(re.fullmatch(hexadecimal, words[at]) for at in (0, 4)):
            continue
        try:
            bits, metric = int(words[1], 16), int(words[5], 16)
            where = ipaddress.IPv6Network((bytes.fromhex(words[0]), bits), strict=False)
        except ValueError:
            continue
        if words[9] != "lo":
            found.append(Route(network=where, interface=words[9], direct=not int(words[4], 16), metric=metric))
    return found


def _third(machine: Machine, path: str) -> int | None:
    words = (machine.text(path) or "").split()
    return number_of(words[2]) if len(words) == 3 else None


def _flows(machine: Machine, ports: list[int]) -> tuple[Flow, ...] | None:
    wanted = " or ".join(f"dport = :{port}" for port in ports)
    text = machine.command("ss", "ss", "-tniH", f"( {wanted} )")
    if text is None:
        return None
    # One connection is a line of addresses, and lines that begin with a blank.
    entries: list[str] = []
    for line in text.splitlines():
        if line[:1].isspace() and entries:
            entries[-1] += " " + line.strip()
        elif len(entries) < FLOWS_MAX:
            entries.append(line)
    found = (flow_of(entry) for entry in entries)
    return tuple(flow for flow in found if flow is not None)


def flow_of(entry: str) -> Flow | None:
    words = entry.split()
    ends = [word for word in words[:6] if re.fullmatch(r"\S+:\d{1,5}", word)]
    if len(ends) < 2:
        return None

    def value(pattern: str) -> float | None:
        match = re.search(rf"(?:^|\s){pattern}(?=[\s/,:]|$)", entry)
        return float(match[1]) if match else None

    def whole(pattern: str) -> int | None:
        found = value(pattern)
        return None if found is None else int(found)

    rate = re.search(r"\sdelivery_rate (\d{1,15})([KMG]?)bps", entry)
    local, peer = ends[0], ends[1]
    host, _, port = peer.rpartition(":")
    retrans = re.search(r"\sretrans:\d+/(\d{1,15})", entry)
    return Flow(
        local=local.rpartition(":")[0].strip("[]"),
        peer=host.strip("[]").removeprefix("::ffff:"),
        port=int(port),
        rtt_ms=value(r"rtt:(\d{1,9}(?:\.\d{1,6})?)"),
        cwnd=whole(r"cwnd:(\d{1,9})"),
        mss=whole(r"mss:(\d{1,9})"),
        path_mtu=whole(r"pmtu:(\d{1,9})"),
        bytes_sent=whole(r"bytes_sent:(\d{1,18})"),
        bytes_retrans=whole(r"bytes_retrans:(\d{1,18})"),
        bytes_received=whole(r"bytes_received:(\d{1,18})"),
        retrans=int(retrans[1]) if retrans else None,
        delivery_rate=int(rate[1]) * {"": 1, "K": 1e3, "M": 1e6, "G": 1e9}[rate[2]] if rate else None,
        window_limited_ms=whole(r"rwnd_limited:(\d{1,15})ms(?:\([\d.]+%\))?"),
        buffer_limited_ms=whole(r"sndbuf_limited:(\d{1,15})ms(?:\([\d.]+%\))?"),
        busy_ms=whole(r"busy:(\d{1,15})ms"),
    )
