"""Queues of network cards and drives: how many, on which processors their interrupts land, how long they are."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.doctor.checks.network import carrying
from headrace.doctor.facts import Facts
from headrace.doctor.facts.interrupts import Interrupts
from headrace.doctor.facts.network import Interface
from headrace.doctor.finding import NOTE, WARNING, Finding
from headrace.doctor.storage import Storage

#: Fewer interrupts say nothing of where they go.
_COUNT_MIN = 100_000
#: Where nearly all come to one processor, and to another node than the device's.
_ONE, _ELSEWHERE = 0.9, 0.5
#: Packets that found no room; one in so many of all.
_MISSED_MIN, _MISSED_SHARE = 100, 1e-6
_NO_ROOM = ("rx_missed_errors", "rx_fifo_errors", "rx_over_errors")


def check_queues(facts: Facts, storage: Sequence[Storage]) -> Iterator[Finding]:
    for interface in carrying(facts, storage):
        if not interface.spreads:
            yield from _one_processor(facts, interface.name, interface.interrupts, card=True)
            yield from _one_queue(facts, interface)
        yield from _elsewhere(facts, interface.name, interface.interrupts, interface.numa_node)
        yield from _ring(interface)
    used = {part for one in storage for part in one.parts}
    for controller in facts.nvme.controllers:
        if controller.name in used and controller.transport == "pcie":
            yield from _one_processor(facts, controller.name, controller.interrupts, card=False)


def _one_processor(facts: Facts, name: str, found: Interrupts | None, *, card: bool) -> Iterator[Finding]:
    cpus = facts.host.cpus or 0
    if found is None or found.vectors < 2 or cpus < 4 or found.count < _COUNT_MIN:
        return
    cpu, share = found.busiest
    if share < _ONE or found.beside.get(cpu, 0) < _ONE * sum(found.beside.values()):
        return
    yield Finding(
        id="irq-one-processor",
        severity=WARNING if card else NOTE,
        about=(name,),
        title=f"{share:.0%} of the interrupts of {name} come to processor {cpu}",
        evidence=f"/proc/interrupts: {found.by_cpu[cpu]} of {found.count} of its {found.vectors} busy queues",
        why="that core is full long before the link or the drive is, and others have nothing to do",
        what_to_do="spread them over the processors of the device's NUMA node: irqbalance, or the script of the driver "
        "(set_irq_affinity)",
        command="systemctl status irqbalance; grep . /proc/irq/*/effective_affinity_list",
    )


def _one_queue(facts: Facts, interface: Interface) -> Iterator[Finding]:
    cpus = facts.host.cpus or 0
    if interface.queues == 1 and cpus >= 4 and interface.driver:
        yield Finding(
            id="net-one-queue",
            severity=WARNING if (interface.speed_mbps or 0) >= 10_000 else NOTE,
            about=(interface.name,),
            title=f"{interface.name} has one receive queue for {cpus} processors",
            evidence=f"/sys/class/net/{interface.name}/queues: rx-0 alone, its rps_cpus 0 or not there"
            + (f", speed: {interface.speed_mbps} Mb/s" if interface.speed_mbps else ""),
            why="one processor takes in every packet: 10 to 30 Gb/s, whatever the link",
            what_to_do="give it more queues (of a virtual machine: where it is defined), or let processors share "
            "(RPS). The link may be down for a moment",
            command=f"ethtool -l {interface.name}; ethtool -L {interface.name} combined 8",
        )


def _elsewhere(facts: Facts, name: str, found: Interrupts | None, node: int | None) -> Iterator[Finding]:
    if found is None or node is None or found.count < _COUNT_MIN or len(set(facts.nodes.values())) < 2:
        return
    away = sum(count for cpu, count in found.by_cpu.items() if facts.nodes.get(cpu, node) != node)
    if away > _ELSEWHERE * found.count:
        yield Finding(
            id="irq-other-node",
            severity=NOTE,
            about=(name,),
            title=f"{away / found.count:.0%} of the interrupts of {name} come to another NUMA node than its own",
            evidence=f"/proc/interrupts: {away} of {found.count}; {name} is on node {node}",
            why="what the card wrote into the cache of one processor is fetched by the other, packet by packet",
            what_to_do="bind them to processors of its node",
            command=f"cat /sys/class/net/{name}/device/local_cpulist; grep . /proc/irq/*/effective_affinity_list",
        )


def _ring(interface: Interface) -> Iterator[Finding]:
    counts = interface.counters
    missed = {name: counts[name] for name in _NO_ROOM if counts.get(name)}
    # Drivers count one packet under several names.
    lost = max(missed.values(), default=0)
    packets = counts.get("rx_packets", 0)
    if interface.ring is None or lost < _MISSED_MIN or lost < packets * _MISSED_SHARE:
        return
    size, most = interface.ring
    if size < most:
        yield Finding(
            id="net-ring",
            severity=WARNING,
            about=(interface.name,),
            title=f"{interface.name} had no room for {lost:,} packets, in a ring of {size} of {most} entries",
            evidence=", ".join(f"{name}: {value}" for name, value in missed.items())
            + f", of {packets} packets; ethtool -g: RX {size}, at most {most}",
            why="answers of many targets come at once (incast): what finds no room is sent again, after a time-out of "
            "200 ms at worst",
            what_to_do="make the ring longer while nothing trains, for many cards take the link down for a moment; "
            "then look whether the counters still move",
            command=f"ethtool -G {interface.name} rx {most}",
        )
