"""Which devices are a volume: missing, swapped, foreign, newer, damaged superblocks; what cannot be made."""

from __future__ import annotations

import struct
from pathlib import Path

import pytest

from headrace.device import crc32c, open_device
from headrace.device.protocol import Buffer
from headrace.errors import (
    CommandFailed,
    HeadraceError,
    NotAVolume,
    UsageError,
    VolumeDamaged,
    VolumeFull,
    VolumeTooNew,
)
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume, layout
from headrace.volume.layout import SUPERBLOCK_BYTES, superblock_offsets
from headrace.volume.media import members
from tests.volume.support import KIB, STRIPE, content, open_read, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else")


def filled(members: int = 3, block_bytes: int = 4096) -> list[MemoryDevice]:
    devices = [MemoryDevice(4 * MIB, block_bytes=block_bytes) for _ in range(members)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, name="träning")
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("x", content(1, 500 * KIB))
        assert session.free_bytes + volume.info().used_bytes == volume.info().capacity_bytes
    return devices


def test_a_member_given_twice() -> None:
    devices = filled()
    with pytest.raises(NotAVolume, match="twice"):
        Volume.open([devices[0], devices[1], devices[1]])
    with pytest.raises(UsageError, match="twice"):
        Volume.create(devices=[devices[0], devices[0]], force=True)


def test_not_a_volume() -> None:
    for size in (4096, 1 * MIB):
        with pytest.raises(NotAVolume, match=r"headrace volume|too small"):
            Volume.open([MemoryDevice(size)])


def reseal(device: MemoryDevice, offset: int, code: str, value: int) -> None:
    """Change a field of both superblocks, checksum and all."""
    for place in superblock_offsets(device.size_bytes):
        block = bytearray(device.data[place : place + SUPERBLOCK_BYTES])
        struct.pack_into(code, block, offset, value)
        struct.pack_into("<I", block, SUPERBLOCK_BYTES - 4, crc32c(bytes(block[:-4])))
        device.data[place : place + SUPERBLOCK_BYTES] = block


def test_a_newer_version_is_refused_by_name() -> None:
    devices = filled()
    reseal(devices[1], 8, "<I", layout.VERSION + 1)
    with pytest.raises(VolumeTooNew, match=f"version {layout.VERSION + 1}"):
        Volume.open(devices)
    with pytest.raises(UsageError, match="holds a volume"):
        Volume.create(devices=devices)


def test_an_unknown_incompatible_feature_is_refused_and_a_compatible_one_is_not() -> None:
    devices = filled()
    for device in devices:
        reseal(device, 24, "<Q", 1 << 63)
    assert open_read(devices)
    reseal(devices[0], 16, "<Q", 1 << 40)
    with pytest.raises(VolumeTooNew, match="0x10000000000"):
        Volume.open(devices)


@pytest.mark.parametrize("place", [0, 1])
def test_one_bad_superblock_is_reported_and_mended(place: int) -> None:
    devices = filled()
    offset = superblock_offsets(devices[0].size_bytes)[place]
    devices[0].data[offset + 100] ^= 1
    volume = Volume.open(devices, write=True)
    assert any("superblock" in warning for warning in volume.info().warnings)
    with writing(volume):
        pass
    assert Volume.open(devices).info().warnings == []
    other = superblock_offsets(devices[0].size_bytes)[1 - place]
    devices[0].data[other + 100] ^= 1
    assert open_read(devices)


class BadSector(MemoryDevice):
    """A block that cannot be read until it is written."""

    bad = -1

    def read_into(self, offset: int, buffer: Buffer) -> None:
        if offset == self.bad:
            raise CommandFailed("unrecovered read error", where=self.uri)
        super().read_into(offset, buffer)

    def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
        super().write(offset, data, fua=fua)
        if offset == self.bad:
            self.bad = -1


@pytest.mark.parametrize("place", [0, 1])
def test_a_superblock_that_cannot_be_read_is_written_again(place: int) -> None:
    devices = filled()
    bad = BadSector(devices[0].size_bytes)
    bad.data[:] = devices[0].data
    bad.bad = superblock_offsets(bad.size_bytes)[place]
    volume = Volume.open([bad, *devices[1:]], write=True)
    assert any("superblock" in warning for warning in volume.info().warnings)
    with writing(volume):
        pass
    assert Volume.open([bad, *devices[1:]]).info().warnings == [] and bad.bad == -1


def test_two_bad_superblocks_say_which() -> None:
    devices = filled()
    for offset in superblock_offsets(devices[0].size_bytes):
        devices[0].data[offset + 100] ^= 1
    with pytest.raises(VolumeDamaged, match=devices[0].uri):
        Volume.open(devices)


@pytest.mark.parametrize(
    "field",
    [
        (48 + 8, "<I", 0),
        (60, "<I", 9),
        (64, "<Q", 3),
        (72, "<Q", 1),
        (72, "<Q", 1 << 50),
        (88, "<Q", 100),
        (96, "<Q", 1 << 40),
        (104, "<I", 7),
        (116, "<I", 999),
    ],
)
def test_fields_out_of_range_are_damage(field: tuple[int, str, int]) -> None:
    devices = filled()
    reseal(devices[0], *field)
    with pytest.raises(VolumeDamaged, match="out of range"):
        Volume.open(devices)


def test_a_volume_is_not_overwritten_unless_forced() -> None:
    devices = filled()
    with pytest.raises(UsageError, match=r"holds a volume.*träning.*--force"):
        Volume.create(devices=devices)
    assert open_read(devices)
    assert state_of(Volume.create(devices=devices, force=True)) == {}


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"stripe_bytes": 1000}, "stripe_bytes"),
        ({"stripe_bytes": 32 * KIB}, "stripe_bytes"),
        ({"log_bytes": 1}, "log_bytes"),
        ({"name": "x" * 129}, "name"),
        ({"name": "\udcff"}, "not UTF-8"),
        ({"devices": []}, "members"),
        ({"devices": [MemoryDevice(256 * KIB)]}, "too small"),
        ({"uris": ["mem:1MiB"]}, "either"),
    ],
)
def test_what_cannot_be_made(options: dict[str, object], match: str) -> None:
    arguments: dict[str, object] = {"devices": [MemoryDevice(2 * MIB)], **options}
    with pytest.raises(UsageError, match=match):
        Volume.create(**arguments)  # type: ignore[arg-type]


@pytest.mark.parametrize("block_bytes", [512, 4096])
@pytest.mark.parametrize("members", [1, 2, 5])
def test_shapes(members: int, block_bytes: int) -> None:
    devices = filled(members, block_bytes)
    volume = Volume.open(devices)
    info = volume.info()
    assert state_of(volume) == {"x": content(1, 500 * KIB)}
    assert (info.name, info.fence, info.object_count, len(info.members)) == ("träning", "process", 1, members)
    assert info.used_bytes + info.free_bytes == info.capacity_bytes == sum(m.data_bytes for m in info.members)
    assert info.writer is not None and (info.writer.state, info.writer.run_id) == ("closed", "test")


def test_members_of_different_sizes_are_filled() -> None:
    devices = [MemoryDevice(size) for size in (2 * MIB, 8 * MIB, 3 * MIB)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE)
    with writing(volume) as session:
        with pytest.raises(VolumeFull):
            for i in range(1000):
                with session.transaction() as tx:
                    tx.put(f"{i}", content(i, 300 * KIB))
        assert session.free_bytes < 300 * KIB + STRIPE * 3
        with pytest.raises(VolumeFull, match="expected"), session.transaction() as tx:
            tx.put("more", content(0, 300 * KIB))
        with session.transaction() as tx:
            tx.delete("0")
            tx.delete("1")
        with session.transaction() as tx:
            tx.put("more", content(0, 300 * KIB))
        assert all(volume.read(f"{i}") == content(i, 300 * KIB) for i in range(2, len(volume.list()) + 1))


def test_full_says_so_before_any_data_is_written() -> None:
    devices = filled(2)
    volume = Volume.open(devices, write=True)
    with writing(volume) as session:
        before = sum(device.writes for device in devices)
        with pytest.raises(
            VolumeFull, match=r"the volume is full: expected 1.0 GiB of free space, found .* free.*; delete"
        ):
            session.transaction().allocate("y", 1 << 30)
        with pytest.raises(VolumeFull):
            session.transaction().write_stream("z", iter([b"x"]), length_bytes=1 << 40)
        assert sum(device.writes for device in devices) == before


def test_by_address(tmp_path: Path) -> None:
    uris = ",".join(f"file:{tmp_path / name}?create=4MiB" for name in "ab")
    with Volume.create(uris, stripe_bytes=STRIPE) as volume:
        with writing(volume) as session, session.transaction() as tx:
            tx.put("x", b"1" * 100_000)
        addresses = volume.uris
    with Volume.open(addresses) as volume:
        assert volume.read("x") == b"1" * 100_000
        assert all(device.read_only for device in volume.devices)
    with open_device(addresses[0]) as device, pytest.raises(HeadraceError, match="missing"):
        Volume.open([device])
    with pytest.raises(HeadraceError):
        Volume.open(f"file:{tmp_path}/nothing")
    with pytest.raises(UsageError, match="at least one"):
        Volume.open("")


@pytest.mark.parametrize(
    ("text", "listed"),
    [
        ("mem:1MiB,mem:2MiB", ["mem:1MiB", "mem:2MiB"]),
        ("file:/a,/b, file:c", ["file:/a", "/b", "file:c"]),
        ("nvme+tcp://a:4420,b:4421/nqn.x?nsid=1", ["nvme+tcp://a:4420,b:4421/nqn.x?nsid=1"]),
        (
            "nvme+tcp://a,b/nqn.x,nvme+tcp://[::1]:1,[::2]/nqn.y",
            ["nvme+tcp://a,b/nqn.x", "nvme+tcp://[::1]:1,[::2]/nqn.y"],
        ),
        ("file:/a,,", ["file:/a"]),
        ("file:/a,http://b", ["file:/a", "http://b"]),
    ],
)
def test_a_comma_within_an_address_separates_its_portals(text: str, listed: list[str]) -> None:
    assert members.addresses(text) == listed


def test_info_reads_no_catalogue_while_a_job_writes() -> None:
    """What the next session would have to leave alone is told out of the log, however many objects there are."""
    devices = filled(2)
    writer = Volume.open(devices, write=True)
    session = writer.session("run", heartbeat_s=60)
    with session.transaction() as tx:
        tx.put_many([f"many/{number:05}" for number in range(5000)], bytes(5000), 1)
    grant = session.transaction().allocate("granted", 300 * KIB)
    reader = Volume.open(devices)
    assert reader._catalog.tables, "the catalogue is not in the log"
    before = sum(device.reads for device in devices)
    info = reader.info()
    assert sum(device.reads for device in devices) - before == 2, "the heartbeat block, on both copies"
    assert info.object_count == 5001
    assert info.used_bytes + info.quarantined_bytes + info.free_bytes == info.capacity_bytes
    session._beat.stop(None)
    with Volume.open(devices, write=True).session("run", heartbeat_s=60) as after:
        assert grant.length_bytes <= after.quarantined_bytes <= info.quarantined_bytes
