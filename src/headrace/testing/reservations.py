"""The rules of NVMe reservations (Base Specification 8.1.22) as a function of the state alone.

The same rules as the target's (`native/target/src/reservation/rules.rs`), written a second time, and compared with it
verb by verb in `tests/testing/test_namespace.py`.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass, field
from uuid import UUID

from headrace.device.reservations import Registrant, ReservationReport, ReservationType

HELD_BY_ALL = (ReservationType.WRITE_EXCLUSIVE_ALL, ReservationType.EXCLUSIVE_ACCESS_ALL)
_REGISTRANTS_ONLY = (ReservationType.WRITE_EXCLUSIVE_REGISTRANTS, ReservationType.EXCLUSIVE_ACCESS_REGISTRANTS)
_EXCLUDES_READS = (
    ReservationType.EXCLUSIVE_ACCESS,
    ReservationType.EXCLUSIVE_ACCESS_REGISTRANTS,
    ReservationType.EXCLUSIVE_ACCESS_ALL,
)


class Refused(Exception):
    """Reservation Conflict."""


class InvalidField(Exception):
    """Invalid Field in Command."""


@dataclass
class ReservationState:
    """Who is registered and who holds. Every verb changes all or, where it raises, nothing."""

    generation: int = 0
    persist: bool = False
    #: In the order of registration.
    keys: dict[UUID, int] = field(default_factory=dict)
    type: ReservationType | None = None
    #: Who acquired it; means nothing where all registrants hold.
    holder: UUID | None = None

    def copy(self) -> ReservationState:
        return copy.deepcopy(self)

    def holds(self, host: UUID) -> bool:
        if self.type is None:
            return False
        return host in self.keys if self.type in HELD_BY_ALL else host == self.holder

    def permits(self, host: UUID, *, write: bool) -> bool:
        """May this host write (flush, deallocate), or read?"""
        if self.type is None or (not write and self.type not in _EXCLUDES_READS):
            return True
        return self.holds(host) or (self.type in (*_REGISTRANTS_ONLY, *HELD_BY_ALL) and host in self.keys)

    def report(self) -> ReservationReport:
        return ReservationReport(
            generation=self.generation,
            type=self.type,
            persistent=self.persist,
            registered=len(self.keys),
            registrants=tuple(
                Registrant(cntlid=0xFFFF, hostid=host, key=key, holds=self.holds(host))
                for host, key in self.keys.items()
            ),
        )

    # ---- verbs ----

    def _own(self, host: UUID, key: int) -> None:
        if self.keys.get(host) != key:
            raise Refused

    def register(self, host: UUID, key: int, *, persist: bool | None, can_persist: bool) -> None:
        self._may_persist(persist, can_persist)
        if self.keys.get(host, key) != key:
            raise Refused
        self.keys[host] = key
        self._registered(persist)

    def replace(self, host: UUID, key: int, *, old: int | None, persist: bool | None, can_persist: bool) -> None:
        """`old` None: whatever it is."""
        self._may_persist(persist, can_persist)
        if host not in self.keys or (old is not None and self.keys[host] != old):
            raise Refused
        self.keys[host] = key
        self._registered(persist)

    def unregister(self, host: UUID, key: int) -> None:
        self._own(host, key)
        held = self.holds(host)
        del self.keys[host]
        if self.type is not None and (not self.keys if self.type in HELD_BY_ALL else held):
            self._end()
        self.generation += 1

    def _may_persist(self, persist: bool | None, can_persist: bool) -> None:
        if persist and not can_persist:
            raise InvalidField

    def _registered(self, persist: bool | None) -> None:
        self.persist = self.persist if persist is None else persist
        self.generation += 1

    def _end(self) -> None:
        self.type = self.holder = None

    def acquire(self, host: UUID, key: int, type: ReservationType) -> None:
        self._own(host, key)
        if self.type is None:
            self.type, self.holder = type, host
        elif not (self.type is type and self.holds(host)):
            raise Refused

    def preempt(self, host: UUID, key: int, victim: int, type: ReservationType) -> list[UUID]:
        """Returns the other hosts that lost their registration."""
        self._own(host, key)
        if self.type is None:
            takes = False
        elif self.type in HELD_BY_ALL:
            takes = victim == 0
        else:
            takes = self.holder is not None and self.keys.get(self.holder) == victim
        if not takes and victim == 0:
            raise InvalidField
        if not takes and victim not in self.keys.values():
            raise Refused
        gone = [
            other
            for other, its_key in self.keys.items()
            if (its_key == victim or (takes and victim == 0)) and not (takes and other == host)
        ]
        for other in gone:
            del self.keys[other]
        if takes:
            self.type, self.holder = type, host
        elif not self.keys:
            self._end()
        self.generation += 1
        return [other for other in gone if other != host]

    def release(self, host: UUID, key: int, type: ReservationType) -> None:
        self._own(host, key)
        if self.holds(host):
            if type is not self.type:
                raise InvalidField
            self._end()

    def clear(self, host: UUID, key: int) -> None:
        self._own(host, key)
        self.keys.clear()
        self._end()
        self.generation += 1
