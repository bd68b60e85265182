"""From byte ranges of an object to segments on its members, by arithmetic over whole arrays.

An object's bytes are a row of runs. A run deals its bytes out in stripe units, round-robin over `width` columns, each
of which is contiguous on one member; a run of width 1 is one contiguous piece. Every run but the last is a multiple of
the checksum block, and a unit is one too, so no checksum block ever crosses a piece.

    byte  ->  run  ->  unit k = (byte - run start) / unit  ->  column k mod width, row k div width  ->  member, offset
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.device import Batch
from headrace.device.ranges import Rows as NativeRows
from headrace.errors import VolumeDamaged
from headrace.volume.layout import COLUMN, RUN, Rows, align_up

I64 = npt.NDArray[np.int64]
U32 = npt.NDArray[np.uint32]


class Pieces(NamedTuple):
    """Segments of some ranges, one row each; all int64. `source` is the range that a segment serves."""

    source: I64
    member: I64
    offset: I64
    #: Where the segment begins in the object, and its bytes: whole checksum blocks, cut at the object's end.
    start: I64
    length: I64
    skip: I64
    take: I64
    #: Where its wanted bytes lie within the range.
    within: I64

    @classmethod
    def join(cls, parts: Sequence[Pieces]) -> Pieces:
        """The segments of all parts, one after another."""
        return parts[0] if len(parts) == 1 else cls(*(np.concatenate(columns) for columns in zip(*parts, strict=True)))

    def blocks(self, block_bytes: int) -> tuple[I64, I64]:
        """First checksum block of each segment, and how many it has."""
        return self.start // block_bytes, -(-self.length // block_bytes)

    def batch(
        self, *, buffer: U32, buffer_offset: I64, birth: int | I64, block_bytes: int, volume_id: bytes, mark: int
    ) -> Batch:
        """The batch that moves these segments. `buffer`, `buffer_offset`: of each range; `birth`: of all segments, or
        of each; `mark` is or-ed to block indices.
        """
        first, _ = self.blocks(block_bytes)
        return Batch(
            member=self.member.astype(np.uint32),
            # None of them is negative, so they are what they are, unsigned.
            offset=self.offset.view(np.uint64),
            length=self.length.view(np.uint64),
            skip=self.skip.view(np.uint64),
            take=self.take.view(np.uint64),
            buffer=buffer[self.source],
            buffer_offset=(buffer_offset[self.source] + self.within).view(np.uint64),
            birth=np.full(len(self.member), birth, np.uint64) if isinstance(birth, int) else birth.view(np.uint64),
            first_block=first.view(np.uint64) | np.uint64(mark) if mark else first.view(np.uint64),
            checksum_block_bytes=block_bytes,
            volume_id=volume_id,
        )


def spread(starts: I64, counts: I64) -> I64:
    """`[s, s + 1, ... s + c - 1]` of every pair, in one array."""
    total = int(counts.sum())
    before = np.cumsum(counts) - counts
    result: I64 = np.repeat(starts - before, counts) + np.arange(total, dtype=np.int64)
    return result


class Extents:
    """Where the bytes of one object (or of its checksum table) lie. Immutable."""

    def __init__(self, runs: Rows, columns: Rows, *, length_bytes: int, block_bytes: int, stripe_bytes: int) -> None:
        """Raises VolumeDamaged where runs and columns contradict each other."""
        self.length_bytes = length_bytes
        self.block_bytes = block_bytes
        self.runs = runs
        self.columns = columns
        self._stripe_bytes = stripe_bytes
        length = runs["length"].astype(np.int64)
        self._width: I64 = runs["width"].astype(np.int64)
        if (
            int(length.sum()) != length_bytes
            or int(self._width.sum()) != len(columns)
            or bool(np.any(length <= 0))
            or bool(np.any(self._width <= 0))
            or bool(np.any(length[:-1] % block_bytes))
        ):
            raise VolumeDamaged(
                "an object's extents contradict each other", found=f"{runs.tolist()} for {length_bytes}"
            )
        self._end: I64 = np.cumsum(length)
        self._start: I64 = self._end - length
        self._unit: I64 = np.where(self._width > 1, stripe_bytes, length)
        units = -(-length // self._unit)
        self._unit_base: I64 = np.cumsum(units) - units
        self._column_base: I64 = np.cumsum(self._width) - self._width
        self._member: I64 = columns["member"].astype(np.int64)
        self._offset: I64 = columns["offset"].astype(np.int64)

    def pieces(self, starts: I64, lengths: I64) -> Pieces:
        """Segments of the byte ranges `[start, start + length)`, which lie within the object; empty ones have none.

        Each is widened to whole checksum blocks.
        """
        block = self.block_bytes
        source = np.flatnonzero(lengths > 0)
        starts, ends = starts[source], starts[source] + lengths[source]
        low = starts // block * block
        high = np.minimum(-(-ends // block) * block, self.length_bytes)
        first, last = self._unit_of(low), self._unit_of(high - 1)
        if bool((first == last).all()):
            # Small ranges, the usual batch of a loader: a segment each.
            row, unit = np.arange(len(source)), first
        else:
            counts = last - first + 1
            row = np.repeat(np.arange(len(source)), counts)
            unit = spread(first, counts)
            starts, ends, low, high, source = starts[row], ends[row], low[row], high[row], source[row]

        if len(self._end) == 1:
            # One run, the usual object: nothing to look up.
            k, width, column_base = unit, self._width[0], self._column_base[0]
            unit_bytes = self._unit[0]
            unit_start = k * unit_bytes
            unit_end = np.minimum(unit_start + unit_bytes, self.length_bytes)
        else:
            run = np.searchsorted(self._unit_base, unit, side="right") - 1
            k, width, column_base = unit - self._unit_base[run], self._width[run], self._column_base[run]
            unit_bytes = self._unit[run]
            unit_start = self._start[run] + k * unit_bytes
            unit_end = np.minimum(unit_start + unit_bytes, self._end[run])
        start = np.maximum(unit_start, low)
        end = np.minimum(unit_end, high)
        column = column_base + k % width
        wanted_start = np.maximum(start, starts)
        wanted_end = np.minimum(end, ends)
        return Pieces(
            source=source,
            member=self._member[column],
            offset=self._offset[column] + k // width * unit_bytes + (start - unit_start),
            start=start,
            length=end - start,
            skip=wanted_start - start,
            take=wanted_end - wanted_start,
            within=wanted_start - starts,
        )

    def rows(self) -> NativeRows:
        """For the native engine, which does the same arithmetic."""
        return (
            self.runs["length"].astype(np.uint64),
            self.runs["width"].astype(np.uint32),
            self.columns["member"].astype(np.uint32),
            self.columns["offset"].astype(np.uint64),
        )

    def _unit_of(self, position: I64) -> I64:
        if len(self._end) == 1:
            return position // int(self._unit[0])
        run = np.searchsorted(self._start, position, side="right") - 1
        return np.asarray(self._unit_base[run] + (position - self._start[run]) // self._unit[run], np.int64)

    def whole(self) -> Pieces:
        """All of it."""
        return self.pieces(np.zeros(1, np.int64), np.full(1, self.length_bytes, np.int64))

    def used(self) -> list[tuple[int, int, int]]:
        """(member, offset, bytes) of every column: the space that belongs to the object, a multiple of ALIGN."""
        return used_space(self.runs, self.columns, self._stripe_bytes)


def used_space(runs: Rows, columns: Rows, stripe_bytes: int) -> list[tuple[int, int, int]]:
    """The space that each column takes on its member. VolumeDamaged where columns are missing."""
    result = []
    places = iter(columns.tolist())
    for length, width, _ in runs.tolist():
        unit = stripe_bytes if width > 1 else length
        for column in range(width):
            place = next(places, None)
            if place is None:
                raise VolumeDamaged("an object's extents contradict each other", found=f"{runs.tolist()}")
            result.append((place[0], place[2], column_bytes(length, width, unit, column)))
    return result


def column_bytes(length: int, width: int, unit: int, column: int) -> int:
    """Space of one column of a run: its units, the last unit of the run rounded up to ALIGN."""
    count = -(-length // unit)
    rows = count // width + (column < count % width)
    if rows == 0:
        return 0
    if (count - 1) % width == column:
        return (rows - 1) * unit + align_up(length - (count - 1) * unit)
    return rows * unit


def make_runs(rows: list[tuple[int, list[tuple[int, int]]]]) -> tuple[Rows, Rows]:
    """RUN[] and COLUMN[] of (length, [(member, offset), ...])."""
    runs = np.array([(length, len(columns), 0) for length, columns in rows], RUN)
    columns = np.array([(member, 0, offset) for _, columns in rows for member, offset in columns], COLUMN)
    return runs, columns
