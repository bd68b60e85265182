"""Every version that was ever released opens for good: one small image of each is kept in `tests/images`."""

from __future__ import annotations

import lzma
import random
from pathlib import Path

import pytest

from headrace.testing import MemoryDevice
from headrace.volume import Volume, layout
from headrace.volume.scrub import scrub
from tests.images.make import EXPECTED, MEMBER_BYTES, MEMBERS
from tests.volume.support import state_of

IMAGES = Path(__file__).parent.parent / "images"


def devices_of(version: int) -> list[MemoryDevice]:
    data = lzma.decompress((IMAGES / f"version-{version}.xz").read_bytes())
    devices = [MemoryDevice(MEMBER_BYTES) for _ in range(MEMBERS)]
    for index, device in enumerate(devices):
        device.data[:] = data[index * MEMBER_BYTES : (index + 1) * MEMBER_BYTES]
    return devices


@pytest.mark.parametrize("version", range(1, layout.VERSION + 1))
def test_the_image_of_every_version_opens_reads_and_is_written_to(version: int) -> None:
    devices = devices_of(version)
    random.Random(version).shuffle(devices)
    volume = Volume.open(devices, write=True)
    info = volume.info()
    assert (info.version, info.name, info.warnings, info.sequence) == (version, "kept", [], volume.sequence)
    assert state_of(volume) == EXPECTED
    assert scrub(devices).clean
    with volume.session("later") as session, session.transaction() as tx:
        tx.put("later", b"written by this version")
        tx.delete("empty")
    expected = {**EXPECTED, "later": b"written by this version"}
    del expected["empty"]
    assert state_of(Volume.open(devices)) == expected
    assert scrub(devices).clean


def test_images_are_small() -> None:
    assert all(path.stat().st_size < 100_000 for path in IMAGES.iterdir() if path.is_file())
