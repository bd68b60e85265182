"""Batches under way: one call starts any number of reads or writes, one wait ends them.

The columns of a batch are in `headrace.device.batch`. Devices of the native engine move their bytes without Python and
without the GIL; if any device of a call is of another kind (the fakes of `headrace.testing`), the whole call runs on
the plain reference engine, `headrace.device.reference`, before it returns.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np

from headrace import _native
from headrace.device import reference
from headrace.device.batch import Batch
from headrace.device.check import check_batch, check_checksums
from headrace.device.native import NativeDevice, buffer_error
from headrace.device.protocol import U32, BlockDevice, Buffer
from headrace.errors import DeviceTimeout, HeadraceError, UsageError


class Transfer:
    """A batch under way.

    Until it is done the buffers are the devices': do not look at what is read into, do not change what is written from.
    Dropping a transfer cancels nothing; its buffers stay alive until the last device is done with them.
    """

    def __init__(self, native: _native.Transfer | None, error: HeadraceError | None = None) -> None:
        self._native = native
        self._error = error

    def done(self) -> bool:
        """All segments ended, well or not; never blocks."""
        return self._native is None or self._native.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end; the first error of the batch is raised, once no segment is under way any more.

        `timeout_s`: seconds; `DeviceTimeout` when they pass, and the batch goes on. `None`: the devices' own deadlines
        decide. The GIL is released; Ctrl-C is heard within 0.1 s (the batch goes on).
        """
        if self._native is not None and not self._native.wait(timeout_s):
            raise DeviceTimeout("the transfer did not end in time", expected=f"{timeout_s:g} s" if timeout_s else None)
        if self._error is not None:
            raise self._error

    def waiting(self) -> tuple[int, int, int] | None:
        """Member, offset and length there of a request that it waits for; None where it has none under way."""
        found = None if self._native is None else self._native.waiting()
        return None if found is None else found[:3]

    @property
    def failed_segment(self) -> int | None:
        """Row of the batch in which the first error was; `None` where there is none, or it is not known."""
        return None if self._native is None else self._native.failed_segment()

    @property
    def failed_range(self) -> tuple[int, int, int, int, int] | None:
        """Of `submit_ranges`: the range in which the first error was, where in it and how many of its bytes, member and
        offset there; `None` where there is none, or it was in no range but in a page of checksums."""
        return None if self._native is None else self._native.failed_range()


def submit_read(
    devices: Sequence[BlockDevice], batch: Batch, buffers: Sequence[Buffer], checksums: U32 | None = None
) -> Transfer:
    """Start to read every segment of `batch` into `buffers`.

    `checksums`: uint32[batch.checksum_count]; with it every block of every segment is read and verified, and
    `ChecksumMismatch` names segment, member, offset and block. Without it only wanted blocks are read.

    `UsageError`, before anything moves: a segment that leaves its device or buffer, an offset that is not a multiple of
    the device's `block_bytes`, a buffer that cannot be written to, checksums of the wrong length.
    """
    check_checksums(batch, checksums, writable=False)
    handles = native_handles(devices)
    if handles is None:
        check_batch(devices, batch, buffers, checksums, write=False)
        return _now(lambda: reference.read(devices, batch, buffers, checksums))
    try:
        native = _native.submit_read(
            handles, batch.member, batch.offset, batch.length, batch.skip, batch.take, batch.buffer,
            batch.buffer_offset, batch.birth, batch.first_block, batch.checksum_block_bytes, batch.volume_id, buffers,
            checksums,
        )  # fmt: skip
    except (BufferError, TypeError, ValueError) as error:
        raise buffer_error(error, writable=True) from error
    return Transfer(native)


def submit_write(
    devices: Sequence[BlockDevice], batch: Batch, buffers: Sequence[Buffer], checksums: U32 | None = None
) -> Transfer:
    """Start to write every segment of `batch` from `buffers`; `skip` and `take` mean nothing here.

    The rest of a segment's last logical block is filled with zeros. `checksums`: writable uint32[batch.checksum_count],
    it receives the checksum of every block and is complete when the transfer is. A write is durable after a flush
    (`ARCHITECTURE.md`, "When is it durable"); this call does not flush.

    `UsageError` as for `submit_read`, and where a member is open for reading only.
    """
    check_checksums(batch, checksums, writable=True)
    for index, device in enumerate(devices):
        if isinstance(device, NativeDevice):
            device.check_fence()
        if device.read_only and bool(np.any(batch.member == index)):
            where = f"member {index}, {device.uri}"
            try:
                if isinstance(device, NativeDevice):
                    device.check_writable()
            except UsageError as error:
                raise UsageError(error.what, where=where, next_step=error.next_step) from None
            raise UsageError("the device is open for reading only", where=where)
    handles = native_handles(devices)
    if handles is None:
        check_batch(devices, batch, buffers, checksums, write=True)
        return _now(lambda: reference.write(devices, batch, buffers, checksums))
    try:
        native = _native.submit_write(
            handles, batch.member, batch.offset, batch.length, batch.buffer, batch.buffer_offset,
            batch.birth, batch.first_block, batch.checksum_block_bytes, batch.volume_id, buffers, checksums,
        )  # fmt: skip
    except (BufferError, TypeError, ValueError) as error:
        raise buffer_error(error, writable=False) from error
    return Transfer(native)


def read_batch(
    devices: Sequence[BlockDevice], batch: Batch, buffers: Sequence[Buffer], checksums: U32 | None = None
) -> None:
    """`submit_read` and wait."""
    submit_read(devices, batch, buffers, checksums).wait()


def write_batch(
    devices: Sequence[BlockDevice], batch: Batch, buffers: Sequence[Buffer], checksums: U32 | None = None
) -> None:
    """`submit_write` and wait."""
    submit_write(devices, batch, buffers, checksums).wait()


def native_handles(devices: Sequence[BlockDevice]) -> list[_native.Device] | None:
    """The native handles; `None` where a device has none."""
    if not all(isinstance(device, NativeDevice) for device in devices):
        return None
    return [device.handle for device in devices if isinstance(device, NativeDevice)]


def _now(move: Callable[[], None]) -> Transfer:
    """Run on the reference engine; what went wrong is raised by the wait, as with the native one."""
    try:
        move()
    except HeadraceError as error:
        return Transfer(None, error)
    return Transfer(None)
