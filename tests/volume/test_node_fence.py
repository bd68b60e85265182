"""The fence of block devices of the kernel, whose reservations are the node's: over the model of a namespace, with the
kernel's rules of joining. The kernel itself: `tests/interop/test_kernel_block.py`.
"""

from __future__ import annotations

import errno
import time
from pathlib import Path
from typing import Any, cast
from uuid import UUID, uuid4

import pytest

from headrace.device import FileLock, KernelReservations, ReservationType, lock_file, new_key
from headrace.device.reservations import ReservationCapabilities, ReservationReport, Reservations
from headrace.errors import CommandFailed, DeviceGone, SessionLost, WriterActive
from headrace.testing import HostDevice, Quirks, SharedNamespace
from headrace.units import MIB
from headrace.volume import Session, Volume
from headrace.volume.writing import fence
from tests.volume.support import STRIPE, state_of
from tests.waiting import PATIENCE_S

BEAT = 0.05


class NodeReservations(KernelReservations):
    """The kernel's way to join, over the model's verbs."""

    def __init__(self, device: NodeDevice, verbs: Reservations) -> None:
        super().__init__("", lambda: device.uri)
        self._device = device
        self._verbs = verbs
        self.unregister = verbs.unregister  # type: ignore[method-assign]
        self.acquire = verbs.acquire  # type: ignore[method-assign]
        self.preempt = verbs.preempt  # type: ignore[method-assign]

    def register(self, key: int, *, replace: int | None = None, **options: Any) -> None:
        # The kernel asks for persistence with every registration.
        self._verbs.register(key, replace=replace, persist=self.capabilities.persist or None)

    def report(self, *, timeout_s: float = 0.0) -> ReservationReport:
        return self._verbs.report()

    @property
    def capabilities(self) -> ReservationCapabilities:
        return self._verbs.capabilities

    @property
    def hostid(self) -> UUID | None:
        return self._device.hostid


class NodeDevice(HostDevice):
    """What `/dev/nvme1n1` is to each process of a node: another way through the one association of the node."""

    def __init__(self, namespace: SharedNamespace, node: UUID) -> None:
        super().__init__(namespace, node, read_only=False)
        self._kept = NodeReservations(self, cast(Reservations, self.reservations))
        self.reservations = self._kept  # type: ignore[assignment]
        self._asked: tuple[int, ReservationType] | None = None

    def as_host(self, hostid: UUID, *, hostnqn: str | None = None, wait: bool = True) -> NodeDevice:
        return NodeDevice(self.namespace, self.hostid)

    def guard_writes(self, key: int, type: ReservationType, *, timeout_s: float = 0.0) -> None:
        self._asked = key, type
        self.check_guard()

    def check_guard(self) -> None:
        assert self._asked is not None
        self._kept.check_held(*self._asked)

    def describe(self) -> dict[str, Any]:
        said = super().describe()
        del said["rescap"]
        problem = "" if self._kept.capabilities else "the namespace offers none"
        return {**said, "transport": "block", "kernel": {"name": "nvme1n1"}, "reservations": {"problem": problem}}


class Cluster:
    """Two members, and nodes that have them as block devices."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, quirks: Quirks | None = None) -> None:
        self.namespaces = [SharedNamespace(4 * MIB, quirks=quirks) for _ in range(2)]
        self.node = uuid4()

        def lock(uri: str) -> FileLock | None:
            path = folder / f"{self.node}-{uri.rpartition(':')[2]}"
            path.touch()
            return lock_file(f"file:{path}")

        monkeypatch.setattr(fence, "lock_file", lock)
        Volume.create(devices=self.devices(), stripe_bytes=STRIPE).close()

    def devices(self) -> list[NodeDevice]:
        return [NodeDevice(namespace, self.node) for namespace in self.namespaces]

    def open(self, **options: Any) -> Volume:
        return Volume.open(self.devices(), write=True, **options)

    def elsewhere(self) -> None:
        """What comes now is another node's."""
        self.node = uuid4()


@pytest.fixture
def cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Cluster:
    return Cluster(tmp_path, monkeypatch)


def put(session: Session, name: str) -> None:
    with session.transaction() as tx:
        tx.put(name, b"x" * 5000)


def test_one_session_a_node_and_one_node_a_session(cluster: Cluster) -> None:
    first = cluster.open().session("run", heartbeat_s=BEAT)
    assert first.fence == "node" == first.volume.info().fence
    put(first, "first")
    with pytest.raises(WriterActive, match="a process of this machine"):
        cluster.open().session("run", takeover="now")
    cluster.elsewhere()
    with cluster.open().session("other", takeover="now", heartbeat_s=60) as second:
        with pytest.raises(SessionLost):
            put(first, "late")
        put(second, "second")
        assert second.quarantined_bytes == 0, "the other node's commands were aborted"
    with cluster.open().session("other") as third:
        put(third, "third")
    assert set(state_of(cluster.open())) == {"first", "second", "third"}


def test_what_the_own_node_has_under_way_was_aborted_by_nobody(cluster: Cluster) -> None:
    dead = cluster.open().session("run", heartbeat_s=BEAT)
    put(dead, "x")
    dead._beat.halt()
    dead._fence.close()
    with cluster.open().session("run", takeover="now", heartbeat_s=60) as session:
        assert session.quarantined_bytes > 0


def test_ranks_of_other_nodes_join_and_late_ones_do_not(cluster: Cluster) -> None:
    session = cluster.open().session("run", heartbeat_s=60)
    ticket = session.ticket
    assert ticket is not None
    here = cluster.open(ticket=ticket)
    cluster.elsewhere()
    there = cluster.open(ticket=ticket)
    with session.transaction() as tx:
        for name, volume in (("here", here), ("there", there)):
            tx.accept(volume.write_grant(tx.allocate(name, 100_000), b"x" * 100_000))
    assert [namespace.state.report().registered for namespace in cluster.namespaces] == [2, 2]
    late = session.transaction().allocate("late", 100_000)
    cluster.elsewhere()
    with cluster.open().session("other", takeover="now", heartbeat_s=60) as taker:
        with pytest.raises(SessionLost, match="took the volume over"):
            cluster.open(ticket=ticket)
        for volume in (here, there):
            with pytest.raises(SessionLost, match="took the volume over"):
                volume.write_grant(late, b"x" * 100_000)
        put(taker, "y")
        assert [namespace.state.report().registered for namespace in cluster.namespaces] == [1, 1]


def test_a_rank_that_joins_while_the_target_is_away_waits_for_it(
    cluster: Cluster, monkeypatch: pytest.MonkeyPatch
) -> None:
    report, refused = NodeReservations.report, []

    def away(self: NodeReservations, *, timeout_s: float = 0.0) -> ReservationReport:
        if len(refused) < 3:
            refused.append(self)
            if len(refused) == 2:
                # What was on its way when the path was lost.
                raise CommandFailed("the kernel does not report", found="EIO") from OSError(errno.EIO, "EIO")
            raise DeviceGone("no path to the target")
        return report(self, timeout_s=timeout_s)

    session = cluster.open().session("run", heartbeat_s=60)
    monkeypatch.setattr(fence, "_RETRY_S", 0.001)
    monkeypatch.setattr(NodeReservations, "report", away)
    rank = cluster.open(ticket=session.ticket)
    with session.transaction() as tx:
        tx.accept(rank.write_grant(tx.allocate("x", 5000), b"x" * 5000))
    assert len(refused) == 3
    refused.clear()
    monkeypatch.setattr(fence, "NODE_PATIENCE_S", 0.0)
    with pytest.raises(DeviceGone):
        cluster.open(ticket=session.ticket)
    refused.clear()
    monkeypatch.setattr(fence, "NODE_PATIENCE_S", PATIENCE_S)

    def refusing(self: NodeReservations, *, timeout_s: float = 0.0) -> ReservationReport:
        refused.append(self)
        raise CommandFailed("the target does not report", found="status 0x2")

    monkeypatch.setattr(NodeReservations, "report", refusing)
    with pytest.raises(CommandFailed, match="0x2"):
        cluster.open(ticket=session.ticket)
    assert len(refused) == 1, "what is refused is not asked again"


def test_a_session_whose_reservation_is_forgotten_ends_by_itself(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The kernel connects again and says nothing: then everybody could write."""
    cluster = Cluster(tmp_path, monkeypatch, Quirks(forgets=True))
    monkeypatch.setattr("headrace.volume.writing.heartbeat.ASK_S", BEAT)
    idle = cluster.open().session("run", heartbeat_s=BEAT)
    cluster.namespaces[1].restart()
    deadline = time.monotonic() + 20
    while idle._lost is None and time.monotonic() < deadline:
        time.sleep(BEAT)
    with pytest.raises(SessionLost, match=r"the reservation of this session is gone.*held by nobody"):
        idle.check()
    idle.close()
    busy = cluster.open().session("run", takeover="now", heartbeat_s=60)
    put(busy, "x")
    for namespace in cluster.namespaces:
        host = namespace.connect()
        key = new_key()
        host.reservations.register(key)
        host.reservations.clear(key)
    with pytest.raises(SessionLost, match="the reservation of this session is gone"):
        put(busy, "y")
    assert "y" not in state_of(cluster.open())
