"""What the whole catalogue adds up to, for whoever writes: which space is used, and how often blobs are referred to.

At a million objects nothing may be done object by object: values are taken apart in columns, a piece of a table at a
time. What is not of the usual shape, and there are few of those, goes through the decoders that readers use.
"""

from __future__ import annotations

import struct
from collections import Counter
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.errors import VolumeDamaged
from headrace.volume import layout
from headrace.volume.catalog.catalog import Catalog
from headrace.volume.catalog.columns import Columns, live
from headrace.volume.data.extents import I64, spread, used_space
from headrace.volume.layout import ALIGN, ObjectValue
from headrace.volume.layout.entry import BLOB_BYTES, OBJECT_BYTES

U8 = npt.NDArray[np.uint8]
#: Member, offset, bytes: one row a range.
Ranges = tuple[I64, I64, I64]


@dataclass
class Usage:
    """Space of all blobs, and the slices of every blob that has a key."""

    #: One array each a piece of the catalogue.
    members: list[I64] = field(default_factory=list)
    offsets: list[I64] = field(default_factory=list)
    lengths: list[I64] = field(default_factory=list)
    slices: Counter[int] = field(default_factory=Counter)
    #: The blob with the highest number, and where it ends, on each member that it is on.
    newest: int = 0
    ends: dict[int, int] = field(default_factory=dict)

    def ranges(self) -> Ranges:
        none = [np.zeros(0, np.int64)]
        return (
            np.concatenate(self.members or none),
            np.concatenate(self.offsets or none),
            np.concatenate(self.lengths or none),
        )


def usage_of(catalog: Catalog, stripe_bytes: int) -> Usage:
    """Of everything that is there now. VolumeDamaged."""
    usage = Usage()
    for columns in catalog.columns():
        _count(columns, stripe_bytes, usage)
    return usage


def usage_of_recent(catalog: Catalog, stripe_bytes: int) -> Usage:
    """Of what the log says that no table has yet: reads nothing. VolumeDamaged."""
    usage = Usage()
    for columns in live((), catalog.recent):
        _count(columns, stripe_bytes, usage)
    return usage


def _gather(data: U8, at: I64, size: int) -> U8:
    """`size` bytes from each place. VolumeDamaged where that is not there."""
    if len(at) and (int(at.min()) < 0 or int(at.max()) + size > len(data)):
        raise VolumeDamaged("an entry of the catalogue makes no sense", found="it is cut short")
    result: U8 = data[at[:, None] + np.arange(size)]
    return result


def _count(columns: Columns, stripe_bytes: int, usage: Usage) -> None:
    data, lengths = columns.data, columns.value_end - columns.value_start
    of_blob = data[columns.key_start] == layout.BLOB_KEY[0]
    objects = np.flatnonzero(~of_blob)
    flags = _gather(data, columns.value_start[objects], 4).view("<u4").ravel()
    inline = objects[flags == layout.INLINE]
    blob_start = np.concatenate([columns.value_start[of_blob], columns.value_start[inline] + OBJECT_BYTES])
    blob_bytes = np.concatenate([lengths[of_blob], lengths[inline] - OBJECT_BYTES])
    _blobs(data, blob_start, blob_bytes, stripe_bytes, usage)
    _slices(columns, objects[flags != layout.INLINE], usage)


_COUNTS = np.dtype(
    [("roots", "<u4"), ("runs", "<u4"), ("columns", "<u4"), ("table_runs", "<u4"), ("table_columns", "<u4")]
)


def _slices(columns: Columns, objects: I64, usage: Usage) -> None:
    """Of objects that are slices: how many each blob has."""
    start = columns.value_start[objects]
    head = _gather(columns.data, start, 8).view("<u4").reshape(-1, 2)
    counts = head[:, 1].astype(np.int64)
    odd = (head[:, 0] != 0) | (columns.value_end[objects] - start != OBJECT_BYTES + layout.SLICE.itemsize * counts)
    for index in objects[odd].tolist():
        ObjectValue.decode(columns.value(index), columns.name(index))
        raise VolumeDamaged("an object's entry makes no sense", where=f"object {columns.name(index)!r}")
    at = spread(np.zeros(len(counts), np.int64), counts) * layout.SLICE.itemsize
    births = _gather(columns.data, np.repeat(start + OBJECT_BYTES, counts) + at, 8).view("<u8").ravel()
    which, how_many = np.unique(births, return_counts=True)
    for birth, count in zip(which.tolist(), how_many.tolist(), strict=True):
        usage.slices[birth] += count


def _blobs(data: U8, start: I64, size: I64, stripe_bytes: int, usage: Usage) -> None:
    if not len(start):
        return
    births = _gather(data, start, 8).view("<u8").ravel()
    counts = _gather(data, start + 20, _COUNTS.itemsize).view(_COUNTS).ravel()
    runs, columns = counts["runs"].astype(np.int64), counts["columns"].astype(np.int64)
    tables = counts["table_runs"].astype(np.int64) + counts["table_columns"]
    need = BLOB_BYTES + 16 * (runs + columns + tables) + 4 * counts["roots"].astype(np.int64)
    if not np.array_equal(need, size):
        raise VolumeDamaged("a blob makes no sense", found=f"{size[need != size][:1].tolist()} bytes")
    # The usual shape: one contiguous piece, and its checksums beside it.
    plain = np.flatnonzero((runs == 1) & (columns == 1) & (tables == 0))
    row = _gather(data, start[plain] + BLOB_BYTES, 32)
    length = row[:, :8].copy().view("<u8").ravel().astype(np.int64)
    member = row[:, 16:20].copy().view("<u4").ravel().astype(np.int64)
    offset = row[:, 24:32].copy().view("<u8").ravel().astype(np.int64)
    usage.members.append(member)
    usage.offsets.append(offset)
    usage.lengths.append(-(-length // ALIGN) * ALIGN)
    others = np.flatnonzero((runs + columns + tables != 0) & ~((runs == 1) & (columns == 1) & (tables == 0)))
    used = [one for index in others.tolist() for one in _space(data, int(start[index]), int(size[index]), stripe_bytes)]
    if used:
        rows = np.array(used, np.int64)
        usage.members.append(rows[:, 0])
        usage.offsets.append(rows[:, 1])
        usage.lengths.append(rows[:, 2])
    last = int(births.argmax())
    if int(births[last]) > usage.newest:
        usage.newest = int(births[last])
        ends: dict[int, int] = {}
        for one, at, taken in _space(data, int(start[last]), int(size[last]), stripe_bytes):
            ends[one] = max(ends.get(one, 0), at + taken)
        usage.ends = ends


def _space(data: U8, start: int, size: int, stripe_bytes: int) -> list[tuple[int, int, int]]:
    try:
        blob = layout.Blob.decode(data[start : start + size].tobytes())
    except (struct.error, ValueError) as error:
        raise VolumeDamaged("a blob makes no sense", found=str(error)) from error
    return used_space(blob.runs, blob.columns, stripe_bytes) + used_space(
        blob.table_runs, blob.table_columns, stripe_bytes
    )
