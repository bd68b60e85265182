"""Records ahead of time: the right ones in the right order, however they are decoded and whatever fails under way."""

from __future__ import annotations

import io
import random
import struct
import threading
import tracemalloc
import zipfile
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.dataset import AheadOptions, RecordsAhead
from headrace.dataset.ingestion.records import ingest_records, open_records
from headrace.dataset.records.npz import npz_array
from headrace.dataset.records.records import Records
from headrace.device.protocol import Buffer
from headrace.errors import ChecksumMismatch, DatasetError, DeviceError, DeviceTimeout, UsageError
from headrace.testing.devices import MemoryDevice
from headrace.testing.serve import serving
from headrace.volume import ObjectInfo, Volume, VolumeTransfer
from headrace.volume.data import patience
from tests.dataset.corpora import memory_volume, native_volume
from tests.stopping import stopped

COUNT = 120


def content(number: int) -> bytes:
    return random.Random(number).randbytes([0, 1, 5000, 40_000][number % 4])


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("files")
    for number in range(COUNT):
        (folder / f"{number:03}.bin").write_bytes(content(number))
        if number % 5 == 0:
            (folder / f"{number:03}.label").write_bytes(b"%d" % number)
    return folder


def fill(volume: Volume, files: Path) -> Records:
    with volume.session(run_id="test") as session:
        ingest_records(open_records(files), session, "a")
    return Records.open(volume, "a")


def batches(count: int = 30, size: int = 7) -> list[list[int]]:
    chance = random.Random(count)
    return [[chance.randrange(COUNT) for _ in range(size)] for _ in range(count)]


@pytest.mark.parametrize("make", [memory_volume, native_volume])
@pytest.mark.parametrize("threads", [0, 3])
def test_batches_come_in_order(make: Callable[[], Volume], threads: int, files: Path) -> None:
    with make() as volume:
        wanted = batches()
        taken: list[int] = []

        def given() -> Iterator[list[int]]:
            for number, batch in enumerate(wanted):
                taken.append(number)
                yield batch

        options = AheadOptions(prefetch=3, ahead_bytes=200_000, threads=threads)
        with RecordsAhead(
            fill(volume, files), given(), kinds=["bin"], decode=lambda record: bytes(record["bin"]), options=options
        ) as ahead:
            for number, found in enumerate(ahead):
                assert found == [content(record) for record in wanted[number]]
                metrics = ahead.metrics()
                assert metrics.in_flight <= 3
                assert metrics.ahead_bytes <= 200_000 or metrics.in_flight == 1
                # Read, found and being found.
                assert len(taken) <= number + 1 + 3 * 3
            assert metrics.batches == len(wanted) and metrics.records == 7 * len(wanted)
            assert metrics.payload_bytes == sum(len(content(record)) for batch in wanted for record in batch)


def test_all_fields_as_they_are(files: Path) -> None:
    with native_volume() as volume:
        (found,) = RecordsAhead(fill(volume, files), [[5, 6, 5]])
        assert [sorted(record) for record in found] == [["bin", "label"], ["bin"], ["bin", "label"]]
        assert found[0]["label"] == b"5" and found[1]["bin"] == content(6)


def test_nothing_to_read(files: Path) -> None:
    with native_volume() as volume:
        records = fill(volume, files)
        assert list(RecordsAhead(records, [])) == []
        assert list(RecordsAhead(records, [[], [1], []], kinds=["label"])) == [[], [{}], []]


@pytest.mark.parametrize("most_bytes", [0, 1 << 20])
def test_an_index_that_is_held_is_read_once(files: Path, most_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    with native_volume() as volume:
        records = fill(volume, files)
        asked: list[str] = []
        submit = Volume.submit_read

        def counted(self: Volume, what: ObjectInfo, *rest: Any, **more: Any) -> VolumeTransfer:
            asked.append(what.name)
            return submit(self, what, *rest, **more)

        monkeypatch.setattr(Volume, "submit_read", counted)
        records.hold_index(most_bytes)
        records.hold_index(most_bytes)
        assert asked == ["a.records.idx"] * bool(most_bytes)
        if most_bytes:
            # Only what is whole is looked at.
            assert records._held is not None
            records._held[1].wait()
        wanted = batches(12)
        options = AheadOptions(prefetch=3, index_bytes=most_bytes)
        found = list(RecordsAhead(records, wanted, options=options))
        for batch, rows in zip(wanted, found, strict=True):
            assert [bytes(row["bin"]) for row in rows] == [content(number) for number in batch]
            assert [bytes(row.get("label", b"")) for row in rows] == [b"%d" % n if n % 5 == 0 else b"" for n in batch]
        # Two reads for as many batches as are read ahead.
        assert asked.count("a.records.idx") == (1 if most_bytes else 2 * 12 // 3)
        assert asked.count("a.records") == 12


class Broken(MemoryDevice):
    """Reads fail while it is told to."""

    broken = False

    def read_into(self, offset: int, buffer: Buffer) -> None:
        if self.broken:
            raise DeviceError("told to fail", where=self.uri)
        super().read_into(offset, buffer)


def test_what_fails_is_tried_again_by_the_next_call(files: Path) -> None:
    device = Broken(16 << 20)
    with Volume.create(devices=[device]) as volume:
        wanted = batches()
        ahead = RecordsAhead(
            fill(volume, files), wanted, kinds=["bin"], decode=lambda record: bytes(record["bin"]),
            options=AheadOptions(prefetch=2),
        )  # fmt: skip
        found = []
        for number in range(len(wanted)):
            device.broken = number % 4 == 3
            try:
                found.append(next(ahead))
            except DeviceError:
                device.broken = False
                found.append(next(ahead))
        # What was read before it broke comes first; an error of what lies ahead costs nothing that is there.
        assert found == [[content(record) for record in batch] for batch in wanted]
        with pytest.raises(StopIteration):
            next(ahead)


@pytest.mark.parametrize("threads", [0, 2])
def test_an_error_of_decoding_is_the_callers_own(files: Path, threads: int) -> None:
    class Bad(Exception):
        pass

    bad = [True]

    def decode(record: dict[str, memoryview]) -> int:
        if bad[0] and record["bin"] == content(3):
            raise Bad("no picture")
        return len(record["bin"])

    with native_volume() as volume:
        wanted = [[1, 2], [4, 3, 5], [6]]
        with RecordsAhead(
            fill(volume, files), wanted, kinds=["bin"], decode=decode, options=AheadOptions(threads=threads)
        ) as ahead:
            assert next(ahead) == [len(content(1)), len(content(2))]
            for _ in range(2):
                with pytest.raises(Bad) as told:
                    next(ahead)
            assert "record 3 of a.records" in "".join(told.value.__notes__)
            bad[0] = False
            assert list(ahead) == [[len(content(record)) for record in batch] for batch in wanted[1:]]


@pytest.mark.parametrize("prefetch", [1, 2, 8])
def test_a_number_that_no_record_has_is_told_in_its_turn(files: Path, prefetch: int) -> None:
    """Also where it is looked up together with others."""
    with native_volume() as volume:
        records = fill(volume, files)
        with RecordsAhead(records, [[1], [2], [COUNT], [3]], options=AheadOptions(prefetch=prefetch)) as ahead:
            assert next(ahead) and next(ahead)
            for _ in range(2):
                with pytest.raises(UsageError, match="no such record"):
                    next(ahead)
        with pytest.raises(UsageError, match="is closed"):
            next(ahead)
        with pytest.raises(UsageError, match="prefetch is out of range"):
            AheadOptions(prefetch=0)


def test_a_look_up_that_fails_keeps_nothing_back_that_was_found(files: Path) -> None:
    with native_volume() as volume:
        records = fill(volume, files)
        # The second batch waits, found, until the first one is handed out.
        options = AheadOptions(prefetch=2, ahead_bytes=1)
        with RecordsAhead(records, [[2], [3], [COUNT], [6]], kinds=["bin"], options=options) as ahead:
            assert [next(ahead)[0]["bin"] for _ in range(2)] == [content(2), content(3)]
            with pytest.raises(UsageError, match="no such record"):
                next(ahead)


def test_nothing_is_looked_up_for_longer_than_a_step_may_wait(files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Not when it begins, and not after a read of a later batch that failed."""
    left: dict[str, float] = {}

    def timed(where: type, name: str) -> None:
        real = getattr(where, name)

        def call(*arguments: Any, **more: Any) -> Any:
            left[name] = patience.left_s()
            return real(*arguments, **more)

        monkeypatch.setattr(where, name, call)

    device = MemoryDevice(16 << 20)
    with Volume.create(devices=[device]) as volume:
        records = fill(volume, files)
        for where, name in ((Records, "hold_index"), (Records, "submit_locate"), (VolumeTransfer, "_mismatch")):
            timed(where, name)
        device.data[device.data.index(content(3))] ^= 1
        options = AheadOptions(threads=1, stall_timeout_s=60)
        with RecordsAhead(records, [[1], [3]], kinds=["bin"], decode=len, options=options) as ahead:
            assert next(iter(ahead)) == [1]
            # A second look at another batch than the one in hand.
            assert 0 <= left["_mismatch"] <= 1
            with pytest.raises(ChecksumMismatch):
                next(ahead)
    assert 0 <= left["hold_index"] <= 1 and 0 <= left["submit_locate"] <= 1


def test_a_target_that_stands_still_is_an_error_and_not_for_ever(files: Path) -> None:
    with serving("nqn.2024-01.test:ahead", "mem:32MiB") as target:
        with Volume.create([target.uri()]) as volume:
            fill(volume, files)
        with Volume.open([target.uri()]) as volume:
            records = Records.open(volume, "a")
            options = AheadOptions(prefetch=2, stall_timeout_s=0.2)
            with RecordsAhead(records, [[1, 2, 3]] * 3, kinds=["bin"], options=options) as ahead:
                with stopped(target.process.pid):
                    for _ in range(2):
                        with pytest.raises(
                            DeviceTimeout, match=r"a batch of records .*in time at object .*, member 0, nvme.*, LBA "
                        ):
                            next(ahead)
                got = []
                while len(got) < 3:
                    try:
                        got.append([bytes(record["bin"]) for record in next(ahead)])
                    except DeviceTimeout:
                        continue  # A busy machine.
                assert got == [[content(1), content(2), content(3)]] * 3


def test_a_decoder_that_hangs_is_an_error(files: Path) -> None:
    go = threading.Event()

    def decode(record: dict[str, memoryview]) -> bytes:
        go.wait(60)
        return bytes(record["bin"])

    with native_volume() as volume:
        options = AheadOptions(threads=1, stall_timeout_s=0.2)
        with RecordsAhead(fill(volume, files), [[1, 2]], kinds=["bin"], decode=decode, options=options) as ahead:
            with pytest.raises(DeviceTimeout, match="was not decoded in time"):
                next(ahead)
            go.set()
            while True:
                try:
                    assert next(ahead) == [content(1), content(2)]
                    break
                except DeviceTimeout:
                    continue  # A busy machine.


@pytest.mark.parametrize("kind", [DeviceError, ValueError])
def test_an_error_of_the_batches_is_not_their_end(files: Path, kind: type[Exception]) -> None:
    def numbers() -> Iterator[list[int]]:
        yield from ([1], [2], [3])
        raise kind("the keys cannot be read")

    with native_volume() as volume, RecordsAhead(fill(volume, files), numbers(), kinds=["bin"]) as ahead:
        assert [next(ahead)[0]["bin"] for _ in range(3)] == [content(number) for number in (1, 2, 3)]
        for _ in range(2):
            with pytest.raises(kind, match="the keys"):
                next(ahead)


# ---- .npz -----------------------------------------------------------------------------------------------------------


def saved(save: Callable[..., None], **arrays: object) -> memoryview:
    file = io.BytesIO()
    save(file, **arrays)
    return memoryview(bytearray(file.getvalue()))


@pytest.mark.parametrize(
    "array",
    [
        np.arange(60, dtype=np.uint8).reshape(3, 4, 5),
        np.asfortranarray(np.arange(12.0).reshape(3, 4)),
        np.float32(7).reshape(()),
        np.zeros((0, 3), np.int16),
        np.array([(1, 2.0)], [("a", "<i4"), ("b", "<f8")]),
    ],
)
@pytest.mark.parametrize("save", [np.savez, np.savez_compressed])
def test_an_array_is_what_numpy_reads(array: np.ndarray, save: Callable[..., None]) -> None:
    data = saved(save, y=[0], x=array)
    found = npz_array(data, "x", "a")
    assert found.dtype == array.dtype and found.shape == array.shape and np.array_equal(found, array)
    stored = save is np.savez and array.size
    assert np.shares_memory(found, np.frombuffer(data, np.uint8)) == bool(stored)


def test_damaged_files_are_told_and_nothing_else() -> None:
    good = saved(np.savez, x=np.arange(1000, dtype=np.uint16))
    chance = random.Random(1)
    for _ in range(300):
        data = bytearray(good)
        for _ in range(chance.randint(1, 4)):
            data[chance.randrange(len(data))] = chance.randrange(256)
        cut = memoryview(data)[: chance.choice([len(data), chance.randrange(len(data))])]
        try:
            npz_array(cut, "x", "a")
        except DatasetError as error:
            assert "no such file" in str(error)
    objects = saved(np.savez, x=np.array([{}], object))
    with pytest.raises(DatasetError, match="Python objects"):
        npz_array(objects, "x", "a")


@pytest.mark.parametrize(
    ("method", "declared", "most_bytes", "told"),
    [
        (zipfile.ZIP_DEFLATED, None, 1 << 20, "unpacks to 16,777,344 bytes, and 1,048,576 are allowed"),
        (zipfile.ZIP_DEFLATED, 1 << 31, None, "unpacks to 2,147,483,648 bytes, and 268,435,456 are allowed"),
        # More is there than is declared.
        (zipfile.ZIP_DEFLATED, 1000, None, "Bad CRC"),
        (zipfile.ZIP_BZIP2, 1000, None, "compressed by method 12"),
        (zipfile.ZIP_LZMA, None, None, "compressed by method 14"),
    ],
)
def test_a_bomb_takes_no_memory(method: int, declared: int | None, most_bytes: int | None, told: str) -> None:
    array = io.BytesIO()
    np.save(array, np.zeros(16 << 20, np.uint8))
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w", method) as archive:
        archive.writestr("x.npy", array.getvalue())
    bomb = bytearray(file.getvalue())
    if declared is not None:
        # In the directory of the file, which readers go by.
        struct.pack_into("<I", bomb, bomb.rindex(b"PK\x01\x02") + 24, declared)
    tracemalloc.start()
    try:
        with pytest.raises(DatasetError, match=told):
            npz_array(memoryview(bomb), "x", "a", most_bytes=most_bytes)
        assert tracemalloc.get_traced_memory()[1] < 2 << 20
    finally:
        tracemalloc.stop()
    if declared is None and method == zipfile.ZIP_DEFLATED:
        assert npz_array(memoryview(bomb), "x", "a").nbytes == 16 << 20
