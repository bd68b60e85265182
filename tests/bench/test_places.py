"""What is read and written where, and what is refused before anything is."""

from __future__ import annotations

import fcntl
import os
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from headrace.bench import cache
from headrace.bench.places import Ranges, Shard, open_place, open_writer
from headrace.bench.places import folder as folder_module
from headrace.bench.places.content import BLOCK
from headrace.device import open_device
from headrace.errors import ChecksumMismatch, DeviceError, HeadraceError, ObjectNotFound, UsageError
from headrace.units import MIB
from headrace.volume import Volume


def quiet(fraction: float, text: str) -> None:
    pass


def of(*rows: tuple[int, int, int]) -> Ranges:
    return Ranges(*(np.array(column, np.int64) for column in zip(*rows, strict=True)))


@pytest.mark.parametrize("how", cache.CACHES)
def test_files_that_are_there_are_read_and_left(folder: Path, how: str) -> None:
    (folder / "deep").mkdir()
    for name, length in (("a", 5000), ("deep/b", 12345), ("empty", 0)):
        (folder / name).write_bytes(os.urandom(length))
    (folder / "link").symlink_to(folder / "a")
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with open_place(str(folder), existing=True) as place:
        assert "17345" not in place.plan(MIB, 0)[0] and "2 files" in place.plan(MIB, 0)[0]
        place.prepare(MIB, tell=quiet)
        assert [tuple(item) for item in place.items] == [("a", 5000), ("deep/b", 12345)]
        said = place.forget(how)
        reader = place.reader(depth=3, cache=how)
        try:
            # Unaligned, over the end of a block, to the very end.
            pending = reader.start(of((0, 4999, 1), (1, 1, 12344), (0, 0, 5000), (1, 4095, 2)))
            assert pending.bytes == 17347
            pending.wait()
            assert pending.done()
            reader.read(1, 12000, 345)
        finally:
            reader.close()
    assert ("O_DIRECT" if how == "direct" else "page cache") in said or "in memory" in said
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def test_a_file_that_becomes_shorter_is_an_error(folder: Path) -> None:
    (folder / "a").write_bytes(bytes(100_000))
    with open_place(str(folder / "a")) as place:
        place.prepare(MIB, tell=quiet)
        os.truncate(folder / "a", 10)
        reader = place.reader(depth=1)
        with pytest.raises(DeviceError, match="shorter"):
            reader.start(of((0, 0, 100_000))).wait()
        reader.close()
        with pytest.raises(UsageError, match="not written"):
            place.plan(0, MIB)


def test_pages_are_dropped_and_counted(folder: Path) -> None:
    path = folder / "a"
    path.write_bytes(os.urandom(4 * MIB))
    assert cache.resident([str(path)]) == 1.0
    if not _in_memory(folder):
        cache.drop([str(path)])
        assert cache.resident([str(path)]) == 0.0
    assert cache.resident([]) is None and cache.resident([str(folder / "none")]) is None
    assert "NOT dropped: 37%" in cache.state("dropped", left=0.37, memory=False, remote="")
    assert "NFS server" in cache.state("direct", left=None, memory=False, remote="the NFS server")


def _in_memory(folder: Path) -> bool:
    with open_place(str(folder)) as place:
        return place.describe()["file system"] in cache.MEMORY


def _damage_file(spec: dict[str, Any]) -> None:
    path = Path(spec["folder"]) / spec["shards"][1][0]
    with path.open("r+b") as file:
        file.seek(5 * BLOCK)
        file.write(b"x" * 8)


def _damage_device(spec: dict[str, Any]) -> None:
    with open_device(spec["uri"]) as device:
        device.write(spec["offsets"][1] + 5 * BLOCK, b"x" * BLOCK)


@pytest.mark.parametrize("kind", ["folder", "namespace", "volume"])
@pytest.mark.parametrize("how", ["dropped", "direct"])
def test_what_is_restored_is_what_was_saved(request: pytest.FixtureRequest, kind: str, how: str) -> None:
    name = str(request.getfixturevalue(kind))
    shards = [Shard("a/one", 9 * MIB + 77), Shard("two", 10 * BLOCK + 5)]
    with open_place(f"headrace://{name}" if kind == "volume" else name, scratch=kind != "folder") as place:
        with place.room(shards, how) as room:
            spec = room.for_writer()
            writer = open_writer(spec)
            moved: list[int] = []
            try:
                room.commit(writer.save([0, 1], moved.append))
                assert sum(moved) == 9 * MIB + 77 + 10 * BLOCK + 5
                # A large shard is told of on the way: silence would be taken for a path that hangs.
                assert len(moved) > len(shards)
                room.forget()
                assert writer.restore([1, 0], moved.append) == sum(moved) / 2
                if kind != "volume":
                    # The volume's own checksums are tested where it is.
                    (_damage_file if kind == "folder" else _damage_device)(spec)
                    with pytest.raises(ChecksumMismatch, match=f"offset {5 * BLOCK}"):
                        writer.restore([0, 1], moved.append)
            finally:
                writer.close()
        assert not place.items
    if kind == "folder":
        assert not [*Path(name).iterdir()]


def test_a_room_that_is_left_early_leaves_nothing(volume: str) -> None:
    with Volume.open(volume) as before:
        free = before.info().free_bytes
    with (
        pytest.raises(ZeroDivisionError),
        open_place(f"headrace://{volume}", scratch=True) as place,
        place.room([Shard("a", MIB)]) as room,
    ):
        writer = open_writer(room.for_writer())
        writer.save([0], lambda count: None)
        writer.close()
        raise ZeroDivisionError
    with Volume.open(volume) as after:
        assert not after.list() and after.info().free_bytes >= free - MIB
        with pytest.raises(ObjectNotFound):
            after.stat("headrace-bench/a")


# ---- refused, before anything is written ----


def test_devices_that_hold_something_are_not_overwritten(namespace: str) -> None:
    with pytest.raises(UsageError, match="--scratch"), open_place(namespace) as place:
        place.plan(0, MIB)
    with open_device(namespace) as device:
        superblock = np.zeros(BLOCK, np.uint8)
        superblock[0x438:0x43A] = np.frombuffer(b"\x53\xef", np.uint8)
        device.write(0, superblock)
        with pytest.raises(UsageError, match="ext4 file system"):
            open_place(namespace, scratch=True)
        device.write(0, np.zeros(BLOCK, np.uint8))
    Volume.create(namespace, name="precious").close()
    with pytest.raises(UsageError, match="precious"):
        open_place(namespace, scratch=True)
    # Reading is no harm.
    with open_place(namespace) as place:
        assert "precious" in place.plan(MIB, 0)[0]


def test_a_device_that_becomes_somebodys_is_left(namespace: str) -> None:
    """While it is asked whether it may be overwritten; and while it is measured: what it holds is not given back."""
    superblock = np.zeros(BLOCK, np.uint8)
    superblock[0x438:0x43A] = np.frombuffer(b"\x53\xef", np.uint8)
    data = np.ones(BLOCK, np.uint8)
    with open_device(namespace) as device:
        with open_place(namespace, scratch=True) as place:
            device.write(MIB, data)
            device.write(0, superblock)
            with pytest.raises(UsageError, match="ext4"):
                place.prepare(MIB, tell=quiet)
        device.write(0, np.zeros(BLOCK, np.uint8))
        with open_place(namespace, scratch=True) as place:
            place.prepare(MIB, tell=quiet)
            device.write(MIB, data)
            device.write(0, superblock)
        found = np.zeros(BLOCK, np.uint8)
        device.read_into(MIB, found)
        assert (found == data).all()


def test_bytes_of_another_save_are_not_taken_for_its_own(namespace: str) -> None:
    with open_place(namespace, scratch=True) as place:
        for restored in (False, True):
            with place.room([Shard("a", MIB)]) as room:
                writer = open_writer(room.for_writer())
                try:
                    if not restored:
                        writer.save([0], lambda count: None)
                        continue
                    with pytest.raises(ChecksumMismatch):
                        writer.restore([0], lambda count: None)
                finally:
                    writer.close()


def test_a_file_as_a_device_is_not_restored_from_memory(folder: Path) -> None:
    (folder / "image").touch()
    os.truncate(folder / "image", 16 * MIB)
    with open_place(f"file:{folder / 'image'}", scratch=True) as place, place.room([Shard("a", MIB)]) as room:
        writer = open_writer(room.for_writer())
        try:
            writer.save([0], lambda count: None)
            room.forget()
            assert _in_memory(folder) or cache.resident([str(folder / "image")]) == 0.0
            assert "in memory" in room.state() or "dropped (0.0% was left)" in room.state()
        finally:
            writer.close()


def test_folders_of_other_runs_are_told_and_not_those_of_its_own_job(folder: Path) -> None:
    (folder / ".headrace-bench-dead").mkdir()
    with open_place(str(folder), job="abc") as first, open_place(str(folder), job="abc") as second:
        first.prepare(MIB, tell=quiet)
        second.prepare(MIB, tell=quiet)
        assert re.fullmatch(
            r"\.headrace-bench-dead: left by a run that was killed, and may be removed|"
            r"\.headrace-bench-dead: of a run that goes on, or was killed and may be removed",
            second.describe()["other runs"],
        )
        with open_place(str(folder)) as third:
            assert len(re.findall(r"\.headrace-bench-abc-\w+", third.describe()["other runs"])) == 2
            assert ": of a run that goes on" in third.describe()["other runs"]
    assert [path.name for path in folder.iterdir()] == [".headrace-bench-dead"]


def test_who_looks_whether_a_run_lives_does_not_keep_it_from_saying_so(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, looks = os.mkdir, list[int]()

    def mkdir(path: str, mode: int) -> None:
        make(path, mode)
        looks.append(os.open(path, os.O_RDONLY))
        fcntl.flock(looks[0], fcntl.LOCK_SH)

    monkeypatch.setattr(os, "mkdir", mkdir)
    monkeypatch.setattr(folder_module, "time", SimpleNamespace(sleep=lambda _: os.close(looks.pop())))
    with open_place(str(folder)) as first, open_place(str(folder)) as second:
        first._made()  # type: ignore[attr-defined]
        assert not looks
        assert "of a run that goes on" in second.describe()["other runs"]


def test_holes_are_told(folder: Path) -> None:
    (folder / "data").write_bytes(os.urandom(MIB))
    os.truncate(folder / "data", 4 * MIB)
    with open_place(str(folder), existing=True) as place:
        assert any("75% of that lies on no medium" in line for line in place.plan(8 * MIB, 0))


@pytest.mark.parametrize(
    ("magic", "offset", "name"),
    [
        # A young pool, whose first uberblock is not the first of the ring; and what is at the end alone.
        (b"\x0c\xb1\xba\x00\x00\x00\x00\x00", (128 << 10) + 4 * 4096, "ZFS"),
        (b"\x0c\xb1\xba\x00\x00\x00\x00\x00", 4 * MIB - (128 << 10) + 1024, "ZFS"),
        (b"\xfc\x4e\x2b\xa9", 4 * MIB - (64 << 10), "md 0.90"),
        (b"\xfc\x4e\x2b\xa9", 4 * MIB - 8192, "md 0.90 or 1.0"),
        (b"EFI PART", 4 * MIB - 512, "GPT"),
        (b"\x83\x74\x02\x6b", 4 * MIB - 4096 + 60, "DRBD"),
    ],
)
def test_what_a_device_may_hold_is_recognised(folder: Path, magic: bytes, offset: int, name: str) -> None:
    with (folder / "image").open("wb") as file:
        file.truncate(4 * MIB)
        file.seek(offset)
        file.write(magic)
    with pytest.raises(UsageError, match=name):
        open_place(f"file:{folder / 'image'}", scratch=True)


def test_it_says_what_it_overwrites(namespace: str) -> None:
    with open_device(namespace) as device:
        device.write(MIB, np.ones(8 * MIB, np.uint8))
    with open_place(namespace, scratch=True) as place:
        said = place.plan(8 * MIB, 4 * MIB)
        assert re.search(rf"OVERWRITES bytes {MIB} to {13 * MIB + BLOCK} ", said[0])
        assert int(said[1].split()[0]) > 20
        with pytest.raises(UsageError, match="too little space"):
            place.plan(60 * MIB, 4 * MIB)


def test_a_volume_that_somebody_writes_to_is_left_alone(volume: str) -> None:
    with (
        Volume.open(volume, write=True) as other,
        other.session("training"),
        open_place(f"headrace://{volume}", scratch=True) as place,
        pytest.raises(HeadraceError, match="training"),
    ):
        place.prepare(MIB, tell=quiet)


@pytest.mark.parametrize(
    ("name", "options", "said"),
    [
        ("", {}, "which path"),
        ("/no/such/place", {}, "nothing to be measured"),
        ("/dev/null", {}, "neither"),
        ("a\0b", {}, "not a path"),
        ("\udcff", {}, "UTF-8"),
        ("mem:1MiB", {}, "mem:"),
        ("nvme+tcp://x", {}, "NVMe/TCP address"),
        ("headrace://nonsense", {}, "not the address"),
        ("headrace://", {}, "no volume"),
        ("/tmp", {"scratch": True}, "--scratch"),
        ("file:/no/such/file", {"existing": True}, "--existing"),
    ],
)
def test_paths_that_cannot_be_meant(name: str, options: dict[str, bool], said: str) -> None:
    with pytest.raises(UsageError, match=said):
        open_place(name, **options)


def test_a_full_file_system_is_one_line(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with open_place(str(folder)) as place, pytest.raises(UsageError, match="too little space"):
        place.plan(1 << 60, 0)

    def full(*_: object) -> int:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "pwrite", full)
    with open_place(str(folder)) as place, pytest.raises(DeviceError, match="no space left") as caught:
        place.prepare(MIB, tell=quiet)
    assert "\n" not in str(caught.value) and not [*folder.iterdir()]


def _written(kind: str, name: str) -> list[bytes]:
    """All that is there now, as a folder, a device or a volume has it."""
    if kind == "folder":
        return [path.read_bytes() for path in Path(name).rglob("*") if path.is_file()]
    if kind == "volume":
        with Volume.open(name) as volume:
            return [volume.read(each.name) for each in volume.list()]
    with open_device(name) as device:
        memory = np.empty(device.size_bytes, np.uint8)
        device.read_into(0, memory)
    return [memory.tobytes()]


@pytest.mark.parametrize("kind", ["folder", "namespace", "volume"])
def test_no_block_is_written_twice(request: pytest.FixtureRequest, kind: str) -> None:
    """Storage that keeps equal blocks once, or caches by what they hold, has nothing to find: in one run, nor between
    two, which may be two ranks."""
    name = str(request.getfixturevalue(kind))
    # More chunks than a writer has memory for, and a short one at the end.
    shards = [Shard("a", 24 * BLOCK), Shard("b", 41 * MIB + BLOCK)]
    blocks: list[int] = []
    for _ in range(2):
        with (
            open_place(f"headrace://{name}" if kind == "volume" else name, scratch=kind != "folder") as place,
            place.room(shards) as room,
        ):
            place.prepare(2 * MIB, tell=quiet)
            writer = open_writer(room.for_writer())
            try:
                room.commit(writer.save([0, 1], lambda count: None))
            finally:
                writer.close()
            for memory in _written(kind, name):
                pieces = [memory[at : at + BLOCK] for at in range(0, len(memory), BLOCK)]
                blocks += [hash(piece) for piece in pieces if any(piece[:16]) and not piece.startswith(b"HRBENCH1")]
    # Data of both runs are all there.
    assert len(blocks) == 2 * (24 + 41 * MIB // BLOCK + 1 + 2 * MIB // BLOCK)
    assert len(set(blocks)) == len(blocks)
