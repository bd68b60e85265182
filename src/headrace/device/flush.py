"""Several devices flushed at once."""

from __future__ import annotations

from collections.abc import Sequence

from headrace import _native
from headrace.device.native import NativeDevice
from headrace.device.protocol import BlockDevice


def flush_all(devices: Sequence[BlockDevice]) -> None:
    """Flush all of them, and raise the first error when every flush has ended; or what is no error, as Ctrl-C.

    Those of the native engine at once, and without a thread of Python's: none may be to be had, or may never come to
    life, where memory is short, and whoever commits must not wait for that. Others one after another.
    """
    errors: list[BaseException] = []
    native: list[NativeDevice] = []
    for device in devices:
        try:
            if isinstance(device, NativeDevice):
                device.check_fence()
                native.append(device)
            else:
                device.flush()
        except BaseException as error:
            errors.append(error)
    try:
        _native.flush([device.handle for device in native])
    except BaseException as error:
        errors.append(error)
    if errors:
        raise next((error for error in errors if not isinstance(error, Exception)), errors[0])
