"""Readers that follow: what a look costs, that it misses nothing, and how they wait."""

from __future__ import annotations

import random
import threading
import time
from typing import Any

import pytest

from headrace.errors import DeviceError, ObjectNotFound, UsageError
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Session, Volume, follow
from headrace.volume.catalog import commit
from headrace.volume.follow import Deadline, Pace
from headrace.volume.layout import ALIGN
from tests.volume.support import STRIPE, content, new_volume, second, silent, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


def put(session: Session, name: str, length: int = 3000) -> None:
    with session.transaction() as tx:
        if name in session.volume:
            tx.delete(name)
        tx.put(name, content(length, length))


def reads(volume: Volume) -> int:
    return sum(device.reads for device in volume.devices)  # type: ignore[attr-defined]


def test_a_look_at_a_quiet_log_is_two_small_reads() -> None:
    volume = new_volume()
    with writing(volume) as session:
        put(session, "x")
        reader = second(volume)
        # It knows how the end of each copy of the log looks.
        for _ in range(2):
            assert not reader.poll()
        for _ in range(follow._EVERYTHING - 3):
            before = reads(volume)
            assert not reader.poll()
            assert reads(volume) - before == 2
        before = reads(volume)
        assert not reader.poll()
        assert reads(volume) - before > 2, "at last it looks at everything"
        put(session, "y")
        assert reader.poll() and set(state_of(reader)) == {"x", "y"}
    # Closed, or damaged on the copy that is looked at: it looks at more, or again, and that is all.
    for _ in range(3):
        assert not reader.poll()
    for copy in range(2):
        volume.devices[volume.superblock.log_member[copy]].write(volume.superblock.log_offset[copy], bytes(4096))
    before = reads(volume)
    assert not reader.poll() and reads(volume) - before > 2


@pytest.mark.parametrize("away", [0, 1])
def test_a_copy_that_is_left_behind_is_known_by_the_second_look(away: int) -> None:
    """The reader sees both members, and the job goes on without the one."""
    volume = new_volume()
    devices = volume.devices
    with writing(volume) as session:
        put(session, "x")
    for looks in range(4):
        reader = second(volume)
        for _ in range(looks):
            reader.poll()
        left = [device for member, device in enumerate(devices) if member != volume.superblock.log_member[away]]
        with writing(Volume.open(left, write=True, degraded=True)) as session:
            put(session, f"without {looks}")
            assert reader.poll() | reader.poll() and f"without {looks}" in reader
        with writing(second(volume)):
            pass


def test_a_record_that_was_met_half_written_is_seen_when_it_is_whole() -> None:
    volume = new_volume()
    superblock = volume.superblock
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put_many([f"many/{number:04}" for number in range(400)], bytes(400), 1)
        reader = second(volume)
        reader.poll()
        assert not reader.poll()
        cursor = reader._cursor
        with session.transaction() as tx:
            tx.delete_prefix("many/")
        rest = [
            (volume.devices[member], superblock.area_offset(copy, cursor.area) + (cursor.block + 1) * ALIGN)
            for copy, member in enumerate(superblock.log_member)
        ]
        second_blocks = [device.data[offset : offset + ALIGN] for device, offset in rest]  # type: ignore[attr-defined]
        for device, offset in rest:
            device.write(offset, bytes(ALIGN))
        assert not reader.poll() and not reader.poll() and len(reader.list()) == 400
        for (device, offset), block in zip(rest, second_blocks, strict=True):
            device.write(offset, bytes(block))
        assert reader.poll() and not reader.list()


def test_a_copy_that_cannot_be_read_is_no_reason_to_miss_anything() -> None:
    class Failing(MemoryDevice):
        fail = False

        def read_into(self, offset: int, buffer: Any) -> None:
            if self.fail:
                raise DeviceError("unrecovered read error", where=self.uri)
            super().read_into(offset, buffer)

    volume = Volume.create(devices=[Failing(4 * MIB) for _ in range(2)], stripe_bytes=STRIPE)
    with writing(volume) as session:
        reader = second(volume)
        reader.poll()
        volume.devices[volume.superblock.log_member[0]].fail = True  # type: ignore[attr-defined]
        put(session, "x")
        assert reader.poll() and not reader.poll()


@pytest.mark.parametrize("seed", range(4))
def test_whatever_is_acknowledged_is_seen_by_the_next_look(seed: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Over moves of the log, tables and merges of them, and sessions one after another, some of which died: those move
    the log without a word."""
    monkeypatch.setattr(commit, "RECENT_BYTES", 1024)
    monkeypatch.setattr(commit, "LOG_BYTES", 24 << 10)
    chance = random.Random(seed)
    volume = Volume.create(devices=[MemoryDevice(4 * MIB) for _ in range(2)], stripe_bytes=STRIPE, log_bytes=128 << 10)
    often, seldom = second(volume), second(volume)
    moved = quiet = 0
    for run in range(6):
        writer = second(volume)
        if chance.random() < 0.5:
            silent(writer, "run")
            often.poll()
            writer = second(volume)
        with writing(writer, "run") as session:
            quiet += not often.poll()
            area = session._writer.cursor.header.generation
            for step in range(chance.randrange(1, 40)):
                put(session, f"{run}/{step % 7}", chance.randrange(1, 9000))
                assert often.poll() and often.sequence == writer.sequence
                quiet += not often.poll()
                if chance.random() < 0.05:
                    assert seldom.poll() and seldom.sequence == writer.sequence
            moved += session._writer.cursor.header.generation - area
            expected = state_of(writer)
        assert state_of(often) == expected
    assert moved > 5 and quiet > 20
    seldom.poll()
    assert state_of(seldom) == expected


def test_what_is_waited_for_comes() -> None:
    volume = new_volume()
    reader = second(volume)
    with writing(volume) as session:
        put(session, "there")
        assert reader.wait_for("there", timeout_s=0).length_bytes == 3000
        timer = threading.Timer(0.05, put, (session, "later", 5))
        timer.start()
        assert reader.wait_for("later", interval_s=0.01, timeout_s=60).length_bytes == 5
        timer.join()
        # Also by the process that writes.
        assert volume.wait_for("later", timeout_s=0).name == "later"
        with pytest.raises(ObjectNotFound, match=r"no object 'never' came at .*: expected within 0\.05 s"):
            reader.wait_for("never", timeout_s=0.05, interval_s=0.01)
    reader.close()
    with pytest.raises(UsageError, match="closed"):
        reader.wait_for("never")


def test_following_gives_each_state_and_misses_none() -> None:
    volume = new_volume()
    reader = second(volume)
    with writing(volume) as session:
        states = reader.follow(interval_s=0.01, longest_s=0.02, timeout_s=60)
        # Before the first look, and by somebody else's look.
        put(session, "0")
        reader.refresh()
        assert next(states) == volume.sequence
        for step in range(1, 4):
            timer = threading.Timer(0.03, put, (session, f"{step}"))
            timer.start()
            assert next(states) == reader.sequence and f"{step}" in reader
            timer.join()
        states.close()
        assert list(reader.follow(timeout_s=0.05, interval_s=0.01)) == []


def test_waits_grow_while_nothing_happens_and_are_never_alike() -> None:
    pace = Pace(1.0, 10.0)
    for expected in (1, 2, 4, 8, 10, 10):
        assert expected / 2 <= pace.wait_s() <= expected * 3 / 2
    pace.found()
    assert pace.wait_s() <= 1.5
    first = [Pace(1.0, 10.0).wait_s() for _ in range(200)]
    assert len(set(first)) > 100 and min(first) < 0.75 and max(first) > 1.25
    for wrong in ((0, 1), (2, 1), (1, float("inf")), (float("nan"), 1)):
        with pytest.raises(UsageError, match="how often"):
            Pace(*wrong)
    for timeout in (-1, float("nan")):
        with pytest.raises(UsageError, match="timeout_s"):
            Deadline(timeout)
    began = time.monotonic()
    assert Deadline(0.02).sleep(60) and time.monotonic() - began < 30
    assert not Deadline(0).sleep(60)
