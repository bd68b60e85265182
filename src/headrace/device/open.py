"""From an address to a device."""

from __future__ import annotations

import uuid
from collections.abc import Sequence

from headrace.device.address import parse_address
from headrace.device.native import NativeDevice
from headrace.device.paths import TrafficClass
from headrace.device.protocol import BlockDevice
from headrace.settings import HostIdentity, host_identity


def open_device(
    uri: str, *, read_only: bool = False, hostnqn: str | None = None, hostid: uuid.UUID | None = None
) -> NativeDevice:
    """Open the device at `uri` (forms and options: `headrace.device.address`).

    NVMe/TCP connects at once, with every handshake, within `connect_timeout`; afterwards it reconnects by itself.
    `read_only`: writes raise `UsageError` here; a file is opened for reading.
    `hostnqn`, `hostid`: who this host is for the target, in place of `headrace.settings.host_identity()`; each may be
    given alone. A device keeps them when it is pickled. They mean nothing to `file:` and `mem:`. A target takes one
    `hostnqn` with several `hostid`, each for itself (a reservation is held by a `hostid`); the other way round many
    targets refuse.

    Raises `UsageError` (the address), `ConnectRefused`, `DeviceTimeout`, `ProtocolError`, `CommandFailed`.
    """
    identity = None
    if hostnqn is not None or hostid is not None:
        site = host_identity()
        identity = HostIdentity(
            hostnqn=site.hostnqn if hostnqn is None else hostnqn, hostid=site.hostid if hostid is None else hostid
        )
    return NativeDevice(parse_address(uri), read_only=read_only, identity=identity)


def lanes(devices: Sequence[BlockDevice], name: TrafficClass) -> list[BlockDevice]:
    """`NativeDevice.lane` of each; a device that knows of no classes of traffic is its own lane."""
    return [device.lane(name) if isinstance(device, NativeDevice) else device for device in devices]
