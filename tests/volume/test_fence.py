"""Who may write, as the target enforces it: against the model of one that several hosts share (`headrace.testing`)."""

from __future__ import annotations

import threading
import time
from pathlib import Path

import pytest

from headrace.device import ReservationType, new_key
from headrace.errors import (
    HeadraceError,
    NotFenced,
    ReservationConflict,
    SessionLost,
    UsageError,
    WriterActive,
)
from headrace.testing import Command, HostDevice, Quirks, SharedNamespace
from headrace.units import MIB
from headrace.volume import Session, Ticket, Volume, layout
from headrace.volume.catalog.log import LogReader
from headrace.volume.copy import copy_in, run
from headrace.volume.writing import fence, stream
from tests.volume.fenced import SHARED, World, put, stopped
from tests.volume.support import BEAT, KIB, STRIPE, content, state_of


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


@pytest.mark.parametrize("by", ["a table", "a move for a record", "a move for a window"])
def test_a_zombie_that_makes_room_hears_that_it_is_lost(by: str, world: World, monkeypatch: pytest.MonkeyPatch) -> None:
    """Whatever it is that it writes for that, the caller hears of the session, not of a status."""
    zombie = stopped(world.open().session("run", heartbeat_s=BEAT))
    put(zombie, "old", b"x" * 5000)
    writer = zombie._writer
    with world.open().session("run", heartbeat_s=BEAT) as session:
        if by == "a table":
            monkeypatch.setattr(writer, "_lacking", lambda *_: 1)
            writer._recent_bytes = 0
        else:
            writer._log_blocks = 0
        tx = zombie.transaction()
        with pytest.raises(SessionLost, match="took the volume over"):
            if by == "a move for a record":
                tx.delete("old")
                tx.commit()
            else:
                tx.put("late", b"x" * (5 if by == "a table" else 3 * MIB))
        with pytest.raises(SessionLost):
            zombie.transaction()
        assert zombie._lost is not None
        put(session, "new", b"y")
    assert set(state_of(world.open())) == {"old", "new"}


@pytest.mark.parametrize(("what", "verb"), [("stream", "write"), ("copy", "write"), ("copy", "flush")])
def test_who_writes_much_hears_that_it_is_lost(
    what: str, verb: str, world: World, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(stream, "_STAGE_BYTES", 64 * KIB)
    monkeypatch.setattr(run, "PACKED_BYTES", 64 * KIB)
    taken: list[Session | None] = []

    def take_over(device: HostDevice, command: Command) -> None:
        if command.verb == verb and (verb == "flush" or command.length >= 32 * KIB) and not taken:
            taken.append(None)
            taken.append(world.open().session("other", takeover="now", heartbeat_s=60))

    (tmp_path / "large").write_bytes(content(0, 500 * KIB))
    with world.open().session("run", heartbeat_s=60) as session:
        tx = session.transaction()
        for namespace in world.namespaces:
            namespace.observer = take_over
        with pytest.raises(SessionLost, match="took the volume over"):
            if what == "stream":
                tx.write_stream("x", [content(0, 500 * KIB)])
            else:
                copy_in(session, [tmp_path / "large"], "x")
        with pytest.raises(SessionLost):
            session.check()
        assert len(taken) == 2 and taken[1] is not None
        taken[1].close()


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


def test_a_zombie_that_renews_itself_too_late_leaves_no_key_behind(world: World) -> None:
    zombie = stopped(world.open().session("run", heartbeat_s=BEAT))
    with world.open().session("run", takeover="now", heartbeat_s=BEAT) as session:
        with pytest.raises(SessionLost):
            zombie.renew()
        assert session.ticket is not None
        for namespace in world.namespaces:
            assert {found.key for found in namespace.connect().reservations.report().registrants} == {
                session.ticket.key
            }
        put(session, "x", b"x")
        zombie.close()
        put(session, "y", b"y")
