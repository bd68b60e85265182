"""Many objects as arrays: a million names and lengths without a million Python objects."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

from headrace.errors import VolumeDamaged
from headrace.volume import layout
from headrace.volume.catalog.catalog import Catalog
from headrace.volume.catalog.columns import I64, Columns, columns_of
from headrace.volume.catalog.tables import merged
from headrace.volume.data.objects import ObjectInfo
from headrace.volume.layout.entry import OBJECT_BYTES

U64 = npt.NDArray[np.uint64]
#: The beginning of an object's value.
_HEAD = np.dtype([("flags", "<u4"), ("slices", "<u4"), ("sequence", "<u8"), ("created", "<u8"), ("length", "<u8")])
assert _HEAD.itemsize == OBJECT_BYTES


@dataclass(frozen=True, eq=False)
class Listing:
    """Objects in the order of their names (as UTF-8). Name *i* is `text[starts[i]:starts[i + 1]]`."""

    text: bytes
    starts: I64
    length_bytes: U64
    #: Of the transaction that committed it.
    sequence: U64
    #: Nanoseconds since 1970, by the writer's clock.
    created_ns: U64

    def __len__(self) -> int:
        return len(self.length_bytes)

    def name(self, index: int) -> str:
        """Name of one of them."""
        if not -len(self) <= index < len(self):
            raise IndexError(index)
        at = index % len(self)
        return self.text[self.starts[at] : self.starts[at + 1]].decode()

    def names(self) -> Iterator[str]:
        """All names, one after another."""
        return map(self.name, range(len(self)))

    def infos(self) -> Iterator[ObjectInfo]:
        """Each as an `ObjectInfo`, without what a listing does not say: of what the object is made."""
        columns = zip(self.length_bytes.tolist(), self.sequence.tolist(), self.created_ns.tolist(), strict=True)
        for name, (length, sequence, created) in zip(self.names(), columns, strict=True):
            yield ObjectInfo(name=name, length_bytes=length, sequence=sequence, created_s=created / 1e9)


def listing_of(catalog: Catalog, prefix: str, after: bytes | None = None, most: int | None = None) -> Listing:
    """Of all objects whose names begin with `prefix`. Reads only that range. VolumeDamaged.

    A piece of it: `after` the name (UTF-8) that the one before ended with, and no more once it has `most`.
    """
    first = layout.object_key(prefix)
    # No byte of UTF-8 is above 0xf4.
    end = first + b"\xff"
    if after is not None:
        first = first[:1] + after + b"\0"
    texts: list[bytes] = []
    sizes: list[I64] = [np.zeros(1, np.int64)]
    heads = [np.zeros(0, _HEAD)]
    count = 0
    for keys, values in merged(catalog.layers(first, end)):
        found = [(key, value) for key, value in zip(keys, values, strict=True) if value is not None and key < end]
        if found:
            texts.append(b"".join(key[1:] for key, _ in found))
            columns = columns_of(found)
            sizes.append(columns.key_end - columns.key_start - 1)
            heads.append(_heads(columns))
            count += len(found)
        if most is not None and count >= most:
            break
    head = np.concatenate(heads)
    return Listing(
        b"".join(texts),
        np.cumsum(np.concatenate(sizes)),
        *(head[field].copy() for field in ("length", "sequence", "created")),
    )


def _heads(columns: Columns) -> npt.NDArray[np.void]:
    if bool(np.any(columns.value_end - columns.value_start < OBJECT_BYTES)):
        raise VolumeDamaged("an object's entry makes no sense", found="it is cut short")
    rows = columns.data[columns.value_start[:, None] + np.arange(OBJECT_BYTES)]
    return np.ascontiguousarray(rows).view(_HEAD).ravel()
