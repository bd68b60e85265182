"""Ask a discovery controller which subsystems there are (NVMe over Fabrics 1.1, section 5: the discovery log page)."""

from __future__ import annotations

import json
from dataclasses import dataclass

from headrace import _native
from headrace.errors import ProtocolError, UsageError
from headrace.settings import host_identity

#: IANA's port of NVMe/TCP discovery controllers; targets usually answer on their I/O port too.
DISCOVERY_PORT = 8009


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

    @property
    def uri(self) -> str | None:
        """The address of namespace 1 there; `None` where headrace cannot connect (not NVMe/TCP, or not a subsystem)."""
        if self.trtype != "tcp" or self.subtype != "nvm":
            return None
        host = f"[{self.traddr}]" if ":" in self.traddr else self.traddr
        return f"nvme+tcp://{host}:{self.trsvcid}/{self.subnqn}?nsid=1"


@dataclass(frozen=True, kw_only=True)
class DiscoveryLog:
    """What the controller knows, at one moment."""

    #: Moves with every change of the log.
    generation: int
    records: tuple[DiscoveryRecord, ...]


def discover(host: str, port: int = DISCOVERY_PORT, *, connect_timeout_s: float = 10.0) -> DiscoveryLog:
    """The discovery log page of the controller at `host`:`port`, within `connect_timeout_s` seconds all in all.

    Raises `ConnectRefused`, `DeviceTimeout`, `ProtocolError`, `CommandFailed`.
    """
    if not 0.1 <= connect_timeout_s <= 3600:
        raise UsageError("connect_timeout_s is out of range", expected="0.1 to 3600", found=f"{connect_timeout_s:g}")
    if not 1 <= port <= 65535:
        raise UsageError("port is out of range", expected="1 to 65535", found=str(port))
    identity = host_identity()
    text = _native.discover(
        host, port, hostnqn=identity.hostnqn, hostid=identity.hostid.bytes, connect_timeout_s=connect_timeout_s
    )
    page = json.loads(text)
    names = DiscoveryRecord.__dataclass_fields__
    try:
        records = tuple(DiscoveryRecord(**{name: str(record[name]) for name in names}) for record in page["records"])
        return DiscoveryLog(generation=int(page["generation"]), records=records)
    except (KeyError, TypeError) as error:
        raise ProtocolError("the discovery log has another shape", where=f"{host}:{port}", found=repr(error)) from error
