"""The same volume through the native engine and through the reference engine."""

from __future__ import annotations

import threading
from pathlib import Path

import numpy as np
import pytest

from headrace.device import open_device
from headrace.errors import ChecksumMismatch, UsageError
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume
from headrace.volume.data.checksums import ChecksumCache, table_page_bytes
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, STRIPE, content, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else")

TOKENS = content(3, 3 * MIB + 123)


def native_volume(tmp_path: Path, members: int) -> Volume:
    uris = [f"file:{tmp_path / str(member)}?create=12MiB" for member in range(members)]
    volume = Volume.create(uris, stripe_bytes=STRIPE)
    with writing(volume) as session, session.transaction() as tx:
        tx.put("tokens", TOKENS, checksum_block_bytes=4096)
        tx.write_stream("stream", [TOKENS[: MIB + 5], TOKENS[MIB + 5 :]])
        tx.put("small", b"small")
    return volume


@pytest.mark.parametrize("members", [1, 3])
def test_both_engines_read_what_the_other_wrote(tmp_path: Path, members: int) -> None:
    volume = native_volume(tmp_path, members)
    plain = []
    for member in range(members):
        device = MemoryDevice(12 * MIB)
        device.data[:] = (tmp_path / str(member)).read_bytes()
        plain.append(device)
    assert state_of(Volume.open(plain)) == state_of(volume)
    assert scrub(volume.devices).clean
    reference = Volume.open(plain, write=True)
    with writing(reference) as session, session.transaction() as tx:
        tx.put("by reference", TOKENS[: 900 * KIB], checksum_block_bytes=4096)
    for member, device in enumerate(plain):
        (tmp_path / str(member)).write_bytes(device.data)
    with Volume.open(volume.uris) as again:
        assert again.read("by reference") == TOKENS[: 900 * KIB]
    volume.close()


def test_thousands_of_ranges_in_one_call(tmp_path: Path) -> None:
    chance = np.random.default_rng(1)
    count, window = 4000, 8193
    with native_volume(tmp_path, 3) as volume:
        starts = chance.integers(0, len(TOKENS) - window, count).astype(np.uint64)
        buffers = [np.zeros((count // 2, window), np.uint8) for _ in range(2)]
        places = (np.arange(count) % (count // 2) * window).astype(np.uint64)
        index = (np.arange(count) // (count // 2)).astype(np.uint32)
        transfer = volume.submit_read("tokens", starts, np.full(count, window, np.uint64), buffers, places, index)
        transfer.wait(60)
        assert transfer.done()
        tokens = np.frombuffer(TOKENS, np.uint8)
        for i in range(count):
            start = int(starts[i])
            assert np.array_equal(buffers[i // (count // 2)][i % (count // 2)], tokens[start : start + window])


def test_a_flipped_byte_names_object_offset_and_member(tmp_path: Path) -> None:
    with native_volume(tmp_path, 3) as volume:
        member, offset, _ = volume.stored("stream").blobs[0].data.used()[1]
        path = tmp_path / str(member)
        data = bytearray(path.read_bytes())
        data[offset + 100] ^= 1
        path.write_bytes(data)
        with Volume.open(volume.uris) as again:
            with pytest.raises(ChecksumMismatch, match=rf"object 'stream'.*member {member}.*offset {offset}") as caught:
                again.read("stream")
            assert caught.value.fault == "media"
            assert again.read("tokens") == TOKENS


def test_one_volume_many_threads(tmp_path: Path) -> None:
    errors: list[BaseException] = []

    def reads(volume: Volume, seed: int) -> None:
        chance = np.random.default_rng(seed)
        try:
            for _ in range(40):
                start, length = int(chance.integers(0, 2 * MIB)), int(chance.integers(0, 100_000))
                assert volume.read("tokens", start, length) == TOKENS[start : start + length]
        except BaseException as error:
            errors.append(error)

    def writes(session: object, thread: int) -> None:
        try:
            for i in range(10):
                with session.transaction() as tx:  # type: ignore[attr-defined]
                    tx.put(f"{thread}/{i}", content(i, 10_000))
        except BaseException as error:
            errors.append(error)

    with native_volume(tmp_path, 2) as volume, writing(volume) as session:
        threads = [threading.Thread(target=reads, args=(volume, seed)) for seed in range(4)]
        threads += [threading.Thread(target=writes, args=(session, number)) for number in range(3)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(60)
        assert errors == []
        assert all(volume.read(f"{thread}/{i}") == content(i, 10_000) for thread in range(3) for i in range(10))


@pytest.mark.parametrize(
    ("offsets", "lengths", "places", "index"),
    [
        ([-1], [1], [0], None),
        ([0], [6], [0], None),
        ([6], [0], [0], None),
        ([5], [1], [0], None),
        ([2**63], [1], [0], None),
        ([0, 1], [1], [0], None),
        ([0], [1], [-1], None),
        ([0], [1], [10], None),
        ([0], [1], [0], [1]),
        ([0.5], [1], [0], None),
        ([[0]], [[1]], [[0]], None),
    ],
)
def test_ranges_that_cannot_be_meant(offsets: list, lengths: list, places: list, index: list | None) -> None:  # type: ignore[type-arg]
    for device in (MemoryDevice(2 * MIB), open_device("mem:2MiB")):
        volume = Volume.create(devices=[device], stripe_bytes=STRIPE)
        with writing(volume) as session, session.transaction() as tx:
            tx.put("five", b"12345")
        with pytest.raises(UsageError):
            volume.submit_read("five", offsets, lengths, [bytearray(10)], places, index).wait()
        with pytest.raises(UsageError):
            volume.submit_read("five", [0], [1], [bytes(10)], [0]).wait()
        assert volume.read("five", 1, 3) == b"234" and volume.read("five", 5) == b""


def test_checksum_tables_are_paged_and_forgotten() -> None:
    devices = [MemoryDevice(64 * MIB)]
    volume = Volume.create(devices=devices)
    size = 36 * MIB  # 9216 checksums: three pages of the table.
    with writing(volume) as session, session.transaction() as tx:
        tx.put("x", bytes(size), checksum_block_bytes=4096)
    (stored,) = volume.stored("x").blobs
    assert len(stored.entry.roots) == 3 == -(-size // 4096 * 4 // table_page_bytes(size // 4096, MIB))
    cache = ChecksumCache(devices, volume.superblock.volume_id, limit_bytes=20 << 10)
    before = devices[0].reads
    last = cache.gather(stored, np.array([9215, 9215]))
    assert devices[0].reads == before + 1 and last[0] == last[1]
    first = cache.gather(stored, np.array([0]))  # Beyond the limit: all is forgotten.
    assert sum(table.loaded_bytes for table in cache._tables.values()) <= 20 << 10
    assert cache.gather(stored, np.array([0, 9215])).tolist() == [first[0], last[0]]
    assert table_page_bytes(1 << 32, MIB) == 256 << 10 and table_page_bytes(16, MIB) == 0
