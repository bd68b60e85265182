"""NVMe reservations: who may write to a namespace, kept and enforced by its target.

A registration belongs to a host identifier (`HEADRACE_HOSTID`), not to a connection: all processes that connect with
one identifier share it. See NVM Express Base Specification 8.1.22.
"""

from __future__ import annotations

import enum
import secrets
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID

from headrace import _native
from headrace.errors import ReservationConflict, UsageError

#: How long one verb may take, a target that is being reconnected to included.
TIMEOUT_S = 30.0

_PERSIST = 1
_KEY_MAX = (1 << 64) - 1


class ReservationType(enum.IntEnum):
    """Who may do what. The holder may do everything."""

    #: Others may read.
    WRITE_EXCLUSIVE = 1
    #: Others may neither read nor write.
    EXCLUSIVE_ACCESS = 2
    #: Registrants may do what the holder may; others may read.
    WRITE_EXCLUSIVE_REGISTRANTS = 3
    EXCLUSIVE_ACCESS_REGISTRANTS = 4
    #: As before, and every registrant is a holder.
    WRITE_EXCLUSIVE_ALL = 5
    EXCLUSIVE_ACCESS_ALL = 6


@dataclass(frozen=True, kw_only=True)
class Registrant:
    """One host that is registered."""

    #: 0xFFFF where the target makes controllers as hosts connect.
    cntlid: int
    hostid: UUID
    key: int
    holds: bool


@dataclass(frozen=True, kw_only=True)
class ReservationReport:
    """What Reservation Report says at one moment."""

    #: Counts changes of who is registered; may begin again when the target restarts.
    generation: int
    #: `None`: nobody holds.
    type: ReservationType | None
    #: Registrations and reservation survive a loss of the target's power.
    persistent: bool
    #: How many there are; `registrants` may have fewer.
    registered: int
    registrants: tuple[Registrant, ...]

    def of(self, hostid: UUID) -> Registrant | None:
        """The registration of a host identifier."""
        return next((found for found in self.registrants if found.hostid == hostid), None)

    @property
    def holders(self) -> tuple[Registrant, ...]:
        return tuple(found for found in self.registrants if found.holds)


@dataclass(frozen=True, kw_only=True)
class ReservationCapabilities:
    """RESCAP: what the namespace offers."""

    types: frozenset[ReservationType]
    #: Persistence through power loss can be switched on.
    persist: bool

    def __bool__(self) -> bool:
        return bool(self.types)


@dataclass(frozen=True, kw_only=True)
class AdminResult:
    """What a controller answered, whatever that is.

    `status_type` and `status_code` are SCT and SC; `status` is their name. `data` is empty unless it succeeded.
    """

    status_type: int
    status_code: int
    do_not_retry: bool
    status: str
    dw0: int
    dw1: int
    data: bytes

    @property
    def ok(self) -> bool:
        return self.status_type == 0 and self.status_code == 0


def report_of(
    generation: int, kind: int, persistent: bool, registered: int, registrants: Iterable[tuple[int, bool, bytes, int]]
) -> ReservationReport:
    """Out of what was read. Of each registrant: CNTLID, whether it holds, host identifier, key."""
    return ReservationReport(
        generation=generation,
        type=ReservationType(kind) if kind in ReservationType.__members__.values() else None,
        persistent=persistent,
        registered=registered,
        registrants=tuple(
            Registrant(cntlid=cntlid, hostid=UUID(bytes=hostid), key=key, holds=holds)
            for cntlid, holds, hostid, key in registrants
        ),
    )


def capabilities_of(rescap: int) -> ReservationCapabilities:
    return ReservationCapabilities(
        types=frozenset(kind for kind in ReservationType if rescap & 1 << kind), persist=bool(rescap & _PERSIST)
    )


def new_key() -> int:
    """A fresh reservation key: 64 random bits, never 0."""
    return secrets.randbits(64) or 1


def check_key(key: int, *, name: str = "key", zero: bool = False) -> int:
    """`key`, if it can be one; `UsageError`."""
    if not (0 if zero else 1) <= key <= _KEY_MAX:
        least = 0 if zero else 1
        raise UsageError(f"not a reservation {name}", expected=f"{least} to 2^64 - 1", found=str(key))
    return key


class Reservations:
    """The reservation verbs of one device. Each raises `ReservationConflict` where the target refuses it,
    `OutcomeUnknown` where its answer was lost and Report cannot tell either, and `UsageError` for what cannot be meant.

    `key` is the one that this host has registered.
    """

    #: Whose a registration is: of the "host" identifier that a device connected with, or of the whole "node", where the
    #: kernel has connected (`headrace.device.kernel_reservations`).
    scope = "host"

    def __init__(self, handle: Callable[[], _native.Device], describe: Callable[[], dict[str, Any]]) -> None:
        self._handle = handle
        self._describe = describe

    def register(
        self,
        key: int,
        *,
        replace: int | None = None,
        ignore_existing: bool = False,
        persist: bool | None = None,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Register `key` for this host identifier. With another one registered: `replace` names it, `ignore_existing`
        replaces whatever it is. `persist` switches persistence through power loss for the whole namespace."""
        check_key(key)
        action, old = ("register", 0) if replace is None else ("replace", check_key(replace, name="key to replace"))
        try:
            _native.reservation_register(
                self._handle(),
                "replace" if ignore_existing else action,
                key=old,
                new_key=key,
                ignore_existing=ignore_existing,
                persist=persist,
                timeout_s=timeout_s,
            )
        except ReservationConflict:
            # A target refuses to replace what is not there.
            if not ignore_existing or replace is not None:
                raise
            _native.reservation_register(
                self._handle(),
                "register",
                key=0,
                new_key=key,
                ignore_existing=True,
                persist=persist,
                timeout_s=timeout_s,
            )

    def unregister(self, key: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """End this host's registration, and a reservation that it holds."""
        _native.reservation_register(
            self._handle(),
            "unregister",
            key=check_key(key),
            new_key=0,
            ignore_existing=False,
            persist=None,
            timeout_s=timeout_s,
        )

    def acquire(self, key: int, type: ReservationType, *, timeout_s: float = TIMEOUT_S) -> None:
        """Take the reservation, which nobody must hold."""
        _native.reservation_acquire(
            self._handle(),
            "acquire",
            key=check_key(key),
            victim=0,
            type=ReservationType(type).value,
            timeout_s=timeout_s,
        )

    def preempt(
        self,
        key: int,
        victim: int,
        type: ReservationType,
        *,
        abort: bool = True,
        timeout_s: float = TIMEOUT_S,
    ) -> None:
        """Unregister everybody who is registered with the key `victim`, and take the reservation if it is theirs; 0
        where all registrants hold: everybody else. With `abort`, success also means that no command of theirs can reach
        the medium any more."""
        _native.reservation_acquire(
            self._handle(),
            "preempt_and_abort" if abort else "preempt",
            key=check_key(key),
            victim=check_key(victim, name="key to preempt", zero=True),
            type=ReservationType(type).value,
            timeout_s=timeout_s,
        )

    def release(self, key: int, type: ReservationType, *, timeout_s: float = TIMEOUT_S) -> None:
        """Give the reservation up; the registration stays."""
        _native.reservation_release(
            self._handle(), key=check_key(key), type=ReservationType(type).value, timeout_s=timeout_s
        )

    def clear(self, key: int, *, timeout_s: float = TIMEOUT_S) -> None:
        """End the reservation and all registrations, one's own too."""
        _native.reservation_release(self._handle(), key=check_key(key), type=None, timeout_s=timeout_s)

    def report(self, *, timeout_s: float = TIMEOUT_S) -> ReservationReport:
        """Who is registered and who holds."""
        return report_of(*_native.reservation_report(self._handle(), timeout_s=timeout_s))

    @property
    def capabilities(self) -> ReservationCapabilities:
        """What the namespace offers; false where it offers nothing."""
        return capabilities_of(int(self._describe().get("rescap", 0)))
