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
