"""Devices whose bytes the native engine moves."""

from __future__ import annotations

import json
import os
import threading
import time
from contextlib import suppress
from copy import copy
from typing import Any, get_args
from uuid import UUID
from weakref import WeakValueDictionary

import numpy as np

from headrace import _native
from headrace.device.address import (
    Address,
    BlockAddress,
    MemoryAddress,
    NvmeTcpAddress,
    parse_address,
)
from headrace.device.events import EVENT, EventPath, EventRecord, Events, no_events
from headrace.device.kernel import about
from headrace.device.kernel_reservations import KernelReservations
from headrace.device.native_open import open_native
from headrace.device.paths import PathInfo, TrafficClass, UnderWay, UnsettledRange
from headrace.device.protocol import Buffer
from headrace.device.reservations import TIMEOUT_S, AdminResult, Reservations, ReservationType
from headrace.errors import (
    ConnectRefused,
    DeviceClosed,
    DeviceGone,
    DeviceTimeout,
    ReservationConflict,
    UsageError,
)
from headrace.settings import HostIdentity, host_identity

#: How long `close` lets queued requests end.
CLOSE_TIMEOUT_S = 5.0

#: How often another host is refused by a target that this device reaches before that is the answer; and the time
#: between two attempts. The death of a target may be noticed by one connection before the other.
_REFUSALS = 3
_RETRY_S = 0.2

#: Every device that this process has open, and some that are closed.
_devices: WeakValueDictionary[int, NativeDevice] = WeakValueDictionary()


def open_devices() -> list[NativeDevice]:
    """Those that are open in this process now; not its views (`lane`). For any thread."""
    found = (reference() for reference in _devices.valuerefs())
    return [device for device in found if device is not None and device.is_open]


class NativeDevice:
    """A `BlockDevice` of the native engine; made by `open_device`.

    It pickles as its address, and opens itself again when it is first used after that or after a fork: connections and
    threads belong to one process. A `mem:` device can do neither, as its bytes are this process's.
    """

    def __init__(
        self,
        address: Address,
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
        self._reservations: Reservations | None = None
        self._guard: tuple[int, ReservationType] | None = None
        self._fence: ReservationConflict | None = None
        self._handle: _native.Device | None = open_native(address, read_only, identity)
        self._pid = os.getpid()
        _devices[id(self)] = self

    # ---- the native side ----

    @property
    def is_open(self) -> bool:
        """In this process, without opening it."""
        return self._handle is not None and self._pid == os.getpid() and not self._closed

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
                handle = open_native(self._address, self._opened_read_only, self._identity)
                if self._guard is not None:
                    # Not passed: then it is fenced, which its writes will say; reads go on.
                    with suppress(ReservationConflict):
                        self._ask(handle, *self._guard)
                self._handle = handle
                _devices[id(self)] = self
            return self._handle

    def __reduce__(self) -> tuple[Any, ...]:
        if isinstance(self._address, MemoryAddress):
            raise UsageError(
                "a mem: device cannot leave its process", where=self.uri, next_step="use file: or nvme+tcp:"
            )
        return (_later, (self.uri, self._opened_read_only, self._identity, self._guard))

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
        self.check_fence()
        try:
            self.handle.write(offset, data, fua)
        except (BufferError, TypeError, ValueError) as error:
            raise buffer_error(error, writable=False) from error

    def flush(self) -> None:
        self.check_fence()
        self.handle.flush()

    def deallocate(self, offset: int, length: int) -> None:
        _check_offset(offset)
        _check_offset(length)
        self.check_writable()
        self.check_fence()
        self.handle.deallocate(offset, length)

    def events(self) -> Events:
        return self.event_record().events

    def event_record(self) -> EventRecord:
        """`events`, and what goes with them. Waits for no I/O; at most 2 s for the I/O thread, which never blocks."""
        found = _native.events(self.handle)
        if found is None:
            raise no_events(self.uri)
        data, recorded, lost, trouble = found
        return EventRecord(
            events=np.frombuffer(data, EVENT), recorded=recorded, lost=lost, paths=self.events_paths(), trouble=trouble
        )

    def events_paths(self) -> tuple[EventPath, ...]:
        """What `path` of an event counts."""
        address = self._address
        if not isinstance(address, NvmeTcpAddress):
            place = address.uri if isinstance(address, MemoryAddress) else str(address.path)
            return (EventPath(name=place, address=place, target=""),)
        return tuple(
            EventPath(name=path.portal, address=path.address, target=address.subsysnqn) for path in self.paths()
        )

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
        kernel: dict[str, Any] = {}
        if isinstance(self._address, BlockAddress):
            kept = self.reservations
            assert isinstance(kept, KernelReservations)
            kernel = {
                "kernel": about(self._address.path),
                "reservations": {"scope": kept.scope, "problem": kept.problem()},
                "guard": self._describe_guard(),
            }
        return {
            **kernel,
            "uri": self.uri,
            "size_bytes": handle.size_bytes,
            "block_bytes": handle.block_bytes,
            "volatile_cache": handle.volatile_cache,
            "read_only": self.read_only,
            **json.loads(handle.describe()),
        }

    # ---- other hosts ----

    def as_host(self, hostid: UUID, *, hostnqn: str | None = None, wait: bool = True) -> NativeDevice:
        """The same device, opened once more as another host: associations of its own, and reservations of its own.
        `hostnqn`: that of this device, unless given. A `mem:` device cannot be opened twice (UsageError).

        While this device has lost its target, this waits for it as I/O does, for `loss_timeout`: a job that lives on
        through a restart of its target must not fail because it joined a session meanwhile. Not without `wait`: then
        it is tried once."""
        if isinstance(self._address, MemoryAddress):
            raise UsageError("a mem: device cannot be opened twice", where=self.uri)
        identity = HostIdentity(hostnqn=hostnqn or self.hostnqn, hostid=hostid)
        if not isinstance(self._address, NvmeTcpAddress):
            return NativeDevice(self._address, identity=identity)
        deadline = time.monotonic() + (self._address.options.loss_timeout_s if wait else 0.0)
        refused = 0
        while True:
            try:
                return NativeDevice(self._address, identity=identity)
            except (ConnectRefused, DeviceTimeout, DeviceGone):
                # A target that is there for this device may still refuse another host, for good.
                refused += any(path.usable for path in self.paths())
                if refused == _REFUSALS or time.monotonic() >= deadline:
                    raise
            time.sleep(_RETRY_S)

    @property
    def hostnqn(self) -> str:
        """The name under which this device is opened."""
        return (self._identity or host_identity()).hostnqn

    # ---- paths ----

    def paths(self) -> list[PathInfo]:
        """How each path is, and why it is not used. `UsageError` here and below: this is no `nvme+tcp:` device."""
        return [PathInfo.from_native(said) for said in json.loads(_native.paths(self.handle))]

    def unsettled(self) -> list[UnsettledRange]:
        """Ranges whose fate is unknown: see `UnsettledRange`. At most 1024; beyond that, neighbours are merged.

        A block device of the kernel names none: its first write of unknown fate fails, and ends all writing there."""
        if isinstance(self._address, BlockAddress):
            return []
        return [
            UnsettledRange(offset=offset, length=length, path=path, generation=generation, age_s=age_s)
            for offset, length, path, generation, age_s in _native.unsettled(self.handle)
        ]

    @property
    def has_paths(self) -> bool:
        """An `nvme+tcp:` device."""
        return isinstance(self._address, NvmeTcpAddress)

    def under_way(self, offset: int = 0, length: int = 1 << 63) -> list[UnderWay]:
        """What is under way, or waits to be sent, to these bytes: at most 256, the oldest first. Of devices that keep
        no account of it, nothing."""
        _check_offset(offset)
        _check_offset(length)
        if not self.has_paths:
            return []
        return [
            UnderWay(path=path or "", reads=reads, offset=at, length=bytes_, age_s=age_s, sent=sent)
            for path, reads, at, bytes_, age_s, sent in _native.under_way(self.handle, offset, length)
        ]

    def settle(self, generation: int) -> int:
        """Forget ranges up to this generation: the caller knows that nothing of those associations is under way any
        more. The number of ranges that are left."""
        _check_offset(generation)
        return _native.settle(self.handle, generation)

    def reconnect(self) -> None:
        """Try at once every path that is refused, held back or waiting."""
        _native.reconnect(self.handle)

    def lane(self, name: TrafficClass) -> NativeDevice:
        """This device for one class of traffic: "feed" (what the device itself is), "checkpoint" or "metadata".

        Each has I/O queues of its own, connected when it is first used; `describe()["lanes"]` says where a target had
        too few. A view shares everything else with the device and ends with it; closing a view does nothing. A device
        that is no `nvme+tcp:` one is its own view.
        """
        if name not in get_args(TrafficClass):
            raise UsageError("no such class of traffic", expected="feed, checkpoint or metadata", found=repr(name))
        if not isinstance(self._address, NvmeTcpAddress):
            return self
        return _Lane(self, name)

    # ---- NVMe ----

    @property
    def reservations(self) -> Reservations:
        """Who may write to the namespace. For a block device of the kernel these are `KernelReservations`: the node's.
        `UsageError` by the verbs of a device that has none."""
        if self._reservations is None:
            if isinstance(self._address, BlockAddress):
                self._reservations = KernelReservations(self._address.path, lambda: self.uri)
            else:
                self._reservations = Reservations(lambda: self.handle, self.describe)
        return self._reservations

    def guard_writes(self, key: int, type: ReservationType, *, timeout_s: float = TIMEOUT_S) -> None:
        """From now on nothing is written before the target has shown, on each new association anew, that this host is
        registered with `key` and the reservation of this type is held by it (for the registrants-only types: under that
        key). Done on the I/O thread, whatever Python does.

        Waits until one path has shown it. `ReservationConflict`: it showed something else. Then, as after each later
        question that is answered so, the device is fenced: writes, flushes and deallocations fail with
        `ReservationConflict` at once, until `unguard_writes`; reads go on. Where no path answers the question for
        `loss_timeout`, they fail with `DeviceGone` until one does. `describe()["guard"]` tells the state.
        The guard goes with the device into other processes.

        A block device of the kernel is asked once, now: the kernel hides its associations. Later the target's refusal
        of a write fences it, and `check_guard` asks again, for whoever has a clock.
        """
        kind = ReservationType(type)
        self._guard = (key, kind)
        self._ask(self.handle, key, kind, timeout_s)

    def check_guard(self, *, timeout_s: float = TIMEOUT_S) -> None:
        """Of a block device of the kernel: does the reservation that the guard wants still hold? `ReservationConflict`,
        and the device is fenced, where it does not. Other devices ask by themselves: then this does nothing."""
        if self._guard is not None and isinstance(self._address, BlockAddress):
            self._ask(self.handle, *self._guard, timeout_s)

    def _ask(self, handle: _native.Device, key: int, kind: ReservationType, timeout_s: float = TIMEOUT_S) -> None:
        if not isinstance(self._address, BlockAddress):
            _native.guard_writes(handle, key=key, type=kind.value, timeout_s=timeout_s)
            return
        kept = self.reservations
        assert isinstance(kept, KernelReservations)
        try:
            kept.check_held(key, kind, timeout_s=timeout_s)
        except ReservationConflict as conflict:
            # Another one, without the frames of this call: they hold the open device.
            self._fence = copy(conflict)
            raise
        self._fence = None

    def check_fence(self) -> None:
        """Raise `ReservationConflict` where the guard of a block device was not passed."""
        if self._guard is not None:
            # In another process the device opens itself, and asks again, now.
            _ = self.handle
        if self._fence is not None:
            raise copy(self._fence)

    def _describe_guard(self) -> dict[str, Any]:
        if self._guard is None:
            return {"state": "off"}
        return {
            "state": "passed" if self._fence is None else "fenced",
            "key": f"{self._guard[0]:#018x}",
            "type": self._guard[1].name,
            "asked": "when it was set, and by check_guard",
            "fenced": "" if self._fence is None else str(self._fence),
        }

    def unguard_writes(self) -> None:
        """End the guard, and a fence with it: for who has made sure by other means."""
        self._guard = None
        self._fence = None
        if not isinstance(self._address, BlockAddress):
            _native.unguard_writes(self.handle)

    def admin(
        self,
        opcode: int,
        *,
        nsid: int = 0,
        cdw10: int = 0,
        cdw11: int = 0,
        cdw12: int = 0,
        cdw13: int = 0,
        cdw14: int = 0,
        cdw15: int = 0,
        data_out: bytes | None = None,
        read_bytes: int = 0,
        timeout_s: float = TIMEOUT_S,
    ) -> AdminResult:
        """Send one admin command as it is, once, and give back what the controller answered, an error status too.

        `data_out` goes with it, or `read_bytes` come back (multiples of 4, at most 1 MiB). `OutcomeUnknown`: it was
        sent, and its answer was lost. Commands of queues and associations are refused with `UsageError`.
        """
        if data_out is not None and read_bytes:
            raise UsageError("data_out and read_bytes exclude each other")
        words = (cdw10, cdw11, cdw12, cdw13, cdw14, cdw15)
        for name, value, most in [("opcode", opcode, 0xFF), ("nsid", nsid, 0xFFFFFFFF)] + [
            (f"cdw{10 + at}", word, 0xFFFFFFFF) for at, word in enumerate(words)
        ]:
            if not 0 <= value <= most:
                raise UsageError(f"not a value of {name}", expected=f"0 to {most:#x}", found=str(value))
        answer = _native.command(
            self.handle,
            admin=True,
            opcode=opcode,
            nsid=nsid,
            cdw=words,
            data_out=data_out,
            read_bytes=read_bytes,
            timeout_s=timeout_s,
        )
        return AdminResult(
            status_type=answer[0],
            status_code=answer[1],
            do_not_retry=answer[2],
            status=answer[3],
            dw0=answer[4],
            dw1=answer[5],
            data=answer[6],
        )

    # ---- the rest ----

    def check_writable(self) -> None:
        """Raise `UsageError` where this device may not be written to."""
        if self._opened_read_only or (self.read_only and not isinstance(self._address, (NvmeTcpAddress, BlockAddress))):
            raise UsageError(
                "the device is open for reading only", where=self.uri, next_step="open it without read_only"
            )
        if self.read_only and isinstance(self._address, BlockAddress):
            raise UsageError(
                "the kernel lets nobody write to this block device",
                where=self.uri,
                expected="one that is not read-only",
                next_step="see why: dmesg; blockdev --setrw makes it writable where the drive allows",
            )
        if self.read_only:
            host = self.describe().get("hostnqn", "HOSTNQN")
            raise UsageError(
                "the target lets this host only read",
                where=self.uri,
                expected="a namespace that is not write protected",
                next_step=f"serve it for writing and let the host write: headrace target allow-host {host}",
            )

    def __enter__(self) -> NativeDevice:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()

    def __repr__(self) -> str:
        return f"<{'closed ' if self._closed else ''}device {self.uri}>"


class _Lane(NativeDevice):
    """A device, seen by one class of traffic."""

    def __init__(self, device: NativeDevice, name: TrafficClass) -> None:
        self._device = device
        self._name = name
        self._address = device._address
        self._identity = device._identity
        self._opened_read_only = device._opened_read_only
        self._reservations = None
        self._guard = None
        self._fence = None
        self._view: tuple[_native.Device, _native.Device] | None = None

    @property
    def handle(self) -> _native.Device:
        handle = self._device.handle
        view = self._view
        if view is None or view[0] is not handle:
            # The device was opened again, in another process.
            self._view = view = (handle, _native.lane(handle, self._name))
        return view[1]

    def __reduce__(self) -> tuple[Any, ...]:
        return (_Lane, (self._device, self._name))

    def guard_writes(self, key: int, type: ReservationType, *, timeout_s: float = TIMEOUT_S) -> None:
        self._device.guard_writes(key, type, timeout_s=timeout_s)

    def unguard_writes(self) -> None:
        self._device.unguard_writes()

    def lane(self, name: TrafficClass) -> NativeDevice:
        return self._device.lane(name)

    def close(self) -> None:
        """Nothing: the device is closed where it was opened."""

    def __repr__(self) -> str:
        return f"<{self._name} of {self._device!r}>"


def _later(
    uri: str, read_only: bool, identity: HostIdentity | None, guard: tuple[int, ReservationType] | None = None
) -> NativeDevice:
    """A device that opens itself when first used: what a pickle holds."""
    device = NativeDevice.__new__(NativeDevice)
    device._address = parse_address(uri)
    device._opened_read_only = read_only
    device._identity = identity
    device._guard = guard
    device._fence = None
    device._reservations = None
    device._closed = False
    device._lock = threading.Lock()
    device._handle = None
    device._pid = os.getpid()
    return device


def _check_offset(offset: int) -> None:
    if not 0 <= offset < 1 << 64:
        raise UsageError("not an offset or length", expected="0 to 2^64 - 1", found=str(offset))


def buffer_error(error: Exception, *, writable: bool) -> UsageError:
    """What a refused buffer means to the caller."""
    kind = "writable, C-contiguous memory" if writable else "C-contiguous memory"
    return UsageError("this object cannot be used as a buffer", expected=kind, found=str(error))
