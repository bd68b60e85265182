"""A heartbeat that needs no GIL: blocks made beforehand, one of which is written each interval."""

from __future__ import annotations

from collections.abc import Sequence

from headrace import _native
from headrace.device.native import NativeDevice
from headrace.device.protocol import BlockDevice

Beat = _native.Beat


def start_beat(
    places: Sequence[tuple[BlockDevice, int]], first: bytes, *, interval_s: float, confirm: bool
) -> Beat | None:
    """A native thread that writes what it is fed (`Beat.feed`) to all places, one after another; `stop` it, or drop it.

    The places hold `first` now. `confirm`: look before each beat that they hold what was written last. None where a
    device is not the native engine's.
    """
    handles = []
    for device, _ in places:
        if not isinstance(device, NativeDevice):
            return None
        handles.append(device.handle)
    return Beat(handles, [offset for _, offset in places], first, interval_s=interval_s, confirm=confirm)
