"""Reservations of the kernel's block devices: the same verbs as over NVMe/TCP, through the PR ioctls (linux/pr.h).

What is different is who is registered: **the node**. The kernel has one association, or one nexus for each path, that
all processes of the node share, so a key keeps other nodes out, not another job on this one. From that follows `join`:
a node that comes to a job registers the job's key, and then must see that key hold. A node that comes late, to a
session that was taken over from, does not; it takes its registration away again and fails.

Who is registered is asked with Reservation Report where the device is an NVMe namespace and this user may send
commands, else with IOC_PR_READ_KEYS and IOC_PR_READ_RESERVATION, which Linux has since 7.0 and which name keys only:
then the host identifiers of a report are nil. The kernel asks for persistence through power loss with every
registration of an NVMe namespace, by itself.
"""

from __future__ import annotations

import ctypes
import errno
import fcntl
import os
import struct
import threading
from collections.abc import Callable
from contextlib import suppress
from typing import TypeVar
from uuid import UUID

from headrace.device.kernel import hostid_of, keeps_reservations, nvme_of, partition_of
from headrace.device.reservations import (
    TIMEOUT_S,
    Registrant,
    ReservationCapabilities,
    ReservationReport,
    Reservations,
    ReservationType,
    capabilities_of,
    check_key,
    report_of,
)
from headrace.errors import (
    CommandFailed,
    DeviceError,
    DeviceGone,
    DeviceTimeout,
    HeadraceError,
    OutcomeUnknown,
    ReservationConflict,
    UsageError,
)

# linux/pr.h: type 'p', numbers from 200; sizes and directions are in the number.
_REGISTER = 0x401870C8
_RESERVE = 0x401070C9
_RELEASE = 0x401070CA
_PREEMPT = 0x401870CB
_PREEMPT_ABORT = 0x401870CC
_CLEAR = 0x401070CD
_READ_KEYS = 0xC01070CE
_READ_RESERVATION = 0x801070CF
_IGNORE_KEY = 1

# linux/pr.h, enum pr_status: what an ioctl returns above 0.
_CONFLICT = 0x18
_PATH_FAILURES = {0xE0000, 0xF0000, 0x10000}

# linux/nvme_ioctl.h: struct nvme_passthru_cmd.
_NVME_ID = 0x4E40
_NVME_ADMIN = 0xC0484E41
_NVME_IO = 0xC0484E43
_PASSTHRU = struct.Struct("=BBHIIIQQII6III")
_IDENTIFY = 0x06
_RESCAP_AT = 31
_REGISTER_OPCODE = 0x0D
_REPORT = 0x0E
_REPORT_HEADER = struct.Struct("<IBH2xB14x40x")
_REPORT_ENTRY = struct.Struct("<HB5xQ16s32x")
#: A report is asked for with room for so many, and again with more where there are more.
_REGISTRANTS = 128
_REGISTRANTS_MAX = 65535
#: What SPDK's target keeps of one namespace: the least that is known of a target.
_FEWEST_KEPT = 16

_NIL = UUID(int=0)

_T = TypeVar("_T")


class KernelReservations(Reservations):
    """The reservation verbs of one block device of the kernel. Errors as of `Reservations`; `UsageError` where the
    device or the kernel keeps none, and for partitions, which share their disk's."""

    scope = "node"

    def __init__(self, path: str, where: Callable[[], str]) -> None:
        self._path = path
        self._uri = where
        self._capabilities: ReservationCapabilities | None = None
        self._lacking = "the namespace offers none"

    # ---- the verbs ----

    def register(
        self,
        key: int,
        *,
        replace: int | None = None,
        ignore_existing: bool = False,
        persist: bool | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Register `key` for this node. Options as in `Reservations`; `persist` cannot be False here."""
        if persist is False:
            raise UsageError("the kernel asks for persistence with every registration", where=self._uri())
        check_key(key)
        old = 0 if replace is None else check_key(replace, name="key to replace")
        flags = _IGNORE_KEY if ignore_existing else 0
        try:
            self._change("register", _REGISTER, struct.pack("=QQII", old, key, flags, 0), timeout_s)
        except (CommandFailed, ReservationConflict) as error:
            self._explain_refused_registration(error, timeout_s)
            raise

    def unregister(self, key: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """End this node's registration, and a reservation that it holds."""
        check_key(key)
        self._check_kept()
        if nvme_of(self._path) is not None:
            # The kernel sends "replace, by key 0", which targets may refuse: so the command is sent as it is meant.
            with suppress(PermissionError):
                status = self._within(timeout_s, "unregister", lambda device: _unregister(device, key), change=True)
                self._judge("unregister", status)
                return
        self._change("unregister", _REGISTER, struct.pack("=QQII", key, 0, 0, 0), timeout_s)

    def acquire(self, key: int, type: ReservationType, *, timeout_s: float = TIMEOUT_S) -> None:
        kind = ReservationType(type).value
        self._change("acquire", _RESERVE, struct.pack("=QII", check_key(key), kind, 0), timeout_s)

    def preempt(
        self,
        key: int,
        victim: int,
        type: ReservationType,
        *,
        abort: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        kind = ReservationType(type).value
        # The kernel's `old_key` is the caller's, its `new_key` the one to preempt: what its drivers do with them.
        data = struct.pack("=QQII", check_key(key), check_key(victim, name="key to preempt", zero=True), kind, 0)
        self._change("preempt", _PREEMPT_ABORT if abort else _PREEMPT, data, timeout_s)

    def release(self, key: int, type: ReservationType, *, timeout_s: float = TIMEOUT_S) -> None:
        kind = ReservationType(type).value
        self._change("release", _RELEASE, struct.pack("=QII", check_key(key), kind, 0), timeout_s)

    def clear(self, key: int, *, timeout_s: float = TIMEOUT_S) -> None:
        self._change("clear", _CLEAR, struct.pack("=QII", check_key(key), 0, 0), timeout_s)

    def join(self, key: int, type: ReservationType, *, timeout_s: float = TIMEOUT_S) -> None:
        """Make this node one of those that write under `key`: register it, and see that it holds.

        Where it does not, the registration is taken away again, and `ReservationConflict` says what was found. Every
        process of the node may call it; `unregister` is for the last one.
        """
        kind = ReservationType(type)
        before = self.report(timeout_s=timeout_s)
        own = self._own(before)
        if own is None or own.key != key:
            self.register(key, timeout_s=timeout_s)
        try:
            self.check_held(key, kind, timeout_s=timeout_s)
        except HeadraceError as refused:
            try:
                self.unregister(key, timeout_s=timeout_s)
            except HeadraceError as error:
                refused.found = f"{refused.found}; and its registration stays: {error}"
            raise

    def check_held(self, key: int, type: ReservationType, *, timeout_s: float = TIMEOUT_S) -> None:
        """`ReservationConflict` unless this node is registered with `key` and the reservation is held under it."""
        kind = ReservationType(type)
        report = self.report(timeout_s=timeout_s)
        own = self._own(report)
        registered = own.key == key if own is not None else any(found.key == key for found in report.registrants)
        if self.hostid is not None and own is None and all(found.hostid != _NIL for found in report.registrants):
            registered = False
        if registered and report.type is kind and any(found.key == key for found in report.holders):
            return
        holders = ", ".join(f"{found.key:#018x}" for found in report.holders) or "nobody"
        raise ReservationConflict(
            "this node is fenced: the reservation is not held under its session's key",
            where=self._uri(),
            expected=f"key {key:#018x}, type {kind.value}",
            found=f"{'registered' if registered else 'not registered'}; held by {holders}"
            + (f", type {report.type.value}" if report.type is not None else ""),
            next_step="the session was taken over from: end this run",
        )

    def report(self, *, timeout_s: float = TIMEOUT_S) -> ReservationReport:
        """Who is registered and who holds. From IOC_PR_READ_KEYS alone the host identifiers are nil, and of several
        registrants with the holder's key the first stands for the holder."""
        self._check_kept()
        if nvme_of(self._path) is not None:
            try:
                return self._within(timeout_s, "report", _report_nvme, change=False)
            except PermissionError:
                pass
        return self._within(timeout_s, "report", _report_keys, change=False)

    @property
    def capabilities(self) -> ReservationCapabilities:
        """What the device offers; false where it offers nothing, or nothing that can be checked."""
        if self._capabilities is None:
            self._capabilities = self._find_capabilities()
        return self._capabilities

    @property
    def hostid(self) -> UUID | None:
        """The host identifier that the kernel gave for this node; `None`: the device has none, or it cannot be seen."""
        return hostid_of(self._path)

    def problem(self) -> str:
        """Why nothing can be reserved here; empty where it can."""
        disk = partition_of(self._path)
        if disk is not None:
            return f"a partition of {disk}: a reservation is the whole disk's"
        if not keeps_reservations(self._path):
            return "the kernel has no reservations for devices of this kind"
        return "" if self.capabilities else self._lacking

    # ---- asking ----

    def _own(self, report: ReservationReport) -> Registrant | None:
        hostid = self.hostid
        return report.of(hostid) if hostid is not None else None

    def _find_capabilities(self) -> ReservationCapabilities:
        nothing = ReservationCapabilities(types=frozenset(), persist=False)
        if partition_of(self._path) is not None or not keeps_reservations(self._path):
            return nothing
        if nvme_of(self._path) is not None:
            with suppress(PermissionError):
                return capabilities_of(self._within(TIMEOUT_S, "identify", _rescap, change=False))
        try:
            self._within(TIMEOUT_S, "report", _report_keys, change=False)
        except (UsageError, CommandFailed, PermissionError) as error:
            self._lacking = (
                f"nobody can say who holds it: {getattr(error, 'found', error)} (the kernel can from 7.0 on)"
            )
            return nothing
        # Neither is told by the kernel: a device refuses what it does not have.
        return ReservationCapabilities(types=frozenset(ReservationType), persist=False)

    def _check_kept(self) -> None:
        disk = partition_of(self._path)
        if disk is not None:
            raise UsageError(
                "a partition cannot be reserved",
                where=self._uri(),
                expected="a whole disk: a reservation shuts hosts out of all of it",
                found=f"a partition of {disk}",
                next_step=f"use /dev/{disk} itself, or leave the volume unfenced",
            )
        if not keeps_reservations(self._path):
            raise self._unsupported("a device of another kind")
        if not self.capabilities:
            raise self._unsupported(self.problem())

    def _unsupported(self, found: str) -> UsageError:
        return UsageError(
            "the block device keeps no reservations",
            where=self._uri(),
            expected="an NVMe namespace, a SCSI disk, or a device-mapper device over one",
            found=found,
            next_step="nothing can keep another node out here: use it unfenced, or not at all",
        )

    def _change(self, verb: str, number: int, data: bytes, timeout_s: float) -> None:
        self._check_kept()

        def work(device: int) -> int:
            # A buffer that may be written to: only then is what the ioctl returns not lost.
            return int(fcntl.ioctl(device, number, bytearray(data), True))

        try:
            status = self._within(timeout_s, verb, work, change=True)
        except PermissionError as error:
            raise self._denied(verb, error) from None
        self._judge(verb, status)

    def _judge(self, verb: str, status: int) -> None:
        if status == 0:
            return
        # Before Linux 6.4 the status of NVMe itself came through.
        if status == _CONFLICT or (status & 0x7FF) == 0x83:
            raise ReservationConflict(
                f"the target refuses to {verb}: another host holds the reservation, or the key is not this node's",
                where=self._uri(),
                found=f"status {status:#x}",
                next_step="see who, with reservations.report() or nvme resv-report",
            )
        if status in _PATH_FAILURES:
            raise DeviceGone(f"no path to the target to {verb} through", where=self._uri(), found=f"status {status:#x}")
        raise CommandFailed(f"the target does not {verb}", where=self._uri(), found=f"status {status:#x}")

    def _denied(self, verb: str, error: OSError) -> DeviceError:
        return DeviceError(
            f"this user may not {verb} on the block device",
            where=self._uri(),
            found=error.strerror,
            next_step="give the process CAP_SYS_ADMIN, or write access to the device and a kernel from Linux 6.5 on",
        )

    def _explain_refused_registration(self, error: DeviceError, timeout_s: float) -> None:
        """Where the target is full, say that."""
        try:
            report = self.report(timeout_s=timeout_s)
        except HeadraceError:
            return
        if report.registered >= _FEWEST_KEPT and self._own(report) is None:
            raise ReservationConflict(
                "the target keeps no more registrations: too many nodes",
                where=self._uri(),
                expected=f"room for one more than {report.registered} (SPDK's target keeps {_FEWEST_KEPT})",
                found=error.found,
                next_step="write from fewer nodes, or over nvme+tcp://, where a session is one host",
            ) from error

    def _within(self, timeout_s: float, verb: str, work: Callable[[int], _T], *, change: bool) -> _T:
        """`work` with the open device, on a thread that is left behind where the kernel does not come back in time."""
        results: list[_T] = []
        failures: list[BaseException] = []

        def run() -> None:
            try:
                # For writing: the kernel wants that of whoever changes a reservation. Not for who asks: closing such a
                # descriptor makes udev look at the device again.
                device = os.open(self._path, (os.O_RDWR if change else os.O_RDONLY) | os.O_CLOEXEC | os.O_NONBLOCK)
                try:
                    results.append(work(device))
                finally:
                    os.close(device)
            except BaseException as error:
                failures.append(error)

        thread = threading.Thread(target=run, name="headrace-reservation", daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            late = OutcomeUnknown if change else DeviceTimeout
            raise late(f"the kernel did not answer to {verb} in time", where=self._uri(), expected=f"{timeout_s:g} s")
        if not failures:
            return results[0]
        error = failures[0]
        if isinstance(error, PermissionError) or not isinstance(error, OSError):
            raise error
        if error.errno in (errno.ENOTTY, errno.EOPNOTSUPP):
            raise self._unsupported(f"{error.strerror} (to {verb})") from None
        gone = error.errno in (errno.ENXIO, errno.ENODEV, errno.ENOENT)
        raise (DeviceGone if gone else CommandFailed)(
            f"the kernel does not {verb}", where=self._uri(), found=error.strerror
        ) from error


# ---- what the device says ----


def _report_keys(device: int) -> ReservationReport:
    room = _REGISTRANTS
    while True:
        keys = (ctypes.c_uint64 * room)()
        head = bytearray(struct.pack("=IIQ", 0, room, ctypes.addressof(keys)))
        _checked(fcntl.ioctl(device, _READ_KEYS, head, True))
        generation, count, _ = struct.unpack("=IIQ", head)
        if count <= room or room >= _REGISTRANTS_MAX:
            break
        room = min(count, _REGISTRANTS_MAX)
    held = bytearray(16)
    _checked(fcntl.ioctl(device, _READ_RESERVATION, held, True))
    key, _, kind = struct.unpack("=QII", held)
    registrants = list(keys[: min(count, room)])
    everybody = kind in (ReservationType.WRITE_EXCLUSIVE_ALL, ReservationType.EXCLUSIVE_ACCESS_ALL)
    first = registrants.index(key) if kind and key in registrants else None
    return report_of(
        generation,
        kind,
        False,
        count,
        [(0xFFFF, everybody or at == first, _NIL.bytes, found) for at, found in enumerate(registrants)],
    )


def _report_nvme(device: int) -> ReservationReport:
    room = _REGISTRANTS
    while True:
        data = (ctypes.c_uint8 * (_REPORT_HEADER.size + room * _REPORT_ENTRY.size))()
        nsid = fcntl.ioctl(device, _NVME_ID)
        _checked(_passthru(device, _NVME_IO, _REPORT, nsid, data, cdw10=len(data) // 4 - 1, cdw11=1))
        whole = bytes(data)
        generation, kind, count, persistent = _REPORT_HEADER.unpack_from(whole)
        if count <= room or room >= _REGISTRANTS_MAX:
            break
        room = min(count, _REGISTRANTS_MAX)
    entries = (
        _REPORT_ENTRY.unpack_from(whole, _REPORT_HEADER.size + at * _REPORT_ENTRY.size)
        for at in range(min(count, room))
    )
    return report_of(
        generation,
        kind,
        bool(persistent & 1),
        count,
        [(cntlid, bool(status & 1), hostid, key) for cntlid, status, key, hostid in entries],
    )


def _unregister(device: int, key: int) -> int:
    """Reservation Register, RREGA unregister; what the target answered."""
    keys = (ctypes.c_uint8 * 16).from_buffer_copy(struct.pack("<QQ", key, 0))
    return _passthru(device, _NVME_IO, _REGISTER_OPCODE, fcntl.ioctl(device, _NVME_ID), keys, cdw10=1)


def _rescap(device: int) -> int:
    data = (ctypes.c_uint8 * 4096)()
    _checked(_passthru(device, _NVME_ADMIN, _IDENTIFY, fcntl.ioctl(device, _NVME_ID), data))
    return int(data[_RESCAP_AT])


def _passthru(
    device: int,
    number: int,
    opcode: int,
    nsid: int,
    data: ctypes.Array[ctypes.c_uint8],
    *,
    cdw10: int = 0,
    cdw11: int = 0,
) -> int:
    """A command that reads into `data`, or sends it; the status of NVMe. PermissionError: this user may not send it."""
    command = bytearray(
        _PASSTHRU.pack(
            opcode, 0, 0, nsid, 0, 0, 0, ctypes.addressof(data), 0, len(data), cdw10, cdw11, 0, 0, 0, 0, 0, 0
        )
    )
    try:
        return int(fcntl.ioctl(device, number, command, True))
    except OSError as error:
        if error.errno == errno.EACCES:
            raise PermissionError(errno.EPERM, os.strerror(errno.EPERM)) from None
        raise


def _checked(status: int) -> None:
    if status:
        raise CommandFailed("the device refuses to say who holds the reservation", found=f"status {status:#x}")
