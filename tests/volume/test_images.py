"""Every version that was ever released opens for good: one small image of each is kept in `tests/images`."""

from __future__ import annotations

import lzma
import random
from functools import cache
from pathlib import Path

import pytest

from headrace.errors import VolumeTooOld
from headrace.testing import MemoryDevice
from headrace.volume import Volume, layout
from headrace.volume.repair.scrub import scrub
from tests.images.make import EXPECTED, MEMBER_BYTES, MEMBERS, expected
from tests.volume.support import state_of

IMAGES = Path(__file__).parent.parent / "images"


@cache
def image_of(version: int) -> bytes:
    return lzma.decompress((IMAGES / f"version-{version}.xz").read_bytes())


def devices_of(version: int) -> list[MemoryDevice]:
    data = image_of(version)
    devices = [MemoryDevice(MEMBER_BYTES[version]) for _ in range(MEMBERS)]
    for index, device in enumerate(devices):
        device.data[:] = data[index * device.size_bytes : (index + 1) * device.size_bytes]
    return devices


def kept() -> list[int]:
    return sorted(int(path.stem.removeprefix("version-")) for path in IMAGES.glob("version-*.xz"))


@pytest.mark.parametrize("version", kept())
def test_the_image_of_every_version_opens_and_reads(version: int) -> None:
    devices = devices_of(version)
    random.Random(version).shuffle(devices)
    volume = Volume.open(devices, write=True)
    info = volume.info()
    assert (info.version, info.name, info.warnings, info.sequence) == (version, "kept", [], volume.sequence)
    assert info.object_count == len(expected(version)) and info.used_bytes > 300_000
    assert state_of(volume) == expected(version)
    assert scrub(devices).clean
    assert len(volume._catalog.tables) >= 2 * (version > 1)


@pytest.mark.parametrize("version", [version for version in kept() if version < layout.VERSION])
def test_an_older_version_is_not_written_to(version: int) -> None:
    devices = devices_of(version)
    before = [bytes(device.data) for device in devices]
    volume = Volume.open(devices, write=True)
    with pytest.raises(VolumeTooOld, match="copy what it holds"):
        volume.session("later", takeover="if-dead")
    volume.close()
    assert [bytes(device.data) for device in devices] == before


@pytest.mark.parametrize("version", [version for version in kept() if version == layout.VERSION])
def test_the_current_version_is_written_to(version: int) -> None:
    devices = devices_of(version)
    volume = Volume.open(devices, write=True)
    with volume.session("later") as session, session.transaction() as tx:
        tx.put("later", b"written by this version")
        tx.delete("empty")
    now = {**expected(version), "later": b"written by this version"}
    del now["empty"]
    assert state_of(Volume.open(devices)) == now
    assert scrub(devices).clean


def test_the_image_of_a_member_that_was_away() -> None:
    data = lzma.decompress((IMAGES / "epochs-2.xz").read_bytes())
    devices = [MemoryDevice(1 << 20) for _ in range(3)]
    for index, device in enumerate(devices):
        device.data[:] = data[index << 20 : index + 1 << 20]
    held = {name: EXPECTED[name] for name in ("run/step-1/small", "data/streamed", "data/table", "empty")}
    volume = Volume.open(devices, write=True)
    assert (volume.info().epoch, volume.log.copies, volume.superblock.area_count) == (4, (0,), 4)
    assert state_of(volume) == held and any("member 1 was away" in text for text in volume.info().warnings)
    with volume.session("later") as session, session.transaction() as tx:
        tx.put("later", b"written")
    assert (volume.info().epoch, volume.log.copies) == (5, (0, 1))
    assert state_of(Volume.open(devices)) == {**held, "later": b"written"} and scrub(devices).clean
    assert "later" in Volume.open(devices[1:], degraded=True)


def test_images_are_small() -> None:
    assert all(path.stat().st_size < 100_000 for path in IMAGES.iterdir() if path.is_file())
