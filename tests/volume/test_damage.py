"""Byte damage: whatever byte is flipped, the volume opens and reads right, or says what is wrong. Never wrong bytes.

The checker, a second reader of the format, must find each flip of a byte that means something.
"""

from __future__ import annotations

import os
import random
import time

import pytest

from headrace.errors import ChecksumMismatch, HeadraceError
from headrace.testing import MemoryDevice
from headrace.volume import Volume
from headrace.volume.layout import ALIGN
from headrace.volume.repair.mend import mend
from headrace.volume.repair.salvage import look
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, STRIPE, State, content, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


def small_image(members: int) -> tuple[list[MemoryDevice], State]:
    """Objects of all kinds: small, striped, with a table of their own, streamed, deleted, composed, packed."""
    devices = [MemoryDevice(1536 * KIB if members == 1 else 1024 * KIB) for _ in range(members)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB, name="small")
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("small", content(1, 700), checksum_block_bytes=4096)
            tx.put("striped", content(2, 150 * KIB))
            tx.put("table", content(3, 80 * KIB), checksum_block_bytes=4096)
            tx.put("gone", content(4, 9 * KIB))
        with session.transaction() as tx:
            tx.delete("gone")
            tx.write_stream("streamed", [content(5, 20 * KIB), content(6, 5)])
            tx.compose("composed", [("table", 5000, 60 * KIB), b"and new bytes"])
            tx.put_many([f"many/{i}" for i in range(4)], content(7, 2800), 700)
    return devices, state_of(volume)


def interesting(devices: list[MemoryDevice], seed: int) -> list[tuple[int, int]]:
    """(member, offset): heads of all blocks that hold something, and a sample of the rest of them."""
    chance = random.Random(seed)
    result = []
    for member, device in enumerate(devices):
        for block in range(0, device.size_bytes, ALIGN):
            data = device.data[block : block + ALIGN]
            used = len(data.rstrip(b"\0"))
            if not used:
                continue
            structure = data[:2] == b"HR" or data[:4] == b"HEAD"
            head = range(0, min(used, 320), 2 if structure else 64)
            rest = [chance.randrange(used) for _ in range(6)]
            result += [(member, block + at) for at in {*head, *rest, used - 1, 4094, 508}]
    return result


@pytest.mark.parametrize("members", [1, 2])
def test_a_flipped_byte_is_never_wrong_data(members: int) -> None:
    devices, state = small_image(members)
    clean = scrub(devices)
    assert clean.clean and clean.object_count == len(state)
    places = interesting(devices, members)
    assert len(places) > 1500
    chance = random.Random(7)
    # All of them pass; a part of them, another one for each kind of volume, is what there is time for.
    places = chance.sample(places, min(len(places), int(os.environ.get("HEADRACE_FLIPS", "300"))))
    reported = mended = 0
    for member, offset in places:
        before = devices[member].data[offset]
        devices[member].data[offset] ^= 1 << chance.randrange(8)
        try:
            volume = Volume.open(devices)
            assert {info.name for info in volume.list()} == set(state)
            for name, data in state.items():
                try:
                    assert volume.read(name) == data
                except ChecksumMismatch as error:
                    assert name in str(error)
                    reported += 1
            mended += volume.info().warnings != []
        except HeadraceError:
            reported += 1
        devices[member].data[offset] = before
    assert reported > 20 and mended > 20
    assert scrub(devices).clean


@pytest.mark.parametrize("members", [1, 2])
def test_the_checker_finds_what_readers_would_stumble_over(members: int) -> None:
    devices, state = small_image(members)
    chance = random.Random(9)
    found = 0
    for member, offset in chance.sample(interesting(devices, 3), 60):
        before = devices[member].data[offset]
        devices[member].data[offset] ^= 1 << chance.randrange(8)
        volume = Volume.open(devices)
        trouble = bool(volume.info().warnings)
        for name in state:
            try:
                volume.read(name)
            except ChecksumMismatch:
                trouble = True
        report = scrub(devices)
        assert not trouble or not report.clean
        found += not report.clean
        devices[member].data[offset] = before
    assert found > 15


def test_the_checker_keeps_to_its_rate_and_says_where_it_is() -> None:
    devices, state = small_image(1)
    size = scrub(devices).bytes_read
    names: list[str] = []
    started = time.monotonic()
    scrub(devices, bytes_per_s=size / 0.5, on_object=names.append)
    assert time.monotonic() - started >= 0.45
    assert sorted(names) == sorted(state)


def test_the_checker_names_object_offset_and_member() -> None:
    devices, state = small_image(2)
    volume = Volume.open(devices)
    (blob,) = volume.stored("striped").blobs
    member, offset, _ = blob.data.used()[1]
    devices[member].data[offset + 5] ^= 1
    (finding,) = scrub(devices).findings
    assert (finding.object_name, finding.object_offset, finding.member, finding.offset, finding.fatal) == (
        "striped",
        STRIPE,
        member,
        offset,
        True,
    )
    assert "member" in str(finding) and "'striped'" in str(finding)
    place = rf"member {member} \({devices[member].uri}\) offset {offset}: expected crc32c 0x\w+, found 0x\w+"
    with pytest.raises(ChecksumMismatch, match=rf"object 'striped', bytes {STRIPE} to {2 * STRIPE}, {place}"):
        volume.read("striped")
    # The rest of it is whole, and damage can be looked at on purpose.
    assert volume.read("striped", 0, 100) == state["striped"][:100]
    buffer = bytearray(10)
    volume.submit_read("striped", [STRIPE], [10], [buffer], [0], verify=False).wait()
    assert buffer[5] == state["striped"][STRIPE + 5] ^ 1


@pytest.mark.parametrize("members", [1, 2])
def test_a_session_mends_what_one_copy_lacks(members: int) -> None:
    devices, _ = small_image(members)
    chance = random.Random(5)
    for member, offset in chance.sample(interesting(devices, 4), 40):
        media = [MemoryDevice(device.size_bytes) for device in devices]
        for medium, device in zip(media, devices, strict=True):
            medium.data[:] = device.data
        media[member].data[offset] ^= 1
        with writing(Volume.open(media, write=True)):
            pass
        assert Volume.open(media).info().warnings == []
        assert [finding for finding in scrub(media).findings if not finding.fatal] == []


def test_damage_of_a_checksum_table_says_which_bytes_cannot_be_verified() -> None:
    devices, state = small_image(2)
    volume = Volume.open(devices)
    (blob, *_) = volume.stored("table").blobs
    for table in blob.tables:
        member, offset, _ = table.used()[0]
        devices[member].data[offset + 9] ^= 1
    for name, listed in (("table", "0 to 81920"), ("composed", "0 to 61440")):
        with pytest.raises(
            ChecksumMismatch, match=rf"checksum table is damaged at object '{name}', bytes {listed}, page 0"
        ):
            volume.read(name)
    try:
        volume.read("table", 70_000, 10)
    except ChecksumMismatch as error:
        text = str(error)
    assert f"member {member} ({devices[member].uri}) offset {offset}" in text
    assert "expected crc32c 0x" in text and "found 0x" in text and "9223" not in text
    assert volume.read("striped") == state["striped"]


@pytest.mark.parametrize("copy", [0, 1])
@pytest.mark.parametrize("members", [1, 2, 3])
def test_a_checksum_table_stands_twice(members: int, copy: int) -> None:
    """One bad copy is read around, reported and written again; the two are on two members where there are two."""
    devices, state = small_image(members)
    volume = Volume.open(devices)
    (stored, *_) = volume.stored("table").blobs
    places = [table.used()[0] for table in stored.tables]
    assert len(places) == 2 and (members == 1) == (places[0][0] == places[1][0])
    before = [bytes(device.data) for device in devices]
    member, offset, length = places[copy]
    devices[member].data[offset : offset + length] = bytes(length)
    assert state_of(volume) == state
    where = f"copy {copy} of page 0 of its checksum table is damaged at member {member} ({devices[member].uri})"
    assert [where in one for one in volume.info().warnings] == [True] * (copy == 0)
    report = scrub(devices)
    (finding,) = report.findings
    assert (finding.fatal, finding.member, finding.offset, finding.object_name) == (False, member, offset, "composed")
    salvaged = look(devices)
    assert b"".join(piece.data or b"" for piece in salvaged.pieces("table")) == state["table"]
    with writing(Volume.open(devices, write=True)) as session:
        assert mend(session, report.findings) == []
    assert scrub(devices).clean
    assert bytes(devices[member].data[offset : offset + length]) == before[member][offset : offset + length]
    devices[member].data[offset : offset + length] = bytes(length)
    other, at, _ = places[1 - copy]
    devices[other].data[at] ^= 1
    assert [finding.fatal for finding in scrub(devices).findings] == [True] * 4, "two copies, two objects"
    with pytest.raises(ChecksumMismatch, match="the checksum table is damaged"):
        Volume.open(devices).read("table")


def test_misdirected_and_stale_blocks_are_caught() -> None:
    """A block of the right size with a right checksum, but of another place, another object or another time."""
    devices = [MemoryDevice(2048 * KIB)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE)
    same = content(1, 64 * KIB)
    with writing(volume) as session, session.transaction() as tx:
        tx.put("a", same + same)
        tx.put("b", same + same)
    places = {name: volume.stored(name).blobs[0].data.used()[0][1] for name in "ab"}
    data = devices[0].data
    # The same bytes at four places have four checksums, because each has its own identity.
    assert data[places["a"] : places["a"] + 64 * KIB] == data[places["b"] : places["b"] + 64 * KIB]
    roots = {name: volume.stored(name).blobs[0].entry.roots.tolist() for name in "ab"}
    assert len({*roots["a"], *roots["b"]}) == 4
    with writing(volume) as session, session.transaction() as tx:
        tx.put("c", content(2, 64 * KIB) + content(3, 64 * KIB))
    start = volume.stored("c").blobs[0].data.used()[0][1]
    first, last = data[start : start + 64 * KIB], data[start + 64 * KIB : start + 128 * KIB]
    data[start : start + 128 * KIB] = last + first
    with pytest.raises(ChecksumMismatch, match="'c'"):
        volume.read("c")
