"""Controllers of fabrics: their states, time-outs, paths and queues."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from headrace.doctor.facts import Facts
from headrace.doctor.facts.nvme import Controller, Namespace
from headrace.doctor.finding import ERROR, NOTE, WARNING, Finding
from headrace.doctor.storage import Storage, interface_of

#: A target that restarts is away for about so long.
_RESTART_S = 60
#: Where no command of one queue pair keeps a fast device busy.
_QUEUE_SIZE_MIN = 32
_USABLE = ("optimized", "non-optimized")


def check_nvme(facts: Facts, storage: Sequence[Storage]) -> Iterator[Finding]:
    for controller in facts.nvme.controllers:
        yield from _state(controller)
        if controller.fabrics and not controller.discovery:
            yield from _timeouts(facts, controller)
            yield from _queues(facts, controller)
    for namespace in facts.nvme.namespaces:
        yield from _paths(facts, namespace)
    yield from _several_disks(facts)


def _state(controller: Controller) -> Iterator[Finding]:
    state = controller.state
    if state in (None, "live", "new"):
        return
    away = state in ("connecting", "resetting")
    loss = controller.ctrl_loss_s
    until = "for ever" if loss == -1 else f"for {loss} s from the loss on" if loss is not None else "for a time"
    yield Finding(
        id="nvme-state",
        severity=ERROR,
        about=(controller.name,),
        title=f"{controller.name} is {state}",
        evidence=f"/sys/class/nvme/{controller.name}/state: {state}; {controller.transport} {controller.address or ''}",
        why=f"I/O by this path waits {until}, or goes by another path; without one, processes hang in D state"
        if away
        else "this path is gone; a file system whose last path it was has turned read-only",
        what_to_do="look whether the target runs, and whether its address can be reached; the kernel's log says why"
        if away
        else "connect again, and look at what was written last",
        command=f"dmesg | grep {controller.name}; nvme list-subsys",
    )


def _timeouts(facts: Facts, controller: Controller) -> Iterator[Finding]:
    loss, fast, name = controller.ctrl_loss_s, controller.fast_io_fail_s, controller.name
    base = f"/sys/class/nvme/{name}"
    if controller.keep_alive_s == 0:
        yield Finding(
            id="nvme-keep-alive",
            severity=ERROR,
            about=(name,),
            title=f"{name} has no keep alive",
            evidence=f"{base}/kato: 0",
            why="a path that died silently is never noticed, and a late write of it may land minutes afterwards",
            what_to_do="stop what uses its disks, unmount them, and connect again with a keep alive of some seconds",
            command=f"nvme disconnect -d {name} && nvme connect ... --keep-alive-tmo=5",
        )
    if loss is not None and 0 <= loss < _RESTART_S:
        yield Finding(
            id="nvme-ctrl-loss",
            severity=WARNING,
            about=(name,),
            title=f"{name} is removed {loss} s after its target was lost",
            evidence=f"{base}/ctrl_loss_tmo: {loss}",
            why="a target that restarts is away for longer: its disk is then removed, its file system fails, and a "
            "training run with it",
            what_to_do="allow for a restart of the target",
            command=f"echo 600 > {base}/ctrl_loss_tmo",
        )
    elif loss is not None and loss >= _RESTART_S:
        yield Finding(
            id="nvme-ctrl-loss",
            severity=NOTE,
            about=(name,),
            title=f"{name} is removed {loss} s after its target was lost",
            evidence=f"{base}/ctrl_loss_tmo: {loss}",
            why="after that the disk is gone for good, and a file system on it turns read-only, also when the target "
            "comes back a second later",
            what_to_do="nothing, where that is meant; -1 waits for ever",
            command=f"echo -1 > {base}/ctrl_loss_tmo",
        )
    paths = max((len(one.paths) for one in facts.nvme.namespaces_of(name)), default=1)
    if loss == -1 and fast == -1:
        yield Finding(
            id="nvme-waits-for-ever",
            severity=WARNING if paths == 1 else NOTE,
            about=(name,),
            title=f"I/O of {name} waits for ever when its target is lost",
            evidence=f"{base}/ctrl_loss_tmo: off, fast_io_fail_tmo: off",
            why="processes that read or write then hang in D state, cannot be killed, and hold up a reboot",
            what_to_do="let I/O fail after a time that is longer than a restart of the target; a file system on it "
            "turns read-only then, and does not hang",
            command=f"echo 120 > {base}/fast_io_fail_tmo",
        )
    if controller.reconnects:
        yield Finding(
            id="nvme-reconnects",
            severity=NOTE,
            about=(name,),
            title=f"{name} lost its target before",
            evidence=f"{base}/diag/reconnect_count: {controller.reconnects}",
            why="each time I/O stood still for some seconds at least",
            what_to_do="compare with the target's own log, and with the counters of the interface",
            command=f"dmesg -T | grep {name}",
        )


def _queues(facts: Facts, controller: Controller) -> Iterator[Finding]:
    io = controller.queues - 1 if controller.queues else None
    cpus = facts.host.cpus
    base = f"/sys/class/nvme/{controller.name}"
    if io is not None and cpus is not None and io < min(4, cpus):
        yield Finding(
            id="nvme-few-queues",
            severity=WARNING if cpus >= 8 else NOTE,
            about=(controller.name,),
            title=f"{controller.name} has {io} I/O queue{'s' if io != 1 else ''} for {cpus} processors",
            evidence=f"{base}/queue_count: {controller.queues}, the admin queue among them",
            why="each queue is one connection, served by one processor at a time: over TCP 1 to 3 GB/s",
            what_to_do="connect with more, where target and host allow it, once nothing uses its disks",
            command="nvme connect ... --nr-io-queues=8",
        )
    if controller.queue_size is not None and 0 < controller.queue_size < _QUEUE_SIZE_MIN:
        yield Finding(
            id="nvme-short-queues",
            severity=NOTE,
            about=(controller.name,),
            title=f"queues of {controller.name} hold {controller.queue_size} commands",
            evidence=f"{base}/sqsize: {controller.queue_size}",
            why="so few commands under way do not fill a link with a round trip of its own",
            what_to_do="connect with longer queues, where the target allows it",
            command="nvme connect ... --queue-size=128",
        )


def _paths(facts: Facts, namespace: Namespace) -> Iterator[Finding]:
    controllers = [one for one in facts.nvme.controllers_of(namespace) if one.fabrics]
    if not controllers:
        return
    disk, base = namespace.name, f"/sys/block/{namespace.name}"
    live = {one.name for one in controllers if one.state == "live"}
    states = {path.controller: path.ana for path in namespace.paths}
    said = ", ".join(f"{name} {state}" for name, state in states.items() if state)
    known = [state for name, state in states.items() if state and name in live]
    if known and not any(state in _USABLE for state in known):
        yield Finding(
            id="nvme-no-usable-path",
            severity=ERROR,
            about=(disk, *states),
            title=f"no path to {disk} may be used",
            evidence=f"ana_state: {said}",
            why="the target says so (ANA): all I/O waits until it changes",
            what_to_do="look at the target: a failover that did not end, or a portal that was taken out",
            command=f"cat {base}/multipath/*/ana_state; nvme list-subsys /dev/{disk}",
        )
    elif known and "optimized" not in known:
        yield Finding(
            id="nvme-no-optimized-path",
            severity=WARNING,
            about=(disk, *states),
            title=f"{disk} is reached by paths that the target calls slower",
            evidence=f"ana_state: {said}",
            why="every command takes the long way through another controller of the target",
            what_to_do="connect the paths that the target calls optimized, or look why they are away",
            command=f"nvme list-subsys /dev/{disk}; nvme discover ...",
        )
    if len(controllers) == 1:
        yield Finding(
            id="nvme-one-path",
            severity=NOTE,
            about=(disk, controllers[0].name),
            title=f"{disk} has one path",
            evidence=f"{controllers[0].name}: {controllers[0].transport} {controllers[0].address or ''}",
            why="a link, switch or portal that fails stops all I/O until it is back",
            what_to_do="connect another portal of the subsystem, through another interface",
            command="nvme connect-all",
        )
        return
    ways = {one.name: interface_of(facts, one.name) for one in controllers}
    if len(set(ways.values())) == 1 and None not in ways.values():
        yield Finding(
            id="nvme-one-interface",
            severity=NOTE,
            about=(disk, *ways),
            title=f"all {len(ways)} paths to {disk} go through {next(iter(ways.values()))}",
            evidence="; ".join(f"{one.name}: {one.address or '?'}" for one in controllers),
            why="that interface, its cable and its switch are one thing that can fail",
            what_to_do="connect one of them through another interface",
            command="nvme connect ... --host-iface=IFACE",
        )
    subsystem = next((one for one in facts.nvme.subsystems if set(states) & set(one.controllers)), None)
    if namespace.multipath and subsystem is not None and subsystem.policy == "numa":
        yield Finding(
            id="nvme-policy-numa",
            severity=WARNING,
            about=(disk, *states),
            title=f"of {len(controllers)} paths to {disk} each NUMA node uses one",
            evidence=f"/sys/class/nvme-subsystem/{subsystem.name}/iopolicy: numa",
            why="the others carry nothing until that one fails: their bandwidth is lost",
            what_to_do="use them all: queue-depth from Linux 6.11 on, else round-robin",
            command=f"echo round-robin > /sys/class/nvme-subsystem/{subsystem.name}/iopolicy",
        )


def _several_disks(facts: Facts) -> Iterator[Finding]:
    """One namespace that is several disks."""
    by_name: dict[str, list[str]] = {}
    for one in facts.nvme.namespaces:
        fabrics = any(controller.fabrics for controller in facts.nvme.controllers_of(one))
        if one.wwid and not one.multipath and fabrics:
            by_name.setdefault(one.wwid, []).append(one.name)
    held = {name for disk in facts.disks if (disk.mapped_as or "").startswith("mpath-") for name in disk.below}
    for names in by_name.values():
        if len(names) > 1 and not held.issuperset(names):
            yield Finding(
                id="nvme-several-disks",
                severity=WARNING,
                about=tuple(names),
                title=f"{', '.join(names)} are one namespace",
                evidence=f"the same wwid; nvme_core.multipath: {_yes(facts.nvme.native_multipath)}",
                why="who writes to two of them overwrites its own data, and none of them has a second path",
                what_to_do="switch the kernel's own multipath on, or put device-mapper's above them",
                command="nvme_core.multipath=Y on the kernel's command line",
            )


def _yes(value: bool | None) -> str:
    return "?" if value is None else "Y" if value else "N"
