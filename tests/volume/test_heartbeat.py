"""The heart of a session: who lives, who is dead, and how anybody tells."""

from __future__ import annotations

import gc
import time
from typing import ClassVar

import pytest

from headrace.device import open_device
from headrace.errors import (
    DeviceTimeout,
    SessionLost,
    WriterActive,
)
from headrace.volume import Volume, layout
from headrace.volume.writing import heartbeat
from tests.volume.fenced import World
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
