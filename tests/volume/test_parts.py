"""An object that is written from several buffers is the one that would have been written from one."""

from __future__ import annotations

import random
from pathlib import Path

import numpy as np
import pytest

from headrace.device import crc32c
from headrace.device.joined import raw_of
from headrace.errors import DeviceError, UsageError
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Parts, Volume
from headrace.volume.repair.scrub import scrub
from headrace.volume.writing import parts as parts_module
from tests.volume.support import KIB, crash_volume, open_read, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


def scattered(rng: random.Random, count: int, longest: int) -> tuple[Parts, bytes]:
    """Buffers with and without gaps between them, and what the object then is."""
    whole = bytearray()
    buffers, offsets = [], []
    for _ in range(count):
        whole += bytes(rng.choice((0, 0, 1, 63, 5000)))
        buffer = rng.randbytes(rng.choice((0, 1, 64, rng.randrange(longest), longest)))
        offsets.append(len(whole))
        buffers.append(np.frombuffer(buffer, np.uint8) if rng.random() < 0.5 else buffer)
        whole += buffer
    whole += bytes(rng.choice((0, 100)))
    return Parts(buffers, offsets, len(whole)), bytes(whole)


@pytest.mark.parametrize("native", [False, True])
def test_parts_are_written_as_one_buffer_would_be(
    native: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(parts_module, "DIRECT_BYTES", 8 * KIB)
    monkeypatch.setattr(parts_module, "WINDOW_BYTES", 32 * KIB)
    if native:
        volume = Volume.create([f"file:{tmp_path}/{i}?create=32MiB" for i in range(2)])
    else:
        volume = Volume.create(devices=[MemoryDevice(32 * MIB) for _ in range(2)])
    rng = random.Random(11)
    expected = {}
    with writing(volume) as session:
        for number in range(24 if native else 8):
            parts, whole = scattered(rng, rng.choice((1, 2, 7, 40)), rng.choice((300, 20_000, 90_000)))
            if not whole:
                continue
            with session.transaction() as tx:
                grant = tx.allocate(f"{number}", len(whole), checksum_block_bytes=rng.choice((4096, 8192)))
                tx.accept(volume.write_grant(grant, parts))
            expected[f"{number}"] = whole
            # What was checksummed as it was written, put together, is what the object should be.
            assert parts.written == raw_of([crc32c(whole)], 0, [len(whole)], [len(whole)], len(whole))
            sums = [crc32c(view) for view in parts.views]
            lengths = [len(view) for view in parts.views]
            assert parts.written == raw_of(sums, 0, parts.ends, lengths, len(whole))
    assert {name: bytes(volume.read(name)) for name in expected} == expected
    assert scrub(volume.devices).findings == []


def test_every_block_is_written_once_and_memory_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "DIRECT_BYTES", 12 * KIB)
    monkeypatch.setattr(parts_module, "WINDOW_BYTES", 32 * KIB)
    rng = random.Random(5)
    for _ in range(50):
        parts, whole = scattered(rng, 30, 40_000)
        end = direct = 0
        for window in parts_module.windows(parts, 4096):
            assert window.together_bytes <= 32 * KIB
            for start, length, part in zip(window.starts, window.lengths, window.parts, strict=True):
                assert start == end and start % 4096 == 0
                end += length
                if part >= 0:
                    direct += length
                    assert parts.starts[part] <= start and end <= parts.ends[part]
        assert end == len(whole)
        longest = max((b - a for a, b in zip(parts.starts, parts.ends, strict=True)), default=0)
        assert direct > 0 or longest < 12 * KIB + 2 * 4096


def test_parts_that_a_lost_controller_took_along_are_written_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts_module, "WINDOW_BYTES", 16 * KIB)
    parts, whole = scattered(random.Random(2), 12, 20_000)
    index, count, again = 0, 1, 0
    while index < count:
        timeline, volume = crash_volume(2)
        timeline.begin()
        lost = [False]

        def after(event: int, index: int = index, lost: list[bool] = lost, timeline: object = timeline) -> None:
            if event == index and not lost[0]:
                lost[0] = True
                timeline.devices[1].lose_cache()  # type: ignore[attr-defined]

        timeline.after_event = after
        with writing(volume) as session, session.transaction() as tx:
            tx.accept(volume.write_grant(tx.allocate("x", len(whole), checksum_block_bytes=4096), parts))
        assert open_read(timeline.crash(len(timeline.events)).nothing()) == {"x": whole}
        again += len(timeline.events) > count > 1
        count = max(count, len(timeline.events))
        index += 1
    assert again


def test_a_failed_write_is_raised_behind_what_is_under_way() -> None:
    class Failing(MemoryDevice):
        broken = False

        def write(self, offset: int, data: object, *, fua: bool = False) -> None:
            if self.broken:
                raise DeviceError("the device is broken", where=self.uri)
            super().write(offset, data, fua=fua)  # type: ignore[arg-type]

    device = Failing(8 * MIB)
    volume = Volume.create(devices=[device])
    with writing(volume) as session:
        tx = session.transaction()
        grant = tx.allocate("x", 100_000)
        device.broken = True
        with pytest.raises(DeviceError, match="broken"):
            volume.write_grant(grant, Parts([bytes(50_000), bytes(50_000)], [0, 50_000], 100_000))
        device.broken = False
        tx.abort()


@pytest.mark.parametrize(
    ("buffers", "offsets", "length"),
    [
        ([b"ab", b"cd"], [0, 1], 4),
        ([b"ab", b"cd"], [2, 0], 4),
        ([b"ab"], [3], 4),
        ([b"ab"], [-1], 4),
        ([b"ab"], [0, 2], 4),
        ([np.zeros((4, 4), np.uint8)[:, 1]], [0], 4),
    ],
)
def test_parts_that_overlap_or_leave_the_object_are_refused(
    buffers: list[bytes], offsets: list[int], length: int
) -> None:
    with pytest.raises(UsageError):
        Parts(buffers, offsets, length)
