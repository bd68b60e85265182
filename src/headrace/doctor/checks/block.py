"""How disks are asked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.doctor.facts import Facts
from headrace.doctor.facts.block import Disk
from headrace.doctor.finding import NOTE, WARNING, Finding
from headrace.doctor.storage import Storage
from headrace.doctor.verdict import FABRIC, PRESENTED
from headrace.units import format_bytes

#: Where requests are so much smaller than the device takes, it sees more of them than it has to.
_REQUEST_KB = 256
_READ_AHEAD_KB = 4096


def check_block(facts: Facts, storage: Sequence[Storage]) -> Iterator[Finding]:
    used = {part for one in storage for part in one.parts}
    for disk in facts.disks:
        if disk.name in used:
            yield from _queue(disk)
            if any(one.name == f"/dev/{disk.name}" and _far(one) for one in storage):
                yield from _read_ahead(disk)
            yield from _throttled(facts, disk)
            yield from _numa(facts, disk)


def _queue(disk: Disk) -> Iterator[Finding]:
    base = f"/sys/block/{disk.name}/queue"
    if disk.name.startswith("nvme") and disk.scheduler not in (None, "none"):
        yield Finding(
            id="block-scheduler",
            severity=NOTE,
            about=(disk.name,),
            title=f"{disk.name} has the scheduler {disk.scheduler}",
            evidence=f"{base}/scheduler: [{disk.scheduler}]",
            why="a lock and a queue in front of a device that has queues of its own",
            what_to_do="take none, unless fairness between cgroups is wanted",
            command=f"echo none > {base}/scheduler",
        )
    most, allowed = disk.max_sectors_kb, disk.max_hw_sectors_kb
    if most is not None and allowed is not None and most < min(allowed, _REQUEST_KB):
        yield Finding(
            id="block-requests",
            severity=NOTE,
            about=(disk.name,),
            title=f"{disk.name} is asked for {most} KiB at a time, and takes {allowed}",
            evidence=f"{base}/max_sectors_kb: {most}, max_hw_sectors_kb: {allowed}",
            why="checkpoints and shards are large: each request more costs processor time and a round trip",
            what_to_do="raise it",
            command=f"echo {min(allowed, 1024)} > {base}/max_sectors_kb",
        )
    elif allowed is not None and 0 < allowed < 128:
        yield Finding(
            id="block-mdts",
            severity=NOTE,
            about=(disk.name,),
            title=f"{disk.name} takes {allowed} KiB in one command",
            evidence=f"{base}/max_hw_sectors_kb: {allowed}",
            why="the device's own limit (MDTS): large reads are cut into many commands",
            what_to_do="more commands under way (deeper queues) make up for it",
        )
    if disk.read_only:
        yield Finding(
            id="block-read-only",
            severity=NOTE,
            about=(disk.name,),
            title=f"{disk.name} is read-only",
            evidence=f"/sys/block/{disk.name}/ro: 1",
            why="nothing can be saved there; some volumes are attached so on purpose",
            what_to_do="attach it for writing, where that was meant",
        )


def _far(one: Storage) -> bool:
    """With files on it that are worth reading ahead."""
    return one.verdict.word in (FABRIC, PRESENTED) and bool({*one.mounted} - {"/"})


def _read_ahead(disk: Disk) -> Iterator[Finding]:
    """Of disks with files on them that are reached over a network."""
    ahead = disk.read_ahead_kb
    if ahead is not None and ahead <= 128 and disk.size_bytes:
        yield Finding(
            id="block-read-ahead",
            severity=NOTE,
            about=(disk.name,),
            title=f"files on {disk.name} are read ahead by {disk.read_ahead_kb} KiB",
            evidence=f"/sys/block/{disk.name}/queue/read_ahead_kb: {disk.read_ahead_kb}",
            why="one reader of a large file has no more than that under way: over a network far less than the link",
            what_to_do="raise it, for file systems that are read from one end to the other",
            command=f"echo {_READ_AHEAD_KB} > /sys/block/{disk.name}/queue/read_ahead_kb",
        )


def _throttled(facts: Facts, disk: Disk) -> Iterator[Finding]:
    numbers = {disk.number, *(number for _, number in disk.partitions)}
    bounds = [one for one in facts.limits.throttles if one.number in numbers]
    if bounds:
        said = ", ".join(
            f"{one.what} {format_bytes(one.value)}/s" if one.what.endswith("bps") else f"{one.what} {one.value}"
            for one in bounds
        )
        file = "io.max" if facts.limits.cgroup_version == 2 else "blkio.throttle"
        yield Finding(
            id="block-throttled",
            severity=WARNING,
            about=(disk.name,),
            title=f"the cgroup bounds I/O of {disk.name}",
            evidence=f"{file} of {facts.limits.cgroup}: {said}",
            why="no more than that comes through, whatever the storage can do",
            what_to_do="ask who runs the node (Slurm, Kubernetes, systemd) for more",
            command="cat /proc/self/cgroup; cat /sys/fs/cgroup/*/io.max",
        )


def _numa(facts: Facts, disk: Disk) -> Iterator[Finding]:
    """Local NVMe on another node than every GPU."""
    namespace = next((one for one in facts.nvme.namespaces if one.name == disk.name), None)
    if namespace is None:
        return
    nodes = {gpu.numa_node for gpu in facts.gpus.gpus if gpu.numa_node is not None}
    for controller in facts.nvme.controllers_of(namespace):
        node = controller.numa_node
        if controller.transport == "pcie" and node is not None and nodes and node not in nodes:
            yield Finding(
                id="block-numa-gpu",
                severity=NOTE,
                about=(disk.name, controller.name),
                title=f"{disk.name} is on NUMA node {node}, and no GPU is",
                evidence=f"/sys/class/nvme/{controller.name}/numa_node: {node}; GPUs on "
                f"{', '.join(map(str, sorted(nodes)))}",
                why="every byte crosses the link between the processors once more",
                what_to_do="nothing, where there is no other; else give each GPU the disks of its own node",
                command="nvidia-smi topo -m",
            )
