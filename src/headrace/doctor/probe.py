"""What only a target itself can say: does it let this host in, how well does it fence, how far away is it.

Nothing is written and nothing reserved: a namespace is opened, asked what it offers, and read at random places.
"""

from __future__ import annotations

import random
import socket
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass, replace
from typing import Any
from uuid import uuid4

import numpy as np

from headrace.device import NativeDevice, NvmeTcpAddress, PathInfo, Portal, open_device
from headrace.device.address import NVME_TCP_PORT
from headrace.doctor.latency import Latency
from headrace.doctor.tcp import PathMtu, TcpState, own_connections, path_mtu, state_of
from headrace.doctor.verdict import FABRIC, UNKNOWN, Verdict
from headrace.errors import ConnectRefused, HeadraceError
from headrace.fabric import discover, parse_endpoint
from headrace.volume.writing import fence

#: For each thing that is waited for.
PATIENCE_S = 5.0
#: Reads for the latency, and for how long at most.
READS, READ_SECONDS = 256, 3.0
_READ_BYTES = 4096
#: Of a discovery log: portals that are looked at.
_ADVERTISED_MAX = 16


@dataclass(frozen=True, kw_only=True)
class PortalProbe:
    """One address of a portal."""

    portal: str
    address: str
    #: Why no TCP connection came to be.
    error: str | None
    #: Of the handshake.
    connect_s: float | None
    mtu: PathMtu | None


@dataclass(frozen=True, kw_only=True)
class TargetProbe:
    uri: str
    #: Why it could not be opened; then all below that is `None` or empty, but for the portals.
    error: str | None
    refused: bool
    portals: tuple[PortalProbe, ...]
    model: str | None = None
    size_bytes: int | None = None
    block_bytes: int | None = None
    volatile_cache: bool | None = None
    hostnqn: str | None = None
    #: What the target offers to keep a writer out that was taken over from: "persistent", "until-restart", "none"; and
    #: what does so now.
    fence: str | None = None
    fence_now: str | None = None
    #: Another host identifier under this host's name is let in, as each writing session needs; and why not.
    session_accepted: bool | None = None
    session_error: str | None = None
    latency: Latency | None = None
    #: Reads that failed while the latency was taken.
    read_error: str | None = None
    paths: tuple[PathInfo, ...] = ()
    connections: tuple[TcpState, ...] = ()
    #: Other portals that the target's discovery log names for this subsystem, connected to for a moment; and entries
    #: that nobody can use.
    advertised: tuple[PortalProbe, ...] = ()
    unusable: tuple[str, ...] = ()


def verdict_of_target(probe: TargetProbe) -> Verdict:
    """A target that let this host in, or that knows the name and this host not, was seen; another one was not."""
    if probe.error is None:
        return Verdict(word=FABRIC, why="NVMe/TCP, by headrace's own host: no kernel device stands between")
    if probe.refused:
        return Verdict(word=FABRIC, why="NVMe/TCP: the target answered, and does not let this host in")
    if all(portal.error is not None for portal in probe.portals):
        return Verdict(word=UNKNOWN, why="an address of NVMe/TCP, at which nobody answered")
    return Verdict(word=UNKNOWN, why="an address of NVMe/TCP: who answered there gave no such namespace")


def probe_target(address: NvmeTcpAddress) -> TargetProbe:
    """Takes some seconds for each portal that does not answer, and never raises for what a target does."""
    with ThreadPoolExecutor(max_workers=len(address.portals)) as pool:
        portals = tuple(one for found in pool.map(_probe_portal, address.portals) for one in found)
    try:
        device = open_device(with_patience(address).uri, read_only=True)
    except HeadraceError as error:
        return TargetProbe(uri=address.uri, error=str(error), refused=_host_refused(error), portals=portals)
    try:
        assert isinstance(device, NativeDevice)
        return _probe_device(address, device, portals)
    except HeadraceError as error:
        return TargetProbe(uri=address.uri, error=str(error), refused=False, portals=portals)
    finally:
        device.close()


def with_patience(address: NvmeTcpAddress, **options: Any) -> NvmeTcpAddress:
    """The same, which waits no longer than a look may take; and with other options."""
    given = address.options
    waits = {
        name: min(getattr(given, name), PATIENCE_S) for name in ("connect_timeout_s", "io_timeout_s", "loss_timeout_s")
    }
    return replace(address, options=replace(given, **waits, **options))


def _probe_device(address: NvmeTcpAddress, device: NativeDevice, portals: tuple[PortalProbe, ...]) -> TargetProbe:
    said: dict[str, Any] = device.describe()
    offers = fence.kind_of(device)
    if offers == fence.UNTIL_RESTART and device.reservations.capabilities.persist:
        offers = fence.PERSISTENT
    now = None
    with suppress(HeadraceError):
        now = fence.in_force(device)
    accepted, why = _session(device)
    latency, failure = measure_latency(device)
    advertised, unusable = _advertised(address, portals)
    return TargetProbe(
        uri=address.uri,
        error=None,
        refused=False,
        portals=portals,
        model=str(said.get("model") or "") or None,
        size_bytes=device.size_bytes,
        block_bytes=device.block_bytes,
        volatile_cache=device.volatile_cache,
        hostnqn=device.hostnqn,
        fence=offers,
        fence_now=now,
        session_accepted=accepted,
        session_error=why,
        latency=latency,
        read_error=failure,
        paths=tuple(device.paths()),
        connections=tuple(own_connections({(one.address, _port(one.portal)) for one in portals})),
        advertised=advertised,
        unusable=unusable,
    )


def _advertised(
    address: NvmeTcpAddress, portals: Sequence[PortalProbe]
) -> tuple[tuple[PortalProbe, ...], tuple[str, ...]]:
    """What the discovery log beside the I/O says of this subsystem; a target without one says nothing."""
    answering = list(dict.fromkeys(one.portal for one in portals if one.error is None))
    if not answering:
        return (), ()
    options = address.options
    try:
        found = discover(
            [parse_endpoint(one, default_port=NVME_TCP_PORT) for one in answering[:1]], referrals=False,
            host_traddr=options.host_traddr, host_iface=options.host_iface, connect_timeout_s=PATIENCE_S,
        )  # fmt: skip
    except HeadraceError:
        return (), ()
    known = {(one.address, _port(one.portal)) for one in portals}
    mine = [one for one in found.records if one.subnqn == address.subsysnqn and one.trtype == "tcp"]
    unusable = [f"{one.portal}: {one.problem}" for one in mine if one.problem is not None]
    others = dict.fromkeys(
        Portal(one.traddr, int(one.trsvcid)) for one in mine
        if one.problem is None and one.trsvcid.isdecimal() and (one.traddr, int(one.trsvcid)) not in known
    )  # fmt: skip
    with ThreadPoolExecutor(max_workers=_ADVERTISED_MAX) as pool:
        probes = pool.map(lambda one: _probe_portal(one, mtu=False), list(others)[:_ADVERTISED_MAX])
        return tuple(one for each in probes for one in each), tuple(unusable[:_ADVERTISED_MAX])


def _session(device: NativeDevice) -> tuple[bool | None, str | None]:
    """As each writing session does: another identifier, the same name."""
    try:
        device.as_host(uuid4(), wait=False).close()
    except HeadraceError as error:
        return False if _host_refused(error) else None, str(error)
    return True, None


def _host_refused(error: HeadraceError) -> bool:
    """The target does not let this host in; a wrong subsystem or namespace, or a port of something else, is refused,
    too, and cured otherwise."""
    said = f"{error.expected} {error.found}"
    return isinstance(error, ConnectRefused) and any(one in said for one in ("HOSTNQN", "HOSTID", "Invalid Host"))


def measure_latency(device: NativeDevice) -> tuple[Latency | None, str | None]:
    """Reads at random places, one at a time. What is found there is not looked at."""
    size = max(_READ_BYTES, device.block_bytes)
    places = device.size_bytes // size
    if places == 0:
        return None, "smaller than one read"
    buffer = np.empty(size, np.uint8)
    chance = random.Random(0)
    taken: list[float] = []
    end = time.monotonic() + READ_SECONDS
    failure = None
    try:
        while len(taken) < READS and time.monotonic() < end:
            begun = time.perf_counter()
            device.read_into(chance.randrange(places) * size, buffer)
            taken.append(time.perf_counter() - begun)
    except HeadraceError as error:
        failure = str(error)
    return latency_of(taken), failure


def latency_of(taken: Sequence[float]) -> Latency | None:
    if not taken:
        return None
    p50, p99 = np.percentile(taken, (50, 99))
    return Latency(count=len(taken), p50_s=float(p50), p99_s=float(p99), max_s=max(taken))


def _probe_portal(portal: Portal, *, mtu: bool = True) -> list[PortalProbe]:
    name = str(portal)
    try:
        infos = socket.getaddrinfo(portal.host, portal.port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        return [PortalProbe(portal=name, address="", error=f"no such name: {error}", connect_s=None, mtu=None)]
    found: dict[str, PortalProbe] = {}
    for family, _, _, _, where in infos[:4]:
        address = str(where[0])
        if family in (socket.AF_INET, socket.AF_INET6) and address not in found:
            found[address] = _probe_address(name, family, address, where, mtu=mtu)
    return list(found.values())


def _probe_address(name: str, family: int, address: str, where: Any, *, mtu: bool) -> PortalProbe:
    begun = time.perf_counter()
    try:
        with socket.socket(family, socket.SOCK_STREAM) as connection:
            connection.settimeout(PATIENCE_S)
            connection.connect(where)
            took = time.perf_counter() - begun
            state = state_of(connection)
    except OSError as error:
        return PortalProbe(portal=name, address=address, error=error.strerror or str(error), connect_s=None, mtu=None)
    # The handshake's own round trip, where the kernel has measured it.
    return PortalProbe(
        portal=name, address=address, error=None, connect_s=state.rtt_s if state and state.rtt_s else took,
        mtu=path_mtu(address, int(where[1])) if mtu else None,
    )  # fmt: skip


def _port(portal: str) -> int:
    return int(portal.rpartition(":")[2])
