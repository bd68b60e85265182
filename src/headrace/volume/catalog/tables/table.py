"""Reading one table: a path of nodes for a key, leaves in order for a range, all of it for whoever writes.

Every node is verified by the checksum that its parent has of it. A copy that is damaged is read around and reported;
a session, which has all tables in memory, writes the same bytes there again.
"""

from __future__ import annotations

import threading
from bisect import bisect_left, bisect_right
from collections import OrderedDict
from collections.abc import Iterator, Sequence

import numpy as np

from headrace.device import BlockDevice
from headrace.errors import DeviceError, ReservationConflict, VolumeDamaged
from headrace.volume.data.durable import write_through
from headrace.volume.data.patience import read_into
from headrace.volume.layout import ALIGN
from headrace.volume.layout.table import MAX_NODE_BYTES, TABLE_COPIES, Child, Node, Root, node_crc

#: Nodes that are kept, of all tables together, in bytes as they stand on the members.
CACHE_BYTES = 8 << 20
#: Bytes read at once where a table is loaded whole; a little more where a node would be cut.
LOAD_BYTES = 1 << 20
#: Leaves of a table that are kept at hand: for some runs of keys at a time. Looks at one until its keys are, too.
_LAST_LEAVES = 4
_FEW_LOOKS = 2
#: What is said about single copies, at most: the first ones say it.
_MAX_FINDINGS = 100


class TableDamaged(VolumeDamaged):
    """No copy of a node can be read: damaged, or the table was replaced and its space used again."""


class NodeStore:
    """Nodes of all tables of a volume: the devices they are read from, and those that were read last. Thread-safe."""

    def __init__(self, devices: Sequence[BlockDevice], volume_id: bytes, cache_bytes: int = CACHE_BYTES) -> None:
        self.devices = devices
        self.volume_id = volume_id
        #: What one copy lacked and the other had: by table, copy and place of the node.
        self._findings: dict[tuple[int, int, int], str] = {}
        self._cache_bytes = cache_bytes
        self._held_bytes = 0
        self._nodes: OrderedDict[tuple[int, int], tuple[Node, int]] = OrderedDict()
        self._lock = threading.Lock()

    def get(self, birth: int, place: int) -> Node | None:
        with self._lock:
            held = self._nodes.get((birth, place))
            if held is None:
                return None
            self._nodes.move_to_end((birth, place))
            return held[0]

    def keep(self, birth: int, place: int, node: Node, size: int) -> None:
        with self._lock:
            if (birth, place) not in self._nodes:
                self._held_bytes += size
            self._nodes[birth, place] = node, size
            while self._held_bytes > self._cache_bytes and len(self._nodes) > 1:
                _, (_, gone) = self._nodes.popitem(last=False)
                self._held_bytes -= gone

    @property
    def findings(self) -> list[str]:
        """What one copy lacked and the other had."""
        return [*self._findings.values()]

    def report(self, birth: int, copy: int, place: int, finding: str) -> None:
        if len(self._findings) < _MAX_FINDINGS:
            self._findings[birth, copy, place] = finding

    def mended(self, birth: int, copy: int) -> None:
        """This copy is good again."""
        for key in [key for key in self._findings if key[:2] == (birth, copy)]:
            del self._findings[key]

    def suspect(self, birth: int) -> bool:
        """Is anything known to be wrong with a copy of this table?"""
        return any(key[0] == birth for key in self._findings)

    def clear(self) -> None:
        """Forget all nodes."""
        with self._lock:
            self._nodes.clear()
            self._held_bytes = 0

    def after_fork(self) -> None:
        """In the child: the lock may have been held by a thread that it does not have."""
        self._lock = threading.Lock()


class Image:
    """A table in memory: verified pieces of it, each of whole nodes."""

    def __init__(self) -> None:
        self._starts: list[int] = []
        self._pieces: list[bytes] = []

    def add(self, place: int, data: bytes) -> None:
        """Pieces come in the order of their places."""
        self._starts.append(place)
        self._pieces.append(data)

    def node(self, place: int, blocks: int) -> bytes:
        index = bisect_right(self._starts, place) - 1
        start = (place - self._starts[index]) * ALIGN
        return self._pieces[index][start : start + blocks * ALIGN]

    def pieces(self) -> Iterator[tuple[int, bytes]]:
        """(place, bytes) of what is held."""
        return zip(self._starts, self._pieces, strict=True)

    @property
    def size_bytes(self) -> int:
        return sum(map(len, self._pieces))

    def forget_some(self, size: int) -> bool:
        """Give about so many bytes of memory back; True where nothing is left. Freeing all at once would be felt."""
        while self._pieces and size > 0:
            size -= len(self._pieces.pop())
        return not self._pieces


class _Leaf:
    """A leaf that was looked into, and the keys that would be in it: from `first` on, below `end` (None: all)."""

    __slots__ = ("_keys", "_looks", "_node", "end", "first")

    def __init__(self, node: Node, first: bytes, end: bytes | None) -> None:
        self._node = node
        self.first = first
        self.end = end
        self._keys: list[bytes] | None = None
        self._looks = 0

    def get(self, key: bytes) -> tuple[bool, bytes | None]:
        keys = self._keys
        if keys is None:
            # Worth it where there are many looks; then each of them is short.
            self._looks += 1
            if self._looks <= _FEW_LOOKS:
                index = self._node.first_at_least(key)
                found = index < self._node.count and self._node.key(index) == key
                return found, self._node.value(index) if found else None
            keys = self._keys = self._node.keys()
        index = bisect_left(keys, key)
        if index < len(keys) and keys[index] == key:
            return True, self._node.value(index)
        return False, None


class Table:
    """One table. Immutable, but for its image, and for the leaves that were looked into last."""

    def __init__(self, root: Root, store: NodeStore, image: Image | None = None) -> None:
        """VolumeDamaged where its extents are on members that the volume does not have."""
        self.root = root
        self.store = store
        self.image = image
        #: Whoever looks up many keys mostly asks for some that lie in a row. Replaced as a whole, so that threads may.
        self._last: tuple[_Leaf, ...] = ()
        #: Of each copy: first block of each extent within the table, and (member, offset).
        self._extents: list[tuple[list[int], list[tuple[int, int]]]] = []
        for rows in root.copies:
            starts, places, block = [], [], 0
            for member, _, offset, length in rows.tolist():
                if member >= len(store.devices):
                    raise VolumeDamaged("no such member", where=f"table {root.birth:#x}", found=str(member))
                starts.append(block)
                places.append((member, offset))
                block += length // ALIGN
            self._extents.append((starts, places))

    @property
    def birth(self) -> int:
        return self.root.birth

    # ---- nodes ----

    def _pieces(self, copy: int, place: int, blocks: int) -> Iterator[tuple[int, int, int]]:
        """(member, offset, bytes) of blocks of one copy."""
        starts, places = self._extents[copy]
        end = place + blocks
        while place < end:
            index = bisect_right(starts, place) - 1
            stop = min(end, starts[index + 1] if index + 1 < len(starts) else end)
            member, offset = places[index]
            yield member, offset + (place - starts[index]) * ALIGN, (stop - place) * ALIGN
            place = stop

    def where(self, copy: int, place: int) -> str:
        member, offset, _ = next(self._pieces(copy, place, 1))
        return f"member {member} ({self.store.devices[member].uri}) offset {offset}"

    def _read(self, copy: int, place: int, blocks: int) -> bytes:
        buffer = np.empty(blocks * ALIGN, np.uint8)
        at = 0
        for member, offset, length in self._pieces(copy, place, blocks):
            read_into(self.store.devices[member], offset, buffer[at : at + length])
            at += length
        return buffer.tobytes()

    def _node_bytes(self, child: Child, first: int = 0) -> bytes:
        """A node from whichever copy has it, `first` tried first. TableDamaged, or DeviceError where none can be
        read."""
        self._inside(child)
        #: Copy -> the checksum that it has.
        found: dict[int, int] = {}
        errors: dict[int, DeviceError] = {}
        for copy in (first, *(other for other in range(TABLE_COPIES) if other != first)):
            try:
                data = self._read(copy, child.place, child.blocks)
            except DeviceError as error:
                errors[copy] = error
                continue
            crc = node_crc(data, self.store.volume_id, self.birth, child.place)
            if crc == child.crc:
                for bad, wrong in [*found.items(), *errors.items()]:
                    why = str(wrong) if isinstance(wrong, DeviceError) else f"crc32c {wrong:#010x}"
                    self.store.report(
                        self.birth, bad, child.place,
                        f"the catalogue: copy {bad} of a node of table {self.birth:#x} is damaged at "
                        f"{self.where(bad, child.place)}: expected crc32c {child.crc:#010x}, found {why}",
                    )  # fmt: skip
                return data
            found[copy] = crc
        if not found:
            raise errors[first]
        bad_places = [*found, *errors]
        raise TableDamaged(
            f"the catalogue is damaged: no copy of the node at block {child.place} of table {self.birth:#x} is good",
            where=" and ".join(self.where(copy, child.place) for copy in bad_places),
            expected=f"crc32c {child.crc:#010x}",
            found=" and ".join([f"{crc:#010x}" for crc in found.values()] + [str(one) for one in errors.values()]),
            next_step="`headrace volume salvage` has what other nodes say",
        )

    def node(self, child: Child) -> Node:
        node = self.store.get(self.birth, child.place)
        if node is None:
            if self.image is not None:
                node = self._decode(self.image.node(child.place, child.blocks), child)
                if not node.level:
                    return node
            else:
                node = self._decode(self._node_bytes(child), child)
            self.store.keep(self.birth, child.place, node, child.blocks * ALIGN)
        return node

    def _decode(self, data: bytes, child: Child) -> Node:
        try:
            return Node(data)
        except ValueError as error:
            raise VolumeDamaged(
                "a node of a table makes no sense", where=f"table {self.birth:#x}, block {child.place}",
                found=str(error),
            ) from error  # fmt: skip

    def _below(self, node: Node, level: int) -> Node:
        """Levels go down by one, so that no path of hostile nodes goes round."""
        if node.level != level:
            raise VolumeDamaged(
                "a node of a table makes no sense", where=f"table {self.birth:#x}",
                expected=f"level {level}", found=f"level {node.level}",
            )  # fmt: skip
        return node

    def _inside(self, child: Child) -> Child:
        """Checked before anything is allocated for it."""
        if not 1 <= child.blocks <= MAX_NODE_BYTES // ALIGN or child.place + child.blocks > self.root.blocks:
            raise VolumeDamaged("a node of a table lies outside of it", where=f"table {self.birth:#x}")
        return child

    def _tree(self, blocks: int) -> int:
        """Nodes of a tree are there once: so many blocks of them are no more than the table has."""
        if blocks > self.root.blocks:
            raise VolumeDamaged(
                "a table makes no sense", where=f"table {self.birth:#x}", found="a node has several parents"
            )
        return blocks

    # ---- keys ----

    def get(self, key: bytes) -> tuple[bool, bytes | None]:
        """Does the table say something of the key, and what: its value, or None where it is deleted."""
        for leaf in self._last:
            if leaf.first <= key and (leaf.end is None or key < leaf.end):
                return leaf.get(key)
        child, first, end = self.root.top, b"", None
        for level in range(self.root.height - 1, -1, -1):
            node = self._below(self.node(child), level)
            if level:
                index = node.child_of(key)
                first = node.key(index) if index else first
                end = node.key(index + 1) if index + 1 < node.count else end
                child = node.child(index)
        leaf = _Leaf(node, first, end)
        self._last = (leaf, *self._last[: _LAST_LEAVES - 1])
        return leaf.get(key)

    def leaves(self, first: bytes = b"", end: bytes | None = None) -> Iterator[Node]:
        """Leaves in order, from the one that `first` would be in to the one before `end`. Read when asked for."""

        seen = 0

        def walk(child: Child, level: int, first: bytes) -> Iterator[Node]:
            nonlocal seen
            node = self._below(self.node(child), level)
            seen = self._tree(seen + child.blocks)
            if level == 0:
                yield node
                return
            start = node.child_of(first)
            for index in range(start, node.count):
                if index > start and end is not None and node.key(index) >= end:
                    return
                yield from walk(node.child(index), level - 1, first if index == start else b"")

        return walk(self.root.top, self.root.height - 1, first)

    # ---- whole ----

    def load(self, copy: int = 0) -> Image:
        """Everything, read in large pieces and verified; from this copy, where that is good."""
        image = Image()
        #: Every node by its place: what a piece is checked against.
        nodes: list[Child] = [self.root.top]
        level = [self.root.top]
        seen = self.root.top.blocks
        for height in range(self.root.height - 1, 0, -1):
            below: list[Child] = []
            for child in level:
                node = self._below(self.node(child), height)
                children = [self._inside(node.child(index)) for index in range(node.count)]
                seen = self._tree(seen + sum(found.blocks for found in children))
                below.extend(children)
            nodes.extend(below)
            level = below
        nodes.sort()
        start = 0
        while start < len(nodes):
            stop, size = start, 0
            while stop < len(nodes) and size < LOAD_BYTES and nodes[stop].place == nodes[start].place + size // ALIGN:
                size += nodes[stop].blocks * ALIGN
                stop += 1
            image.add(nodes[start].place, self._verified(nodes[start:stop], copy))
            start = stop
        return image

    def _verified(self, nodes: Sequence[Child], copy: int) -> bytes:
        """Nodes that stand one after another; a bad one is read from the other copy."""
        first, blocks = nodes[0].place, sum(node.blocks for node in nodes)
        try:
            data = self._read(copy, first, blocks)
        except DeviceError:
            data = b""
        view = memoryview(data)
        parts: list[bytes | memoryview] = []
        whole = True
        for child in nodes:
            start = (child.place - first) * ALIGN
            part: bytes | memoryview = view[start : start + child.blocks * ALIGN]
            if not data or node_crc(part, self.store.volume_id, self.birth, child.place) != child.crc:
                part, whole = self._node_bytes(child, copy), False
            parts.append(part)
        return data if whole else b"".join(parts)

    def mend(self, devices: Sequence[BlockDevice]) -> None:
        """Read both copies, and write what either lacks again: the same bytes to the same places, durable when this
        returns. `devices`: to write with. A copy that cannot be read or written stays as it is, and is reported.
        """
        image = self.image
        assert image is not None
        for copy in range(TABLE_COPIES):
            try:
                for place, data in image.pieces():
                    self._mend_piece(devices, copy, place, data)
            except ReservationConflict:
                raise
            except DeviceError as error:
                self.store.report(
                    self.birth, copy, 0,
                    f"the catalogue: copy {copy} of table {self.birth:#x} cannot be mended at "
                    f"{self.where(copy, 0)}: {error}",
                )  # fmt: skip
            else:
                self.store.mended(self.birth, copy)

    def _mend_piece(self, devices: Sequence[BlockDevice], copy: int, place: int, data: bytes) -> None:
        good = np.frombuffer(data, np.uint8).reshape(-1, ALIGN)
        try:
            there = np.frombuffer(self._read(copy, place, len(good)), np.uint8).reshape(-1, ALIGN)
            bad = np.flatnonzero((there != good).any(axis=1)).tolist()
        except DeviceError:
            # Perhaps only a block of it, which is good again once it was written.
            bad = [*range(len(good))]
        for block in bad:
            for member, offset, length in self._pieces(copy, place + block, 1):
                write_through(devices[member], offset, good[block : block + 1].reshape(-1)[:length])
