"""From an address to a device."""

from __future__ import annotations

from headrace.device.address import parse_address
from headrace.device.native import NativeDevice


def open_device(uri: str, *, read_only: bool = False) -> NativeDevice:
    """Open the device at `uri` (forms and options: `headrace.device.address`).

    NVMe/TCP connects at once, with every handshake, within `connect_timeout`; afterwards it reconnects by itself.
    `read_only`: writes raise `UsageError` here; a file is opened for reading.

    Raises `UsageError` (the address), `ConnectRefused`, `DeviceTimeout`, `ProtocolError`, `CommandFailed`.
    """
    return NativeDevice(parse_address(uri), read_only=read_only)
