"""One host's handle on a `SharedNamespace`: what `headrace.device` gives for a real one, with the same names."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, TypeVar
from uuid import UUID

from headrace.device.events import Events, no_events
from headrace.device.paths import TrafficClass, UnsettledRange
from headrace.device.protocol import Buffer
from headrace.device.reference import as_bytes
from headrace.device.reservations import (
    TIMEOUT_S,
    ReservationCapabilities,
    ReservationReport,
    ReservationType,
    capabilities_of,
    check_key,
)
from headrace.errors import (
    CommandFailed,
    DeviceClosed,
    DeviceTimeout,
    OutcomeUnknown,
    ReservationConflict,
    UsageError,
)
from headrace.testing.devices import check_range
from headrace.testing.namespace import Accident, Command, Controller, Ghost, SharedNamespace
from headrace.testing.reservations import InvalidField, Refused, ReservationState

_T = TypeVar("_T")


class HostDevice:
    """Made by `SharedNamespace.connect`. A `BlockDevice`, with reservations, a guard of writes and unsettled ranges."""

    def __init__(self, namespace: SharedNamespace, hostid: UUID, *, read_only: bool = False) -> None:
        self.namespace = namespace
        self.hostid = hostid
        self.uri = namespace.uri
        self.size_bytes = namespace.size_bytes
        self.block_bytes = namespace.block_bytes
        self.volatile_cache = namespace.volatile_cache
        self.read_only = read_only
        self.reservations = HostReservations(self)
        self._controller: Controller = namespace.attach(hostid)
        self._losses = 0
        self._closed = False
        self._guard: tuple[int, ReservationType] | None = None
        self._fence: str | None = None
        self._unsettled: list[UnsettledRange] = []

    # ---- commands and their accidents ----

    def carry_out(self, command: Command, do: Callable[[], _T]) -> _T:
        """Tell the observer, have the accident that it wants, and send the command (again)."""
        if self._closed:
            raise DeviceClosed("the device was closed", where=self.uri)
        observer = self.namespace.observer
        accident = observer(self, command) if observer is not None else None
        with self.namespace.lock:
            self._associate()
            if accident is None:
                return self._send(command, do)
            landed: _T | None = None
            admitted = self._allowed(command)
            if accident.landed:
                landed = self._send(command, do)
            if command.verb in ("write", "deallocate"):
                # Whether a copy lives on or not, this host cannot know.
                self._leave_behind(command, accident if admitted else Accident())
            self.lose(cache_lost=accident.cache_lost)
            if accident.given_up:
                raise DeviceTimeout("no answer came in time", where=f"{self.uri} offset {command.offset}")
            self._associate()
            if command.verb == "preempt_and_abort" and accident.landed:
                raise OutcomeUnknown("the answer was lost", where=self.uri, found="the preempted hosts are shut out")
            if landed is not None and command.verb not in ("read", "write", "flush", "deallocate"):
                return landed  # Report has shown it.
            return self._send(command, do)

    def _allowed(self, command: Command) -> bool:
        writes = command.verb in ("write", "flush", "deallocate")
        if not writes and command.verb != "read":
            return True
        return not (writes and self._fence) and self.namespace.state.permits(self.hostid, write=writes)

    def _send(self, command: Command, do: Callable[[], _T]) -> _T:
        if command.verb in ("write", "flush", "deallocate") and self._fence is not None:
            raise self._fenced()
        if not self._allowed(command):
            self.namespace.conflicts += 1
            raise ReservationConflict(f"{command.verb} was refused", where=self.uri, found="Reservation Conflict")
        return do()

    def _leave_behind(self, command: Command, accident: Accident) -> None:
        self._unsettled.append(
            UnsettledRange(
                offset=command.offset,
                length=command.length,
                path=self.uri,
                generation=self._losses + 1,
                age_s=0.0,
            )
        )
        if accident.ghost is not None:
            self.leave_ghost(command, admitted=accident.ghost == "admitted")

    def may_write(self) -> bool:
        """Would a write that is sent now be let to the medium?"""
        with self.namespace.lock:
            return not self._closed and self._allowed(Command(verb="write"))

    def show_early(self, command: Command) -> None:
        """A write that is under way: reads give its bytes, and it is not durable, whatever it asks for."""
        with self.namespace.lock:
            if self._controller.alive:
                self.namespace.write(self._controller, command.offset, command.data, fua=False)

    def leave_ghost(self, command: Command, *, admitted: bool) -> None:
        """A write of a process that died: sent, never answered."""
        self.namespace.ghosts.append(
            Ghost(host=self.hostid, device=self, offset=command.offset, data=command.data, admitted=admitted)
        )

    def lose(self, *, cache_lost: bool = True) -> None:
        """This device's association is lost. It finds out, and connects again, with its next command."""
        self.namespace.lose(self._controller, cache_lost=cache_lost)

    def _associate(self) -> None:
        """Connect again where the association was lost; the guard asks first."""
        if self._controller.alive:
            return
        self._losses += 1
        self._controller = self.namespace.attach(self.hostid)
        if self._guard is not None and self._fence is None:
            self._ask(*self._guard)

    # ---- BlockDevice ----

    def loss_count(self) -> int:
        return self._losses

    def events(self) -> Events:
        raise no_events(self.uri)

    def read_into(self, offset: int, buffer: Buffer) -> None:
        view = as_bytes(buffer)
        check_range(self, offset, len(view))
        found = self.carry_out(
            Command(verb="read", offset=offset, length=len(view)), lambda: self.namespace.read(offset, len(view))
        )
        view[:] = memoryview(found)

    def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
        content = as_bytes(data).tobytes()
        check_range(self, offset, len(content))
        self.check_writable()
        command = Command(verb="write", offset=offset, length=len(content), data=content, fua=fua)
        self.carry_out(command, lambda: self.namespace.write(self._controller, offset, content, fua=fua))

    def flush(self) -> None:
        self.carry_out(Command(verb="flush"), lambda: self.namespace.flush(self._controller))

    def deallocate(self, offset: int, length: int) -> None:
        """Leaves zeros here."""
        check_range(self, offset, length)
        self.check_writable()
        command = Command(verb="deallocate", offset=offset, length=length, data=bytes(length))
        self.carry_out(command, lambda: self.namespace.write(self._controller, offset, bytes(length), fua=False))

    def check_writable(self) -> None:
        if self.read_only:
            raise UsageError("the device is open for reading only", where=self.uri)

    def close(self) -> None:
        with self.namespace.lock:
            if not self._closed:
                self._closed = True
                self.namespace.lose(self._controller, cache_lost=False)

    def as_host(self, hostid: UUID, *, hostnqn: str | None = None, wait: bool = True) -> HostDevice:
        return self.namespace.connect(hostid)

    def lane(self, name: TrafficClass) -> HostDevice:
        """The device itself: queues do not matter here."""
        return self

    def describe(self) -> dict[str, Any]:
        guard: dict[str, Any] = {"state": "off"}
        if self._guard is not None:
            guard = {"state": "passed" if self._fence is None else "fenced", "fenced": self._fence or ""}
        return {
            "transport": "memory",
            "uri": self.uri,
            "block_bytes": self.block_bytes,
            "hostid": str(self.hostid),
            "rescap": int(self._rescap()),
            "associations_lost": self._losses,
            "guard": guard,
        }

    def _rescap(self) -> int:
        quirks = self.namespace.quirks
        if quirks.no_reservations:
            return 0
        return sum(1 << kind for kind in ReservationType) | (0 if quirks.forgets else 1)

    def __reduce__(self) -> tuple[Any, ...]:
        raise UsageError("a memory device cannot leave its process", where=self.uri)

    def __repr__(self) -> str:
        return f"<host {str(self.hostid)[:8]} at {self.uri}>"

    # ---- what losing an association leaves open ----

    def unsettled(self) -> list[UnsettledRange]:
        return list(self._unsettled)

    def settle(self, generation: int) -> int:
        self._unsettled = [one for one in self._unsettled if one.generation > generation]
        return len(self._unsettled)

    # ---- guard ----

    def guard_writes(self, key: int, type: ReservationType, *, timeout_s: float = TIMEOUT_S) -> None:
        with self.namespace.lock:
            self._guard, self._fence = (key, ReservationType(type)), None
            self._associate()
            self._ask(*self._guard)
        if self._fence is not None:
            raise self._fenced()

    def unguard_writes(self) -> None:
        self._guard = self._fence = None

    def _ask(self, key: int, type: ReservationType) -> None:
        report = self.namespace.state.report()
        own = report.of(self.hostid)
        if own is None:
            self._fence = "this host is not registered"
        elif own.key != key:
            self._fence = f"this host is registered with key {own.key:#x}"
        elif report.type is not type or not self._held(report, key, type):
            self._fence = "no reservation of that type is held under that key"

    def _held(self, report: ReservationReport, key: int, type: ReservationType) -> bool:
        if type in (ReservationType.WRITE_EXCLUSIVE_REGISTRANTS, ReservationType.EXCLUSIVE_ACCESS_REGISTRANTS):
            return any(holder.key == key for holder in report.holders)
        own = report.of(self.hostid)
        return own is not None and own.holds

    def _fenced(self) -> ReservationConflict:
        return ReservationConflict(
            "the device is fenced: this host may not write any more", where=self.uri, found=self._fence
        )


class HostReservations:
    """The verbs of `headrace.device.Reservations`."""

    def __init__(self, device: HostDevice) -> None:
        self._device = device

    def _do(self, verb: str, change: Callable[[ReservationState], _T]) -> _T:
        device = self._device

        def do() -> _T:
            if device.namespace.quirks.no_reservations:
                raise self._failed(verb, "Invalid Command Opcode")
            try:
                return change(device.namespace.state)
            except Refused:
                raise ReservationConflict(
                    f"{verb} was refused", where=device.uri, found="Reservation Conflict"
                ) from None
            except InvalidField:
                raise self._failed(verb, "Invalid Field in Command") from None

        return device.carry_out(Command(verb=verb), do)

    def _failed(self, verb: str, status: str) -> CommandFailed:
        return CommandFailed(f"{verb} was refused", where=self._device.uri, found=status)

    def register(
        self,
        key: int,
        *,
        replace: int | None = None,
        ignore_existing: bool = False,
        persist: bool | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        check_key(key)
        host, can = self._device.hostid, not self._device.namespace.quirks.forgets

        def change(state: ReservationState) -> None:
            if replace is not None or (ignore_existing and host in state.keys):
                state.replace(host, key, old=None if ignore_existing else replace, persist=persist, can_persist=can)
            else:
                state.register(host, key, persist=persist, can_persist=can)

        self._do("register", change)

    def unregister(self, key: int, *, timeout_s: float = TIMEOUT_S) -> None:
        check_key(key)
        self._do("unregister", lambda state: state.unregister(self._device.hostid, key))

    def acquire(self, key: int, type: ReservationType, *, timeout_s: float = TIMEOUT_S) -> None:
        check_key(key)
        self._do("acquire", lambda state: state.acquire(self._device.hostid, key, ReservationType(type)))

    def preempt(
        self, key: int, victim: int, type: ReservationType, *, abort: bool = True, timeout_s: float = TIMEOUT_S
    ) -> None:
        check_key(key)
        namespace = self._device.namespace

        def change(state: ReservationState) -> None:
            if abort and namespace.quirks.refuses_abort:
                raise InvalidField
            gone = state.preempt(self._device.hostid, key, victim, ReservationType(type))
            if abort and not namespace.quirks.fences_without_draining:
                namespace.drain(gone)
            elif abort and any(ghost.host in gone and ghost.admitted for ghost in namespace.ghosts):
                raise CommandFailed(
                    "the preempted hosts are shut out, but not drained",
                    where=self._device.uri,
                    found="Command Interrupted",
                )

        self._do("preempt_and_abort" if abort else "preempt", change)

    def release(self, key: int, type: ReservationType, *, timeout_s: float = TIMEOUT_S) -> None:
        check_key(key)
        self._do("release", lambda state: state.release(self._device.hostid, key, ReservationType(type)))

    def clear(self, key: int, *, timeout_s: float = TIMEOUT_S) -> None:
        check_key(key)
        self._do("clear", lambda state: state.clear(self._device.hostid, key))

    def report(self, *, timeout_s: float = TIMEOUT_S) -> ReservationReport:
        return self._do("report", lambda state: state.report())

    @property
    def capabilities(self) -> ReservationCapabilities:
        return capabilities_of(self._device._rescap())


__all__ = ["HostDevice", "HostReservations"]
