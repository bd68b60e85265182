"""The heart of a session: who lives, who is dead, and how anybody tells."""

from __future__ import annotations

import _thread
import gc
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, ClassVar

import pytest

from headrace.device import open_device
from headrace.errors import (
    DeviceTimeout,
    HeadraceError,
    SessionLost,
    WriterActive,
)
from headrace.volume import Session, Volume, layout
from headrace.volume.space import worker
from headrace.volume.writing import heartbeat
from tests.volume.fenced import World, put, stopped
from tests.volume.support import BEAT, STRIPE, new_volume, open_read, second, silent, writing


def test_a_dead_session_is_taken_over_when_asked_or_by_its_own_run() -> None:
    volume = new_volume()
    silent(volume, "run")
    with pytest.raises(WriterActive, match=r"no beat in \d+\.\d s, the last one due at 20\d\d-.*seems to be dead"):
        second(volume).session("other")
    started = time.monotonic()
    session = second(volume).session("run", heartbeat_s=BEAT)
    assert time.monotonic() - started >= 5 * BEAT
    session._beat.stop(None)
    with second(volume).session("other", takeover="if-dead"):
        pass


def test_slow_answers_prove_nothing() -> None:
    """The owner may wait for the same device: only looks that were answered promptly count, and not for ever."""
    beat = heartbeat.new_heartbeat(1, "run", 0.02)

    class Slow:
        delays: ClassVar[list[float]] = []
        looks = 0

        def read(self) -> layout.Heartbeat:
            self.looks += 1
            time.sleep(self.delays.pop(0) if self.delays else 0)
            return beat

    block = Slow()
    block.delays = [0, 0, 0.05, 0, 0, 0]
    assert heartbeat.wait_for_silence(block, beat, 3)  # type: ignore[arg-type]
    assert block.looks >= 6
    block.delays = [0.03] * 1000
    with pytest.raises(DeviceTimeout, match="too slowly"):
        heartbeat.wait_for_silence(block, beat, 3)  # type: ignore[arg-type]


@pytest.mark.usefixtures("nobody_else")
def test_the_heartbeat_may_be_lost_on_one_copy_or_both() -> None:
    volume = new_volume()
    with writing(volume) as session, session.transaction() as tx:
        tx.put("x", b"1")
    for copies in ((0,), (1,), (0, 1)):
        for copy in copies:
            device = volume.devices[volume.superblock.log_member[copy]]
            device.write(volume.superblock.log_offset[copy], bytes(4096))
        with writing(second(volume)) as session:
            assert session.number > 1
    assert open_read(volume.devices) == {"x": b"1"}


def test_a_session_that_nobody_holds_any_more_stops_beating(world: World) -> None:
    volume = world.open()
    volume.session("run", heartbeat_s=BEAT)
    gc.collect()
    block = heartbeat.HeartbeatBlock(volume.superblock, volume.devices)
    deadline = time.monotonic() + 20
    first, found = None, block.read()
    # One beat may have been under way, for long on a busy machine.
    while found != first and time.monotonic() < deadline:
        first = found
        time.sleep(6 * BEAT)
        found = block.read()
    assert first is not None and first.state == layout.ACTIVE and found == first


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


@contextmanager
def no_threads(monkeypatch: pytest.MonkeyPatch, *, refused: bool) -> Iterator[list[Callable[[], None]]]:
    """Those that are begun are refused, or never come to life."""
    unborn: list[Callable[[], None]] = []

    def none(target: Callable[[], None], arguments: tuple[Any, ...]) -> int:
        if refused:
            raise RuntimeError("can't start new thread")
        unborn.append(target)
        return 0

    with monkeypatch.context() as patch:
        patch.setattr(worker, "BIRTH_S", 0.05)
        patch.setattr(_thread, "start_new_thread", none)
        yield unborn


def beats(session: Session) -> None:
    """Waits until it does."""
    block = heartbeat.HeartbeatBlock(session.volume.superblock, session.volume.devices)
    first, deadline = block.read(), time.monotonic() + 60
    while (found := block.read()) == first:
        assert time.monotonic() < deadline, "its heart stands still"
        time.sleep(BEAT)
    assert first is not None and found is not None and (found.session, found.nonce) == (first.session, first.nonce)


@pytest.mark.parametrize("refused", [True, False])
@pytest.mark.parametrize("native", [True, False])
def test_a_session_whose_heart_is_never_born_does_not_open(
    native: bool, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with open_device("mem:8MiB") as device:
        volume = Volume.create(devices=[device], stripe_bytes=STRIPE) if native else new_volume()
        with no_threads(monkeypatch, refused=refused) as unborn:
            with pytest.raises(HeadraceError, match="no thread could be started at headrace-heartbeat"):
                volume.session("run", heartbeat_s=60)
            # Who comes to life after all finds that nobody waits.
            for late in unborn:
                late()
        # Nobody has to be waited for.
        with second(volume).session("other", heartbeat_s=BEAT) as session:
            beats(session)


@pytest.mark.parametrize("refused", [True, False])
def test_a_heart_that_a_renewal_could_not_begin_again_beats_with_the_next_call(
    world: World, refused: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    with world.open().session("run", heartbeat_s=BEAT) as session:
        put(session, "before", b"x")
        with no_threads(monkeypatch, refused=refused):
            for _ in range(2):
                with pytest.raises(HeadraceError, match="no thread could be started at headrace-heartbeat"):
                    session.renew()
            with pytest.raises(HeadraceError, match="no thread could be started at headrace-heartbeat"):
                session.check()
        session.check()
        beats(session)
        put(session, "after", b"y")
    assert open_read(world.devices()) == {"before": b"x", "after": b"y"}


def test_a_heart_outlives_want_of_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = new_volume()
    with volume.session("run", heartbeat_s=BEAT) as session:
        write, failed = session._beat._block.write, []

        def failing(beat: layout.Heartbeat) -> None:
            if len(failed) < 2:
                failed.append(beat)
                raise MemoryError
            write(beat)

        session._beat._block.write = failing  # type: ignore[method-assign]
        beats(session)
        assert len(failed) == 2 and not session._beat.died


@pytest.mark.filterwarnings("ignore::pytest.PytestUnraisableExceptionWarning")
def test_a_session_whose_heart_died_looks_before_it_beats_on(world: World) -> None:
    """Whoever took it for dead has the volume now; without a fence only a look tells."""
    plain = new_volume()
    for volume, other in ((plain, second(plain)), (world.open(), world.open())):
        old = volume.session("run", heartbeat_s=BEAT)
        die(old)
        old.check()
        assert not old._beat.died
        beats(old)
        die(old)
        with other.session("other", takeover="now", heartbeat_s=60) as session:
            with pytest.raises(SessionLost, match="took the volume over"):
                old.check()
            put(session, "x", b"1")
        assert stopped(old)._lost is not None


def die(session: Session) -> None:
    """By an error that it does not expect."""

    def failing(beat: layout.Heartbeat) -> None:
        raise RuntimeError("no heart expects this")

    session._beat._block.write = failing  # type: ignore[method-assign]
    deadline = time.monotonic() + 60
    while not session._beat.died and time.monotonic() < deadline:
        time.sleep(BEAT / 10)
