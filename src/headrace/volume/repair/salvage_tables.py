"""Salvage, the tables: every node that one of its copies has whole, and on behind those that neither has.

Whoever made the image may have made it to be read for ever: a node with many parents, copies that lie on top of each
other, tables of which each says that it is as large as all members. So nodes are read once, and all of them together
are no more than the members hold, some times over.
"""

from __future__ import annotations

from bisect import bisect_right
from itertools import accumulate

from headrace.volume.layout import ALIGN
from headrace.volume.layout.table import MAX_NODE_BYTES, TABLE_COPIES, Child, Node, Root, node_crc
from headrace.volume.repair.salvage_media import Lost, Media

#: Blocks of nodes that may be read: so often what the members hold, and at least so many. Several generations of the
#: log may name the same tables.
_ROUNDS = 4
_LEAST_BLOCKS = 4096

Entries = list[tuple[bytes, bytes | None]]


class TableReader:
    """Reads tables of one volume."""

    def __init__(self, volume_id: bytes, media: Media, lost: Lost) -> None:
        self._volume_id = volume_id
        self._media = media
        self._lost = lost
        self._blocks_left = max(_ROUNDS * media.size_bytes // ALIGN, _LEAST_BLOCKS)

    def read(self, root: Root, *, quiet: bool = False) -> tuple[Entries, bool]:
        """What is left of a table, in order, and whether that is all; `quiet`: nobody is told what is lost."""
        walk = _Walk(self, root, Lost() if quiet else self._lost)
        walk.below(root.top, root.height - 1)
        return walk.entries, walk.whole

    def take(self, blocks: int) -> bool:
        self._blocks_left -= blocks
        return self._blocks_left >= 0

    def node(self, root: Root, copies: list[_Copy], child: Child) -> Node | None:
        """From whichever copy has it."""
        for copy in copies:
            data = b""
            for member, offset, length in copy.pieces(child.place, child.blocks):
                part, _ = self._media.read(member, offset, length)
                if part is None:
                    break
                data += part
            if node_crc(data, self._volume_id, root.birth, child.place) != child.crc:
                continue
            try:
                node = Node(data)
                node.check()
            except ValueError:
                continue
            return node
        return None


class _Copy:
    """Where the blocks of one copy are."""

    def __init__(self, root: Root, copy: int) -> None:
        rows = root.copies[copy].tolist()
        self._places = [(member, offset) for member, _, offset, _ in rows]
        self._ends = [*accumulate(length // ALIGN for _, _, _, length in rows)]

    def pieces(self, place: int, blocks: int) -> list[tuple[int, int, int]]:
        """(member, offset, bytes) of blocks that the table has."""
        found, end = [], place + blocks
        while place < end:
            index = bisect_right(self._ends, place)
            start = self._ends[index - 1] if index else 0
            stop = min(end, self._ends[index])
            member, offset = self._places[index]
            found.append((member, offset + (place - start) * ALIGN, (stop - place) * ALIGN))
            place = stop
        return found


class _Walk:
    """Through one table, from the top down."""

    def __init__(self, reader: TableReader, root: Root, lost: Lost) -> None:
        self.entries: Entries = []
        self.whole = True
        self._reader = reader
        self._root = root
        self._lost = lost
        self._copies = [_Copy(root, copy) for copy in range(TABLE_COPIES)]
        self._seen: set[int] = set()

    def below(self, child: Child, level: int) -> bool:
        """A node and all below it; False where enough was read."""
        root, said = self._root, f"table {self._root.birth:#x} of the catalogue"
        if not 1 <= child.blocks <= MAX_NODE_BYTES // ALIGN or child.place + child.blocks > root.blocks:
            return self._lacks(f"{said}: a node at block {child.place} that lies outside of it")
        if child.place in self._seen:
            return self._lacks(f"{said}: a node at block {child.place} has several parents: it counts once")
        self._seen.add(child.place)
        if not self._reader.take(child.blocks):
            self._lacks(f"{said}: it and others say more than the members hold: the rest is left out")
            return False
        node = self._reader.node(root, self._copies, child)
        if node is None or node.level != level:
            most = "" if level else f", with {root.entry_count} entries or fewer"
            return self._lacks(f"{said}: a node at block {child.place}, on both copies{most}")
        if not level:
            self.entries += zip(node.keys(), node.values(), strict=True)
            return True
        return all(self.below(node.child(index), level - 1) for index in range(node.count))

    def _lacks(self, text: str) -> bool:
        self.whole = False
        self._lost.say(text)
        return True
