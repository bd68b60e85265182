"""What is said of damage, and by whom. Every byte in turn: `test_bytes.py`; each case: `test_damage_cases.py`."""

from __future__ import annotations

import time

import pytest

from headrace.errors import ChecksumMismatch
from headrace.testing import MemoryDevice
from headrace.volume import Volume
from headrace.volume.repair.mend import mend
from headrace.volume.repair.salvage import look
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, STRIPE, State, content, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


def small_image(members: int) -> tuple[list[MemoryDevice], State]:
    """Objects of all kinds: small, striped, with a table of their own, streamed, deleted, composed, packed."""
    devices = [MemoryDevice(2048 * KIB if members == 1 else 1280 * KIB) for _ in range(members)]
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
