"""Sessions of unknown fate, one after another: what the next one knows of them, and when it waits."""

from __future__ import annotations

import pytest

from headrace.device import BlockDevice
from headrace.errors import SessionLost
from headrace.testing import MemoryDevice, Quirks, SharedNamespace
from headrace.units import MIB
from headrace.volume import Session, Volume, layout
from headrace.volume.writing import heartbeat, past
from tests.volume.support import STRIPE

pytestmark = pytest.mark.usefixtures("nobody_else")


class Places:
    """Where a volume is, and sessions that are killed there."""

    def __init__(self, quirks: Quirks | None = None) -> None:
        self.namespaces = [SharedNamespace(4 * MIB, quirks=quirks) for _ in range(2)]
        Volume.create(devices=self.devices(), stripe_bytes=STRIPE).close()
        self.killed: list[Session] = []

    def devices(self) -> list[BlockDevice]:
        return [namespace.connect() for namespace in self.namespaces]

    def session(self, **options: bool) -> Session:
        return Volume.open(self.devices(), write=True).session("run", takeover="if-dead", heartbeat_s=60.0, **options)

    def kill(self, *, after_s: float = 0.0) -> Session:
        """A session that is gone, having held the volume for so long."""
        session = self.session()
        with session.transaction() as tx:
            tx.put(f"{session.number}", b"x" * 5000)
        session._beat.halt()
        last = session._beat.last()
        block = heartbeat.HeartbeatBlock(session.volume.superblock, session._fence.devices)
        beats = int(after_s * 1e9) // last.interval_ns
        block.write(last._replace(beat=1 + beats, due_ns=last.started_ns + int(after_s * 1e9)))
        self.killed.append(session)
        return session

    def lost_on_its_way_in(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """A session that has said that it is there, and is killed before it has a record in the log."""

        def die(self: Session, *_: object) -> None:
            self._beat.halt()
            raise SystemExit

        with monkeypatch.context() as patch:
            patch.setattr(Session, "_take_log", die)
            patch.setattr(heartbeat.Heart, "stop", lambda *_: None)
            with pytest.raises(SystemExit):
                self.session()


CONFIRMS_NOTHING = Quirks(refuses_abort=True)


def area(session: Session) -> int:
    return session._writer.cursor.area


def test_the_second_of_unknown_fate_is_waited_for(waited: list[float], caplog: pytest.LogCaptureFixture) -> None:
    places = Places(CONFIRMS_NOTHING)
    first, second = places.kill(), places.kill()
    assert area(second) // 2 != area(first) // 2 and not waited, "the other pair was safe"
    with places.session() as third:
        assert [record.levelname for record in caplog.records] == ["WARNING"]
        assert "opens for writing in 60 seconds" in caplog.text and third.volume.uris[1] in caplog.text
        assert sum(waited) == past.QUIET_S and area(third) // 2 != area(second) // 2
        assert sorted(info.name for info in third.volume.list()) == ["1", "2"]
        assert third._beat.last().flags & layout.SETTLED


def test_who_held_the_volume_for_long_enough_shows_that_those_before_it_are_gone(waited: list[float]) -> None:
    places = Places(CONFIRMS_NOTHING)
    for _ in range(4):
        places.kill(after_s=past.QUIET_S)
    places.kill(after_s=past.QUIET_S - 1)
    assert not waited
    places.session().close()
    assert waited


def test_one_that_was_lost_on_its_way_in_is_waited_for(waited: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places(CONFIRMS_NOTHING)
    places.session().close()
    places.lost_on_its_way_in(monkeypatch)
    assert not waited
    places.session().close()
    assert sum(waited) == past.QUIET_S


def test_where_the_targets_confirm_nobody_waits(waited: list[float], monkeypatch: pytest.MonkeyPatch) -> None:
    places = Places()
    for _ in range(2):
        places.kill()
        places.lost_on_its_way_in(monkeypatch)
    with places.session() as session:
        assert not waited and session.quarantined_bytes == 0 and session._settled


def test_a_short_session_in_between_does_not_make_space_free(waited: list[float]) -> None:
    """Late writes do not end sooner because somebody came and went."""
    places = Places(CONFIRMS_NOTHING)
    places.kill()
    for _ in range(3):
        info = Volume.open(places.devices()).info()
        with places.session() as session:
            assert session.quarantined_bytes >= MIB and session.quarantined_bytes == info.quarantined_bytes
    places.kill(after_s=past.QUIET_S)
    with places.session() as session:
        assert set(session.catalog.windows) <= {session.number, session.number - 1}
    assert not waited


def test_memory_and_files_are_not_waited_for(waited: list[float]) -> None:
    volume = Volume.create(devices=[MemoryDevice(4 * MIB) for _ in range(2)], stripe_bytes=STRIPE)
    for _ in range(3):
        volume.session("run", takeover="if-dead", heartbeat_s=60.0)._beat.halt()
        volume = Volume.open(volume.devices, write=True)
    assert not waited


def test_the_block_of_a_session_that_nobody_judged_says_nothing() -> None:
    last = heartbeat.new_heartbeat(5, "run", 1.0)._replace(flags=layout.SETTLED)
    fence = past.Fence.__new__(past.Fence)
    fence.strengths, fence._aborted, fence._own_node = [], {}, set()
    verdict = heartbeat.Verdict(last, clean=True)
    assert past.look_back(verdict, 6, fence, away=False).settled
    assert not past.look_back(verdict, 6, fence, away=True).settled
    assert past.look_back(verdict, 7, fence, away=False) == past.Past(False, False)


def test_the_wait_ends_where_the_session_is_lost(waited: list[float]) -> None:
    def lost() -> None:
        if len(waited) == 3:
            raise SessionLost("taken over by hand")

    with pytest.raises(SessionLost):
        past.wait_until_quiet(lost, [])
    assert sum(waited) == 3.0
