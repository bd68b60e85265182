"""Many small objects at once: one blob for the bytes of all, and the objects' values as rows of one array."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from itertools import islice
from operator import lt
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.errors import UsageError
from headrace.volume import layout
from headrace.volume.catalog.bulk import Bulk, Keys
from headrace.volume.data.extents import I64
from headrace.volume.data.names import check_name
from headrace.volume.layout import MAX_NAME_BYTES, OBJECT_BYTES

#: An object of one slice, as `layout.entry` draws it.
_ONE_SLICE = np.dtype(
    [
        ("flags", "<u4"), ("slice_count", "<u4"), ("sequence", "<u8"), ("created_ns", "<u8"), ("length_bytes", "<u8"),
        ("birth", "<u8"), ("start", "<u8"), ("length", "<u8"),
    ]
)  # fmt: skip
assert _ONE_SLICE.itemsize == OBJECT_BYTES + layout.SLICE.itemsize


_FRONT = b"\0" + layout.OBJECT_KEY
_JOIN = _FRONT.decode()


class Packed(NamedTuple):
    """The objects of one blob: ascending keys, and the length of each."""

    keys: Sequence[bytes]
    lengths: I64

    def share(self, prefix: str, taken: int) -> int:
        """Of `taken` bytes for all of them, those for names that begin with `prefix`: as their lengths are."""
        key = layout.object_key(prefix)
        first = bisect_left(self.keys, key)
        # Names are UTF-8: nothing in them is as high as this.
        end = bisect_left(self.keys, key + b"\xff", first)
        # Ranges may overlap: of the lengths' sum, not of the bytes that are written.
        return taken * int(self.lengths[first:end].sum()) // max(1, int(self.lengths.sum()))


class Pack(NamedTuple):
    """Objects that are slices of one blob; `keys` ascend, `starts` and `lengths` belong to them."""

    keys: Keys
    starts: I64
    lengths: I64
    birth: int
    created_ns: int

    def bulk(self, sequence: int) -> Bulk:
        """What the catalogue gets of the objects in the commit `sequence`."""
        rows = np.zeros(len(self.keys.each), _ONE_SLICE)
        rows["slice_count"] = 1
        rows["sequence"], rows["created_ns"], rows["birth"] = sequence, self.created_ns, self.birth
        rows["length_bytes"] = rows["length"] = self.lengths
        rows["start"] = self.starts
        empty = self.lengths == 0
        if not empty.any():
            return Bulk(self.keys, rows.tobytes(), np.arange(1, len(rows) + 1) * rows.itemsize)
        # Without the slice.
        rows["slice_count"][empty] = 0
        sizes = np.where(empty, OBJECT_BYTES, rows.itemsize)
        table = rows.view(np.uint8).reshape(len(rows), rows.itemsize)
        kept = np.arange(rows.itemsize) < sizes[:, None]
        return Bulk(self.keys, table[kept].tobytes(), np.cumsum(sizes))

    @property
    def slice_count(self) -> int:
        return int(np.count_nonzero(self.lengths))


def keys_of(names: Sequence[str]) -> tuple[Keys, bool]:
    """The key of each name, and whether they ascend. UsageError for the first name that no object can have, or that is
    there twice."""
    zeros = np.zeros(0, np.int64)
    try:
        # With what a key begins with in front of each, so that splitting gives keys.
        text = _JOIN.join(["", *names]).encode() + b"\0"
        keys = text[1:-1].split(b"\0")
        zeros = np.flatnonzero(np.frombuffer(text, np.uint8) == 0)
    except (UnicodeEncodeError, TypeError):
        text, keys = b"", []
    longest = MAX_NAME_BYTES + len(layout.OBJECT_KEY)
    if len(keys) != len(names) or _has_bad_part(text, zeros) or int(np.diff(zeros).max()) - 1 > longest:
        for name in names:
            if not isinstance(name, str):
                raise UsageError("not a name for an object", expected="text", found=repr(name)[:80])
            check_name(name)
    ordered = ascending(keys)
    if not ordered and len(set(keys)) != len(keys):
        seen: set[str] = set()
        for name in names:
            if name in seen:
                raise UsageError("two of the objects have one name", found=repr(name))
            seen.add(name)
    # Each end has so many zeros before it, and that of the text's begin.
    ends = zeros[1:] - np.arange(1, len(zeros))
    return Keys(keys, text.replace(b"\0", b""), ends), ordered


def _has_bad_part(text: bytes, zeros: I64) -> bool:
    """Is a name empty, or a part of one between slashes? `text`: keys, with zeros between them and at both ends."""
    letters = np.frombuffer(text, np.uint8)
    # Behind a zero and what keys begin with, and behind a slash: the next zero, or a slash. The last one is a zero.
    behind = letters[np.concatenate([zeros[:-1] + len(_FRONT), np.flatnonzero(letters == ord("/")) + 1])]
    return bool(np.any((behind == 0) | (behind == ord("/"))))


def ascending(keys: Sequence[bytes]) -> bool:
    """Each is above the one before: in order, and none twice."""
    return all(map(lt, keys, islice(keys, 1, None)))


def ranges_of(count: int, lengths: npt.ArrayLike, offsets: npt.ArrayLike | None, size: int) -> tuple[I64, I64]:
    """Starts and lengths of `count` objects within a buffer of `size` bytes. UsageError where one leaves it."""
    sizes = _column(lengths, "lengths")
    if sizes.ndim == 0:
        sizes = np.full(count, sizes, np.int64)
    starts = np.cumsum(sizes) - sizes if offsets is None else _column(offsets, "offsets")
    if starts.shape != (count,) or sizes.shape != (count,):
        raise UsageError("one length and one offset for each name", expected=str(count), found=f"{sizes.shape}")
    wrong = np.flatnonzero((sizes < 0) | (starts < 0) | (starts > size) | (sizes > size - starts))
    if len(wrong):
        i = int(wrong[0])
        raise UsageError(
            "an object leaves the data",
            expected=f"within {size} bytes",
            found=f"number {i}: {int(sizes[i])} bytes from {int(starts[i])}",
        )
    return starts, sizes


def _column(values: npt.ArrayLike, what: str) -> I64:
    array: npt.NDArray[Any] = np.asarray(values)
    if array.ndim > 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError(what, expected="whole numbers, one dimension", found=str(array.dtype))
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 1 << 63:
        raise UsageError(what, expected="below 2^63", found=str(int(array.max())))
    return array.astype(np.int64)
