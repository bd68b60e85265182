"""What the measurements show: of targets, of disks, of mounted file systems."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from shlex import quote

from headrace.doctor.finding import ERROR, NOTE, WARNING, Finding
from headrace.doctor.probe import TargetProbe
from headrace.doctor.touch import TIMEOUT_S, Touch
from headrace.units import format_bytes, format_seconds
from headrace.volume.writing import fence

#: A read takes the round trip, and what the target does. Beyond so many round trips, and this time, it is the target.
_ROUND_TRIPS, _SLOW_S = 10, 1e-3
_TAIL = 10
_RETRANS = 1e-3
_FULL = 0.95


def check_measured(probes: Sequence[TargetProbe], touches: Sequence[Touch]) -> Iterator[Finding]:
    for probe in probes:
        yield from _portals(probe)
        if probe.error is not None:
            yield _not_opened(probe)
        else:
            yield from _fence(probe)
            yield from _session(probe)
            yield from _speed(probe)
            yield from _paths(probe)
            yield from _advertised(probe)
    for one in touches:
        yield from _touch(one)


def _portals(probe: TargetProbe) -> Iterator[Finding]:
    answering = {one.portal for one in probe.portals if one.error is None}
    silent = [one for one in probe.portals if one.portal not in answering]
    # Where none answers, that the target was not opened says it all.
    for one in silent if answering else ():
        yield Finding(
            id="target-portal",
            severity=WARNING,
            about=(probe.uri,),
            title=f"portal {one.portal} does not answer",
            evidence=f"{one.address or one.portal}: {one.error}",
            why="a path is missing: the next failure stops all I/O",
            what_to_do="look whether the target listens there, and whether the way is open",
            command=f"headrace discover {one.portal}",
        )
    for one in probe.portals:
        if one.mtu is not None and (one.mtu.black_hole or one.mtu.full is False):
            hole = one.mtu.black_hole
            yield Finding(
                id="target-path-mtu",
                severity=ERROR if hole else WARNING,
                about=(probe.uri,),
                title=f"packets of {one.mtu.mtu} bytes do not reach {one.portal}",
                evidence="datagrams that must not be cut (DF): small ones are answered, full ones "
                + ("vanish" if hole else "come back as too large"),
                why="large transfers hang while small commands work" if hole else "a hop between has a smaller MTU",
                what_to_do="give this interface, every switch and tunnel between, and the target one MTU",
                command=f"tracepath -n {one.address}; ip link",
            )


def _not_opened(probe: TargetProbe) -> Finding:
    return Finding(
        id="target-refused" if probe.refused else "target-away",
        severity=ERROR,
        about=(probe.uri,),
        title="the target does not let this host in" if probe.refused else "the target cannot be used",
        evidence=probe.error or "",
        why="nothing can be read or written there",
        what_to_do="allow this host's name on the target, or set HEADRACE_HOSTNQN to one that it allows"
        if probe.refused
        else "what the message says; where nobody answers, look whether it runs, and whether the way there is open",
        command=f"headrace discover {probe.portals[0].portal}" if probe.portals else None,
    )


def _fence(probe: TargetProbe) -> Iterator[Finding]:
    if probe.fence == fence.NONE:
        yield Finding(
            id="fence-none",
            severity=WARNING,
            about=(probe.uri,),
            title="the target cannot keep out a writer that was taken over from",
            evidence="RESCAP offers no reservation of the type write exclusive, registrants only",
            why="a job that was thought dead can wake up and overwrite what its successor saved; sessions of a volume "
            "refuse it unless they are told --unfenced",
            what_to_do="serve it from a target with reservations (headrace serve, Linux 6.13 with resv_enable, SPDK)",
        )
    elif probe.fence == fence.UNTIL_RESTART:
        yield Finding(
            id="fence-until-restart",
            severity=NOTE,
            about=(probe.uri,),
            title="the target forgets reservations when it restarts",
            evidence="RESCAP: no persistence through power loss",
            why="between its restart and the next beat of the session an older writer could write; headrace's own host "
            "asks on each new association before it writes, so none of its sessions does",
            what_to_do="nothing, where all who write are headrace; else a target that keeps them (headrace serve does, "
            "but for mem:)",
        )


def _session(probe: TargetProbe) -> Iterator[Finding]:
    if probe.session_accepted is False:
        yield Finding(
            id="target-session",
            severity=ERROR,
            about=(probe.uri,),
            title="the target does not let in a session identifier under this host's name",
            evidence=probe.session_error or "",
            why="each writing session is an identifier of its own, so that it alone can be shut out: none opens",
            what_to_do="allow the name with any identifier on the target; give it as HEADRACE_HOSTNQN",
        )


def _speed(probe: TargetProbe) -> Iterator[Finding]:
    if probe.read_error is not None:
        yield Finding(
            id="target-read", severity=ERROR, about=(probe.uri,), title="a read failed", evidence=probe.read_error,
            why="the medium, or the way there", what_to_do="look at the target's log",
        )  # fmt: skip
    latency = probe.latency
    trips = [one.min_rtt_s for one in probe.connections] or [one.connect_s for one in probe.portals if one.connect_s]
    trip = min((one for one in trips if one), default=None)
    if latency is not None and trip and latency.p50_s > max(_ROUND_TRIPS * trip, _SLOW_S):
        yield Finding(
            id="target-slow",
            severity=WARNING,
            about=(probe.uri,),
            title=f"a read takes {format_seconds(latency.p50_s)}, the way there and back {format_seconds(trip)}",
            evidence=f"{latency.count} reads of 4 KiB, one at a time: median {format_seconds(latency.p50_s)}, p99 "
            f"{format_seconds(latency.p99_s)}; round trip by TCP_INFO",
            why="the time goes to the target or its medium, not to the network",
            what_to_do="look what else it serves, and on what its namespaces lie",
        )
    elif latency is not None and latency.p99_s > max(_TAIL * latency.p50_s, 5 * _SLOW_S):
        yield Finding(
            id="target-tail",
            severity=NOTE,
            about=(probe.uri,),
            title=f"1 % of reads take {format_seconds(latency.p99_s)}, half take {format_seconds(latency.p50_s)}",
            evidence=f"{latency.count} reads of 4 KiB, one at a time; longest {format_seconds(latency.max_s)}",
            why="a step waits for the slowest of its reads: neighbours, losses, or a machine that is busy",
            what_to_do="measure again while nothing else runs; look for retransmissions",
        )
    for one in probe.connections:
        if one.bytes_sent and one.bytes_retrans and one.bytes_retrans > max(one.bytes_sent * _RETRANS, 10 * one.mss):
            yield Finding(
                id="target-retransmits",
                severity=WARNING,
                about=(probe.uri,),
                title=f"packets to {one.peer}:{one.port} are lost",
                evidence=f"TCP_INFO of our own connection: {one.bytes_retrans} of {one.bytes_sent} bytes sent again",
                why="each costs a round trip, or a time-out of 200 ms",
                what_to_do="look for drops at the switch and the other end",
                command="nstat -az TcpRetransSegs TcpExtTCPTimeouts",
            )


def _paths(probe: TargetProbe) -> Iterator[Finding]:
    states = [(one.portal, one.ana) for one in probe.paths if one.ana is not None]
    if states and all(state != "optimized" for _, state in states):
        yield Finding(
            id="target-no-optimized-path",
            severity=WARNING,
            about=(probe.uri,),
            title="no portal of this address is one that the target calls optimized",
            evidence=", ".join(f"{portal}: {state}" for portal, state in states),
            why="every command takes the long way through another controller of the target",
            what_to_do="add the other portals to the address",
            command=f"headrace discover {states[0][0]}",
        )


def _advertised(probe: TargetProbe) -> Iterator[Finding]:
    """Portals of its discovery log that the address does not name."""
    answering = {one.portal for one in probe.advertised if one.error is None}
    silent = {one.portal: one.error for one in probe.advertised if one.portal not in answering}
    for portal, said in [*silent.items(), *((None, one) for one in probe.unusable)]:
        yield Finding(
            id="target-advertised",
            severity=WARNING,
            about=(probe.uri,),
            title=f"the target names portal {portal}, which does not answer from here"
            if portal
            else "the target names a portal that nobody can use",
            evidence=f"its discovery log, for this subsystem: {portal + ': ' if portal else ''}{said}",
            why="whoever connects all that is named (nvme connect-all, headrace discover) waits for it, and counts on "
            "a path that is none",
            what_to_do="take it out of the log, or open the way there; a listener at a wildcard must name an address",
            command=f"headrace discover {probe.portals[0].portal}",
        )
    if answering:
        yield Finding(
            id="target-more-portals",
            severity=NOTE,
            about=(probe.uri,),
            title=f"the target has portals that the address does not name: {len(answering)}",
            evidence=f"its discovery log: {', '.join(sorted(answering)[:8])}; they answer",
            why="with one path less, one failure more stops all I/O",
            what_to_do="name them in the address, with commas, or as `headrace discover` prints it",
            command=f"headrace discover {probe.portals[0].portal}",
        )


def _touch(one: Touch) -> Iterator[Finding]:
    name = one.path.removeprefix("/dev/")
    about = (name, one.path)
    if one.outcome == "silent":
        yield Finding(
            id="storage-silent",
            severity=ERROR,
            about=about,
            title=f"{one.path} does not answer",
            evidence=f"nothing came back within {TIMEOUT_S:g} s",
            why="whoever touches it hangs, also ls and df",
            what_to_do="look whether its server or target is there",
            command="dmesg -T | tail; cat /proc/*/stack 2>/dev/null | grep -E 'nfs|nvme' | head",
        )
    elif one.outcome == "failed" and one.kind == "disk" and one.latency is not None:
        yield Finding(
            id="storage-read", severity=ERROR, about=about, title=f"a read of {one.path} failed",
            evidence=one.error or "", why="the medium, or the way there", what_to_do="look at the kernel's log",
            command="dmesg -T | tail -50",
        )  # fmt: skip
    elif one.outcome == "failed" and one.kind == "mount":
        yield Finding(
            id="storage-failed", severity=ERROR, about=about, title=f"{one.path} cannot be used",
            evidence=one.error or "", why="its server forgot it (ESTALE), or its disk is gone",
            what_to_do="end what uses it, unmount it, and mount it again",
            command=f"fuser -vm {quote(one.path)}; umount {quote(one.path)}",
        )  # fmt: skip
    if one.stripes == 1:
        yield Finding(
            id="lustre-stripes",
            severity=NOTE,
            about=about,
            title=f"a new file in {one.path} lies on one target",
            evidence="its layout (lustre.lov): stripe count 1",
            why="a checkpoint or a shard that all nodes read is then as fast as that one server",
            what_to_do="lay folders of large files out over several targets; files that are there stay as they are",
            command=f"lfs setstripe -c 8 -S 4M {quote(one.path)}/FOLDER",
        )
    if one.size_bytes and one.free_bytes is not None and one.free_bytes < one.size_bytes * (1 - _FULL):
        yield Finding(
            id="storage-full",
            severity=WARNING,
            about=about,
            title=f"{one.path} is nearly full",
            evidence=f"statvfs: {format_bytes(one.free_bytes)} of {format_bytes(one.size_bytes)} free",
            why="the next checkpoint may not fit, and full media and file systems are slow",
            what_to_do="remove old checkpoints, or grow it",
            command=f"df -h {quote(one.path)}",
        )
