"""The crash device, by cases small enough to be counted."""

from __future__ import annotations

import random

from headrace.testing import CrashDevice, MemoryDevice, Timeline

BLOCK = 4096


def one(fill: int, blocks: int = 1) -> bytes:
    return bytes([fill]) * BLOCK * blocks


def blocks(device: MemoryDevice) -> list[int]:
    return list(device.data[::BLOCK])


def test_unflushed_writes_may_be_lost_torn_and_reordered() -> None:
    timeline = Timeline()
    device = CrashDevice(timeline, 3 * BLOCK)
    device.write(0, one(9, 3))
    timeline.begin()
    device.write(0, one(1, 2))
    device.write(BLOCK, one(2, 2))
    crash = timeline.crash(2)
    assert blocks(crash.nothing()[0]) == [9, 9, 9]
    assert blocks(crash.everything()[0]) == [1, 2, 2]
    chance = random.Random(0)
    seen = {tuple(blocks(crash.some(chance)[0])) for _ in range(500)}
    assert seen == {(a, b, c) for a in (9, 1) for b in (9, 1, 2) for c in (9, 2)}


def test_a_flush_makes_durable_once_it_is_acknowledged_and_fua_at_once() -> None:
    timeline = Timeline()
    first, second = CrashDevice(timeline, 2 * BLOCK), CrashDevice(timeline, 2 * BLOCK)
    timeline.begin()
    first.write(0, one(1))
    second.write(0, one(2))
    first.flush()
    second.write(BLOCK, one(3), fua=True)
    assert [blocks(d) for d in timeline.crash(2).nothing()] == [[0, 0], [0, 0]]
    assert [blocks(d) for d in timeline.crash(3).nothing()] == [[1, 0], [0, 0]]
    assert [blocks(d) for d in timeline.crash(3).everything()] == [[1, 0], [2, 3]]
    assert [blocks(d) for d in timeline.crash(4).nothing()] == [[1, 0], [0, 3]]
    assert timeline.crash(4).blocks_in_the_air == 1


def test_a_lost_cache_takes_unflushed_writes_and_a_later_flush_succeeds() -> None:
    timeline = Timeline()
    device = CrashDevice(timeline, 2 * BLOCK)
    timeline.begin()
    device.write(0, one(1))
    device.flush()
    device.write(0, one(2))
    device.write(BLOCK, one(3), fua=True)
    assert device.loss_count() == 0
    device.lose_cache()
    assert device.loss_count() == 1
    device.flush()
    assert blocks(device) == [1, 3]
    assert blocks(timeline.crash(len(timeline.events)).everything()[0]) == [1, 3]


def test_notes_are_those_before_the_crash() -> None:
    timeline = Timeline()
    device = CrashDevice(timeline, BLOCK)
    timeline.begin()
    timeline.note("a")
    device.write(0, one(1))
    timeline.note("b")
    assert [crash.notes for crash in timeline.crashes()] == [["a"], ["a", "b"]]
