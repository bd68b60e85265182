"""RDMA: ports, and what they count."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.doctor.facts import Facts
from headrace.doctor.facts.rdma import CONGESTION, TROUBLE, Port, RdmaDevice
from headrace.doctor.finding import ERROR, NOTE, WARNING, Finding
from headrace.doctor.storage import Storage, interface_of


def check_rdma(facts: Facts, storage: Sequence[Storage]) -> Iterator[Finding]:
    used = {part for one in storage for part in one.parts}
    for device in facts.rdma.devices:
        for port in device.ports:
            yield from _port(device, port, device.name in used)
            yield from _counters(device, port)
            if port.link_layer == "Ethernet" and not device.software:
                yield from _flow_control(facts, port, device.name in used)
    hard = [one.name for one in facts.rdma.devices if not one.software]
    rails = {interface_of(facts, one.name) for one in facts.nvme.controllers if one.transport == "rdma"}
    below = [facts.rdma.device_of(rail) for rail in rails if rail is not None]
    soft = sorted({one.name for one in below if one is not None and one.software})
    over_tcp = [one.name for one in facts.nvme.controllers if one.transport == "tcp" and not one.discovery]
    active = [one for one in facts.rdma.devices for port in one.ports if port.state == "ACTIVE" and not one.software]
    if over_tcp and active:
        yield Finding(
            id="rdma-unused",
            severity=NOTE,
            about=(*over_tcp, *hard),
            title="storage goes over TCP by the kernel, though there are RDMA devices",
            evidence=f"{', '.join(over_tcp)}: transport tcp; {', '.join(hard)}: ACTIVE",
            why="where the target speaks RDMA as well, a command is some 10 us shorter and costs less processor time",
            what_to_do="ask the target's discovery service what else it offers",
            command="nvme discover -t rdma -a ADDRESS -s 4420",
        )
    if soft:
        yield Finding(
            id="rdma-software",
            severity=WARNING,
            about=tuple(soft),
            title=f"storage goes over {', '.join(soft)}: RDMA in software",
            evidence="no card is behind it: driver rxe or siw",
            why="slower than TCP, made for tests",
            what_to_do="use NVMe/TCP where there is no card",
        )


def _port(device: RdmaDevice, port: Port, used: bool) -> Iterator[Finding]:
    base = f"/sys/class/infiniband/{device.name}/ports/{port.number}"
    if port.state is not None and port.state != "ACTIVE":
        yield Finding(
            id="rdma-port",
            severity=ERROR if used else NOTE,
            about=(device.name,),
            title=f"port {port.name} is {port.state}",
            evidence=f"{base}/state: {port.state}, phys_state: {port.physical or '?'}",
            why="nothing goes through it" + ("" if used else "; nothing here uses it for storage either"),
            what_to_do="look at the cable; on InfiniBand, whether a subnet manager runs (INIT means none)",
            command=f"rdma link show {port.name}; ibstat {device.name}",
        )
    if port.lanes in (1, 2) and port.link_layer == "InfiniBand":
        yield Finding(
            id="rdma-width",
            severity=WARNING if port.lanes == 1 else NOTE,
            about=(device.name,),
            title=f"port {port.name} runs on {port.lanes} of 4 lanes",
            evidence=f"{base}/rate: {port.rate_gbps:g} Gb/sec ({port.lanes}X)",
            why="a lane that failed takes its share of the rate"
            + ("; HDR100 and NDR200 have two on purpose" if port.lanes == 2 else ""),
            what_to_do="reseat or replace the cable",
            command=f"ibstat {device.name}; mlxlink -d {device.name}",
        )
    if port.link_layer == "Ethernet" and port.gid_types and "RoCE v2" not in port.gid_types:
        yield Finding(
            id="rdma-roce-v1",
            severity=WARNING if used else NOTE,
            about=(device.name,),
            title=f"port {port.name} speaks RoCE v1 only",
            evidence=f"{base}/gid_attrs/types: {', '.join(port.gid_types)}",
            why="v1 is not routed, and has no ECN: it stops where the subnet does",
            what_to_do="give the interface an IP address, and the card RoCE v2",
            command=f"rdma link show {port.name}",
        )


def _counters(device: RdmaDevice, port: Port) -> Iterator[Finding]:
    moved = {name: port.counters[name] for name in TROUBLE if port.counters.get(name)}
    if not moved:
        return
    marks = {name: port.counters[name] for name in CONGESTION if name in port.counters}
    ethernet = port.link_layer == "Ethernet"
    silent = ethernet and marks and not any(marks.values())
    why = "each is a packet that was lost, late or damaged: RDMA goes back to it, or waits for a time-out"
    if silent:
        why += "; no ECN mark was ever seen, so congestion control does not work"
    yield Finding(
        id="rdma-counters",
        severity=WARNING,
        about=(device.name,),
        title=f"port {port.name} counts trouble",
        evidence=", ".join(f"{name}: {value}" for name, value in list(moved.items())[:8])
        + (f"; {', '.join(f'{name}: {value}' for name, value in marks.items())}" if marks else ""),
        why=why,
        what_to_do="look whether they move under load; on Ethernet, PFC and ECN on card and switch alike"
        if ethernet
        else "look whether they move under load; then at the cable",
        command=f"grep . /sys/class/infiniband/{device.name}/ports/{port.number}/*counters/*",
    )


def _flow_control(facts: Facts, port: Port, used: bool) -> Iterator[Finding]:
    """RoCE wants a way to slow senders down: pauses (PFC or global), or marks (ECN). Only what is known is held
    against it."""
    interface = next((facts.network.interface(one) for one in port.interfaces), None)
    if interface is None or interface.flow_control is None:
        return
    name, control = interface.name, interface.flow_control
    lost = {name: port.counters[name] for name in TROUBLE if port.counters.get(name)}
    no_marks = control.ecn == () or (
        control.ecn is None
        and any(one in port.counters for one in CONGESTION)
        and not any(port.counters.get(one) for one in CONGESTION)
        and bool(lost)
    )
    if control.pfc == () and control.pause is False and no_marks:
        yield Finding(
            id="rdma-no-flow-control",
            severity=WARNING if used and lost else NOTE,
            about=(port.device, name),
            title=f"nothing slows senders to {name} down: no pauses, no ECN",
            evidence=f"dcb pfc show dev {name}: all priorities off; ethtool -a {name}: RX and TX off; "
            + ("roce_np or roce_rp: no priority on" if control.ecn == () else "no ECN mark was ever counted")
            + (f"; lost: {', '.join(f'{key}: {value}' for key, value in list(lost.items())[:4])}" if lost else ""),
            why="RoCE goes back to the first packet that a full switch drops: its rate collapses under load",
            what_to_do="ask who runs the network which priority it marks or pauses; then ECN for that one on card and "
            "switch alike. Pauses (PFC) that the switch does not know of stop the port",
            command=f"grep . /sys/class/net/{name}/ecn/roce_*/enable/*; mlnx_qos -i {name}",
        )
    received = {key: value for key, value in control.pauses.items() if key.startswith("rx_") and "duration" not in key}
    if received:
        yield Finding(
            id="rdma-paused",
            severity=NOTE,
            about=(port.device, name),
            title=f"the switch told {name} to pause",
            evidence=f"ethtool -S {name}: "
            + ", ".join(f"{key}: {value}" for key, value in list(control.pauses.items())[:8]),
            why="while it pauses nothing is sent; many pauses mean that congestion is stopped late, link by link, and "
            "stops others with it",
            what_to_do="look whether they move under load; ECN should slow senders down before that",
            command=f"ethtool -S {name} | grep -i pause",
        )
