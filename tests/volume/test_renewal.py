"""A session becomes another host in the middle: what late writes may hit until then, and what a failure leaves."""

from __future__ import annotations

import itertools
import threading
import time
from contextlib import suppress
from uuid import UUID

import pytest

from headrace.errors import (
    DeviceError,
    DeviceGone,
    SessionLost,
    UsageError,
    VolumeError,
    VolumeFull,
    WriterActive,
)
from headrace.testing import Accident, Command, HostDevice, Quirks, SharedNamespace
from headrace.volume.writing import heartbeat
from headrace.volume.writing.heartbeat import HeartbeatBlock
from tests.volume.fenced import World, put, stopped
from tests.volume.support import BEAT, KIB, content, state_of


@pytest.mark.parametrize("after_s", [30.0, 0.0])
def test_what_was_given_up_may_land_until_the_session_is_another_host(
    world: World, after_s: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A write whose association was lost: its space is not used again before the target has confirmed, nor is it
    deallocated, and a ghost that lands later meets nobody."""
    monkeypatch.setattr("headrace.volume.space.deallocate.AFTER_S", after_s)

    def lose(device: HostDevice, command: Command) -> Accident | None:
        if command.verb == "write" and command.length >= 64 * KIB and not lost:
            lost.append(command.offset)
            return Accident(ghost="admitted")
        return None

    lost: list[int] = []
    with world.open().session("run", heartbeat_s=60) as session:
        for namespace in world.namespaces:
            namespace.observer = lose
        with session.transaction() as tx:
            tx.put("x", b"x" * 200_000)
            tx.put("y", b"y" * 100_000)
            tx2 = session.transaction()
        with session.transaction() as tx:
            tx.delete("x")
            tx.delete("y")
        deadline = time.monotonic() + 20
        while not after_s and session.deallocation.deallocated_bytes < 100_000 and time.monotonic() < deadline:
            time.sleep(0.01)
        key = session.ticket
        assert lost and sum(len(namespace.ghosts) for namespace in world.namespaces) == 1
        # Full but for that place: round and round.
        for step in range(60):
            with session.transaction() as tx:
                tx.put(f"{step}", content(step, 300 * KIB))
                if step:
                    tx.delete(f"{step - 1}")
        assert all(not namespace.overwrites for namespace in world.namespaces)
        tx2.abort()
        assert session.transaction().abort() is None and session.ticket != key
        assert all(not namespace.ghosts for namespace in world.namespaces), "preempted and aborted"
        with pytest.raises(UsageError, match="open transactions"):
            session.transaction()
            session.renew()
        for transaction in list(session._transactions.values()):
            transaction.abort()
        assert session.renew()
        assert len(world.namespaces[0].state.keys) == 1
        put(session, "after", b"z" * 5000)
    assert state_of(world.open())["after"] == b"z" * 5000
    with world.open().session("next") as following:
        assert following.quarantined_bytes == 0


def test_grants_that_nobody_answered_are_free_after_a_renewal(world: World) -> None:
    with world.open().session("run", heartbeat_s=60) as session:
        tx = session.transaction()
        grant = tx.allocate("x", 300 * KIB)
        tx.abort()
        free = session.free_bytes
        assert session.quarantined_bytes >= 300 * KIB
        assert session.renew() and session.quarantined_bytes == 0
        assert session.free_bytes >= free + 300 * KIB
        with pytest.raises(SessionLost):
            world.open().write_grant(grant, bytes(300 * KIB))
    assert session.volume.info().writer.state == "closed"  # type: ignore[union-attr]


def test_a_grant_that_is_being_written_keeps_the_host_that_it_is_written_by(world: World) -> None:
    """In the session's own process no target refuses what comes late: its table would land in space of others."""
    begun, go = threading.Event(), threading.Event()

    def hold(device: HostDevice, command: Command) -> None:
        if command.verb == "write" and command.length >= 64 * KIB and not begun.is_set():
            begun.set()
            assert go.wait(20)

    volume, data = world.open(), content(0, 300 * KIB)
    with volume.session("run", heartbeat_s=60) as session:
        tx = session.transaction()
        grant = tx.allocate("x", len(data))
        for namespace in world.namespaces:
            namespace.observer = hold
        rank = threading.Thread(target=volume.write_grant, args=(grant, data))
        rank.start()
        assert begun.wait(20)
        tx.abort()
        with pytest.raises(UsageError, match="open transactions"):
            session.renew()
        go.set()
        rank.join(20)
        assert session.renew() and session.quarantined_bytes == 0
        put(session, "y", data)
        with pytest.raises(UsageError, match="has ended"):
            volume.write_grant(grant, bytes(len(data)))
        assert volume.read("y") == data


def test_a_renewal_waits_for_no_target(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    as_host, waits = HostDevice.as_host, []

    def seen(self: HostDevice, hostid: UUID, *, hostnqn: str | None = None, wait: bool = True) -> HostDevice:
        waits.append(wait)
        return as_host(self, hostid, hostnqn=hostnqn, wait=wait)

    monkeypatch.setattr(HostDevice, "as_host", seen)
    with world.open().session("run", heartbeat_s=60) as session:
        assert session.renew()
    assert waits == [True, True, False, False]


class Failing:
    """The n-th command about reservations fails, as `accident` says; None: its target is away from then on."""

    def __init__(self, world: World, n: int, accident: Accident | None) -> None:
        self._world, self._n, self._accident = world, n, accident
        self._left = 0
        self._away: list[SharedNamespace] = []
        #: It came to that.
        self.happened = False

    def __enter__(self) -> None:
        self._left = self._n
        for namespace in self._world.namespaces:
            namespace.observer = self._observe

    def __exit__(self, *exc: object) -> None:
        self._away.clear()
        for namespace in self._world.namespaces:
            namespace.observer = None

    def _observe(self, device: HostDevice, command: Command) -> Accident | None:
        if device.namespace in self._away:
            raise DeviceGone("the target is away")
        if command.verb in ("read", "write", "flush"):
            return None
        self._left -= 1
        if self._left != -1:
            return None
        self.happened = True
        if self._accident is None:
            self._away.append(device.namespace)
            raise DeviceGone("the target is away")
        return self._accident


@pytest.mark.parametrize("accident", [None, Accident(given_up=True), Accident(landed=True, given_up=True)])
def test_a_renewal_that_fails_anywhere_goes_on_later(world: World, accident: Accident | None) -> None:
    failed = halves = 0
    for n in itertools.count():
        failing = Failing(world, n, accident)
        with world.open().session("run", takeover="now", heartbeat_s=BEAT) as session:
            # Windows of one that ended half way, until somebody has held the volume for long enough.
            inherited = session.quarantined_bytes
            put(session, f"before {n}", b"x" * 5000)
            with suppress(VolumeError), session.transaction() as tx:
                tx.allocate("never answered", 100_000)
            try:
                with failing:
                    session.renew()
            except DeviceError:
                failed += 1
                # Meanwhile it lives, and says so.
                time.sleep(2 * BEAT)
                session.check()
                if session._half_way is not None:
                    with pytest.raises(DeviceError, match="on its way to be another host"):
                        session.mend_tables()
                    halves += 1
                block = HeartbeatBlock(session.volume.superblock, session.volume.devices)
                with pytest.raises(WriterActive, match="its heart beats"):
                    heartbeat.judge(block, run_id="?", takeover="if-dead", missed_beats=200, where="", last_session=0)
            put(session, f"after {n}", b"y" * 5000)
            # A preemption whose answer was lost confirms nothing.
            told = session.renew()
            assert told is (session.quarantined_bytes == inherited) and (
                told or accident == Accident(landed=True, given_up=True)
            )
            assert session.ticket is not None and world.holders() == [session.ticket.key] * 2
            assert all(len(namespace.state.keys) == 1 for namespace in world.namespaces)
            rank = world.open(ticket=session.ticket)
            with session.transaction() as tx:
                tx.accept(rank.write_grant(tx.allocate(f"rank {n}", 5000), b"z" * 5000))
            half = n % 2 == 0
            if half:
                # It ends half way: the next one finds a volume that is closed, and trusts no more of it than it must.
                with failing, suppress(DeviceError):
                    session.renew()
        with world.open().session("next") as following:
            put(following, f"next {n}", b"z" * 5000)
            assert half or not told or following.quarantined_bytes <= inherited
        if not failing.happened:
            break
    assert failed >= 8 and halves
    assert len(state_of(world.open())) == 4 * (n + 1)


def test_a_deallocation_under_way_survives_a_renewal(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.volume.space.deallocate.AFTER_S", 0.0)
    begun, go = threading.Event(), threading.Event()

    def hold(device: HostDevice, command: Command) -> None:
        if command.verb == "deallocate" and not begun.is_set():
            begun.set()
            assert go.wait(20)

    with world.open().session("run", heartbeat_s=60) as session:
        put(session, "x", b"x" * 400 * KIB)
        for namespace in world.namespaces:
            namespace.observer = hold
        with session.transaction() as tx:
            tx.delete("x")
        assert begun.wait(20)
        threading.Timer(0.1, go.set).start()
        assert session.renew()
        deadline = time.monotonic() + 20
        while session.deallocation.deallocated_bytes < 400 * KIB and time.monotonic() < deadline:
            assert session.deallocation.failed is None
            time.sleep(0.01)
        assert session.deallocation.deallocated_bytes >= 400 * KIB and session.quarantined_bytes == 0


def test_full_only_of_what_waits_says_so_and_renews_itself(world: World) -> None:
    with world.open().session("run", heartbeat_s=60) as session:
        free = session.free_bytes
        with suppress(VolumeError), session.transaction() as tx:
            tx.allocate("never answered", free - 500 * KIB)
        key = session.ticket
        with (
            pytest.raises(VolumeFull, match=r"waiting until late writes can be ruled out; end the open transactions"),
            session.transaction() as tx,
        ):
            tx.put("x", content(1, 600 * KIB))
        assert session.ticket == key
        put(session, "x", content(1, 600 * KIB))
        assert session.ticket != key


def test_what_no_target_confirmed_stays_quarantined_over_renewals() -> None:
    """The second host was drained, the first was not: its ghosts may land all the same, and a successor waits, too."""

    def lose(device: HostDevice, command: Command) -> Accident | None:
        if command.verb == "write" and command.length >= 64 * KIB and not lost:
            lost.append(command.offset)
            return Accident(ghost="admitted")
        return None

    lost: list[int] = []
    world = World(quirks=Quirks(fences_without_draining=True))
    world.create()
    session = world.open().session("run", heartbeat_s=BEAT)
    with session.transaction() as tx:
        for namespace in world.namespaces:
            namespace.observer = lose
        tx.put("x", b"x" * 200_000)
    key = session.ticket
    with session.transaction() as tx:
        tx.delete("x")
    assert key != session.ticket and lost, "renewed by itself"
    key = session.ticket
    session.transaction().abort()
    assert key == session.ticket, "there is nothing to be gained by another renewal"
    assert session.renew() is False
    for step in range(60):
        with session.transaction() as tx:
            tx.put(f"{step}", content(step, 300 * KIB))
            if step:
                tx.delete(f"{step - 1}")
    assert sum(len(namespace.ghosts) for namespace in world.namespaces) == 1
    assert all(not namespace.overwrites for namespace in world.namespaces)
    stopped(session)
    with world.open().session("run", heartbeat_s=BEAT) as successor:
        assert successor.quarantined_bytes > 0


def test_a_renewal_whose_block_cannot_be_written_leaves_a_heart(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    def away(block: HeartbeatBlock, mine: object) -> None:
        raise DeviceError("the target is away")

    with world.open().session("run", heartbeat_s=60) as session:
        before = session._beat
        with monkeypatch.context() as patch:
            patch.setattr(HeartbeatBlock, "write", away)
            assert session.renew()
        assert session._beat is not before
        put(session, "x", b"x")
        assert session.renew()
    assert state_of(world.open()) == {"x": b"x"}
