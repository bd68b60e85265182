"""Structures that somebody made by hand, all their checksums right: whoever meets them has one error of ours, soon.

    python -m tests.volume.forged --cases 2000 --seed 1

A case takes a small volume, changes fields of one structure on every copy, and makes its checksums right again: of the
superblock, the heartbeat block, an area header, a record of the log, its payload. Then it is opened, read, checked,
salvaged and written to. `bytes` damages what checksums catch; here they catch nothing.
"""

from __future__ import annotations

import argparse
import random
import struct
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import SimpleNamespace
from unittest.mock import patch

from headrace.device import crc32c
from headrace.errors import HeadraceError
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume
from headrace.volume.layout import ALIGN, RECORD_BYTES, AreaHeader, Record, RecordHead, Superblock, place_seed
from headrace.volume.repair.salvage import look, summary
from headrace.volume.repair.scrub import scrub
from headrace.volume.writing import heartbeat, past
from tests.volume.support import KIB, STRIPE, content, writing

#: A deed that takes longer is told.
SLOW_S = 10.0
SPECIAL = (0, 1, 2, 3, 63, 64, 255, 4096, 1 << 20, (1 << 31) - 1, 1 << 31, (1 << 32) - 1, 1 << 40, 1 << 62, 1 << 63)
KINDS = ("superblock", "heartbeat", "header", "record", "payload")

Image = list[bytes]
#: Places, widths and values.
Wish = list[tuple[int, int, int]]


def made(members: int) -> Image:
    """A volume with objects of each kind, tables, a job that ended and one that did not."""
    devices = [MemoryDevice((4 - members) * MIB) for _ in range(members)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)
    with writing(volume, "run") as session:
        with session.transaction() as tx:
            tx.put_many([f"many/{i:03}" + "x" * 100 for i in range(200)], bytes(200), 1)
        with session.transaction() as tx:
            tx.put("big", content(1, 300 * KIB), checksum_block_bytes=4096)
            tx.put("small", content(2, 5000))
            tx.put("packed/a", b"a" * 100)
        with session.transaction() as tx:
            tx.compose("composed", [("small", 100, 3000), b"between", ("small", 0, 70)])
            tx.delete("many/000" + "x" * 100)
    session = volume.session("other", takeover="if-dead", heartbeat_s=60.0)
    with session.transaction() as tx:
        tx.put("last", content(3, 9000))
    session.transaction().allocate("never", 100 * KIB)
    return [bytes(device.data) for device in devices]


def forge(image: Image, kind: str, wish: Wish) -> Image:
    """The same change on every copy of a structure."""
    media = [bytearray(one) for one in image]
    superblock = Superblock.decode(image[0][:ALIGN], "")
    if kind == "superblock":
        for medium in media:
            for offset in (0, len(medium) // ALIGN * ALIGN - ALIGN):
                block = _changed(medium[offset : offset + ALIGN], wish)
                medium[offset : offset + ALIGN] = block[:-4] + struct.pack("<I", crc32c(bytes(block[:-4])))
        return list(map(bytes, media))
    for copy in range(2):
        medium = media[superblock.log_member[copy]]
        if kind == "heartbeat":
            at = superblock.log_offset[copy]
            block = _changed(medium[at : at + ALIGN], wish)
            crc = crc32c(bytes(block[:508]), place_seed(superblock.volume_id, 0, 1 << 32))
            medium[at : at + ALIGN] = block[:508] + struct.pack("<I", crc) + block[512:]
            continue
        area, header = _in_force(medium, superblock, copy)
        start = superblock.area_offset(copy, area)
        if kind == "header":
            wish = [(8 + at % 56, *rest) for at, *rest in wish]
            block = _changed(medium[start : start + ALIGN], wish)
            crc = crc32c(bytes(block[:-4]), place_seed(superblock.volume_id, 0, area))
            medium[start : start + ALIGN] = block[:-4] + struct.pack("<I", crc)
            continue
        records = list(_records(medium, superblock, start, header))
        number = random.Random(wish[0][0] * 7 + wish[0][2]).randrange(len(records))
        previous = 0
        for index, (block_index, record) in enumerate(records):
            if index == number and kind == "payload" and record.payload:
                record = record._replace(payload=bytes(_changed(bytearray(record.payload), wish)))
            fields: dict[str, int] = {"previous": previous}
            if index == number and kind == "record":
                field = ("kind", "sequence", "durable", "session", "previous")[wish[0][0] % 5]
                fields[field] = wish[0][2] % {"kind": 1 << 16, "previous": 1 << 32}.get(field, 1 << 64)
            record = record._replace(**fields)
            data, previous = record.encode(superblock.volume_id, block_index)
            medium[start + block_index * ALIGN : start + block_index * ALIGN + len(data)] = data
    return list(map(bytes, media))


def wished(chance: random.Random) -> Wish:
    return [
        (
            chance.randrange(700),
            chance.choice((1, 2, 4, 8)),
            chance.choice((chance.choice(SPECIAL), chance.getrandbits(64), chance.getrandbits(16))),
        )
        for _ in range(chance.choice((1, 1, 1, 2, 3)))
    ]


def _changed(block: bytearray, wish: Wish) -> bytearray:
    block = bytearray(block)
    for at, width, value in wish:
        # Fields are aligned; where a structure is shorter it is hit somewhere all the same.
        at = (at % max(len(block) - width + 1, 1)) // width * width
        block[at : at + width] = (value & ((1 << 8 * width) - 1)).to_bytes(width, "little")[: len(block) - at]
    return block


def _in_force(medium: bytearray, superblock: Superblock, copy: int) -> tuple[int, AreaHeader]:
    found = []
    for area in range(superblock.area_count):
        at = superblock.area_offset(copy, area)
        header = AreaHeader.decode(bytes(medium[at : at + ALIGN]), superblock.volume_id, area)
        if header is not None:
            found.append((header.epoch, header.generation, area, header))
    *_, area, header = max(found, key=lambda one: one[:2])
    return area, header


def _records(medium: bytearray, superblock: Superblock, start: int, header: AreaHeader) -> Iterator[tuple[int, Record]]:
    block, previous = 1, 0
    while block < superblock.area_blocks:
        at = start + block * ALIGN
        head = RecordHead.decode(bytes(medium[at : at + RECORD_BYTES]), superblock.volume_id, block)
        if head is None or (head.generation, head.previous) != (header.generation, previous):
            return
        record = head.with_payload(bytes(medium[at + RECORD_BYTES : at + RECORD_BYTES + head.payload_bytes]))
        assert record is not None
        yield block, record
        block, previous = block + record.blocks, record.crc


# ---- what is done with it --------------------------------------------------------------------------------------------


def _read(image: Image) -> None:
    with Volume.open([*map(_device, image)]) as volume:
        volume.info()
        for info in volume.list():
            with suppress(HeadraceError):
                if info.length_bytes < 4 * MIB:
                    volume.read(info.name)


def _poll(image: Image) -> None:
    with Volume.open([*map(_device, image)], degraded=True) as volume:
        volume.poll()
        volume.refresh()


def _scrub(image: Image) -> None:
    for finding in scrub([*map(_device, image)]).findings:
        str(finding)


def _salvage(image: Image) -> None:
    found = look([*map(_device, image)])
    for one in found.objects[:20]:
        if one.length_bytes < 4 * MIB:
            summary(found.pieces(one.name))


def _write(image: Image) -> None:
    devices = [*map(_device, image)]
    with Volume.open(devices, write=True) as volume:
        session = volume.session("mine", takeover="now", heartbeat_s=60.0)
        try:
            with session.transaction() as tx:
                tx.put("mine", content(9, 20_000))
            with session.transaction() as tx:
                for info in volume.list()[:3]:
                    tx.delete(info.name)
        finally:
            session.close()
    with Volume.open(devices) as volume:
        assert volume.read("mine") == content(9, 20_000)


DEEDS: tuple[Callable[[Image], None], ...] = (_read, _poll, _scrub, _salvage, _write)


def _device(data: bytes) -> MemoryDevice:
    device = MemoryDevice(len(data))
    device.data[:] = data
    return device


@contextmanager
def hurried() -> Iterator[None]:
    """Nobody waits for anybody, by the clock."""
    slept: list[float] = []
    with (
        patch.object(heartbeat, "SETTLE_S", 0.0),
        patch.object(heartbeat, "wait_for_silence", lambda block, seen, missed: True),
        patch.object(past, "time", SimpleNamespace(sleep=slept.append, monotonic=lambda: sum(slept))),
    ):
        yield


def run(cases: int, seed: int, counts: Counter[str]) -> list[str]:
    """What went wrong, a line each."""
    wrong = []
    images = [made(1), made(2)]
    for case in range(cases):
        chance = random.Random(f"{seed} {case}")
        image, kind, wish = chance.choice(images), chance.choice(KINDS), wished(chance)
        wrong += tried(forge(image, kind, wish), f"case {case}: {kind} {wish}", counts)
    return wrong


def tried(image: Image, said: str, counts: Counter[str]) -> list[str]:
    """All that can be done with it; what went wrong."""
    wrong = []
    for deed in DEEDS:
        began = time.monotonic()
        try:
            deed(image)
            counts[f"{deed.__name__} well"] += 1
        except HeadraceError as error:
            str(error)
            counts[f"{deed.__name__} {type(error).__name__}"] += 1
        except Exception as error:
            place = traceback.extract_tb(error.__traceback__)[-1]
            wrong.append(f"{said}: {deed.__name__}: {type(error).__name__}: {error} ({place.filename}:{place.lineno})")
            print(wrong[-1], flush=True)
            if sys.flags.dev_mode:
                traceback.print_exc()
        if (took := time.monotonic() - began) > SLOW_S:
            print(f"{said}: {deed.__name__}: {took:.1f} s")
    return wrong


def main() -> int:
    parser = argparse.ArgumentParser(prog="python -m tests.volume.forged")
    parser.add_argument("--cases", type=int, default=500)
    parser.add_argument("--seed", type=int, default=random.SystemRandom().randrange(1 << 31))
    given = parser.parse_args()
    print(f"seed {given.seed}")
    counts: Counter[str] = Counter()
    with hurried():
        wrong = run(given.cases, given.seed, counts)
    print("\n".join(f"{count:6} {what}" for what, count in sorted(counts.items())))
    print(f"{len(wrong)} of {given.cases} cases went wrong")
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
