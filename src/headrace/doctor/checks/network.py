"""Interfaces that carry storage, and the TCP connections on them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.doctor.facts import Facts
from headrace.doctor.facts.network import Flow, Interface
from headrace.doctor.finding import ERROR, MACHINE, NOTE, WARNING, Finding
from headrace.doctor.storage import Storage
from headrace.doctor.verdict import FABRIC, NETWORK_FS

_JUMBO = 8000
#: Of bytes sent that were sent again: TCP's rate falls with it.
_RETRANS_WARN, _RETRANS_ERROR = 1e-3, 1e-2
#: Before that a share says nothing.
_BYTES_MIN = 10 << 20
#: Of packets.
_LOST_SHARE = 1e-5
_CHANGES_MAX = 10


def carrying(facts: Facts, storage: Sequence[Storage]) -> list[Interface]:
    """The interfaces by which storage is reached over a network."""
    parts = {part for one in storage if one.meant in (FABRIC, NETWORK_FS) for part in one.parts}
    return [one for one in facts.network.interfaces if one.name in parts and one.name != "lo"]


def check_network(facts: Facts, storage: Sequence[Storage]) -> Iterator[Finding]:
    interfaces = carrying(facts, storage)
    for interface in interfaces:
        yield from _mtu(interface)
        yield from _link(interface)
        yield from _losses(interface)
        yield from _offloads(interface)
        yield from _numa(facts, interface)
    for flow in facts.network.flows or ():
        yield from _flow(facts, flow)
    fast = max((one.speed_mbps or 0 for one in interfaces), default=0)
    yield from _buffers(facts, fast)


def _mtu(interface: Interface) -> Iterator[Finding]:
    fast = (interface.speed_mbps or 0) >= 10_000
    if interface.mtu is None or interface.mtu >= _JUMBO or not (fast or interface.mtu < 1500):
        return
    yield Finding(
        id="net-mtu",
        severity=WARNING if fast else NOTE,
        about=(interface.name,),
        title=f"{interface.name} carries storage in packets of {interface.mtu} bytes",
        evidence=f"/sys/class/net/{interface.name}/mtu: {interface.mtu}"
        + (f", speed: {interface.speed_mbps} Mb/s" if interface.speed_mbps else ""),
        why="six times as many packets as with 9000: processor time on both sides, and less than line rate where a "
        "core is full",
        what_to_do="raise it on the host, every switch between (in a cloud: on its network), and the target together; "
        "one that stays small makes a black hole",
        command=f"ip link set {interface.name} mtu 9000",
    )


def _link(interface: Interface) -> Iterator[Finding]:
    base = f"/sys/class/net/{interface.name}"
    if interface.state in ("down", "lowerlayerdown", "dormant"):
        yield Finding(
            id="net-down",
            severity=ERROR,
            about=(interface.name,),
            title=f"{interface.name}, by which storage is reached, is {interface.state}",
            evidence=f"{base}/operstate: {interface.state}",
            why="nothing goes through it",
            what_to_do="look at cable, switch port and driver",
            command=f"ip -s link show {interface.name}; ethtool {interface.name}",
        )
    if (interface.carrier_changes or 0) > _CHANGES_MAX:
        yield Finding(
            id="net-flaps",
            severity=WARNING,
            about=(interface.name,),
            title=f"the link of {interface.name} came and went {interface.carrier_changes} times",
            evidence=f"{base}/carrier_changes: {interface.carrier_changes}",
            why="each time I/O stands still, and what was under way is sent again",
            what_to_do="look at the cable, the transceiver and the switch port",
            command=f"dmesg -T | grep {interface.name}; ethtool -m {interface.name}",
        )


def _losses(interface: Interface) -> Iterator[Finding]:
    base = f"/sys/class/net/{interface.name}/statistics"
    counts = interface.counters
    crc = counts.get("rx_crc_errors", 0)
    if crc:
        yield Finding(
            id="net-crc",
            severity=WARNING,
            about=(interface.name,),
            title=f"{interface.name} received {crc:,} damaged packets",
            evidence=f"{base}/rx_crc_errors: {crc}",
            why="a cable, transceiver or port is damaged; each is a retransmission, and TCP's checksum misses one of "
            "65536",
            what_to_do="replace the cable or transceiver; until then use digests (hdgst, ddgst)",
            command=f"ethtool -S {interface.name} | grep -i -E 'crc|symbol|err'",
        )
    for side in ("rx", "tx"):
        packets = counts.get(f"{side}_packets", 0)
        lost = {key: counts.get(f"{side}_{key}", 0) for key in ("errors", "dropped", "missed_errors")}
        if packets and sum(lost.values()) > max(100, packets * _LOST_SHARE):
            said = ", ".join(f"{side}_{key}: {value}" for key, value in lost.items() if value)
            yield Finding(
                id="net-losses",
                severity=WARNING,
                about=(interface.name,),
                title=f"{interface.name} loses packets",
                evidence=f"{base}: {said}, of {packets} packets",
                why="TCP halves its rate for each loss; RDMA stops for a time-out",
                what_to_do="longer rings, more queues, interrupts spread over processors of the card's NUMA node",
                command=f"ethtool -g {interface.name}; ethtool -S {interface.name} | grep -E 'drop|miss|err|out_of'",
            )


def _offloads(interface: Interface) -> Iterator[Finding]:
    off = [name for name, on in (interface.offloads or {}).items() if not on]
    if off:
        yield Finding(
            id="net-offloads",
            severity=WARNING,
            about=(interface.name,),
            title=f"{interface.name} does by processor what a card can do",
            evidence=f"ethtool -k {interface.name}: {', '.join(f'{name}: off' for name in off)}",
            why="a core is full at a fraction of the link",
            what_to_do="switch them on, unless a driver is known to be broken",
            command=f"ethtool -K {interface.name} tso on gso on gro on",
        )


def _numa(facts: Facts, interface: Interface) -> Iterator[Finding]:
    nodes = {gpu.numa_node for gpu in facts.gpus.gpus if gpu.numa_node is not None}
    if interface.numa_node is not None and nodes and interface.numa_node not in nodes:
        yield Finding(
            id="net-numa-gpu",
            severity=NOTE,
            about=(interface.name,),
            title=f"{interface.name} is on NUMA node {interface.numa_node}, and no GPU is",
            evidence=f"/sys/class/net/{interface.name}/device/numa_node: {interface.numa_node}; GPUs on "
            f"{', '.join(map(str, sorted(nodes)))}",
            why="every byte crosses the link between the processors once more",
            what_to_do="reach storage by a card on a GPU's node, where there is one",
            command="nvidia-smi topo -m",
        )


def _flow(facts: Facts, flow: Flow) -> Iterator[Finding]:
    where = f"{flow.peer}:{flow.port}"
    way = facts.network.way_to(flow.peer, flow.local)
    about = (way,) if way else (MACHINE,)
    sent, again = flow.bytes_sent, flow.bytes_retrans
    if sent and again and sent > _BYTES_MIN and again / sent > _RETRANS_WARN:
        share = again / sent
        yield Finding(
            id="tcp-retransmits",
            severity=ERROR if share > _RETRANS_ERROR else WARNING,
            about=about,
            title=f"{share:.2%} of what is sent to {where} is sent again",
            evidence=f"ss -ti: bytes_sent:{sent} bytes_retrans:{again}"
            + (f" rtt:{flow.rtt_ms}" if flow.rtt_ms else ""),
            why="packets are lost on the way: TCP's rate falls with the root of it, and the slowest answers take a "
            "time-out longer",
            what_to_do="look for drops at the switch and the other end, for a wrong MTU, for a full link",
            command=f"ss -tni dst {flow.peer}; nstat -az TcpRetransSegs TcpExtTCPTimeouts",
        )
    mtu = facts.network.interface(way)
    if flow.path_mtu and mtu is not None and mtu.mtu and flow.path_mtu < mtu.mtu:
        yield Finding(
            id="tcp-path-mtu",
            severity=WARNING,
            about=about,
            title=f"packets to {where} are at most {flow.path_mtu} bytes, though {way} has {mtu.mtu}",
            evidence=f"ss -ti: pmtu:{flow.path_mtu}" + (f" mss:{flow.mss}" if flow.mss else ""),
            why="something between has a smaller MTU: large packets were dropped until the kernel found out",
            what_to_do="give every switch and tunnel between the same MTU",
            command=f"tracepath -n {flow.peer}",
        )
    busy = flow.busy_ms or 0
    for limited, what, cure in (
        (flow.window_limited_ms, "the other end's receive window", "larger receive buffers there (net.ipv4.tcp_rmem)"),
        (flow.buffer_limited_ms, "its own send buffer", "larger send buffers here (net.ipv4.tcp_wmem)"),
    ):
        if limited and busy > 1000 and limited > busy // 10:
            yield Finding(
                id="tcp-limited",
                severity=NOTE,
                about=about,
                title=f"the connection to {where} waits for {what}",
                evidence=f"ss -ti: {limited} ms of {busy} ms in which it had something to send",
                why="the link could carry more",
                what_to_do=cure,
                command="sysctl net.ipv4.tcp_rmem net.ipv4.tcp_wmem",
            )


def _buffers(facts: Facts, fastest_mbps: int) -> Iterator[Finding]:
    most = facts.network.receive_max_bytes
    # What is under way on such a link within half a millisecond.
    need = fastest_mbps * 1_000_000 // 8 // 2000
    if most is not None and fastest_mbps >= 10_000 and most < need:
        yield Finding(
            id="tcp-buffers",
            severity=WARNING,
            about=(MACHINE,),
            title="TCP's receive buffers are small for this link",
            evidence=f"net.ipv4.tcp_rmem: at most {most}; {fastest_mbps // 1000} Gb/s for 0.5 ms are {need} bytes",
            why="one connection cannot have more under way than its buffer holds",
            what_to_do="raise the largest value",
            command=f"sysctl -w net.ipv4.tcp_rmem='4096 131072 {max(32 << 20, need)}'",
        )
