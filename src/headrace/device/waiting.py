"""What a read that does not end waits for, in words: device, block, path."""

from __future__ import annotations

from contextlib import suppress

from headrace.device.native import NativeDevice
from headrace.device.paths import PathInfo
from headrace.device.protocol import BlockDevice
from headrace.errors import HeadraceError


def describe_wait(device: BlockDevice, offset: int, length: int) -> str:
    """`URI, LBA 2048 to 2055, sent to HOST:PORT 1.2 s ago`: of a read of these bytes that is under way. It asks nothing
    of the target, and never raises for the state that the device is in."""
    text = device.uri
    with suppress(HeadraceError):
        block = device.block_bytes
        text += f", LBA {offset // block} to {max(offset, offset + length - 1) // block}"
        text += _by_which_path(device, offset, length)
    return text


def troubled_paths(device: BlockDevice) -> list[str]:
    """Paths that are slow beside others, or that cannot be used, and why."""
    said = []
    with suppress(HeadraceError):
        for path in paths_of(device):
            if not path.usable:
                said.append(f"{path.portal} is {path.state}" + (f" ({path.why})" if path.why else ""))
            elif path.slow:
                said.append(f"{path.portal} is slow")
    return said


def paths_of(device: BlockDevice) -> list[PathInfo]:
    """None where it is no `nvme+tcp:` device."""
    return device.paths() if isinstance(device, NativeDevice) and device.has_paths else []


def _by_which_path(device: BlockDevice, offset: int, length: int) -> str:
    if not isinstance(device, NativeDevice):
        return ""
    commands = [each for each in device.under_way(offset, max(1, length)) if each.reads]
    sent = next((each for each in commands if each.path), None)
    if sent is not None:
        times = f", for the {sent.sent}th time" if sent.sent > 1 else ""
        return f", sent to {sent.path} {sent.age_s:.1f} s ago{times}"
    return ", waiting for a path" if commands else ""
