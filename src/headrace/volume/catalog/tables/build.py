"""Writing a table, bottom up: leaves as entries come, inner nodes as leaves fill them, the top last.

Nothing refers to a table before a record of the log does, so a crash in the middle leaves free space. Its nodes are
written with FUA: acknowledged means durable.
"""

from __future__ import annotations

from bisect import bisect_right
from collections.abc import Sequence
from itertools import accumulate
from typing import Protocol

import numpy as np

from headrace.device import BlockDevice
from headrace.errors import VolumeFull
from headrace.volume.catalog.bulk import Bulk
from headrace.volume.catalog.tables.table import Image
from headrace.volume.data.durable import write_through
from headrace.volume.layout import ALIGN, EXTENT
from headrace.volume.layout.table import (
    MAX_NODE_BYTES,
    NODE_BYTES,
    TABLE_COPIES,
    Child,
    Root,
    encode_child,
    encode_node,
    join_node,
    node_crc,
)

#: A leaf or an inner node is closed when another entry would make it longer.
TARGET_BYTES = 8 << 10
#: Nodes are gathered up to this before they are written.
WRITE_BYTES = 256 << 10
#: Extents of a table whose length is not known double from the first to the second.
FIRST_EXTENT = 256 << 10
LAST_EXTENT = 64 << 20
_WRAP = 1 << 32

#: (member, offset, bytes)
Range = tuple[int, int, int]


class Space(Protocol):
    """Where tables get their space."""

    def take(self, size: int, least: int) -> tuple[Range, Range]:
        """Two ranges of the same length, `least` to `size` bytes, on different members where there are two.
        VolumeFull: nothing was taken."""

    def give_back(self, ranges: Sequence[Range]) -> None:
        """Space that no command was ever sent to, or where all have ended."""

    def quarantine(self, ranges: Sequence[Range]) -> None:
        """Space that a command of unknown fate may still reach."""


class Builder:
    """One table in the making."""

    def __init__(
        self, devices: Sequence[BlockDevice], volume_id: bytes, birth: int, space: Space, *, expected_bytes: int,
        image: Image | None = None,
    ) -> None:  # fmt: skip
        """`expected_bytes`: of nodes, at most or about; `image`: gets what is written, too."""
        self.birth = birth
        self._devices = devices
        self._volume_id = volume_id
        self._space = space
        self._expected = max(expected_bytes, ALIGN)
        #: What was written, where somebody wants it.
        self.image = image
        self._next_extent = FIRST_EXTENT
        #: Of each level, from the leaves up: what its open node has so far.
        self._keys: list[list[bytes]] = []
        self._values: list[list[bytes | None]] = []
        self._sizes: list[int] = []
        #: Extents of copies A and B; the last pair is being filled.
        self._extents: list[tuple[Range, Range]] = []
        self._filled = 0
        self._waiting: list[bytes] = []
        self._waiting_bytes = 0
        self._place = 0
        self._top: Child | None = None
        self._entries = self._deleted = 0

    @property
    def written_bytes(self) -> int:
        """Of one copy so far."""
        return self._place * ALIGN

    def add(self, key: bytes, value: bytes | None) -> None:
        """Keys come ascending; a value of None is a deletion."""
        self._entries += 1
        self._deleted += value is None
        self._push(0, key, value)

    def extend(self, keys: Sequence[bytes], values: Sequence[bytes | None]) -> None:
        """`add` for each, by whole leaves."""
        if not keys:
            return
        self._open(0)
        sizes = map(int.__add__, map(len, keys), [8 if value is None else 8 + len(value) for value in values])
        ends = list(accumulate(sizes))
        self._entries += len(keys)
        self._deleted += values.count(None)
        at = before = 0
        while at < len(keys):
            end = bisect_right(ends, before + TARGET_BYTES - self._sizes[0], at)
            if end == at:
                if self._keys[0]:
                    self._close_node(0)
                    continue
                end += 1
            self._keys[0] += keys[at:end]
            self._values[0] += values[at:end]
            self._sizes[0] += ends[end - 1] - before
            at, before = end, ends[end - 1]

    def extend_bulk(self, bulk: Bulk, start: int, end: int) -> None:
        """`add` for entries `start` to `end`, by whole leaves that are cut out as they are."""
        if start == end:
            return
        self._open(0)
        keys = bulk.keys[start:end]
        key_start, value_start = bulk.starts(start)
        key_ends, value_ends = bulk.all_keys.ends[start:end], bulk.ends[start:end]
        # What they would take as one leaf, up to each.
        ends = key_ends + value_ends + np.arange(8, 8 * len(keys) + 8, 8) - (key_start + value_start)
        # As a node has them; a difference of two is right, also where these wrap round.
        short_key_ends, short_value_ends = key_ends.astype("<u4"), value_ends.astype("<u4")
        self._entries += len(keys)
        at = before = 0
        while at < len(keys):
            stop = int(ends.searchsorted(before + TARGET_BYTES - self._sizes[0], side="right"))
            if stop == at:
                if self._keys[0]:
                    self._close_node(0)
                    continue
                stop += 1
            key_end, value_end = int(key_ends[stop - 1]), int(value_ends[stop - 1])
            if stop == len(keys) or self._keys[0]:
                # Not a whole leaf: others come, or came, into it.
                self._keys[0] += keys[at:stop]
                self._values[0] += bulk.values(start + at, start + stop)
                self._sizes[0] += int(ends[stop - 1]) - before
            else:
                node = join_node(
                    0,
                    short_key_ends[at:stop] - np.uint32(key_start % _WRAP),
                    short_value_ends[at:stop] - np.uint32(value_start % _WRAP),
                    bulk.all_keys.text[key_start:key_end],
                    bulk.data[value_start:value_end],
                )
                self._push(1, keys[at], encode_child(self._put_node(node)))
            at, before = stop, int(ends[stop - 1])
            key_start, value_start = key_end, value_end

    def _open(self, level: int) -> None:
        if level == len(self._keys):
            self._keys.append([])
            self._values.append([])
            self._sizes.append(NODE_BYTES)

    def _push(self, level: int, key: bytes, value: bytes | None) -> None:
        self._open(level)
        size = 8 + len(key) + (0 if value is None else len(value))
        if self._keys[level] and self._sizes[level] + size > TARGET_BYTES:
            self._close_node(level)
        self._keys[level].append(key)
        self._values[level].append(value)
        self._sizes[level] += size

    def _close_node(self, level: int) -> None:
        first, child = self._emit(level)
        self._push(level + 1, first, encode_child(child))

    def _emit(self, level: int) -> tuple[bytes, Child]:
        keys, values = self._keys[level], self._values[level]
        child = self._put_node(encode_node(level, keys, values))
        self._keys[level], self._values[level], self._sizes[level] = [], [], NODE_BYTES
        return keys[0], child

    def _put_node(self, data: bytes) -> Child:
        """The next node, which is written with others."""
        if len(data) > MAX_NODE_BYTES:
            raise VolumeFull("an entry is too large for the catalogue", found=f"{len(data)} bytes")
        place = self._reserve(len(data))
        child = Child(place, len(data) // ALIGN, node_crc(data, self._volume_id, self.birth, place))
        self._waiting.append(data)
        self._waiting_bytes += len(data)
        if self._waiting_bytes >= WRITE_BYTES:
            self._write()
        return child

    def _reserve(self, size: int) -> int:
        """The place of the next node, which takes `size` bytes of one extent."""
        if not self._extents or self._filled + size > self._extents[-1][0][2]:
            self._write()
            self._trim()
            # What is left of the guess, within the doubling; a guess that was too small costs another extent.
            left = max(self._expected - self._place * ALIGN, ALIGN)
            self._extents.append(self._space.take(max(size, min(left, self._next_extent)), size))
            self._next_extent = min(2 * self._next_extent, LAST_EXTENT)
            self._filled = 0
        place = self._place
        self._place += size // ALIGN
        self._filled += size
        return place

    def _write(self) -> None:
        """What is waiting, to both copies: durable when this returns."""
        if not self._waiting:
            return
        data = b"".join(self._waiting)
        start = self._filled - len(data)
        for member, offset, _ in self._extents[-1]:
            write_through(self._devices[member], offset + start, data)
        if self.image is not None:
            self.image.add(self._place - len(data) // ALIGN, data)
        self._waiting.clear()
        self._waiting_bytes = 0

    def _trim(self) -> None:
        """Give back what the last extent has too much."""
        if not self._extents:
            return
        pair = self._extents[-1]
        if self._filled < pair[0][2]:
            self._space.give_back([(m, offset + self._filled, length - self._filled) for m, offset, length in pair])
            kept = [(m, offset, self._filled) for m, offset, _ in pair]
            self._extents[-1] = kept[0], kept[1]

    def finish(self) -> Root | None:
        """The table, durable; None where it has no entries."""
        if not self._entries:
            return None
        level = 0
        # A level with one open node and none above it is the top.
        while level < len(self._keys) - 1:
            if self._keys[level]:
                self._close_node(level)
            level += 1
        _, self._top = self._emit(level)
        self._write()
        self._trim()
        copies = [
            np.array([(pair[copy][0], 0, pair[copy][1], pair[copy][2]) for pair in self._extents], EXTENT)
            for copy in range(TABLE_COPIES)
        ]
        return Root(self.birth, self._entries, self._deleted, self._top, level + 1, self._place, (copies[0], copies[1]))

    def space(self) -> list[Range]:
        """All that was taken and not given back."""
        return [one for pair in self._extents for one in pair]

    def abandon(self, *, failed: bool) -> None:
        """Nothing will refer to it. `failed`: a write did, and may still land."""
        (self._space.quarantine if failed else self._space.give_back)(self.space())
        self._extents.clear()
