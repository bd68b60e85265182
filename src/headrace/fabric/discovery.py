"""Ask discovery controllers which subsystems there are (Base Specification 5.1.12.3.1: the discovery log page)."""

from __future__ import annotations

import json
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from urllib.parse import quote

from headrace import _native
from headrace.errors import ProtocolError, UsageError
from headrace.settings import host_identity

#: IANA's port of NVMe/TCP discovery controllers; targets usually answer on their I/O port too.
DISCOVERY_PORT = 8009
#: Portals that one address may have (`headrace.device.address`).
_PORTALS_MAX = 16


@dataclass(frozen=True, kw_only=True)
class DiscoveryRecord:
    """One way to one subsystem."""

    #: "tcp", "rdma", "fc" or "loop".
    trtype: str
    #: "ipv4", "ipv6", "ib" or "fc".
    adrfam: str
    #: "nvm" (a subsystem with namespaces), "referral" (another discovery controller) or "discovery" (this one).
    subtype: str
    traddr: str
    #: The port, as text.
    trsvcid: str
    subnqn: str
    #: Why nobody can connect by this entry: a wildcard address, no port, TLS demanded. `None`: somebody can.
    problem: str | None = None
    #: HOST:PORT of the discovery controller that said so.
    controller: str = ""

    @property
    def portal(self) -> str:
        """`HOST:PORT`, brackets around an IPv6 address."""
        return f"[{self.traddr}]:{self.trsvcid}" if ":" in self.traddr else f"{self.traddr}:{self.trsvcid}"

    @property
    def uri(self) -> str | None:
        """The address of namespace 1 there; `None` where headrace cannot connect (not NVMe/TCP, or not a subsystem)."""
        if self.trtype != "tcp" or self.subtype != "nvm" or self.problem is not None:
            return None
        return _uri([self.portal], self.subnqn)


@dataclass(frozen=True, kw_only=True)
class DiscoveryController:
    """One that answered."""

    address: str
    #: Moves with every change of its log.
    generation: int
    #: The controller that referred to it; `None`: the caller named it.
    via: str | None


@dataclass(frozen=True, kw_only=True)
class DiscoveryFailure:
    """A controller that was not asked, or did not answer as it should."""

    address: str
    via: str | None
    error: str


@dataclass(frozen=True, kw_only=True)
class Discovery:
    """What discovery controllers know, at one moment."""

    controllers: tuple[DiscoveryController, ...]
    #: Each way once, even where several controllers know it.
    records: tuple[DiscoveryRecord, ...]
    #: Some did not answer, although others did.
    failures: tuple[DiscoveryFailure, ...]

    def subsystems(self) -> dict[str, str]:
        """NQN -> the address of namespace 1 by every way there is, for `headrace.device.open_device`."""
        ways: dict[str, list[str]] = {}
        for record in self.records:
            if record.uri is not None:
                ways.setdefault(record.subnqn, []).append(record.portal)
        return {nqn: _uri(portals[:_PORTALS_MAX], nqn) for nqn, portals in ways.items()}


def _uri(portals: list[str], nqn: str) -> str:
    return f"nvme+tcp://{','.join(portals)}/{quote(nqn, safe=':._-')}?nsid=1"


def discover(
    portals: Iterable[tuple[str, int]],
    *,
    referrals: bool = True,
    host_traddr: str | None = None,
    host_iface: str | None = None,
    connect_timeout_s: float = 10.0,
) -> Discovery:
    """The discovery log pages of the controllers at `portals` ((host, port) each), and of those they refer to.

    Each is asked once, within `connect_timeout_s` seconds; referrals are followed 8 deep, to at most 64 controllers and
    for at most six times that time. `host_traddr`, `host_iface`: from where connections come.

    Raises `ConnectRefused`, `DeviceTimeout`, `ProtocolError`, `CommandFailed` where none of `portals` answers.
    """
    places = list(portals)
    if not 0.1 <= connect_timeout_s <= 3600:
        raise UsageError("connect_timeout_s is out of range", expected="0.1 to 3600", found=f"{connect_timeout_s:g}")
    for _, port in places:
        if not 1 <= port <= 65535:
            raise UsageError("port is out of range", expected="1 to 65535", found=str(port))
    identity = host_identity()
    text = _native.discover(
        places,
        referrals=referrals,
        hostnqn=identity.hostnqn,
        hostid=identity.hostid.bytes,
        host_traddr=host_traddr,
        host_iface=host_iface,
        connect_timeout_s=connect_timeout_s,
    )
    found: dict[str, Any] = json.loads(text)
    names = DiscoveryRecord.__dataclass_fields__
    try:
        return Discovery(
            controllers=tuple(DiscoveryController(**controller) for controller in found["controllers"]),
            records=tuple(DiscoveryRecord(**{name: record[name] for name in names}) for record in found["records"]),
            failures=tuple(DiscoveryFailure(**failure) for failure in found["failures"]),
        )
    except (KeyError, TypeError) as error:
        raise ProtocolError("the discovery log has another shape", found=repr(error)) from error
