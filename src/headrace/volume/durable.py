"""When is it durable: the one place that decides it for data.

A write that was acknowledged but not flushed is lost when the controller that completed it is lost, and a Flush that
succeeds afterwards, on a new association, proves nothing. So:

    count the device's losses -> write -> flush -> count again;   moved: write the same bytes again

through the same device object, which is the association's owner, with the bytes kept until the end. Structures of the
log are written with FUA instead: acknowledged means durable, and there is nothing to count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence

from headrace.device import BlockDevice
from headrace.device.protocol import Buffer
from headrace.errors import DeviceError

#: Each attempt outlives at least one loss of a controller; so many in a row mean that it cannot be used.
ATTEMPTS = 8


def lost_since(devices: Sequence[BlockDevice], before: Sequence[int]) -> bool:
    """The loss rule: may a write since `before` be gone although it and the flush behind it succeeded?"""
    return [device.loss_count() for device in devices] != list(before)


def flush_all(devices: Sequence[BlockDevice]) -> None:
    """Flush all at once, and raise the first error when every flush has ended."""
    errors: list[BaseException] = []

    def flush(device: BlockDevice) -> None:
        try:
            device.flush()
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=flush, args=(device,), name="headrace-flush") for device in devices[1:]]
    for thread in threads:
        thread.start()
    for device in devices[:1]:
        flush(device)
    for thread in threads:
        thread.join()
    if errors:
        raise errors[0]


def write_durably(devices: Sequence[BlockDevice], write: Callable[[], None]) -> None:
    """Run `write`, which writes the same bytes to the same places of `devices` whenever it is called, until they are
    durable.
    """
    for _ in range(ATTEMPTS):
        before = [device.loss_count() for device in devices]
        write()
        flush_all(devices)
        if not lost_since(devices, before):
            return
    raise DeviceError(
        "the device lost its connection during every attempt to write",
        where=", ".join(device.uri for device in devices),
        expected=f"one of {ATTEMPTS} writes and the flush behind it on one association",
    )


def write_through(device: BlockDevice, offset: int, data: Buffer) -> None:
    """A structure of the log or a superblock: durable when this returns."""
    device.write(offset, data, fua=True)
