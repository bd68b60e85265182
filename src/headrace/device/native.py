"""Devices whose bytes the native engine moves."""

from __future__ import annotations

import json
import os
import threading
from pathlib import Path
from typing import Any

from headrace import _native
from headrace.device.address import FileAddress, MemoryAddress, NvmeTcpAddress, parse_address
from headrace.device.protocol import Buffer
from headrace.errors import DeviceClosed, DeviceError, UsageError
from headrace.settings import HostIdentity, host_identity

#: How long `close` lets queued requests end.
CLOSE_TIMEOUT_S = 5.0


class NativeDevice:
    """A `BlockDevice` of the native engine; made by `open_device`.

    It pickles as its address, and opens itself again when it is first used after that or after a fork: connections and
    threads belong to one process. A `mem:` device can do neither, as its bytes are this process's.
    """

    def __init__(
        self,
        address: NvmeTcpAddress | FileAddress | MemoryAddress,
        *,
        read_only: bool = False,
        identity: HostIdentity | None = None,
    ) -> None:
        """`identity`: `None` means that of each process that opens the device."""
        self._address = address
        self._identity = identity
        self._opened_read_only = read_only
        self._closed = False
        self._lock = threading.Lock()
        self._handle: _native.Device | None = _open(address, read_only, identity)
        self._pid = os.getpid()

    # ---- the native side ----

    @property
    def handle(self) -> _native.Device:
        """The open native device of this process; raises `DeviceClosed` after `close`."""
        handle = self._handle
        if handle is not None and self._pid == os.getpid() and not self._closed:
            return handle
        return self._reopen()

    def _reopen(self) -> _native.Device:
        if self._pid != os.getpid():
            # The lock may have been held by a thread that the fork did not copy.
            self._lock = threading.Lock()
            self._handle = None
            self._pid = os.getpid()
        with self._lock:
            if self._closed:
                raise DeviceClosed("the device is closed", where=self.uri)
            if self._handle is None:
                if isinstance(self._address, MemoryAddress):
                    raise DeviceClosed("a mem: device belongs to the process that opened it", where=self.uri)
                self._handle = _open(self._address, self._opened_read_only, self._identity)
            return self._handle

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._address, MemoryAddress):
            raise UsageError(
                "a mem: device cannot leave its process", where=self.uri, next_step="use file: or nvme+tcp:"
            )
        return (_later, (self.uri, self._opened_read_only, self._identity))

    # ---- BlockDevice ----

    @property
    def uri(self) -> str:
        return self._address.uri

    @property
    def size_bytes(self) -> int:
        return self.handle.size_bytes

    @property
    def block_bytes(self) -> int:
        return self.handle.block_bytes

    @property
    def volatile_cache(self) -> bool:
        return self.handle.volatile_cache

    @property
    def read_only(self) -> bool:
        return self._opened_read_only or self.handle.read_only

    def loss_count(self) -> int:
        return self.handle.loss_count()

    def read_into(self, offset: int, buffer: Buffer) -> None:
        _check_offset(offset)
        try:
            self.handle.read_into(offset, buffer)
        except (BufferError, TypeError, ValueError) as error:
            raise buffer_error(error, writable=True) from error

    def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
        _check_offset(offset)
        self.check_writable()
        try:
            self.handle.write(offset, data, fua)
        except (BufferError, TypeError, ValueError) as error:
            raise buffer_error(error, writable=False) from error

    def flush(self) -> None:
        self.handle.flush()

    def deallocate(self, offset: int, length: int) -> None:
        _check_offset(offset)
        _check_offset(length)
        self.check_writable()
        self.handle.deallocate(offset, length)

    def close(self) -> None:
        """Let queued requests end (at most 5 s), then fail the rest with `DeviceClosed`. Again: does nothing."""
        if self._pid != os.getpid():
            self._lock = threading.Lock()
            self._handle = None
            self._pid = os.getpid()
        with self._lock:
            self._closed = True
            handle, self._handle = self._handle, None
        if handle is not None:
            handle.close(CLOSE_TIMEOUT_S)

    def describe(self) -> dict[str, Any]:
        handle = self.handle
        return {
            "uri": self.uri,
            "size_bytes": handle.size_bytes,
            "block_bytes": handle.block_bytes,
            "volatile_cache": handle.volatile_cache,
            "read_only": self.read_only,
            **json.loads(handle.describe()),
        }

    # ---- the rest ----

    def check_writable(self) -> None:
        """Raise `UsageError` where this device may not be written to."""
        if self.read_only:
            raise UsageError(
                "the device is open for reading only", where=self.uri, next_step="open it without read_only"
            )

    def __enter__(self) -> NativeDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{'closed ' if self._closed else ''}device {self.uri}>"


def _later(uri: str, read_only: bool, identity: HostIdentity | None) -> NativeDevice:
    """A device that opens itself when first used: what a pickle holds."""
    device = NativeDevice.__new__(NativeDevice)
    device._address = parse_address(uri)
    device._opened_read_only = read_only
    device._identity = identity
    device._closed = False
    device._lock = threading.Lock()
    device._handle = None
    device._pid = os.getpid()
    return device


def _open(
    address: NvmeTcpAddress | FileAddress | MemoryAddress, read_only: bool, identity: HostIdentity | None
) -> _native.Device:
    if isinstance(address, MemoryAddress):
        if read_only:
            raise UsageError(
                "a new mem: device holds nothing to read", where=address.uri, next_step="open it without read_only"
            )
        return _native.open_memory(address.size_bytes, block_bytes=address.block_bytes)
    if isinstance(address, FileAddress):
        return _open_file(address, read_only)
    identity = identity or host_identity()
    options = address.options
    return _native.open_nvme_tcp(
        list(address.portals),
        address.subsysnqn,
        options.nsid,
        uuid=options.uuid.bytes if options.uuid else None,
        nguid=bytes.fromhex(options.nguid) if options.nguid else None,
        hostnqn=identity.hostnqn,
        hostid=identity.hostid.bytes,
        header_digest=options.header_digest,
        data_digest=options.data_digest,
        queues=options.queues,
        depth=options.depth,
        policy=options.policy,
        host_traddr=options.host_traddr,
        host_iface=options.host_iface,
        tos=options.tos,
        hpda=options.hpda,
        maxr2t=options.maxr2t,
        poll_us=options.poll_us,
        keep_alive_s=options.keep_alive_s,
        connect_timeout_s=options.connect_timeout_s,
        io_timeout_s=options.io_timeout_s,
        loss_timeout_s=options.loss_timeout_s,
    )


def _open_file(address: FileAddress, read_only: bool) -> _native.Device:
    create = address.create_bytes
    if create is not None:
        if read_only:
            raise UsageError("create and read_only exclude each other", where=address.path)
        if not Path(address.path).exists():
            try:
                _native.create_file(address.path, create)
            except DeviceError:
                # Somebody else may have made it meanwhile; if it has the right size, that is what was asked for.
                if not Path(address.path).exists():
                    raise
    device = _native.open_file(
        address.path, block_bytes=address.block_bytes, read_only=read_only, io_engine=address.engine
    )
    if create is not None and device.size_bytes != create:
        found = device.size_bytes
        device.close()
        raise UsageError(
            "the file exists with another size", where=address.path, expected=f"{create} bytes", found=f"{found} bytes"
        )
    return device


def _check_offset(offset: int) -> None:
    if not 0 <= offset < 1 << 64:
        raise UsageError("not an offset or length", expected="0 to 2^64 - 1", found=str(offset))


def buffer_error(error: Exception, *, writable: bool) -> UsageError:
    """What a refused buffer means to the caller."""
    kind = "writable, C-contiguous memory" if writable else "C-contiguous memory"
    return UsageError("this object cannot be used as a buffer", expected=kind, found=str(error))
