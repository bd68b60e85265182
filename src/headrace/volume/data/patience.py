"""How long this thread waits for what it looks up in catalogue and log.

Most look-ups are answered out of memory. One that is not reads from a device, and waits as long as that may take,
which for a target that stands still is minutes. Who has promised an answer by then says so around whatever it does:

    by(time.monotonic() + 5.0, volume.submit_read, ...)     # DeviceTimeout: what it needs to know did not come
"""

from __future__ import annotations

import time
from collections.abc import Callable
from contextvars import ContextVar, copy_context
from functools import partial
from typing import ParamSpec, TypeVar

import numpy as np
import numpy.typing as npt

from headrace.device import Batch, BlockDevice, NativeDevice, describe_wait, submit_read
from headrace.errors import DeviceTimeout

#: By `time.monotonic`; None: as long as the devices wait.
_end: ContextVar[float | None] = ContextVar("headrace_look_up_until", default=None)

T = TypeVar("T")
P = ParamSpec("P")


def by(end_s: float, call: Callable[P, T], *args: P.args, **kwargs: P.kwargs) -> T:
    """Call it; what it looks up comes by then, or earlier where that was said around this."""
    # A context of its own is left however this ends, also where Ctrl-C comes on the way into it or out of it.
    return copy_context().run(_call, end_s, partial(call, *args, **kwargs))


def _call(end_s: float, call: Callable[[], T]) -> T:
    before = _end.get()
    _end.set(end_s if before is None else min(before, end_s))
    return call()


def left_s() -> float:
    """As a lock's `acquire` wants it: -1 without an end."""
    end_s = _end.get()
    return -1 if end_s is None else max(0.0, end_s - time.monotonic())


def read_into(device: BlockDevice, offset: int, buffer: npt.NDArray[np.uint8]) -> None:
    """`device.read_into`, as long as this thread waits. After a DeviceTimeout the buffer is the device's."""
    left = left_s()
    if left < 0 or not isinstance(device, NativeDevice):
        device.read_into(offset, buffer)
        return
    length = buffer.nbytes
    batch = Batch(
        member=np.zeros(1, np.uint32),
        offset=np.array([offset], np.uint64),
        length=np.array([length], np.uint64),
        buffer_offset=np.zeros(1, np.uint64),
    )
    transfer = submit_read([device], batch, [buffer])
    try:
        transfer.wait(left)
    except DeviceTimeout:
        if transfer.done():
            raise
        raise DeviceTimeout(
            "what is looked up in the volume did not come in time", where=describe_wait(device, offset, length)
        ) from None
