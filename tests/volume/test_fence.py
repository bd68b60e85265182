"""Who may write, as the target enforces it: against the model of one that several hosts share (`headrace.testing`)."""

from __future__ import annotations

import gc
import itertools
import threading
import time
from contextlib import suppress

import pytest

from headrace.device import ReservationType, new_key, open_device
from headrace.errors import (
    DeviceError,
    DeviceGone,
    HeadraceError,
    NotFenced,
    ReservationConflict,
    SessionLost,
    UsageError,
    VolumeError,
    VolumeFull,
    WriterActive,
)
from headrace.testing import Accident, Command, HostDevice, Quirks, SharedNamespace
from headrace.units import MIB
from headrace.volume import Session, Ticket, Volume, layout
from headrace.volume.catalog.log import LogReader
from headrace.volume.writing import fence, heartbeat
from headrace.volume.writing.heartbeat import HeartbeatBlock
from tests.volume.support import KIB, STRIPE, content, state_of

BEAT = 0.05
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


@pytest.fixture
def world() -> World:
    made = World()
    made.create()
    return made


def stopped(session: Session) -> Session:
    """As after SIGSTOP: its heart does not beat, and it knows nothing of that."""
    session._beat.halt()
    return session


def put(session: Session, name: str, data: bytes) -> None:
    with session.transaction() as tx:
        tx.put(name, data)


def test_a_reader_forgets_a_record_that_was_never_durable(world: World) -> None:
    """It read what a writer was just writing; then writer and target lost it, and the next session, whose predecessor
    the target drained, writes others to the same place."""
    old = stopped(world.open().session("run", heartbeat_s=BEAT))
    reader = world.open()
    cursor, superblock = old._writer.cursor, old.volume.superblock
    data, _ = layout.Record(
        layout.WINDOW, cursor.sequence + 1, cursor.durable, cursor.header.generation, old.number, cursor.previous, b""
    ).encode(superblock.volume_id, cursor.block)
    for copy, member in enumerate(superblock.log_member):
        device = old._fence.devices[member]
        assert isinstance(device, HostDevice)
        offset = superblock.area_offset(copy, cursor.area) + cursor.block * layout.ALIGN
        device.show_early(Command(verb="write", offset=offset, length=len(data), data=data))
    reader.refresh()
    assert reader._cursor.sequence == cursor.sequence + 1
    for device in old._fence.devices:
        assert isinstance(device, HostDevice)
        device.lose(cache_lost=True)
    with world.open().session("run", heartbeat_s=60) as session:
        assert session._writer.cursor.area == cursor.area, "the log did not move"
        put(session, "new", b"y" * 5000)
        assert reader.refresh() and state_of(reader) == {"new": b"y" * 5000}


# ---- one host a session, and nothing released ----


def test_a_session_is_one_fresh_host_that_holds_every_member(world: World) -> None:
    keys = set(world.holders())
    for _ in range(2):
        volume = world.open()
        with volume.session("run") as session:
            put(session, f"by {session.number}", b"x" * 5000)
            ticket = session.ticket
            assert ticket is not None and session.fence == "persistent" == volume.info().fence
            for namespace in world.namespaces:
                report = namespace.state.report()
                assert [(one.key, one.hostid.bytes, one.holds) for one in report.registrants] == [
                    (ticket.key, ticket.hostid, True)
                ]
                assert report.type is SHARED
            assert ticket.key not in keys
            keys.add(ticket.key)
        assert world.holders() == [ticket.key] * 2, "closed, and held all the same"


def test_a_reader_and_a_closed_session_cannot_write(world: World) -> None:
    volume = world.open()
    session = volume.session("run")
    put(session, "object", b"x" * 5000)
    late = session._fence.devices
    ticket = session.ticket
    assert ticket is not None
    session.close()
    with pytest.raises(ReservationConflict):
        volume.devices[0].write(64 * KIB, bytes(4096))
    with world.open().session("next") as after:
        # A rank of the closed session is late: its association opens, and is not believed.
        with pytest.raises(SessionLost):
            world.open(ticket=ticket)
        put(after, "new", b"y")
    assert late[0] is not volume.devices[0]
    assert state_of(volume) == {"object": b"x" * 5000} and volume.refresh()


def test_every_member_is_fenced_before_the_log_is_read(world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    stopped(world.open().session("run", heartbeat_s=BEAT))
    seen = []
    original = LogReader.load

    def look(self: LogReader, **options: bool) -> object:
        if options.get("every_copy"):
            seen.append(world.holders())
        return original(self, **options)

    monkeypatch.setattr(LogReader, "load", look)
    with world.open().session("run", heartbeat_s=BEAT) as session:
        assert session.ticket is not None
        assert seen == [[session.ticket.key] * 2]


# ---- zombies ----


def test_a_zombie_is_refused_wherever_it_writes(world: World) -> None:
    volume = world.open()
    zombie = stopped(volume.session("run", heartbeat_s=BEAT))
    tx = zombie.transaction()
    tx.put("late", b"x" * 200_000)
    grant = zombie.transaction().allocate("later", 100_000)
    with world.open().session("run", heartbeat_s=60) as session:
        put(session, "new", b"y")
        before = [bytes(namespace.read(0, namespace.size_bytes)) for namespace in world.namespaces]
        conflicts = world.conflicts
        with pytest.raises(SessionLost, match="took the volume over"):
            tx.commit()
        with pytest.raises(SessionLost):
            volume.write_grant(grant, bytes(100_000))
        with pytest.raises(SessionLost):
            world.open().write_grant(grant, bytes(100_000))
        with pytest.raises(SessionLost):
            zombie.transaction()
        zombie.close()
        assert world.conflicts > conflicts
        assert before == [bytes(namespace.read(0, namespace.size_bytes)) for namespace in world.namespaces]
    assert state_of(world.open()) == {"new": b"y"}


def test_a_zombie_that_moves_the_log_destroys_nothing(world: World) -> None:
    """It moves to the area that its successor uses: what used to be the one hole."""
    zombie = stopped(world.open().session("run", heartbeat_s=BEAT))
    put(zombie, "old", b"x" * 5000)
    with world.open().session("run", heartbeat_s=BEAT) as session:
        put(session, "new", b"y")
        with pytest.raises(SessionLost), zombie.lost_if_fenced():
            zombie._writer.move(say_so=True)
        put(session, "newer", b"z")
    assert set(state_of(world.open())) == {"old", "new", "newer"}


def test_a_living_session_finds_out_by_its_heart(world: World) -> None:
    zombie = world.open().session("run", heartbeat_s=BEAT)
    with world.open().session("other", takeover="now") as session:
        deadline = time.monotonic() + 20
        while zombie._lost is None and time.monotonic() < deadline:
            time.sleep(0.01)
        with pytest.raises(SessionLost, match="took the volume over"):
            zombie.check()
        put(session, "new", b"y")


def test_a_target_that_forgot_lets_nobody_write_unasked() -> None:
    """Linux keeps reservations in memory: after a restart everybody could write. The guard of each association asks
    first."""
    world = World(quirks=Quirks(forgets=True))
    world.create()
    volume = world.open()
    session = stopped(volume.session("run", heartbeat_s=BEAT))
    assert session.fence == "until-restart" == volume.info().fence
    tx = session.transaction()
    tx.put("x", b"x" * 5000)
    for namespace in world.namespaces:
        namespace.restart()
    with pytest.raises(SessionLost):
        tx.commit()
    with pytest.raises(SessionLost):
        session.transaction()
    session.close()
    # Nobody holds: the next session does.
    with world.open().session("run", takeover="if-dead", heartbeat_s=BEAT, missed_beats=1) as again:
        put(again, "y", b"y")
    assert "y" in state_of(world.open())


def test_a_target_that_remembers_goes_on(world: World) -> None:
    session = world.open().session("run", heartbeat_s=60)
    for namespace in world.namespaces:
        namespace.restart()
    put(session, "x", b"x" * 5000)
    session.close()
    assert state_of(world.open()) == {"x": b"x" * 5000}


def test_a_late_registration_is_thrown_out_by_nobody_but_does_not_write(world: World) -> None:
    """A taker that was stopped after the target answered its first report, and wakes up when another has won."""
    judged = fence.holder(world.namespaces[0].connect())
    with world.open().session("run", heartbeat_s=60) as session:
        with pytest.raises(WriterActive, match="at the same moment"):
            fence.take(world.devices(), judged=judged)
        assert session.ticket is not None
        assert world.holders() == [session.ticket.key] * 2
        assert all(len(namespace.state.keys) == 1 for namespace in world.namespaces)
        put(session, "x", b"x")


def test_a_taker_that_was_stopped_between_two_members(world: World) -> None:
    def stop(device: HostDevice, command: object) -> None:
        if getattr(command, "verb", "") == "register" and device.namespace is world.namespaces[1]:
            world.namespaces[1].observer = None
            with world.open().session("second", takeover="now", heartbeat_s=60) as session:
                put(session, "x", b"x")
                assert session.ticket is not None
                won.append(session.ticket.key)

    won: list[int] = []
    world.namespaces[1].observer = stop
    with pytest.raises((WriterActive, SessionLost)):
        fence.take(world.devices(), judged=world.holders()[0])
    assert world.holders()[0] == won[0]
    with world.open().session("third", heartbeat_s=60) as session:
        put(session, "y", b"y")
    assert state_of(world.open()) == {"x": b"x", "y": b"y"}


def test_a_taker_that_lost_the_first_member_leaves_the_second_alone(world: World) -> None:
    """Stopped behind its last report of member 0, it asks once more before it goes on."""
    reports = 0

    def stop(device: HostDevice, command: Command) -> None:
        nonlocal reports
        reports += command.verb == "report"
        if reports == 4:  # Who held, before; two while it took; and this one.
            world.namespaces[0].observer = None
            winners.append(world.open().session("second", takeover="now", heartbeat_s=60))

    winners: list[Session] = []
    world.namespaces[0].observer = stop
    judged = world.holders()[0]
    with pytest.raises(WriterActive):
        fence.take(world.devices(), judged=judged)
    (winner,) = winners
    assert winner.ticket is not None and world.holders() == [winner.ticket.key] * 2
    put(winner, "x", b"x")
    winner.close()


def test_of_many_takers_one_wins(world: World) -> None:
    stopped(world.open().session("run", heartbeat_s=BEAT))
    results: list[object] = []
    together = threading.Barrier(4)

    def take(name: str) -> None:
        volume = world.open()
        together.wait()
        try:
            results.append(volume.session(name, takeover="if-dead", heartbeat_s=BEAT))
        except HeadraceError as error:
            results.append(error)

    threads = [threading.Thread(target=take, args=(f"taker {i}",)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    (winner,) = [one for one in results if isinstance(one, Session)]
    assert len(results) == 4
    put(winner, "x", b"x")
    assert winner.ticket is not None and world.holders() == [winner.ticket.key] * 2
    winner.close()


# ---- what a takeover confirms ----


def windows_after(world: World) -> int:
    """The bytes that the successor of a stopped session leaves alone."""
    zombie = stopped(world.open().session("run", heartbeat_s=BEAT))
    put(zombie, "x", b"x" * 100_000)
    with world.open().session("run", heartbeat_s=BEAT) as session:
        return session.quarantined_bytes


@pytest.mark.parametrize(
    ("quirks", "drained"),
    [(Quirks(), True), (Quirks(forgets=True), True), (Quirks(refuses_abort=True), False)],
)
def test_space_is_free_at_once_where_the_target_drained(quirks: Quirks, drained: bool) -> None:
    world = World(quirks=quirks)
    world.create()
    assert (windows_after(world) == 0) is drained


def test_a_predecessor_that_the_target_does_not_know_is_not_drained(world: World) -> None:
    zombie = stopped(world.open().session("run", heartbeat_s=BEAT))
    put(zombie, "x", b"x" * 100_000)
    cleaner = [namespace.connect() for namespace in world.namespaces]
    for device in cleaner:
        key = new_key()
        device.reservations.register(key)
        device.reservations.clear(key)
    with world.open().session("run", heartbeat_s=BEAT) as session:
        assert session.quarantined_bytes > 0


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
                    heartbeat.judge(block, run_id="?", takeover="refuse", missed_beats=2, where="", last_session=0)
            put(session, f"after {n}", b"y" * 5000)
            # A preemption whose answer was lost confirms nothing.
            told = session.renew()
            assert told is (session.quarantined_bytes == 0) and (
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
            assert half or not told or following.quarantined_bytes == 0
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


# ---- strengths ----


def test_a_target_without_reservations_has_to_be_asked_for() -> None:
    world = World(quirks=Quirks(no_reservations=True))
    world.create()
    volume = world.open()
    assert volume.info().fence == "none"
    with pytest.raises(NotFenced, match="unfenced=True"):
        volume.session("run")
    with volume.session("run", unfenced=True) as session:
        assert session.fence == "none" and session.ticket is None
        put(session, "x", b"x")
    assert state_of(volume) == {"x": b"x"}


def test_the_worst_member_counts() -> None:
    namespaces = [SharedNamespace(4 * MIB), SharedNamespace(4 * MIB, quirks=Quirks(forgets=True))]
    devices = [namespace.connect() for namespace in namespaces]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE)
    with volume.session("run") as session:
        assert session.fence == "until-restart"


def test_making_a_volume_takes_the_devices_only_when_forced(world: World) -> None:
    with world.open().session("run", heartbeat_s=60) as session:
        with pytest.raises(UsageError, match="holds a volume"):
            world.create()
        world.create(force=True)
        with pytest.raises(SessionLost):
            put(session, "x", b"x")
    other = SharedNamespace(4 * MIB)
    foreign, key = other.connect(), new_key()
    foreign.reservations.register(key)
    foreign.reservations.acquire(key, SHARED)
    with pytest.raises(UsageError, match="another host holds"):
        Volume.create(devices=[other.connect()], stripe_bytes=STRIPE)
    Volume.create(devices=[other.connect()], stripe_bytes=STRIPE, force=True)


@pytest.mark.parametrize("kind", [ReservationType.WRITE_EXCLUSIVE, ReservationType.WRITE_EXCLUSIVE_ALL])
def test_reservations_of_other_types_are_taken_over_too(world: World, kind: ReservationType) -> None:
    for namespace in world.namespaces:
        host, key = namespace.connect(), new_key()
        host.reservations.register(key)
        host.reservations.preempt(key, namespace.state.report().holders[0].key, kind)
        other = namespace.connect()
        other.reservations.register(new_key())
    with world.open().session("run", missed_beats=1) as session:
        put(session, "x", b"x")
        assert session.ticket is not None
        assert [len(namespace.state.keys) for namespace in world.namespaces] == [1, 1]


# ---- ranks ----


def test_ranks_write_as_the_session(world: World) -> None:
    with world.open().session("run", heartbeat_s=60) as session:
        assert session.ticket is not None
        ticket = Ticket.from_json(session.ticket.to_json())
        early, late = world.open(ticket=ticket), world.open()
        with session.transaction() as tx:
            for rank, volume in enumerate((early, late)):
                grant = tx.allocate(f"rank {rank}", 100_000)
                tx.accept(volume.write_grant(grant, content(rank, 100_000)))
        assert all(len(namespace.state.keys) == 1 for namespace in world.namespaces)
        for volume in (early, late):
            volume.close()
    assert state_of(world.open()) == {f"rank {rank}": content(rank, 100_000) for rank in range(2)}


# ---- the heart ----


def test_a_session_that_nobody_holds_any_more_stops_beating(world: World) -> None:
    volume = world.open()
    volume.session("run", heartbeat_s=BEAT)
    gc.collect()
    block = heartbeat.HeartbeatBlock(volume.superblock, volume.devices)
    time.sleep(4 * BEAT)
    first = block.read()
    time.sleep(6 * BEAT)
    assert first is not None and first.state == layout.ACTIVE and block.read() == first


def test_without_a_fence_the_native_heart_stops_where_the_block_is_anothers() -> None:
    with open_device("mem:8MiB") as device:
        volume = Volume.create(devices=[device], stripe_bytes=STRIPE)
        old = volume.session("run", heartbeat_s=BEAT)
        assert isinstance(old._beat, heartbeat.NativeHeart) and old.fence == "process"
        # Damaged, it is its own to write again.
        block = heartbeat.HeartbeatBlock(volume.superblock, volume.devices)
        for place, offset in block.places:
            place.write(offset, bytes(4096))
        deadline = time.monotonic() + 20
        while block.read() is None and time.monotonic() < deadline:
            time.sleep(BEAT)
        found = block.read()
        assert found is not None and old._lost is None
        # Beats are made beforehand, and say when each was to come.
        assert abs(found.due_ns - time.time_ns()) < 10e9 and found.due_ns > found.started_ns
        first = found
        while (found := block.read()) is None or found.beat < first.beat + 2:
            time.sleep(BEAT)
        assert found.due_ns - first.due_ns == (found.beat - first.beat) * int(BEAT * 1e9)
        with Volume.open([device], write=True).session("other", takeover="now", heartbeat_s=60) as session:
            while old._lost is None and time.monotonic() < deadline:
                time.sleep(BEAT)
            with pytest.raises(SessionLost, match="'other'"):
                old.check()
            time.sleep(3 * BEAT)
            found = block.read()
            assert found is not None and found.session == session.number


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
