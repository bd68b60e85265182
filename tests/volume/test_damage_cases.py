"""Each case of damage, by hand: one kept image, a listed edit, and what is said and what is saved then.

`version-2.xz` has two members, superblocks, heartbeats, a log, several tables and objects of all kinds. A case edits
it, and says what opening, reading, the checker, a session and salvage make of that.
"""

from __future__ import annotations

import re
import struct
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import pytest

from headrace.device import crc32c
from headrace.errors import (
    ChecksumMismatch,
    HeadraceError,
    NotAVolume,
    VolumeDamaged,
    VolumeTooNew,
)
from headrace.testing import MemoryDevice
from headrace.volume import Volume, layout
from headrace.volume.layout import ALIGN, SUPERBLOCK_BYTES
from headrace.volume.repair.mend import mend
from headrace.volume.repair.salvage import look
from headrace.volume.repair.scrub import scrub
from tests.images.make import expected
from tests.volume.support import state_of, writing
from tests.volume.test_images import devices_of

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")

STATE = expected(2)
STRIPED = "run/step-1/striped"


class Image:
    """The kept image, and where everything stands in it. Edits change `devices`."""

    def __init__(self) -> None:
        self.devices = devices_of(2)
        self.volume = Volume.open(devices_of(2))
        self.block = self.volume.superblock
        self.cursor = self.volume._cursor

    def wipe(self, member: int, offset: int, length: int = ALIGN) -> None:
        self.devices[member].data[offset : offset + length] = bytes(length)

    def log(self, copy: int, area: int, block: int) -> tuple[int, int]:
        """Member and offset of a block of the log."""
        return self.block.log_member[copy], self.block.area_offset(copy, area) + block * ALIGN

    def header(self, *copies: int) -> None:
        for copy in copies:
            self.wipe(*self.log(copy, self.cursor.area, 0))

    def heartbeat(self, *copies: int) -> None:
        for copy in copies:
            self.wipe(self.block.log_member[copy], self.block.log_offset[copy])

    def records(self) -> list[tuple[int, layout.RecordHead]]:
        """(block, head) of all that are in force."""
        found, at = [], 1
        member, offset = self.log(0, self.cursor.area, 0)
        while at < self.cursor.block:
            data = bytes(self.devices[member].data[offset + at * ALIGN : offset + at * ALIGN + 64])
            head = layout.RecordHead.decode(data, self.block.volume_id, at)
            assert head is not None
            found.append((at, head))
            at += head.blocks
        return found

    def record(self, which: int, *copies: int) -> None:
        at, _ = self.records()[which]
        for copy in copies:
            self.wipe(*self.log(copy, self.cursor.area, at))

    def superblock(self, member: int, *copies: int) -> None:
        for copy in copies:
            self.wipe(member, layout.superblock_offsets(self.devices[member].size_bytes)[copy])

    def reseal(self, code: str, at: int, value: int) -> None:
        """Change a field of every superblock, checksum and all."""
        for device in self.devices:
            for place in layout.superblock_offsets(device.size_bytes):
                block = bytearray(device.data[place : place + SUPERBLOCK_BYTES])
                struct.pack_into(code, block, at, value)
                struct.pack_into("<I", block, SUPERBLOCK_BYTES - 4, crc32c(bytes(block[:-4])))
                device.data[place : place + SUPERBLOCK_BYTES] = block

    def swap(self) -> None:
        self.devices.reverse()

    def other_volume(self) -> None:
        stranger = [MemoryDevice(device.size_bytes) for device in self.devices]
        Volume.create(devices=stranger, stripe_bytes=self.block.stripe_bytes, log_bytes=self.block.area_bytes)
        self.devices[1] = stranger[1]

    def shrink(self) -> None:
        small = MemoryDevice(self.devices[1].size_bytes - (64 << 10))
        small.data[:] = self.devices[1].data[: small.size_bytes]
        self.devices[1] = small

    def node(self, *copies: int) -> None:
        """A leaf of the largest table."""
        table = max(self.volume._catalog.tables, key=lambda one: one.root.entry_count)
        child = table.root.top
        while (node := table.node(child)).level:
            child = node.child(0)
        for copy in copies:
            for member, offset, length in table._pieces(copy, child.place, child.blocks):
                self.wipe(member, offset, length)

    def page(self) -> None:
        """Of the checksum table of an object; it stands once in this image."""
        member, offset, _ = self.volume.stored("data/table").blobs[0].tables[0].used()[0]
        self.devices[member].data[offset + 7] ^= 1

    def place(self, name: str, at: int) -> tuple[int, int]:
        pieces = self.volume.stored(name).blobs[0].data.pieces(np.array([at]), np.array([1]))
        return int(pieces.member[0]), int(pieces.offset[0])

    def data(self) -> None:
        member, offset = self.place(STRIPED, 64 << 10)
        self.devices[member].data[offset + 99] ^= 1

    def stale(self) -> None:
        """A block that was written as block 0, whole and right, of an older blob."""
        (one, first), (other, second) = self.place("data/streamed", 0), self.place(STRIPED, 0)
        self.devices[other].data[second : second + (64 << 10)] = self.devices[one].data[first : first + (64 << 10)]

    def misdirected(self) -> None:
        """Two blocks of one object, each in the other's place: both were written, and read well."""
        (one, first), (other, second) = self.place("data/table", 0), self.place("data/table", 4096)
        a = self.devices[one].data[first : first + 4096]
        b = self.devices[other].data[second : second + 4096]
        self.devices[one].data[first : first + 4096], self.devices[other].data[second : second + 4096] = b, a


@dataclass(frozen=True)
class Case:
    """An edit, and what is said then.

    `opens`: the error of opening or listing, and what is in its text; None: it opens. `reads`: objects that do not
    read, and what is said of each. `checker`: what is in its findings, in order, or the error that it raises; `fatal`:
    are they. `lost`: what salvage says that is lost; `left`: how many objects it has not whole, -1: it depends.
    """

    name: str
    edit: Callable[[Image], object]
    opens: tuple[type[HeadraceError], str] | None = None
    reads: tuple[tuple[str, str], ...] = ()
    checker: tuple[str, ...] | type[HeadraceError] = ()
    fatal: bool = False
    lost: tuple[str, ...] = ()
    left: int = 0
    doubtful: bool = False


def at(member: int, offset: str = r"\d+") -> str:
    return rf"member {member} \(memory-device:\d+\) offset {offset}"


SUMS = r"expected crc32c 0x\w{8}, found 0x\w{8}"
BOTH = f"{at(0)} and {at(1)}"
SALVAGE = "`headrace volume salvage` copies out what still verifies"
RESTORE = "restore the object from another copy"

CASES = [
    Case("nothing", lambda image: None),
    # ---- superblocks
    Case(
        "a copy of a superblock",
        lambda image: image.superblock(1, 0),
        checker=(rf"a copy of the superblock is bad \(there is none\): {at(1, '0')}",),
        lost=("member 1 .*: one copy of its superblock",),
    ),
    Case(
        "both copies of a superblock",
        lambda image: image.superblock(1, 0, 1),
        opens=(NotAVolume, "this is not a headrace volume at memory-device"),
        checker=NotAVolume,
        lost=("member 1 .*: both copies of its superblock; known by what it holds", "nothing says which epoch"),
    ),
    Case(
        "a field of every superblock is out of range",
        lambda image: image.reseal("<Q", 64, 3),
        opens=(VolumeDamaged, r"a field of the superblock is out of range at .* offset 0: found stripe 3, area \d+"),
        checker=VolumeDamaged,
        left=-1,
    ),
    Case(
        "a newer version",
        lambda image: image.reseal("<I", 8, layout.VERSION + 1),
        opens=(VolumeTooNew, "newer headrace .*expected format version 2 at most, found version 3; upgrade headrace"),
        checker=VolumeTooNew,
        left=-1,
    ),
    Case(
        "an unknown incompatible feature",
        lambda image: image.reseal("<Q", 16, 1 << 40),
        opens=(VolumeTooNew, "features that this headrace does not know .*found 0x10000000000; upgrade headrace"),
        checker=VolumeTooNew,
        left=-1,
    ),
    Case("an unknown compatible feature", lambda image: image.reseal("<Q", 24, 1 << 40)),
    # ---- members
    Case("members swapped", Image.swap),
    Case(
        "a member is missing",
        lambda image: image.devices.pop(),
        opens=(NotAVolume, "members of the volume are missing .*expected 2 members, found 1; number 1 not among them"),
        checker=NotAVolume,
        lost=("member 1: it is missing",),
        left=80,
    ),
    Case(
        "a member given twice",
        lambda image: image.devices.append(image.devices[0]),
        opens=(NotAVolume, "a member was given twice at memory-device"),
        checker=NotAVolume,
        lost=("says that it is member 0, as memory-device:.* does: left out",),
    ),
    Case(
        "a member of another volume",
        Image.other_volume,
        opens=(NotAVolume, r"different volumes at .*expected volume \w{32}, found volume \w{32}"),
        checker=NotAVolume,
        lost=(r"it is a member of another volume, \w{32}: left out", "member 1: it is missing"),
        left=80,
    ),
    Case(
        "a member that shrank",
        Image.shrink,
        opens=(VolumeDamaged, "the member is smaller than it was .*expected 4194304 bytes, found 4128768 bytes"),
        checker=VolumeDamaged,
        lost=("one copy of its superblock", "smaller than it was"),
    ),
    # ---- heartbeats
    Case("a heartbeat", lambda image: image.heartbeat(1), checker=(f"log copy 1 lacks the heartbeat block: {at(1)}",)),
    Case(
        "both heartbeats",
        lambda image: image.heartbeat(0, 1),
        checker=(f"log copy 0 lacks the heartbeat block: {at(0)}", f"log copy 1 lacks the heartbeat block: {at(1)}"),
        fatal=True,
    ),
    # ---- the log
    Case(
        "a header of the log",
        lambda image: image.header(0),
        checker=(f"log copy 0 lacks the header of area 0: {at(0)}",),
    ),
    Case(
        "MOVED, and no area that it moved to",
        lambda image: image.header(0, 1),
        opens=(VolumeDamaged, f"moved to an area that has no valid header on any copy at {BOTH}: .*; {SALVAGE}"),
        checker=("the log moved to an area that has no valid header",),
        fatal=True,
    ),
    Case(
        "no header at all",
        lambda image: [
            image.wipe(*image.log(copy, area, 0)) for copy in (0, 1) for area in range(image.block.area_count)
        ],
        opens=(VolumeDamaged, f"no copy of the log has a valid header at {BOTH}, and {BOTH}; {SALVAGE}"),
        checker=VolumeDamaged,
    ),
    Case("a snapshot record", lambda image: image.record(0, 1), checker=(rf"log copy 1 lacks record \d+: {at(1)}",)),
    Case(
        "a snapshot record on both copies",
        lambda image: image.record(0, 0, 1),
        opens=(VolumeDamaged, f"the catalog is damaged on every log copy at block 1 of area 0, {BOTH}: .*; {SALVAGE}"),
        checker=("a record is damaged on every log copy",),
        fatal=True,
        lost=("the log: records before block 2", "the newest snapshot of the catalogue: what older ones say stands in"),
        doubtful=True,
    ),
    Case("a record", lambda image: image.record(5, 0), checker=(rf"log copy 0 lacks record \d+: {at(0)}",)),
    Case(
        "a record on both copies",
        lambda image: image.record(5, 0, 1),
        opens=(VolumeDamaged, rf"there are later ones at block \d+ of area 0, {BOTH}: expected record \d+; {SALVAGE}"),
        checker=("a record is damaged on every log copy",),
        fatal=True,
        lost=("the log: records before block",),
        doubtful=True,
    ),
    # ---- tables
    Case(
        "a node",
        lambda image: image.node(0),
        checker=(rf"copy 0 of a node of table 0x\w+ does not match its checksum: {at(1)}: {SUMS}",),
    ),
    Case(
        "a node on both copies",
        lambda image: image.node(0, 1),
        opens=(
            VolumeDamaged,
            rf"no copy of the node at block 0 of table 0x\w+ is good at {at(1)} and {at(0)}: {SUMS} and 0x",
        ),
        checker=("copy 0 of a node", "copy 1 of a node", *["only a lost node of the catalogue said"] * 2),
        fatal=True,
        lost=("of the catalogue: a node at block 0, on both copies, with 618 entries or fewer",),
        left=-1,
    ),
    # ---- checksum tables and data
    Case(
        "a page of checksums, which stands once in a volume of before",
        Image.page,
        reads=(
            (
                "data/table",
                rf"table is damaged at object 'data/table', bytes 0 to 81920, page 0 of it, {at(0)}: {SUMS}",
            ),
            ("model/composed", rf"'model/composed', bytes 119006 to 200921, page 0 of it, {at(0)}: {SUMS}; {RESTORE}"),
        ),
        checker=("'data/table' bytes 0 to 81920", "'model/composed' bytes 119006 to 200921"),
        fatal=True,
        left=2,
    ),
    Case(
        "a block of data",
        Image.data,
        reads=(
            ("model/composed", rf"bytes 64542 to 119006, {at(0)}: {SUMS}; {RESTORE}"),
            (STRIPED, rf"do not match their checksum at object '{STRIPED}', bytes 65536 to 131072, {at(0)}: {SUMS}"),
        ),
        checker=("'model/composed' bytes 64542 to 119006", f"'{STRIPED}' bytes 65536 to 131072"),
        fatal=True,
        left=2,
    ),
    Case(
        "a stale block",
        Image.stale,
        reads=(
            ("model/composed", rf"bytes 6 to 64542, {at(1)}"),
            (STRIPED, rf"bytes 0 to 65536, {at(1)}: {SUMS}"),
        ),
        checker=("'model/composed' bytes 6 to 64542", f"'{STRIPED}' bytes 0 to 65536"),
        fatal=True,
        left=2,
    ),
    Case(
        "misdirected blocks",
        Image.misdirected,
        reads=(("data/table", rf"bytes 0 to 4096, {at(0)}"), ("model/composed", rf"bytes 119006 to 123097, {at(0)}")),
        checker=(
            "'data/table' bytes 0 to 4096",
            "'model/composed' bytes 119006 to 123097",
            "'data/table' bytes 4096 to 8192",
            "'model/composed' bytes 123097 to 127193",
        ),
        fatal=True,
        left=2,
    ),
]


def names(cases: list[Case]) -> list[str]:
    return [case.name for case in cases]


def lines_match(patterns: Sequence[str], lines: Sequence[str]) -> None:
    assert len(lines) == len(patterns), lines
    for pattern, line in zip(patterns, lines, strict=True):
        assert re.search(pattern, line), f"{pattern!r} is not in {line!r}"


@pytest.mark.parametrize("case", CASES, ids=names(CASES))
def test_what_is_said(case: Case) -> None:
    image = Image()
    case.edit(image)
    before = [bytes(device.data) for device in image.devices]
    # Opening and reading.
    if case.opens is not None:
        kind, text = case.opens
        with pytest.raises(kind, match=text):
            state_of(Volume.open(image.devices))
    else:
        volume = Volume.open(image.devices)
        bad = dict(case.reads)
        for info in volume.list():
            if info.name in bad:
                with pytest.raises(ChecksumMismatch, match=bad[info.name]):
                    volume.read(info.name)
            elif info.length_bytes > 2000 or info.name < "late":
                assert volume.read(info.name) == STATE[info.name]
    # The checker.
    if isinstance(case.checker, tuple):
        findings = scrub(image.devices).findings
        lines_match(case.checker, [str(finding) for finding in findings])
        assert any(finding.fatal for finding in findings) == case.fatal
    else:
        with pytest.raises(case.checker):
            scrub(image.devices)
    _salvaged(case, image)
    assert [bytes(device.data) for device in image.devices] == before, "looking changes nothing"


def _salvaged(case: Case, image: Image) -> None:
    """What is listed verifies, and is right; what is not there is said."""
    try:
        found = look(image.devices)
    except HeadraceError:
        assert case.left == -1 and case.checker is not None
        return
    lines_match(case.lost, found.lost)
    assert any(one.doubtful for one in found.objects) == case.doubtful
    whole = 0
    for one in found.objects:
        data = STATE.get(one.name)
        pieces = list(found.pieces(one.name))
        for piece in pieces:
            part = None if data is None else data[piece.offset : piece.offset + piece.length]
            assert piece.data in (None, part), one.name
            assert (piece.data is None) == bool(piece.why)
        whole += all(piece.data is not None for piece in pieces) and data is not None
    if case.left >= 0:
        assert whole == len(STATE) - case.left


@pytest.mark.parametrize("name", [case.name for case in CASES if case.checker and not case.fatal and not case.opens])
def test_a_session_writes_it_again(name: str) -> None:
    image = Image()
    next(case for case in CASES if case.name == name).edit(image)
    with writing(Volume.open(image.devices, write=True)) as session:
        assert mend(session, scrub(image.devices).findings) == []
    assert scrub(image.devices).clean
    volume = Volume.open(image.devices)
    assert volume.info().warnings == [] and state_of(volume) == STATE


def test_a_header_that_is_lost_on_both_copies_does_not_take_commits_along_unseen() -> None:
    """After a session whose predecessor did not end no MOVED says that the log went on in another area."""
    devices = [MemoryDevice(4 << 20) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=64 << 10, log_bytes=128 << 10)
    dead = volume.session("dead", heartbeat_s=60)
    with dead.transaction() as tx:
        tx.put("first", b"1")
    with writing(Volume.open(devices, write=True)) as session:
        cursor, block = session._writer.cursor, volume.superblock
        places = [(block.log_member[copy], block.area_offset(copy, cursor.area)) for copy in range(2)]
        with session.transaction() as tx:
            tx.put("second", b"2")
    for member, offset in places:
        devices[member].data[offset + 30] ^= 1
    with pytest.raises(VolumeDamaged, match=rf"newest area is damaged on every log copy at {BOTH}: .*; {SALVAGE}"):
        Volume.open(devices)
    assert ["newest area" in str(finding) for finding in scrub(devices).findings if finding.fatal] == [True]
    assert {one.name for one in look(devices).objects} == {"first", "second"}
    # Only the snapshot: a move that was cut short. What was before stands.
    for member, offset in places:
        area = bytes(devices[member].data[offset : offset + block.area_bytes])
        heads = [layout.RecordHead.decode(area[at * ALIGN :][:64], block.volume_id, at) for at in range(1, 32)]
        found = [(at + 1, head.sequence) for at, head in enumerate(heads) if head is not None]
        behind = next(at for at, sequence in found if sequence != found[0][1])
        image_of_snapshot = area[: behind * ALIGN].ljust(len(area), b"\0")
        devices[member].data[offset : offset + len(area)] = image_of_snapshot
    assert state_of(Volume.open(devices)) == {"first": b"1"}


def test_a_torn_tail_is_no_damage() -> None:
    """The last record destroyed on both copies is what a power cut leaves: what came before stands."""
    image = Image()
    image.record(-1, 0, 1)
    state = state_of(Volume.open(image.devices))
    assert state.keys() - STATE.keys() == {"later/149"}, "its deletion was the last commit, and no marker says so"
    assert scrub(image.devices).clean
    with writing(Volume.open(image.devices, write=True)):
        pass
    assert state_of(Volume.open(image.devices)) == STATE, "a session finds it, and marks it"
