"""Tables that somebody made by hand, all their checksums right: one error, soon, and no more memory than they take."""

from __future__ import annotations

import numpy as np
import pytest

from headrace.errors import VolumeDamaged
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume.catalog.columns import live
from headrace.volume.catalog.tables import NodeStore, Table, merged
from headrace.volume.catalog.tables.merge import batches
from headrace.volume.layout import ALIGN, EXTENT
from headrace.volume.layout.table import Child, Root, encode_child, encode_node, node_crc

ID = b"0123456789abcdef"


class Maker:
    """Nodes wherever one wants them, on both copies."""

    def __init__(self, birth: int = 7) -> None:
        self.birth = birth
        self.devices = [MemoryDevice(MIB), MemoryDevice(MIB)]

    def node(self, place: int, data: bytes, blocks: int | None = None) -> Child:
        for device in self.devices:
            device.write(place * ALIGN, data)
        return Child(place, len(data) // ALIGN if blocks is None else blocks, node_crc(data, ID, self.birth, place))

    def table(self, top: Child, height: int, blocks: int = 64) -> Table:
        copies = [np.array([(member, 0, 0, blocks * ALIGN)], EXTENT) for member in range(2)]
        root = Root(self.birth, 1, 0, top, height, blocks, (copies[0], copies[1]))
        root, _ = Root.decode_from(root.encode(), 0)
        return Table(root, NodeStore(self.devices, ID))


def parents(maker: Maker, leaf: Child, height: int) -> Table:
    """Each node has 100 children, all of them the same: 100^height leaves of one block."""
    child = leaf
    keys = [b"%03d" % i for i in range(100)]
    for level in range(1, height + 1):
        child = maker.node(level, encode_node(level, keys, [encode_child(child)] * len(keys)))
    return maker.table(child, height + 1)


def test_a_node_with_many_parents_is_not_read_for_each() -> None:
    maker = Maker()
    table = parents(maker, maker.node(0, encode_node(0, [b"000"], [b"v"])), 8)
    with pytest.raises(VolumeDamaged, match="table"):
        table.load()
    with pytest.raises(VolumeDamaged, match="table"):
        for _ in table.leaves():
            pass
    assert table.get(b"000") == (True, b"v")


@pytest.mark.parametrize("blocks", [0, 257, (1 << 32) - 1])
def test_a_node_of_any_size_is_not_allocated(blocks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    maker = Maker()
    leaf = maker.node(0, encode_node(0, [b"k"], [b"v"]), blocks)
    top = maker.node(1, encode_node(1, [b"k"], [encode_child(leaf)]))
    table = maker.table(top, 2, 1 << 33)
    sizes: list[int] = []
    read = Table._read

    def noted(self: Table, copy: int, place: int, blocks: int) -> bytes:
        sizes.append(blocks)
        assert blocks <= 256
        return read(self, copy, place, blocks)

    monkeypatch.setattr(Table, "_read", noted)
    for look in (lambda: table.get(b"k"), lambda: list(table.leaves()), table.load):
        with pytest.raises(VolumeDamaged):
            look()
    assert sizes


def test_keys_that_do_not_ascend_end_a_merge() -> None:
    one, other = Maker(7), Maker(8)
    first = one.table(one.node(0, encode_node(0, [b"z", b"a"], [b"1", b"2"])), 1)
    second = other.table(other.node(0, encode_node(0, [b"m", b"n"], [b"3", b"4"])), 1)
    with pytest.raises(VolumeDamaged, match="table"):
        for _ in merged([batches(first.leaves()), batches(second.leaves())]):
            pass


@pytest.mark.parametrize(
    "at, value", [(32, 5000), (36, 1), (36, 1 << 31), (40, 0xFFFF), (44, 1), (44, 0x7FFFFFFF), (40, 0x7FFFFFFF)]
)
def test_entries_that_leave_their_node_are_not_counted(at: int, value: int) -> None:
    maker = Maker()
    data = bytearray(encode_node(0, [b"nkey", b"nnext"], [b"value", b"longer value"]))
    data[at : at + 4] = value.to_bytes(4, "little")
    table = maker.table(maker.node(0, bytes(data)), 1)
    with pytest.raises(VolumeDamaged, match="node"):
        list(live([table], {}))
