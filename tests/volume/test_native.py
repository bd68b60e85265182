"""The same volume through the native engine and through the reference engine."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.device import open_device
from headrace.device.protocol import Buffer
from headrace.errors import ChecksumMismatch, UsageError
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume, read
from headrace.volume.data.checksums import ChecksumCache, table_page_bytes
from headrace.volume.read import submit_pieces
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


def composed(tmp_path: Path) -> tuple[Volume, bytes]:
    """A volume with the object "all" of slices of blobs with checksum blocks of two sizes, one of them with a table."""
    volume = native_volume(tmp_path, 3)
    parts = [("tokens", 5, MIB + 77), ("stream", 4097, 2 * MIB), ("tokens", 2 * MIB, None), ("small", 0, None)]
    with writing(volume) as session, session.transaction() as tx:
        tx.compose("all", parts)
    whole = b"".join(
        {"small": b"small"}.get(name, TOKENS)[start:][:length] for name, start, length in parts
    )  # fmt: skip
    return volume, whole


def test_the_native_engine_cuts_ranges_as_we_do(tmp_path: Path) -> None:
    chance = np.random.default_rng(5)
    volume, whole = composed(tmp_path)
    sizes = [blob.entry.checksum_block_bytes for blob in volume.stored("all").blobs]
    assert len(set(sizes)) == 2
    with volume:
        for name, want in [("all", whole), ("tokens", TOKENS), ("stream", TOKENS), ("small", b"small")]:
            stored = volume.stored(name)
            for count in (1, 3, 200):
                starts = chance.integers(0, len(want) + 1, count)
                lengths = np.minimum(chance.integers(0, 70_000, count), len(want) - starts)
                places = np.cumsum(lengths) - lengths
                index = chance.integers(0, 2, count).astype(np.uint32)
                got = [[np.zeros(int(lengths.sum()), np.uint8) for _ in range(2)] for _ in range(2)]
                volume.submit_read(name, starts, lengths, got[0], places, index).wait(60)
                submit_pieces(volume, stored, starts, lengths, places, got[1], index, True).wait(60)
                for start, length, place, which in zip(starts, lengths, places, index, strict=True):
                    part = want[start : start + length]
                    assert got[0][which][place : place + length].tobytes() == part
                    assert got[1][which][place : place + length].tobytes() == part


@pytest.mark.parametrize("native", [True, False])
def test_a_read_that_is_refused_half_way_leaves_no_transfer_behind(
    tmp_path: Path, native: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Two sizes of checksum blocks are two transfers: where the second is refused, the first has ended."""
    volume, whole = composed(tmp_path)
    begun: list[Waited] = []

    class Waited:
        ended = False

        def wait(self) -> None:
            self.ended = True
            raise ChecksumMismatch("of what was not read to its end")

    def one(*arguments: object) -> Waited:
        if begun:
            raise UsageError("the segment leaves its buffer")
        begun.append(Waited())
        return begun[0]

    monkeypatch.setattr(read, "submit_ranges" if native else "submit_read", one)
    buffer = np.zeros(len(whole), np.uint8)
    with volume, pytest.raises(UsageError, match="leaves its buffer"):
        if native:
            volume.submit_read("all", [0], [len(whole)], [buffer], [0])
        else:
            column = np.array([0], np.int64)
            submit_pieces(volume, volume.stored("all"), column, column + len(whole), column, [buffer], None, True)
    assert [transfer.ended for transfer in begun] == [True]


def test_damage_is_named_alike_and_one_copy_of_a_table_is_enough(tmp_path: Path) -> None:
    volume, whole = composed(tmp_path)
    tokens, stream = volume.stored("tokens").blobs[0], volume.stored("stream").blobs[0]
    tables = [table.used()[0] for table in tokens.tables]
    assert len(tables) == 2
    # Read cold and in small ranges, so that the one which fails is in the middle of a batch.
    starts = np.arange(0, len(whole) - 50_000, 50_000)
    lengths = np.full(len(starts), 50_000)
    places = starts.copy()
    end = int(starts[-1]) + 50_000

    def read(volume: Volume, native: bool) -> bytes:
        into = [np.zeros(len(whole), np.uint8)]
        if native:
            volume.submit_read("all", starts, lengths, into, places).wait(60)
        else:
            submit_pieces(volume, volume.stored("all"), starts, lengths, places, into, None, True).wait(60)
        return into[0][:end].tobytes()

    for spaces in ([tokens.data.used()[1]], [stream.data.used()[2]], tables):
        for member, offset, _ in spaces:
            flip(tmp_path / str(member), offset + 3)
        found = []
        for native in (True, False):
            with Volume.open(volume.uris) as again:
                with pytest.raises(ChecksumMismatch, match=rf"object 'all'.*offset {spaces[0][1]}") as caught:
                    read(again, native)
                found.append(str(caught.value))
                assert again.read("small") == b"small"
        assert found[0] == found[1]
        for member, offset, _ in spaces:
            flip(tmp_path / str(member), offset + 3)

    member, offset, _ = tables[0]
    flip(tmp_path / str(member), offset + 3)
    with Volume.open(volume.uris) as again:
        assert read(again, True) == whole[:end]
        (finding,) = again.info().warnings
        assert "copy 0 of page 0 of its checksum table is damaged" in finding
        # The engine has the page now: the other copy is gone, and it is read all the same.
        flip(tmp_path / str(tables[1][0]), tables[1][1] + 3)
        assert again.read("tokens") == TOKENS
    volume.close()


def flip(path: Path, at: int) -> None:
    with path.open("r+b") as file:
        file.seek(at)
        (byte,) = file.read(1)
        file.seek(at)
        file.write(bytes([byte ^ 4]))


def test_pages_of_tables_come_once_and_go_one_by_one(tmp_path: Path) -> None:
    with Volume.create([f"file:{tmp_path / 'wide'}?create=160MiB"], stripe_bytes=MIB) as volume:
        size = 100 * MIB  # 25,600 checksums: seven pages.
        with writing(volume) as session, session.transaction() as tx:
            tx.put("x", np.zeros(size, np.uint8), checksum_block_bytes=4096)
        page = table_page_bytes(size // 4096, MIB)
        assert page == 16 * KIB
        pages = volume._checksums.pages
        into = np.ones(8 * MIB, np.uint8)
        for start in (0, 1, 17 * MIB, 0):
            volume.submit_read("x", [start], [100], [into], [0]).wait()
        # Each with what it costs beside its bytes.
        beside = pages.kept_bytes // 2 - page
        assert 0 < beside < 1024 and pages.kept_bytes == 2 * (page + beside)
        volume.read_into("x", 30 * MIB, into)
        assert pages.kept_bytes == 3 * (page + beside) and not into.any()
        volume.submit_read("x", [99 * MIB], [100], [into], [0], verify=False).wait()
        assert pages.kept_bytes == 3 * (page + beside)
        # A child shares no lock with threads that it does not have: it begins with none.
        assert os.waitstatus_to_exitcode(_in_a_fork(lambda: volume._checksums.pages.kept_bytes)) == 0


def _in_a_fork(work: Callable[[], int]) -> int:
    """The status of a child that ends with what `work` gives."""
    child = os.fork()
    if child == 0:
        os._exit(min(1, work()))
    return os.waitpid(child, 0)[1]


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


def test_no_thread_waits_for_the_pages_of_another() -> None:
    class Slow(MemoryDevice):
        """One read stands still until it may go on."""

        entered, go_on = threading.Event(), threading.Event()
        armed = False

        def read_into(self, offset: int, buffer: Buffer) -> None:
            if self.armed:
                self.armed = False
                self.entered.set()
                assert self.go_on.wait(60)
            super().read_into(offset, buffer)

    device = Slow(64 * MIB)
    volume = Volume.create(devices=[device])
    with writing(volume) as session, session.transaction() as tx:
        tx.put("x", bytes(36 * MIB), checksum_block_bytes=4096)
    (stored,) = volume.stored("x").blobs
    cache = ChecksumCache([device], volume.superblock.volume_id)
    found: dict[str, list[int]] = {}

    def gather(name: str, *blocks: int) -> threading.Thread:
        thread = threading.Thread(target=lambda: found.update({name: cache.gather(stored, np.array(blocks)).tolist()}))
        thread.start()
        return thread

    warm = cache.gather(stored, np.array([0, 1])).tolist()
    device.armed = True
    slow = gather("slow", 0, 5000)
    try:
        assert device.entered.wait(60)
        # What is there; another page; the very page that is on its way.
        for name, blocks in (("warm", (0, 1)), ("other", (9000,)), ("same", (5000,))):
            gather(name, *blocks).join(60)
            assert name in found
        assert "slow" not in found and found["warm"] == warm
    finally:
        device.go_on.set()
        slow.join(60)
    assert found["slow"] == [warm[0], found["same"][0]]
