"""Tables of the catalogue: what is built is found, node by node and whole; damage of one copy is read around."""

from __future__ import annotations

import random
from collections.abc import Sequence
from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.device.protocol import Buffer
from headrace.errors import CommandFailed, DeviceError, VolumeDamaged, VolumeFull
from headrace.testing import MemoryDevice
from headrace.units import KIB, MIB
from headrace.volume.catalog.bulk import Bulk, Keys
from headrace.volume.catalog.tables import Builder, Merge, NodeStore, Table, TableDamaged, merged
from headrace.volume.catalog.tables.build import Range
from headrace.volume.catalog.tables.merge import batches
from headrace.volume.layout import ALIGN
from headrace.volume.layout.table import (
    MAX_NODE_BYTES,
    Child,
    Node,
    Root,
    Tables,
    TablesChanged,
    encode_child,
    encode_node,
)

ID = bytes(range(16))
Content = dict[bytes, bytes | None]


class TwoMembers:
    """Space of two members, handed out upwards; what was given back or quarantined is remembered."""

    def __init__(self, largest: int = 64 * MIB) -> None:
        self.at = [0, 0]
        self.largest = largest
        self.returned: list[Range] = []
        self.quarantined: list[Range] = []

    def take(self, size: int, least: int) -> tuple[Range, Range]:
        size = max(least, min(size, self.largest)) // ALIGN * ALIGN
        first, second = (0, self.at[0], size), (1, self.at[1], size)
        # A gap, so that extents do not become one.
        self.at = [self.at[0] + size + ALIGN, self.at[1] + size + 2 * ALIGN]
        return first, second

    def give_back(self, ranges: Sequence[Range]) -> None:
        self.returned.extend(ranges)

    def quarantine(self, ranges: Sequence[Range]) -> None:
        self.quarantined.extend(ranges)


class Counting(MemoryDevice):
    read_bytes = 0

    def read_into(self, offset: int, buffer: Buffer) -> None:
        self.read_bytes += memoryview(buffer).nbytes
        super().read_into(offset, buffer)


def build(devices: Sequence[MemoryDevice], content: Content, space: TwoMembers | None = None, birth: int = 7) -> Table:
    builder = Builder(devices, ID, birth, space or TwoMembers(), expected_bytes=len(content) * 200)
    for key in sorted(content):
        builder.add(key, content[key])
    root = builder.finish()
    assert root is not None
    decoded = Root.decode(root.encode(), "here")
    assert decoded[:6] == root[:6] and all(map(np.array_equal, decoded.copies, root.copies))
    return Table(decoded, NodeStore(devices, ID))


def content_of(count: int, seed: int = 1) -> Content:
    chance = random.Random(seed)
    return {
        b"n%07d" % (3 * i): None if chance.random() < 0.1 else chance.randbytes(chance.randrange(60))
        for i in range(count)
    }


def everything(table: Table) -> Content:
    return {key: value for keys, values in batches(table.leaves()) for key, value in zip(keys, values, strict=True)}


@pytest.mark.parametrize("count", [1, 2, 200, 5000, 40_000])
@pytest.mark.parametrize("largest", [MIB * 64, 40 << 10])
def test_what_is_built_is_found(count: int, largest: int) -> None:
    devices = [Counting(16 * MIB), Counting(16 * MIB)]
    content = content_of(count)
    space = TwoMembers(largest)
    table = build(devices, content, space)
    assert table.root.entry_count == count and table.root.deleted_count == list(content.values()).count(None)
    # Nothing was written outside of the table, and nothing of what was taken is neither its own nor given back.
    assert sorted(table.root.space() + space.returned)[0][0] == 0
    assert table.root.stored_bytes == sum(length for _, _, length in table.root.space())
    chance = random.Random(2)
    for key in chance.sample(sorted(content), min(count, 300)):
        assert table.get(key) == (True, content[key])
        assert table.get(key + b"x") == (False, None)
    # In order, and in several places at a time: those are asked of leaves at hand.
    rows = sorted(content)[:2000]
    for one, other in zip(rows, rows[len(rows) // 2 :] + rows, strict=False):
        for key in (one, other):
            assert table.get(key) == (True, content[key]) and table.get(key[:-1]) == (False, None)
            assert table.get(key + b"x") == (False, None)
    assert table.get(b"") == table.get(b"zzz") == (False, None)
    assert everything(table) == content
    table.image = table.load()
    read = devices[0].read_bytes
    assert everything(table) == content
    for key in chance.sample(sorted(content), min(count, 300)):
        assert table.get(key) == (True, content[key])
    assert devices[0].read_bytes == read and devices[1].read_bytes == 0


def test_a_key_costs_one_path_and_a_range_its_leaves() -> None:
    devices = [Counting(16 * MIB), Counting(16 * MIB)]
    table = build(devices, content_of(80_000))
    assert table.root.height == 3
    table.get(b"n0060000")
    assert devices[0].read_bytes <= 3 * 8192
    scan = batches(table.leaves(b"n0090000"), b"n0090000")
    keys, _ = next(scan)
    assert keys[0] == b"n0090000" and devices[0].read_bytes <= 5 * 8192


@settings(max_examples=60, deadline=None)
@given(st.lists(st.dictionaries(st.binary(max_size=3), st.none() | st.binary(max_size=5)), min_size=1, max_size=5))
def test_merging_is_the_newest_for_every_key(layers: list[Content]) -> None:
    """Newest first, as a catalogue has them."""
    expected: Content = {}
    for layer in reversed(layers):
        expected.update(layer)

    def cut(layer: Content) -> list[tuple[list[bytes], list[bytes | None]]]:
        keys = sorted(layer)
        return [(keys[i : i + 2], [layer[key] for key in keys[i : i + 2]]) for i in range(0, len(keys), 2)]

    found = [
        (key, value)
        for keys, values in merged([iter(cut(layer)) for layer in layers])
        for key, value in zip(keys, values, strict=True)
    ]
    assert found == sorted(expected.items())


@pytest.mark.parametrize("last", [False, True])
def test_a_merge_goes_step_by_step_and_drops_deletions_at_the_end(last: bool) -> None:
    devices = [MemoryDevice(16 * MIB), MemoryDevice(16 * MIB)]
    space = TwoMembers()
    contents = [content_of(900, 1), content_of(3000, 2), content_of(2000, 3)]
    tables = [build(devices, content, space, birth) for birth, content in enumerate(contents)]
    merge = Merge(tables, lambda size: Builder(devices, ID, 99, space, expected_bytes=size), last=last)
    steps = 0
    while not merge.step():
        steps += 1
    assert steps > 10
    root = merge.builder.finish()
    assert root is not None
    expected = {**contents[2], **contents[1], **contents[0]}
    if last:
        expected = {key: value for key, value in expected.items() if value is not None}
    assert everything(Table(root, NodeStore(devices, ID))) == expected


def test_a_table_that_has_nothing_is_none() -> None:
    devices = [MemoryDevice(MIB), MemoryDevice(MIB)]
    space = TwoMembers()
    table = build(devices, {b"a": None}, space)
    merge = Merge([table], lambda size: Builder(devices, ID, 9, space, expected_bytes=size), last=True)
    while not merge.step():
        pass
    assert merge.builder.finish() is None and merge.builder.space() == []


def test_a_large_value_makes_a_large_node_and_a_larger_one_is_refused() -> None:
    devices = [MemoryDevice(8 * MIB), MemoryDevice(8 * MIB)]
    content: Content = {b"a": b"1", b"b": bytes(MAX_NODE_BYTES - 100), b"c": b"3"}
    table = build(devices, content)
    assert everything(table) == content and table.get(b"b") == (True, content[b"b"])
    builder = Builder(devices, ID, 8, TwoMembers(), expected_bytes=1)
    builder.add(b"b", bytes(MAX_NODE_BYTES))
    with pytest.raises(VolumeFull, match="too large"):
        builder.finish()


@pytest.mark.parametrize("whole", [None, 0, 1])
@pytest.mark.parametrize("copy", [0, 1])
def test_one_bad_copy_is_read_around_and_reported_two_are_named(copy: int, whole: int | None) -> None:
    """`whole`: loaded as a session does, from this copy."""
    devices = [MemoryDevice(16 * MIB), MemoryDevice(16 * MIB)]
    content = content_of(3000)
    table = build(devices, content)

    def read() -> tuple[Content, list[str]]:
        fresh = Table(table.root, NodeStore(devices, ID))
        if whole is not None:
            fresh.image = fresh.load(whole)
        return everything(fresh), fresh.store.findings

    member, offset, length = table.root.space()[copy]
    other = table.root.space()[1 - copy][1]
    for block in range(length // ALIGN):
        at = offset + block * ALIGN + 40
        devices[member].data[at] ^= 1
        found, said = read()
        assert found == content
        if copy == (whole or 0):
            assert len(said) == 1
        else:
            # The other one was read first; a load goes down the tree by copy 0.
            assert len(said) <= (whole == 1)
        assert all(f"copy {copy} " in one and f"member {member} ({devices[member].uri}) offset" in one for one in said)
        devices[1 - member].data[other + block * ALIGN + 41] ^= 1
        with pytest.raises(
            TableDamaged, match=r"member \d \(.*offset \d+ and member \d .*expected crc32c 0x.* found 0x"
        ):
            read()
        devices[member].data[at] ^= 1
        devices[1 - member].data[other + block * ALIGN + 41] ^= 1
    assert read() == (content, [])


@pytest.mark.parametrize("copy", [0, 1])
def test_a_bad_copy_is_written_again(copy: int) -> None:
    devices = [MemoryDevice(16 * MIB), MemoryDevice(16 * MIB)]
    table = build(devices, content_of(3000))
    before = [bytes(device.data) for device in devices]
    member, offset, length = table.root.space()[copy]
    for block in (0, 3, length // ALIGN - 1):
        devices[member].data[offset + block * ALIGN : offset + (block + 1) * ALIGN] = bytes(ALIGN)
    fresh = Table(table.root, NodeStore(devices, ID))
    fresh.image = fresh.load(copy)
    assert len(fresh.store.findings) == 3
    written = sum(device.writes for device in devices)
    fresh.mend(devices)
    assert fresh.store.findings == []
    assert [bytes(device.data) for device in devices] == before
    assert sum(device.writes for device in devices) == written + 3, "nothing else was touched"

    class Stuck(MemoryDevice):
        def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
            raise DeviceError("this block cannot be written")

    devices[member].data[offset] ^= 1
    stuck = Stuck(devices[member].size_bytes)
    fresh.mend([stuck, stuck])
    assert any(f"copy {copy}" in one and "cannot be written" in one for one in fresh.store.findings)


def test_a_copy_that_cannot_be_read_is_read_around() -> None:
    class Deaf(MemoryDevice):
        def read_into(self, offset: int, buffer: Buffer) -> None:
            raise CommandFailed("unrecovered read error", where=self.uri)

    devices = [Deaf(16 * MIB), MemoryDevice(16 * MIB)]
    content = content_of(3000)
    table = build(devices, content)
    assert everything(table) == content
    table.image = table.load()
    assert everything(table) == content
    with pytest.raises(CommandFailed):
        Table(table.root, NodeStore([devices[0]] * 2, ID)).get(b"x")


def test_a_failed_write_leaves_space_in_quarantine() -> None:
    class Failing(MemoryDevice):
        def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
            raise CommandFailed("write fault", where=self.uri)

    space = TwoMembers()
    builder = Builder([Failing(MIB), Failing(MIB)], ID, 1, space, expected_bytes=1)
    builder.add(b"a", b"1")
    with pytest.raises(CommandFailed):
        builder.finish()
    taken = builder.space()
    builder.abandon(failed=True)
    assert space.quarantined == taken != [] and not space.returned


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_node_decodes_or_is_refused_and_never_reads_beyond(data: st.DataObject) -> None:
    node = bytearray(encode_node(0, [b"a", b"bb", b"c" * 200], [b"1", None, b"333"]))
    for _ in range(data.draw(st.integers(1, 3))):
        node[data.draw(st.integers(0, 300))] = data.draw(st.integers(0, 255))
    try:
        decoded = Node(bytes(node))
        decoded.check()
    except ValueError:
        return
    assert decoded.count == len(decoded.keys()) == len(decoded.values())
    assert [decoded.key(i) for i in range(decoded.count)] == decoded.keys() == sorted(decoded.keys())
    assert [decoded.value(i) for i in range(decoded.count)] == decoded.values()


def test_a_path_of_nodes_that_leaves_the_table_or_goes_round_is_damage() -> None:
    from headrace.volume.layout.table import node_crc

    devices = [MemoryDevice(MIB), MemoryDevice(MIB)]
    table = build(devices, {b"a": b"1"})
    for child in (Child(0, 1, 0), Child(1 << 40, 1, 0), Child(0, 1 << 31, 0)):
        node = encode_node(1, [b"a"], [encode_child(child)])
        for member, offset, _ in table.root.space():
            devices[member].data[offset : offset + len(node)] = node
        top = Child(0, 1, node_crc(node, ID, table.birth, 0))
        hostile = Table(table.root._replace(top=top, height=2), NodeStore(devices, ID))
        with pytest.raises(VolumeDamaged):
            hostile.get(b"a")
        with pytest.raises(VolumeDamaged):
            hostile.load()


def test_payloads_of_tables() -> None:
    devices = [MemoryDevice(16 * MIB), MemoryDevice(16 * MIB)]
    space = TwoMembers(40 << 10)
    roots = [build(devices, content_of(count), space, birth).root for birth, count in enumerate((10, 2000))]
    tables = Tables(5, 6, 7, roots)
    payload = tables.encode()
    decoded = Tables.decode(payload, "here")
    assert decoded[:3] == tables[:3] and [root.encode() for root in decoded.roots] == [root.encode() for root in roots]
    changed = TablesChanged([1, 2], roots[:1])
    again = TablesChanged.decode(changed.encode(), "here")
    assert again.removed == [1, 2] and again.added[0].encode() == roots[0].encode()
    for cut in range(len(payload)):
        with pytest.raises(VolumeDamaged):
            Tables.decode(payload[:cut], "here")
    for cut in range(len(changed.encode())):
        with pytest.raises(VolumeDamaged):
            TablesChanged.decode(changed.encode()[:cut], "here")


@settings(max_examples=300, deadline=None)
@given(st.data())
def test_a_changed_root_decodes_or_is_damage(data: st.DataObject) -> None:
    rows = np.array([(0, 0, 8192, 8192), (1, 0, 4096, 4096)], [("m", "<u4"), ("f", "<u4"), ("o", "<u8"), ("l", "<u8")])
    root = Root(1, 2, 1, Child(2, 1, 77), 1, 3, (rows.view("<u8").view(rows.dtype), rows))
    payload = bytearray(Tables(1, 2, 3, [root]).encode())
    for _ in range(data.draw(st.integers(1, 3))):
        payload[data.draw(st.integers(0, len(payload) - 1))] = data.draw(st.integers(0, 255))
    try:
        decoded = Tables.decode(bytes(payload), "here")
    except VolumeDamaged:
        return
    for one in decoded.roots:
        assert one.top.place + one.top.blocks <= one.blocks


@pytest.mark.parametrize("seed", range(4))
def test_a_bulk_becomes_the_same_table_as_its_entries(seed: int) -> None:
    chance = random.Random(seed)
    size = chance.choice([20, 300, 3000])
    content = {
        b"n" + chance.randbytes(chance.choice([3, 12, 900])).hex().encode(): chance.randbytes(
            chance.choice([0, 32, 56])
        )
        for _ in range(size)
    }
    content[b"nbig"] = bytes(20_000)
    keys = sorted(content)
    values = [content[key] for key in keys]
    bulk = Bulk(Keys.of(keys), b"".join(values), np.cumsum([len(value) for value in values]))
    assert [bulk.value(bulk.find(key) or 0) for key in keys] == values and bulk.find(b"none") is None
    cuts = [0, *sorted(chance.sample(range(1, len(keys)), 3)), len(keys)]
    made = []
    for packed in (False, True):
        devices = [MemoryDevice(32 * MIB) for _ in range(2)]
        builder = Builder(devices, ID, 7, TwoMembers(), expected_bytes=64 * KIB)
        # Entries before and between, as loose changes are.
        for number, (start, end) in enumerate(pairwise(cuts)):
            builder.add(keys[start - 1] + b"\0" if number else b"b", None if number % 2 else b"x")
            if packed:
                builder.extend_bulk(bulk, start, end)
            else:
                builder.extend(keys[start:end], values[start:end])
        made.append((builder.finish(), [bytes(device.data) for device in devices]))
    assert made[0][1] == made[1][1]
    assert made[0][0] is not None and made[1][0] is not None and made[0][0].top == made[1][0].top
