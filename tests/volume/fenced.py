"""A volume on namespaces that several hosts share (`headrace.testing`), for tests of who may write."""

from __future__ import annotations

from headrace.device import ReservationType
from headrace.testing import HostDevice, Quirks, SharedNamespace
from headrace.units import MIB
from headrace.volume import Session, Ticket, Volume
from headrace.volume.writing import fence
from tests.volume.support import STRIPE

SHARED = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS


class World:
    """Some namespaces, and processes that open the volume on them, each as a host of its own."""

    def __init__(self, members: int = 2, quirks: Quirks | None = None) -> None:
        self.namespaces = [SharedNamespace(4 * MIB, quirks=quirks) for _ in range(members)]

    def devices(self) -> list[HostDevice]:
        return [namespace.connect() for namespace in self.namespaces]

    def create(self, **options: bool) -> None:
        Volume.create(devices=self.devices(), stripe_bytes=STRIPE, **options).close()

    def open(self, *, ticket: Ticket | None = None) -> Volume:
        return Volume.open(self.devices(), write=True, ticket=ticket)

    @property
    def conflicts(self) -> int:
        return sum(namespace.conflicts for namespace in self.namespaces)

    def holders(self) -> list[int | None]:
        return [fence.holder(namespace.connect()) for namespace in self.namespaces]


def stopped(session: Session) -> Session:
    """As after SIGSTOP: its heart does not beat, and it knows nothing of that."""
    session._beat.halt()
    return session


def put(session: Session, name: str, data: bytes) -> None:
    with session.transaction() as tx:
        tx.put(name, data)
