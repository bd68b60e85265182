"""When is it durable: the one place that decides it for data.

A write that was acknowledged but not flushed is lost when the controller that completed it is lost, and a Flush that
succeeds afterwards, on a new association, proves nothing. So:

    count the device's losses -> write -> flush -> count again;   moved: write the same bytes again

through the same device object, which is the association's owner, with the bytes kept until the end. Many writes may
share the flush (`Unflushed`); then the bytes of all are kept until it has succeeded. Structures of the
log are written with FUA instead: acknowledged means durable, and there is nothing to count.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.device import BlockDevice, flush_all
from headrace.device.protocol import Buffer
from headrace.errors import DeviceError

#: Each attempt outlives at least one loss of a controller; so many in a row mean that it cannot be used.
ATTEMPTS = 8


def lost_since(devices: Sequence[BlockDevice], before: Sequence[int]) -> bool:
    """The loss rule: may a write since `before` be gone although it and the flush behind it succeeded?"""
    return [device.loss_count() for device in devices] != list(before)


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
    raise _gave_up(devices)


class Writable(Protocol):
    """Space that is being written: `begin` before a command goes there, `end` when those have been answered. A `begin`
    without an `end` is a write of unknown fate, whatever comes after it."""

    def begin(self) -> None: ...

    def end(self) -> None: ...


@dataclass
class _Waiting:
    space: Writable
    devices: Sequence[BlockDevice]
    #: Losses of each device before the first write.
    before: list[int]
    write: Callable[[], None]
    kept_bytes: int


class Unflushed:
    """Writes that share one flush: each is kept, with its bytes, until a flush proves that none of it was lost.

    Thread-safe: what another thread writes while a flush runs waits for the next one.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._waiting: list[_Waiting] = []
        self._flushing = threading.Lock()
        #: Of a flush, which may have been for any write that had begun by then.
        self._failed: BaseException | None = None

    @property
    def kept_bytes(self) -> int:
        with self._lock:
            return sum(waiting.kept_bytes for waiting in self._waiting)

    def write(
        self, space: Writable, devices: Sequence[BlockDevice], write: Callable[[], None], *, kept_bytes: int
    ) -> None:
        """Run `write`, which writes the same bytes to the same places whenever it is called, also from `flush`."""
        waiting = _Waiting(space, devices, [device.loss_count() for device in devices], write, kept_bytes)
        space.begin()
        write()
        space.end()
        with self._lock:
            self._waiting.append(waiting)

    def flush(self) -> None:
        """Make durable what was written before this call; what a lost association may have taken along is written
        again. Where it fails, nothing of it is known to be durable, and no later flush makes up for it.
        """
        # Whoever comes while another thread flushes waits for that: it may have taken the caller's writes along.
        with self._flushing:
            if self._failed is not None:
                raise DeviceError(
                    "an earlier flush of these writes failed",
                    found=str(self._failed) or type(self._failed).__name__,
                    next_step="abort, and write all of it again",
                ) from self._failed
            with self._lock:
                left, self._waiting = self._waiting, []
            try:
                self._flush(left)
            except BaseException as error:
                self._failed = error
                for waiting in left:
                    waiting.space.begin()
                raise

    def _flush(self, left: list[_Waiting]) -> None:
        """Takes out of `left` what is durable."""
        for _ in range(ATTEMPTS):
            if not left:
                return
            flush_all(list({id(device): device for waiting in left for device in waiting.devices}.values()))
            left[:] = [waiting for waiting in left if lost_since(waiting.devices, waiting.before)]
            for waiting in left:
                waiting.before = [device.loss_count() for device in waiting.devices]
                waiting.space.begin()
                waiting.write()
                waiting.space.end()
        if left:
            raise _gave_up([device for waiting in left for device in waiting.devices])


def _gave_up(devices: Sequence[BlockDevice]) -> DeviceError:
    return DeviceError(
        "the device lost its connection during every attempt to write",
        where=", ".join(sorted({device.uri for device in devices})),
        expected=f"one of {ATTEMPTS} writes and the flush behind it on one association",
    )


def write_through(device: BlockDevice, offset: int, data: Buffer) -> None:
    """A structure of the log or a superblock: durable when this returns."""
    device.write(offset, data, fua=True)
