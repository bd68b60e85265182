"""Salvage of images that somebody made by hand, all their checksums right: it ends soon, names what it left out, and
has the rest; and whatever an object is called, its bytes come out, and no file lands elsewhere.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import pytest

from headrace.cli import main
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume, layout
from headrace.volume.data.objects import Range
from headrace.volume.layout import ALIGN, EXTENT, ObjectValue, Operation, Record, Totals
from headrace.volume.layout.table import Child, Root, Tables, TablesChanged, encode_child, encode_node, node_crc
from headrace.volume.repair.salvage import look
from tests.volume.support import STRIPE, content, writing

STATE = {"a": content(1, 9000), "b": content(2, 200_000)}
BIRTH = 0xBAD << 32


class Image:
    """A volume with two objects, whose log and data somebody goes on with."""

    def __init__(self, size_bytes: int = 4 * MIB, log_bytes: int = MIB // 4) -> None:
        self.devices = [MemoryDevice(size_bytes) for _ in range(2)]
        volume = Volume.create(devices=self.devices, stripe_bytes=STRIPE, log_bytes=log_bytes)
        with writing(volume) as session, session.transaction() as tx:
            for name, data in STATE.items():
                tx.put(name, data)
        volume = Volume.open(self.devices)
        self.block, self.cursor = volume.superblock, volume._cursor
        self.value = volume._catalog.get(layout.object_key("a"))
        assert self.value is not None
        #: Where nobody's bytes are, on both members.
        self.free = self.block.members[0].data_end - MIB

    def log(self, kind: int, payload: bytes) -> None:
        """One more record."""
        cursor = self.cursor
        record = Record(
            kind, cursor.sequence + 1, cursor.sequence, cursor.header.generation, 1, cursor.previous, payload
        )
        data, cursor.previous = record.encode(self.block.volume_id, cursor.block)
        self.raw(cursor.block, data)
        cursor.sequence += 1
        cursor.block += record.blocks
        assert cursor.block < self.block.area_blocks

    def raw(self, block: int, data: bytes, area: int | None = None) -> None:
        for copy in range(layout.LOG_COPIES):
            at = self.block.area_offset(copy, self.cursor.area if area is None else area) + block * ALIGN
            self.devices[self.block.log_member[copy]].data[at : at + len(data)] = data

    def commit(self, *operations: Operation) -> None:
        payload = layout.encode_operations(operations, self.cursor.sequence + 1, Totals(0, 0))
        self.log(layout.COMMIT, payload)

    def node(self, place: int, data: bytes) -> Child:
        for device in self.devices:
            at = self.free + place * ALIGN
            device.data[at : at + len(data)] = data
        return Child(place, len(data) // ALIGN, node_crc(data, self.block.volume_id, BIRTH, place))

    def root(self, top: Child, height: int, blocks: int, birth: int = BIRTH) -> Root:
        copies = [np.array([(member, 0, self.free, blocks * ALIGN)], EXTENT) for member in range(2)]
        return Root(birth, 1, 0, top, height, blocks, (copies[0], copies[1]))

    def reads(self) -> int:
        return sum(device.reads for device in self.devices)

    def salvaged(self) -> tuple[list[str], dict[str, bytes], int]:
        """What is said to be lost, what is whole, and how many reads that took."""
        before = self.reads()
        found = look(self.devices)
        parts = {one.name: [piece.data for piece in found.pieces(one.name)] for one in found.objects}
        whole = {name: b"".join(part for part in data if part) for name, data in parts.items() if None not in data}
        return found.lost, whole, self.reads() - before


def adopt(root: Root) -> Operation:
    return Operation(layout.ADOPT, b"", root.encode())


def test_a_node_with_many_parents_is_read_once() -> None:
    """Each node has 100 children, all of them the same: 100^8 leaves."""
    image = Image()
    child = image.node(0, encode_node(0, [b"ndeep"], [image.value]))
    keys = [b"n%03d" % i for i in range(100)]
    for level in range(1, 9):
        child = image.node(level, encode_node(level, keys, [encode_child(child)] * len(keys)))
    image.commit(adopt(image.root(child, 9, 64)))
    lost, whole, reads = image.salvaged()
    assert whole == {**STATE, "deep": STATE["a"]} and reads < 200
    assert any("several parents" in line for line in lost) and len(lost) < 20


def test_tables_that_all_are_the_same_space_are_not_read_for_each() -> None:
    image = Image()
    leaves = [image.node(i, encode_node(0, [b"n%02d" % i], [image.value])) for i in range(60)]
    keys = [b"n%02d" % i for i in range(60)]
    top = image.node(60, encode_node(1, keys, [encode_child(leaf) for leaf in leaves]))
    image.log(layout.TABLES, Tables(1, 1, 1, [image.root(top, 2, 64)] * 1000).encode())
    lost, whole, reads = image.salvaged()
    assert STATE.items() <= whole.items() and len(whole) == 62
    assert reads < 12_000, "1,000 tables of 61 nodes"
    assert any("more than the members hold" in line for line in lost)


@pytest.mark.parametrize("blocks", [0, 257, (1 << 32) - 1])
def test_a_node_of_any_size_is_not_allocated(blocks: int) -> None:
    image = Image()
    leaf = image.node(0, encode_node(0, [b"nleaf"], [image.value]))._replace(blocks=blocks)
    good = image.node(1, encode_node(0, [b"nmore"], [image.value]))
    top = image.node(2, encode_node(1, [b"nleaf", b"nmore"], [encode_child(leaf), encode_child(good)]))
    image.commit(adopt(image.root(top, 2, 1 << 20)))
    lost, whole, _ = image.salvaged()
    assert whole == {**STATE, "more": STATE["a"]} and any("outside of it" in line for line in lost)


def test_keys_that_lie_on_top_of_each_other_are_no_node() -> None:
    """Every other key would be nearly all of the node: 100 KiB that become gigabytes."""
    image = Image()
    names = [b"n%05d" % i for i in range(4000)]
    data = bytearray(encode_node(0, names, [b"v" * 10] * len(names)))
    ends = np.frombuffer(data, "<u4", len(names), 32)
    ends[::2] = ends[-1]
    image.commit(adopt(image.root(image.node(0, bytes(data)), 1, 64)))
    lost, whole, _ = image.salvaged()
    assert whole == STATE and any("a node at block 0" in line for line in lost)


def test_tables_made_of_tables_made_of_tables() -> None:
    """None of them is there, so what each was made of is asked for."""
    image = Image(24 * MIB, 3 * MIB)
    nowhere = Child(0, 1, 1)
    image.commit(adopt(image.root(nowhere, 1, 64, 1)))
    for birth in range(2, 700):
        # More than one is no merge: else the parts of both would be read twice, and theirs four times.
        more = [image.root(nowhere, 1, 64, other) for other in (birth, birth + 10_000)]
        image.log(layout.TABLES_CHANGED, TablesChanged([birth - 1, birth + 9_999], more).encode())
    lost, whole, reads = image.salvaged()
    assert whole == STATE and reads < 3000
    assert any("table 0x2bb of the catalogue" in line for line in lost)


def test_records_that_lie_on_top_of_each_other() -> None:
    """Each says that it goes to the end of the area."""
    image = Image()
    blocks = image.block.area_blocks
    for at in range(1, blocks):
        payload = bytes((blocks - at) * ALIGN - layout.RECORD_BYTES)
        data, _ = Record(layout.COMMIT, 1, 0, 1 << 40, 1, 0, payload).encode(image.block.volume_id, at)
        head = bytearray(data[:ALIGN])
        head[layout.RECORD_BYTES + 1] = 1
        image.raw(at, bytes(head), area=2)
    lost, whole, _ = image.salvaged()
    assert whole == STATE and any("on top of each other" in line for line in lost)


def test_a_payload_that_looks_like_records_is_none() -> None:
    image = Image()
    inner, _ = Record(layout.COMMIT, 9, 0, 1 << 40, 1, 0, b"").encode(image.block.volume_id, image.cursor.block + 1)
    image.log(layout.WINDOW, bytes(ALIGN - layout.RECORD_BYTES) + inner)
    assert image.salvaged()[:2] == ([], STATE)


def test_checksums_of_a_pack_are_read_once() -> None:
    devices = [MemoryDevice(4 * MIB) for _ in range(2)]
    volume = Volume.create(devices=devices, stripe_bytes=STRIPE)
    names = [f"{i:03}" for i in range(200)]
    with writing(volume) as session, session.transaction() as tx:
        tx.put_many(names, content(3, 200 * ALIGN), ALIGN)
    found = look(devices)
    before = sum(device.reads for device in devices)
    assert b"".join(piece.data or b"" for name in names for piece in found.pieces(name)) == content(3, 200 * ALIGN)
    assert sum(device.reads for device in devices) - before <= 200 + 2


@pytest.mark.parametrize(
    "row", [(7 << 32, 0, 1 << 62), (7 << 32, 0, (1 << 64) - 1), (7 << 32, (1 << 64) - 1, 10)], ids=str
)
def test_an_object_of_any_length_is_no_endless_work(row: Range, tmp_path: Path) -> None:
    image = Image()
    length = row[2]
    slices = np.array([row], layout.SLICE)
    image.commit(
        Operation(
            layout.PUT, b"nendless", ObjectValue(sequence=1, created_ns=1, length_bytes=length, slices=slices).encode()
        ),
        Operation(layout.PUT, b"nhuge", huge_blob().encode()),
    )
    status, found = salvage(image.devices, tmp_path)
    assert status == 1
    rows = {one["name"]: one for one in found["objects"]}
    assert (rows["endless"]["lost_bytes"], rows["huge"]["lost_bytes"]) == (length, 1 << 60)
    assert {name: rows[name]["why"] for name in STATE} == dict.fromkeys(STATE, "")


def huge_blob() -> ObjectValue:
    """An exbibyte, says its entry, in a volume of a few MiB."""
    runs = np.array([(1 << 60, 1, 0)], layout.RUN)
    columns = np.array([(0, 0, 0)], layout.COLUMN)
    none = runs[:0], columns[:0]
    blob = layout.Blob(
        birth=9 << 32, length_bytes=1 << 60, checksum_block_bytes=4096, table_page_bytes=0, runs=runs, columns=columns,
        table_runs=none[0], table_columns=none[1], roots=np.zeros(1, np.uint32),
    )  # fmt: skip
    return ObjectValue(sequence=1, created_ns=1, length_bytes=1 << 60, blob=blob)


def salvage(devices: Sequence[MemoryDevice], folder: Path) -> tuple[int, dict]:  # type: ignore[type-arg]
    """By the command, into `folder`/out."""
    paths = [folder / f"{index}.img" for index in range(len(devices))]
    for path, device in zip(paths, devices, strict=True):
        path.write_bytes(bytes(device.data))
    said = folder / "said"
    with pytest.MonkeyPatch.context() as patch, said.open("w") as out:
        patch.setattr("sys.stdout", out)
        status = main(["volume", "salvage", *(f"file:{path}" for path in paths), "--to", f"{folder}/out", "--json"])
    return status, json.loads(said.read_text())


NAMES = [
    "plain", "plain/below", "other/below", "other", ".partial", "other-names", "a.damaged", "ü/…",
    "../escaped", "/absolute/path", "..", ".", "", "a//b", "x/", "nul\0nul", "x" * 300, "y" * 250, "long/" * 800,
    "/".join("d" * 1500), "%s",
]  # fmt: skip


def test_whatever_an_object_is_called_its_bytes_come_out(tmp_path: Path) -> None:
    image = Image()
    image.commit(*(Operation(layout.PUT, layout.object_key(name), image.value) for name in NAMES))
    status, found = salvage(image.devices, tmp_path)
    rows = {row["name"]: row for row in found["objects"]}
    assert (status, found["lost"], set(rows)) == (0, [], {*NAMES, *STATE})
    out = (tmp_path / "out").resolve()
    files = [Path(row["file"]).resolve() for row in rows.values()]
    assert len(set(files)) == len(rows)
    for row, file in zip(rows.values(), files, strict=True):
        assert out in file.parents and file.read_bytes() == STATE.get(row["name"], STATE["a"]), row["name"]
    ordinary = {name for name, row in rows.items() if row["file"] == f"{tmp_path}/out/{name}"}
    assert {"plain", "a.damaged", "ü/…", "y" * 250, "a", "b", "%s"} <= ordinary
    assert not {"../escaped", "/absolute/path", "nul\0nul", "x" * 300, ""} & ordinary
    left = {path for path in out.rglob("*") if path.is_file()}
    assert left == set(files) and {path.name for path in tmp_path.iterdir()} == {"0.img", "1.img", "out", "said"}
