"""Byte damage: every byte of every structure of a small volume flipped in turn, and every sector of it lost.

    python -m tests.volume.bytes                     all of it: a long run (docs/proofs.md)
    python -m tests.volume.bytes --sample 500 --seed 7
    python -m tests.volume.bytes --only 'two members, 4096: record'     -v to see each case

An image of each kind (one member, two members; blocks of 512 and of 4096 bytes) has superblocks, heartbeats, area
headers, records of each kind, tables, checksum tables and data. Each structure is damaged on one copy, and on all:

    one copy     it opens, every object reads right, the checker names the place as a bad copy, and a session (with
                 `mend` for checksum tables) writes it again
    every copy   an error of `headrace.errors`, or an older state where that cannot be told from a torn write; never
                 wrong bytes, never another exception
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache

import numpy as np

from headrace.device import crc32c, reference
from headrace.errors import ChecksumMismatch, HeadraceError
from headrace.testing import MemoryDevice
from headrace.volume import Volume, layout
from headrace.volume.layout import ALIGN
from headrace.volume.repair import scrub as scrub_module
from headrace.volume.repair.findings import ScrubReport
from headrace.volume.repair.mend import mend
from headrace.volume.repair.salvage import look
from headrace.volume.repair.scrub import scrub
from headrace.volume.writing import heartbeat
from tests.volume.support import KIB, STRIPE, State, content, state_of, writing

SECTOR = 512
KINDS = {
    f"{'one member' if members == 1 else 'two members'}, {block}": (members, block)
    for members in (1, 2)
    for block in (512, 4096)
}
#: Of data every so many bytes are flipped, since one is as good as another within a block.
DATA_STRIDE = 61
#: Bytes of a structure that are flipped whatever the stride.
HEAD = 64
#: A session is opened on every so many of the damaged images.
SESSION_STRIDE = 9


@dataclass(frozen=True)
class Structure:
    """A structure and its copies, each (member, offset). `length`: the bytes that mean something."""

    what: str
    places: tuple[tuple[int, int], ...]
    length: int
    #: Nothing behind it in the log.
    last: bool = False
    #: The objects that end with it.
    objects: tuple[str, ...] = ()

    @property
    def data(self) -> bool:
        return self.what == "data"


@dataclass
class Image:
    kind: str
    sizes: list[int]
    block_bytes: int
    #: Of each member now, and some time before.
    now: list[bytes]
    older: list[bytes]
    state: State
    #: What readers could see before.
    states: list[State]
    structures: list[Structure] = field(default_factory=list)

    def devices(self) -> list[MemoryDevice]:
        result = [MemoryDevice(len(data), block_bytes=self.block_bytes) for data in self.now]
        for device, data in zip(result, self.now, strict=True):
            device.data[:] = data
        return result


# ---- making an image -------------------------------------------------------------------------------------------------


@cache
def make(kind: str) -> Image:
    """The same for all who ask: cases work on copies of it."""
    members, block_bytes = KINDS[kind]
    devices = [MemoryDevice((2048 if members == 1 else 1280) * KIB, block_bytes=block_bytes) for _ in range(members)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB, name="bytes")
    states: list[State] = [{}]
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("small", content(1, 700), checksum_block_bytes=4096)
            tx.put("striped", content(2, 70 * KIB))
            tx.put("gone", content(4, 90 * KIB), checksum_block_bytes=4096)
            tx.put("empty", b"")
        states.append(state_of(volume))
        with session.transaction() as tx:
            tx.delete("gone")
        with session.transaction() as tx:
            tx.put("table", content(3, 68 * KIB), checksum_block_bytes=4096)
            tx.write_stream("streamed", [content(5, 10 * KIB), content(6, 5)])
        with session.transaction() as tx:
            tx.compose("composed", [("table", 5000, 60 * KIB), b"and new bytes"])
        # Commits that are tables each, of the same long names, and small ones until the tables have become one.
        names = [_long("many", number) for number in range(36)]
        for turn in range(4):
            with session.transaction() as tx:
                if turn:
                    tx.delete_prefix("many/")
                tx.put_many(names, b"", 0)
        older = [bytes(device.data) for device in devices]
        turn = 0
        # One kind of image ends with the tables just merged, the other with a snapshot.
        merged = False
        while not merged or (members == 1 and layout.SNAPSHOT not in _kinds(volume)):
            states.append(state_of(volume))
            with session.transaction() as tx:
                tx.put(_long("late", turn), b"")
                if turn:
                    tx.delete(_long("late", turn - 1))
            turn += 1
            assert turn < 200
            merged |= layout.TABLES_CHANGED in _kinds(volume)
        states.append(state_of(volume))
    with writing(volume) as session, session.transaction() as tx:
        tx.delete_prefix("many/02")
    states.append(state_of(volume))
    image = Image(
        kind, [device.size_bytes for device in devices], block_bytes, [bytes(device.data) for device in devices],
        older, state_of(volume), states,
    )  # fmt: skip
    image.structures = [*_structures(devices)]
    return image


def _long(folder: str, number: int) -> str:
    return f"{folder}/{number:03}/{'x' * 900}"


def _kinds(volume: Volume) -> set[int]:
    """Of the records in force."""
    return {head.kind for _, head in _heads(volume)}


def _heads(volume: Volume) -> Iterator[tuple[int, layout.RecordHead]]:
    """(block, head) of every record in force."""
    block, cursor = volume.superblock, Volume.open(volume.devices)._cursor
    at = 1
    while at < cursor.block:
        buffer = np.empty(ALIGN, np.uint8)
        volume.devices[block.log_member[0]].read_into(block.area_offset(0, cursor.area) + at * ALIGN, buffer)
        head = layout.RecordHead.decode(buffer.tobytes(), block.volume_id, at)
        assert head is not None
        yield at, head
        at += head.blocks


def _structures(devices: Sequence[MemoryDevice]) -> Iterator[Structure]:
    volume = Volume.open(devices)
    block = volume.superblock
    for member, device in enumerate(devices):
        first, last = layout.superblock_offsets(device.size_bytes)
        yield Structure("superblock", ((member, first), (member, last)), layout.SUPERBLOCK_BYTES)
    log = [(block.log_member[copy], block.log_offset[copy]) for copy in range(layout.LOG_COPIES)]
    yield Structure("heartbeat", tuple(log), 512)
    cursor = volume._cursor
    areas = [(block.log_member[copy], block.area_offset(copy, cursor.area)) for copy in range(layout.LOG_COPIES)]
    yield Structure("area header", tuple(areas), ALIGN)
    for at, head in _heads(volume):
        places = tuple((member, start + at * ALIGN) for member, start in areas)
        last = at + head.blocks == cursor.block
        yield Structure(f"record {KIND_NAMES[head.kind]}", places, layout.RECORD_BYTES + head.payload_bytes, last)
    for table in volume._catalog.tables:
        yield from _nodes(table)
    blobs: dict[int, tuple[object, list[str]]] = {}
    for info in volume.list():
        for blob in volume.stored(info).blobs:
            blobs.setdefault(blob.entry.birth, (blob, []))[1].append(info.name)
    for blob, names in blobs.values():
        for page in range(-(-blob.tables[0].length_bytes // blob.entry.table_page_bytes) if blob.tables else 0):  # type: ignore[attr-defined]
            places, length = [], 0
            for table in blob.tables:  # type: ignore[attr-defined]
                pieces = table.pieces(np.array([page * table.block_bytes]), np.array([1]))
                places.append((int(pieces.member[0]), int(pieces.offset[0])))
                length = int(pieces.length[0])
            yield Structure("page of checksums", tuple(places), length, objects=tuple(names))
        whole = blob.data.whole()  # type: ignore[attr-defined]
        for member, offset, length in zip(
            whole.member.tolist(), whole.offset.tolist(), whole.length.tolist(), strict=True
        ):
            yield Structure("data", ((member, offset),), length, objects=tuple(names))


KIND_NAMES = {
    getattr(layout, name): name
    for name in ("COMMIT", "SNAPSHOT", "SESSION", "WINDOW", "MARKER", "MOVED", "TABLES", "TABLES_CHANGED")
}


def _nodes(table: object) -> Iterator[Structure]:
    waiting = [table.root.top]  # type: ignore[attr-defined]
    while waiting:
        child = waiting.pop()
        places = tuple(
            next((member, offset) for member, offset, _ in table._pieces(copy, child.place, 1))  # type: ignore[attr-defined]
            for copy in range(2)
        )
        yield Structure("node", places, child.blocks * ALIGN)
        node = table.node(child)  # type: ignore[attr-defined]
        if node.level:
            waiting += [node.child(index) for index in range(node.count)]


# ---- cases -----------------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class Case:
    """`how`: "flip", "zero" or "older"; `copies`: which ones are damaged."""

    structure: int
    how: str
    at: int
    copies: tuple[int, ...]

    def said(self, image: Image) -> str:
        one = image.structures[self.structure]
        places = ", ".join(f"member {one.places[copy][0]} offset {one.places[copy][1]}" for copy in self.copies)
        return f"{image.kind}: {one.what} (number {self.structure}), {self.how} at byte {self.at}, {places}"


def cases(image: Image, stride: int = 1) -> Iterator[Case]:
    """All of them; `stride`: of what is behind the head of a structure, a byte of so many."""
    for number, one in enumerate(image.structures):
        copies: list[tuple[int, ...]] = [(copy,) for copy in range(len(one.places))]
        if len(one.places) > 1:
            copies.append(tuple(range(len(one.places))))
        for which in copies:
            step = DATA_STRIDE * stride if one.data else stride
            head = 0 if one.data else min(HEAD, one.length)
            for at in (*range(head), *range(head + (number + len(which)) % step, one.length, step)):
                yield Case(number, "flip", at, which)
            for at in range(0, one.length, SECTOR):
                yield Case(number, "zero", at, which)
                yield Case(number, "older", at, which)


class Wrong(AssertionError):
    """The volume did not keep its promise."""


def check(image: Image, case: Case, bit: int, *, session: bool) -> str:
    """Damage, look, and say how it went in a word. Wrong."""
    one = image.structures[case.structure]
    devices = image.devices()
    changed = False
    for copy in case.copies:
        member, offset = one.places[copy]
        data = devices[member].data
        start = offset + case.at
        before = bytes(data[start : start + SECTOR])
        if case.how == "flip":
            data[start] ^= 1 << bit
        elif case.how == "zero":
            data[start : start + SECTOR] = bytes(SECTOR)
        else:
            data[start : start + SECTOR] = image.older[member][start : start + SECTOR]
        size = min(SECTOR, one.length - case.at)
        changed |= data[start : start + size] != before[:size]
    if not changed:
        return "as it was"
    if len(case.copies) == len(one.places):
        return _lost(image, one, devices)
    return _one_copy(image, case, one, devices, session)


def _read(devices: Sequence[MemoryDevice], states: Sequence[State]) -> tuple[State, list[HeadraceError]]:
    """Every object that reads; nothing that was never there."""
    volume = Volume.open(devices)
    found: State = {}
    errors: list[HeadraceError] = []
    names = []
    for info in volume.list():
        name = info.name
        names.append(name)
        try:
            # Most are there for their names only.
            found[name] = volume.read(name) if info.length_bytes else b""
        except HeadraceError as error:
            errors.append(error)
            if isinstance(error, ChecksumMismatch) and f"object {name!r}, bytes " not in str(error):
                raise Wrong(f"which object and bytes: {error}") from None
    if not any(set(names) == set(state) and found.items() <= state.items() for state in states):
        raise Wrong("what is read was never there")
    return found, errors


def _checked(devices: Sequence[MemoryDevice]) -> ScrubReport | None:
    try:
        return scrub(devices)
    except HeadraceError:
        return None


def _one_copy(image: Image, case: Case, one: Structure, devices: list[MemoryDevice], session: bool) -> str:
    found, errors = _read(devices, [image.state])
    if errors or found != image.state:
        raise Wrong(f"one bad copy: {errors}")
    report = scrub(devices)
    member, offset = one.places[case.copies[0]]
    named = [
        finding for finding in report.findings
        if not finding.fatal and finding.member == member and offset <= finding.offset < offset + one.length
    ]  # fmt: skip
    if not named or any(finding.fatal for finding in report.findings):
        raise Wrong(f"the checker says {[str(finding) for finding in report.findings]}")
    if not session:
        return "read around"
    with writing(Volume.open(devices, write=True)) as opened:
        if left := mend(opened, report.findings):
            raise Wrong(f"not mended: {left}")
    after = scrub(devices)
    if not after.clean:
        raise Wrong(f"after a session: {[str(finding) for finding in after.findings]}")
    if Volume.open(devices).info().warnings or state_of(Volume.open(devices)) != image.state:
        raise Wrong("after a session it is not as it was")
    return "mended"


def _lost(image: Image, one: Structure, devices: list[MemoryDevice]) -> str:
    """Every copy is damaged."""
    report = _checked(devices)
    try:
        found, errors = _read(devices, [image.state] if one.data or one.objects else image.states)
    except HeadraceError as error:
        if report is not None and not any(finding.fatal for finding in report.findings):
            raise Wrong(f"{error}, and the checker says nothing of it") from None
        _salvaged(image, devices)
        return "named"
    if errors:
        if report is None or not any(finding.fatal for finding in report.findings):
            raise Wrong(f"{errors[0]}, and the checker says nothing of it")
        _salvaged(image, devices)
        return "named"
    if found == image.state:
        # A heartbeat: opening does not need it.
        return "not needed"
    if not one.last:
        raise Wrong("an older state, and nobody says so")
    return "a torn tail"


def _salvaged(image: Image, devices: list[MemoryDevice]) -> None:
    """What it hands out is right; raises only errors of headrace."""
    try:
        found = look(devices)
    except HeadraceError:
        return
    for entry in found.objects:
        for piece in found.pieces(entry.name):
            right = [state[entry.name] for state in image.states if entry.name in state]
            if piece.data is not None and piece.data not in [
                data[piece.offset : piece.offset + piece.length] for data in right
            ]:
                raise Wrong(f"salvaged wrong bytes of {entry.name!r} at {piece.offset}")


# ---- running ---------------------------------------------------------------------------------------------------------


def native_sums() -> None:
    """The native CRC in the reference engine, and no time that passes over heartbeats."""

    def rows(data: reference.U8, seeds: reference.U32) -> reference.U32:
        return np.array([crc32c(row, int(seed)) for row, seed in zip(data, seeds, strict=True)], np.uint32)

    reference.crc32c_rows = rows
    heartbeat.SETTLE_S = 0.0
    # Nobody writes beside the checker: one look is enough.
    scrub_module._LOOKS = 1
    heartbeat.wait_for_silence = lambda block, seen, missed: True


def run(
    image: Image, chosen: Sequence[Case], chance: random.Random, verbose: bool = False
) -> tuple[Counter[str], list[str]]:
    """How the cases went, and what should not be."""
    counts: Counter[str] = Counter()
    wrong = []
    for number, case in enumerate(chosen):
        bit = chance.randrange(8)
        try:
            how = check(image, case, bit, session=number % SESSION_STRIDE == 0)
        except Exception as error:
            how = "WRONG"
            wrong.append(f"{case.said(image)}, bit {bit}: {type(error).__name__}: {error}")
            print(wrong[-1], file=sys.stderr, flush=True)
        if verbose:
            print(f"{how:12} {case.said(image)}")
        counts[f"{image.structures[case.structure].what}, {len(case.copies)}: {how}"] += 1
    return counts, wrong


def sample(image: Image, count: int, chance: random.Random) -> list[Case]:
    """Some cases, of each structure as many."""
    by_structure: dict[int, list[Case]] = {}
    for case in cases(image):
        by_structure.setdefault(case.structure, []).append(case)
    order = [*by_structure]
    chance.shuffle(order)
    return [chance.choice(by_structure[order[number % len(order)]]) for number in range(count)]


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.volume.bytes", description=__doc__)
    parser.add_argument("--sample", type=int, help="so many cases of each kind, instead of all")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--stride", type=int, default=1, help="of what is behind the heads, a byte of so many")
    parser.add_argument("--only", default="", help="kinds and structures whose name has this")
    parser.add_argument("-v", "--verbose", action="store_true")
    options = parser.parse_args()
    native_sums()
    bad = 0
    for kind in KINDS:
        chance = random.Random(options.seed)
        started = time.monotonic()
        image = make(kind)
        if options.sample is None:
            chosen = [
                case
                for case in cases(image, options.stride)
                if options.only in f"{kind}: {image.structures[case.structure].what}"
            ]
        else:
            chosen = sample(image, options.sample, chance)
        counts, wrong = run(image, chosen, chance, options.verbose)
        bad += len(wrong)
        print(f"{kind}: {len(chosen)} cases in {time.monotonic() - started:.0f} s, {len(wrong)} wrong", flush=True)
        for what, count in sorted(counts.items()):
            print(f"  {what}: {count}", flush=True)
    return bad != 0


if __name__ == "__main__":
    sys.exit(main())
