"""NICs of a node and targets of the storage that the needed rates take."""

from __future__ import annotations

import math

from headrace.plan import units
from headrace.plan.job import Job
from headrace.plan.quantities import Answer, Formula, Question, Range

#: Where no NIC is named, these are looked at, Gbit/s.
NIC_GBIT = (25, 100, 200, 400)
ONE_NODE = Range.point(1, units.NODES)

PEAK = Formula(
    result="a node moves at most",
    text="max(reads of training, writes of saves, reads of a restart) / nodes",
    unit=units.RATE_PER_NODE,
    symbols={"reading": units.RATE, "writing": units.RATE, "restarting": units.RATE, "nodes": units.NODES},
    source="a link carries reads and writes at the same time; a restart reads nothing else",
    function=lambda reading, writing, restarting, nodes: max(reading, writing, restarting) / nodes,
)

NICS = Formula(
    result="storage NICs of a node",
    text="ceil(a node moves / (NIC * efficiency))",
    unit=units.COUNT,
    symbols={"a node moves": units.RATE_PER_NODE, "NIC": units.RATE_PER_NODE, "efficiency": units.SHARE},
    source="arithmetic",
    function=lambda a_node_moves, NIC, efficiency: _whole(a_node_moves / (NIC * efficiency)),
)

LINKS = Formula(
    result="what the NICs carry, in all",
    text="nodes * NICs * NIC * efficiency",
    unit=units.RATE,
    symbols={
        "nodes": units.NODES, "NICs": units.COUNT, "NIC": units.RATE_PER_NODE, "efficiency": units.SHARE,
    },
    source="arithmetic",
    function=lambda nodes, NICs, NIC, efficiency: nodes * NICs * NIC * efficiency,
)  # fmt: skip

TARGETS_READ = Formula(
    result="targets that deliver it",
    text="ceil(max(reads of training, reads of a restart) / target)",
    unit=units.COUNT,
    symbols={"reading": units.RATE, "restarting": units.RATE, "target": units.RATE},
    source="arithmetic; measure a target: its own rate stands here",
    function=lambda reading, restarting, target: _whole(max(reading, restarting) / target),
)

TARGETS_WRITE = Formula(
    result="targets that take it",
    text="ceil(writes of saves / target)",
    unit=units.COUNT,
    symbols={"writing": units.RATE, "target": units.RATE},
    source="arithmetic; measure a target: its own rate stands here",
    function=lambda writing, target: _whole(writing / target),
)


def _whole(value: float) -> float:
    """Rounded up, but not for a last digit that division left over; at least one."""
    return float(max(1, math.ceil(value * (1 - 1e-12))))


def nic(job: Job) -> Range | None:
    """Speed of one NIC of a node, B/s/node; None: not said."""
    given = job.range("network.nic_gbit")
    return None if given is None else _per_node(given)


def _per_node(speed: Range) -> Range:
    unit = units.Unit(units.RATE_PER_NODE.exponents, "link")
    return Range(speed.low, speed.likely, speed.high, unit, speed.origin, speed.source)


def links(job: Job, nodes: Range) -> Answer | None:
    """What the NICs of all nodes carry together; None: no NIC is said."""
    speed = nic(job)
    if speed is None:
        return None
    return LINKS.put(
        {"nodes": nodes, "NICs": job.need("network.nics"), "NIC": speed, "efficiency": job.need("network.efficiency")}
    )


def question(job: Job, nodes: Range, *, reading: Range, writing: Range, restarting: Range) -> Question:
    put = {"reading": reading, "writing": writing, "restarting": restarting, "nodes": nodes}
    peak = PEAK.put(put)
    answers = [peak]
    efficiency = job.need("network.efficiency")
    said = nic(job)
    speeds = [said] if said else [_per_node(Range.point(gbit * 1e9 / 8, units.LINK)) for gbit in NIC_GBIT]
    for speed in speeds:
        answers.append(NICS.put({"a node moves": peak.value, "NIC": speed, "efficiency": efficiency}))
    read, write = job.range("network.target_read"), job.range("network.target_write")
    if read is not None:
        answers.append(TARGETS_READ.put({"reading": reading, "restarting": restarting, "target": read}))
    if write is not None:
        answers.append(TARGETS_WRITE.put({"writing": writing, "target": write}))
    note = ""
    if read is None or write is None:
        note = "how many targets: unknown, until one is measured (network.target_read, network.target_write)"
    return Question(name="network", title="Which NICs, how many targets?", answers=tuple(answers), note=note)
