"""Objects out of parts of others: what `Transaction.compose` means, as slices of blobs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from headrace.device.protocol import Buffer
from headrace.errors import ObjectNotFound, UsageError, VolumeDamaged
from headrace.volume import layout
from headrace.volume.catalog.catalog import Catalog
from headrace.volume.catalog.changes import MAX_SLICES, values_of, whole
from headrace.volume.data.names import check_length
from headrace.volume.data.objects import ObjectInfo, replaced
from headrace.volume.layout import Blob, ObjectValue, Rows
from headrace.volume.writing.stream import write_stream
from headrace.volume.writing.write import buffer_bytes, contiguous

if TYPE_CHECKING:
    from headrace.volume.volume import Volume
    from headrace.volume.writing.transaction import Transaction

#: Bytes of a committed object: (name or info, offset, length; None: to its end).
Range: TypeAlias = tuple[str | ObjectInfo, int, int | None]
#: A range; or new bytes; or a function that gives new bytes when its turn comes.
Part: TypeAlias = Range | Buffer | Callable[[], Buffer]


def whole_objects(
    volume: Volume, catalog: Catalog, objects: Sequence[ObjectInfo]
) -> tuple[list[Rows], dict[int, tuple[Blob, str]]]:
    """SLICE[n] of each object, all of it; and their blobs by birth, each with one of the objects. Looks into the
    catalogue once for all of them. ObjectNotFound, VolumeDamaged."""
    keys = [layout.object_key(info.name) for info in objects]
    values = values_of(catalog, sorted(set(keys)))
    slices: list[Rows] = []
    blobs: dict[int, tuple[Blob, str]] = {}
    for info, key in zip(objects, keys, strict=True):
        encoded = values.get(key)
        if encoded is None:
            raise ObjectNotFound(f"there is no object {info.name!r}", where=repr(volume))
        value = ObjectValue.decode(encoded, info.name)
        if value.sequence != info.sequence:
            raise replaced(info.name)
        if value.blob is not None:
            blobs[value.blob.birth] = value.blob, info.name
            slices.append(whole(value.blob))
            continue
        for birth, start, length in value.slices.tolist():
            if birth not in blobs:
                blobs[birth] = volume.blob(birth), info.name
            room = blobs[birth][0].length_bytes
            if start > room or length > room - start:
                raise VolumeDamaged("a slice leaves its blob", where=f"object {info.name!r}")
        slices.append(value.slices)
    return slices, blobs


class Composition:
    """Resolves the parts of one object. The new bytes of all parts together become one blob."""

    def __init__(self, transaction: Transaction, name: str, block_bytes: int) -> None:
        self._transaction = transaction
        self._name = name
        self._block_bytes = block_bytes
        #: [birth, start, length]; birth None: of the new bytes.
        self._rows: list[tuple[int | None, int, int]] = []

    def resolve(self, parts: Iterable[Part]) -> Rows:
        """SLICE[n]. Writes the new bytes, in their order, as the parts are gone through."""
        new = self._new_bytes(iter(parts))
        # Nothing is allocated where there are no new bytes.
        first = next(new, None)
        birth = 0
        if first is not None:
            allocation = self._transaction.begin(self._name, own=False)
            birth = allocation.birth

            def buffers() -> Iterator[Buffer]:
                yield first
                yield from new

            write_stream(self._transaction, allocation, buffers(), length_bytes=None, block_bytes=self._block_bytes)
        return np.array(
            [(birth if owner is None else owner, start, length) for owner, start, length in self._rows], layout.SLICE
        )

    def _new_bytes(self, parts: Iterator[Part]) -> Iterator[Buffer]:
        """Goes through all parts; gives the bytes of those that have some, none of them empty."""
        position = 0
        for part in parts:
            if isinstance(part, tuple):
                self._add_range(part)
                continue
            buffer = part() if callable(part) else part
            view = contiguous(buffer, f"a part of object {self._name!r}")
            length = buffer_bytes(view)
            if length:
                self._add(None, position, length)
                position += length
                yield view

    def _add_range(self, part: Range) -> None:
        if len(part) != 3:
            raise UsageError("a part of an object", expected="(object, offset, length)", found=repr(part)[:80])
        what, offset, length = part
        stored = self._transaction.find(what)
        offset = check_length(offset)
        length = max(0, stored.length_bytes - offset) if length is None else check_length(length)
        if offset + length > stored.length_bytes:
            raise UsageError(
                "the range leaves the object",
                where=f"object {stored.name!r}",
                expected=f"within {stored.length_bytes} bytes",
                found=f"{length} bytes from {offset}",
            )
        for birth, start, count in stored.slices(offset, length):
            self._add(birth, start, count)

    def _add(self, birth: int | None, start: int, length: int) -> None:
        if self._rows:
            owner, begin, before = self._rows[-1]
            if owner == birth and begin + before == start:
                self._rows[-1] = owner, begin, before + length
                return
        if len(self._rows) >= MAX_SLICES:
            raise UsageError(
                "the object has too many parts",
                where=f"object {self._name!r}",
                expected=f"at most {MAX_SLICES} that do not follow one another",
                next_step="write it as one object, or as several",
            )
        self._rows.append((birth, start, length))
