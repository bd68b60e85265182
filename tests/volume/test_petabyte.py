"""Volumes of a pebibyte and of 16 EiB, in memory that holds only what was written: no address overflows, and nothing
takes time or memory for what is empty.
"""

from __future__ import annotations

import pytest

from headrace.device.protocol import Buffer
from headrace.device.reference import as_bytes
from headrace.errors import ChecksumMismatch, VolumeFull
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Session, Volume
from headrace.volume.repair.mend import mend
from headrace.volume.repair.salvage import look
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, STRIPE, content, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")

PIECE = 4096
#: (members, bytes of each)
SHAPES = {
    "1 PiB on 64 members": (64, (1 << 44) + 12 * KIB),
    "16 EiB on 2 members": (2, (1 << 63) - 512),
    "8 EiB on 1 member": (1, (1 << 63) - 4096),
}


class SparseDevice(MemoryDevice):
    """A device of any size; blocks that were never written are zeros."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(PIECE, block_bytes=512)
        self.size_bytes = size_bytes
        self.pieces: dict[int, bytes] = {}

    def read_into(self, offset: int, buffer: Buffer) -> None:
        view = as_bytes(buffer)
        self._check(offset, len(view))
        self.reads += 1
        at = 0
        while at < len(view):
            start, skip = divmod(offset + at, PIECE)
            part = self.pieces.get(start, bytes(PIECE))[skip : skip + len(view) - at]
            view[at : at + len(part)] = as_bytes(part)
            at += len(part)

    def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
        view = as_bytes(data).tobytes()
        self._check(offset, len(view))
        self.writes += 1
        at = 0
        while at < len(view):
            start, skip = divmod(offset + at, PIECE)
            part = view[at : at + PIECE - skip]
            old = self.pieces.get(start, bytes(PIECE))
            self.pieces[start] = old[:skip] + part + old[skip + len(part) :]
            at += len(part)

    def flip(self, offset: int) -> None:
        start, skip = divmod(offset, PIECE)
        old = self.pieces[start]
        self.pieces[start] = old[:skip] + bytes([old[skip] ^ 1]) + old[skip + 1 :]


#: From the end of each member.
FAR = 16 * MIB


def _to_the_far_end(session: Session) -> None:
    """The next space that is handed out is what lies last on each member."""
    for index, row in enumerate(session.volume.superblock.members):
        for spaces in (session._allocator._free, session._allocator._pool):
            spaces[index].cursor = row.data_end - FAR
        pool = session._allocator._pool[index]
        for start, end in pool.ranges():
            pool.remove(start, end)


@pytest.mark.parametrize("shape", SHAPES)
def test_a_volume_as_large_as_addresses_go(shape: str) -> None:
    members, size = SHAPES[shape]
    devices = [SparseDevice(size) for _ in range(members)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE)
    capacity = volume.info().capacity_bytes
    assert members * size - members * 16 * MIB < capacity == volume.info().free_bytes < members * size
    state = {
        "near/small": content(1, 700),
        "near/striped": content(2, 5 * MIB + 7),
        "far/striped": content(3, 5 * MIB + 7),
        "far/small": content(4, 9000),
        "far/composed": b"",
    }
    with writing(volume) as session:
        with session.transaction() as tx:
            for name in ("near/small", "near/striped"):
                tx.put(name, state[name], checksum_block_bytes=4096)
        _to_the_far_end(session)
        with session.transaction() as tx:
            for name in ("far/striped", "far/small"):
                tx.put(name, state[name], checksum_block_bytes=4096)
        with session.transaction() as tx:
            tx.compose("far/composed", [("near/striped", 5, 100_000), ("far/striped", MIB, 100_000)])
        state["far/composed"] = state["near/striped"][5:100_005] + state["far/striped"][MIB : MIB + 100_000]
        with pytest.raises(VolumeFull):
            session.transaction().allocate("more", capacity)
    used = volume.stored("far/striped").blobs[0].data.used()
    assert max(offset + length for _, offset, length in used) > size - FAR - MIB
    assert len({member for member, _, _ in used}) == members
    fresh = Volume.open(devices[::-1])
    assert state_of(fresh) == state
    assert fresh.read("far/striped", 5 * MIB, 7) == state["far/striped"][5 * MIB :]
    info = fresh.info()
    assert info.used_bytes + info.free_bytes + info.quarantined_bytes == info.capacity_bytes
    # Checker and salvage look at what is there.
    report = scrub(devices)
    assert report.clean and report.object_count == len(state) and report.bytes_read < 64 * MIB
    found = look(devices)
    assert (
        found.lost == []
        and {one.name: b"".join(piece.data or b"" for piece in found.pieces(one.name)) for one in found.objects}
        == state
    )
    assert sum(len(device.pieces) for device in devices) * PIECE < 64 * MIB
    # A session finds the space of all of it, and what is at the far end can be deleted and used again.
    again = Volume.open(devices, write=True)
    with writing(again) as session, session.transaction() as tx:
        tx.delete("near/small")
        tx.put("late", content(5, 3 * MIB))
    assert state_of(Volume.open(devices))["late"] == content(5, 3 * MIB)


def test_damage_at_the_far_end_is_named_and_mended() -> None:
    size = (1 << 63) - 512
    devices = [SparseDevice(size) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE)
    with writing(volume) as session:
        _to_the_far_end(session)
        with session.transaction() as tx:
            tx.put("x", content(3, MIB), checksum_block_bytes=4096)
    (blob,) = volume.stored("x").blobs
    member, offset, _ = blob.tables[0].used()[0]
    devices[member].flip(offset)
    report = scrub(devices)
    (finding,) = report.findings
    assert (finding.member, finding.offset, finding.fatal) == (member, offset, False) and offset > size - FAR - MIB
    with writing(volume) as session:
        assert mend(session, report.findings) == []
    assert scrub(devices).clean
    member, offset, _ = blob.data.used()[0]
    devices[member].flip(offset + 1)
    with pytest.raises(ChecksumMismatch, match=rf"bytes 0 to 4096, member {member} \(.*\) offset {offset}"):
        Volume.open(devices).read("x")
