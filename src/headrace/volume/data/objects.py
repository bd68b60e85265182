"""Objects as readers have them: which blob, and which bytes of it, each byte of an object is."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import NamedTuple, Protocol

import numpy as np

from headrace.device import Source, make_source
from headrace.errors import ObjectNotFound, VolumeDamaged
from headrace.volume import layout
from headrace.volume.data.extents import I64, U32, Extents, Pieces, spread, used_space
from headrace.volume.layout import Blob, ObjectHead, ObjectValue

#: (member, offset, bytes)
Range = tuple[int, int, int]


@dataclass(frozen=True, kw_only=True)
class ObjectInfo:
    """One committed object. Name and `sequence` together name its content for good: objects never change."""

    name: str
    length_bytes: int
    #: Sequence of the transaction that committed it; a new object of the same name has another.
    sequence: int
    #: Wall clock of the writer, seconds since 1970.
    created_s: float
    #: Of the blob that is this object's own: its number, its checksum blocks, and its space on the members, checksum
    #: table included. All 0 where the object is slices of blobs that others may share, and out of a listing.
    birth: int = 0
    checksum_block_bytes: int = 0
    stored_bytes: int = 0


def info_of(name: str, value: bytes) -> ObjectInfo:
    """From what the catalogue has of it. VolumeDamaged."""
    head = ObjectHead.decode(value, name)
    birth, block_bytes, stored_bytes = layout.peek_blob(value) if head.flags & layout.INLINE else (0, 0, 0)
    return ObjectInfo(
        name=name,
        length_bytes=head.length_bytes,
        sequence=head.sequence,
        created_s=head.created_ns / 1e9,
        birth=birth,
        checksum_block_bytes=block_bytes,
        stored_bytes=stored_bytes,
    )


def replaced(name: str) -> ObjectNotFound:
    """Another object has this name than the `ObjectInfo` is of."""
    return ObjectNotFound("the object was replaced", where=f"object {name!r}", next_step="read it by name")


def space_of(blob: Blob, stripe_bytes: int) -> list[Range]:
    """Everything on the members that belongs to the blob, its checksum table included."""
    return used_space(blob.runs, blob.columns, stripe_bytes) + used_space(
        blob.table_runs, blob.table_columns, stripe_bytes
    )


class StoredBlob:
    """A blob with its extents, ready to be read. Immutable."""

    def __init__(self, blob: Blob, stripe_bytes: int) -> None:
        self.entry = blob
        self.data = Extents(
            blob.runs,
            blob.columns,
            length_bytes=blob.length_bytes,
            block_bytes=blob.checksum_block_bytes,
            stripe_bytes=stripe_bytes,
        )
        self._stripe_bytes = stripe_bytes
        self.block_count = -(-blob.length_bytes // blob.checksum_block_bytes)
        #: Of each copy of the checksum table; none where it lies in the entry.
        self.tables = [
            Extents(
                runs,
                columns,
                length_bytes=self.block_count * 4,
                block_bytes=blob.table_page_bytes,
                stripe_bytes=stripe_bytes,
            )
            for runs, columns in blob.tables
        ]
        roots = -(-self.block_count * 4 // blob.table_page_bytes) if blob.table_page_bytes else self.block_count
        if roots != len(blob.roots):
            raise VolumeDamaged(
                "checksums contradict the length of what they are of",
                where=f"blob {blob.birth:#x}",
                expected=f"{roots} roots",
                found=str(len(blob.roots)),
            )

    @cached_property
    def source(self) -> Source:
        """The same for the native engine."""
        return make_source(
            birth=self.entry.birth,
            length_bytes=self.entry.length_bytes,
            block_bytes=self.entry.checksum_block_bytes,
            stripe_bytes=self._stripe_bytes,
            rows=self.data.rows(),
            sums=np.ascontiguousarray(self.entry.roots, np.uint32),
            table=(self.entry.table_page_bytes, self.tables[0].rows()) if self.tables else None,
        )


class Cut(NamedTuple):
    """Ranges of an object as ranges of its blobs, all with checksum blocks of one size; all but `which` int64."""

    blobs: list[StoredBlob]
    #: Index of each one's blob, uint32; None: the first.
    which: U32 | None
    #: The range of the object that each serves; None: range i.
    source: I64 | None
    #: In the blob.
    start: I64
    length: I64
    #: Where it lies within the range of the object; None: at its beginning.
    within: I64 | None

    def buffers(self, index: U32 | None) -> U32 | None:
        """Of each, where `index` is of the object's ranges."""
        return index if index is None or self.source is None else index[self.source]

    def places(self, offsets: I64) -> I64:
        """Where each goes, where `offsets` is where the object's ranges go."""
        if self.source is None or self.within is None:
            return offsets
        result: I64 = offsets[self.source] + self.within
        return result


class StoredObject:
    """An object with its blobs, ready to be read. Immutable."""

    def __init__(self, name: str, value: ObjectValue, blob_of: Callable[[int], StoredBlob], stripe_bytes: int) -> None:
        """`blob_of`: the blob of a birth number. VolumeDamaged where a slice leaves its blob."""
        self.name = name
        self.value = value
        self.length_bytes = value.length_bytes
        self.blobs: list[StoredBlob] = []
        if value.blob is not None:
            self.blobs.append(StoredBlob(value.blob, stripe_bytes))
            rows = np.array([(value.blob.birth, 0, value.length_bytes)], layout.SLICE)
        else:
            rows = value.slices
        births, self._which = np.unique(rows["birth"], return_inverse=True)
        if value.blob is None:
            self.blobs = [blob_of(birth) for birth in births.tolist()]
        lengths = rows["length"].astype(np.int64)
        self._blob_start: I64 = rows["start"].astype(np.int64)
        self._end: I64 = np.cumsum(lengths)
        self._start: I64 = self._end - lengths
        room = np.array([blob.entry.length_bytes for blob in self.blobs], np.uint64)[self._which]
        # Subtracted where it cannot wrap round: values from media are not trusted to have a sum.
        if np.any(rows["start"] > room) or np.any(rows["length"] > room - rows["start"]):
            raise VolumeDamaged("a slice leaves its blob", where=f"object {name!r}")

    def slices(self, offset: int, length: int) -> list[tuple[int, int, int]]:
        """(birth, start in the blob, bytes) of the range, which lies within the object; none of them empty."""
        end = offset + length
        result = []
        first = int(np.searchsorted(self._end, offset, side="right"))
        for index in range(first, len(self._end)):
            low, high = max(offset, int(self._start[index])), min(end, int(self._end[index]))
            if low >= high:
                break
            begin = low - int(self._start[index]) + int(self._blob_start[index])
            result.append((self.blobs[int(self._which[index])].entry.birth, begin, high - low))
        return result

    def ranges_of(self, birth: int, low: int, high: int) -> list[tuple[int, int]]:
        """(start, end) in the object of all that bytes `low` to `high` of a blob are in it."""
        result = []
        for index, which in enumerate(self._which.tolist()):
            if self.blobs[which].entry.birth != birth:
                continue
            begin, start = int(self._blob_start[index]), int(self._start[index])
            first = max(low, begin)
            last = min(high, begin + int(self._end[index]) - start)
            if first < last:
                result.append((start + first - begin, start + last - begin))
        return result

    def parts(self, starts: I64, lengths: I64) -> Iterator[tuple[StoredBlob, Pieces]]:
        """Segments of the byte ranges `[start, start + length)`, which lie within the object, blob by blob.

        `source` and `within` of the pieces are those of the ranges; `start` counts in the blob.
        """
        if self.value.blob is not None:
            yield self.blobs[0], self.blobs[0].data.pieces(starts, lengths)
            return
        row, index_of, in_blob, length, within = self._slices_of(starts, lengths)
        for index in np.unique(index_of).tolist():
            mine = np.flatnonzero(index_of == index)
            pieces = self.blobs[index].data.pieces(in_blob[mine], length[mine])
            back = mine[pieces.source]
            yield self.blobs[index], pieces._replace(source=row[back], within=within[back] + pieces.within)

    def cut(self, starts: I64, lengths: I64) -> list[Cut]:
        """The byte ranges `[start, start + length)`, which lie within the object, in its blobs."""
        if self.value.blob is not None:
            return [Cut(self.blobs, None, None, starts, lengths, None)]
        row, index_of, in_blob, length, within = self._slices_of(starts, lengths)
        used, which = np.unique(index_of, return_inverse=True)
        blobs = [self.blobs[index] for index in used.tolist()]
        sizes = np.array([blob.entry.checksum_block_bytes for blob in blobs], np.int64)
        result = []
        for size in np.unique(sizes).tolist():
            mine = np.flatnonzero(sizes[which] == size)
            some, each = np.unique(which[mine], return_inverse=True)
            result.append(
                Cut(
                    [blobs[index] for index in some.tolist()],
                    each.astype(np.uint32),
                    row[mine],
                    in_blob[mine],
                    length[mine],
                    within[mine],
                )
            )
        return result

    def _slices_of(self, starts: I64, lengths: I64) -> tuple[I64, I64, I64, I64, I64]:
        """For each part of a range that is one slice: the range, the index of the blob, where it is in that, its bytes,
        where it is in the range."""
        source = np.flatnonzero(lengths > 0)
        low, high = starts[source], starts[source] + lengths[source]
        first = np.searchsorted(self._end, low, side="right")
        counts = np.searchsorted(self._end, high - 1, side="right") - first + 1
        which = spread(first, counts)
        row = np.repeat(np.arange(len(source)), counts)
        begin = np.maximum(self._start[which], low[row])
        end = np.minimum(self._end[which], high[row])
        in_blob = begin - self._start[which] + self._blob_start[which]
        return source[row], self._which[which], in_blob, end - begin, begin - low[row]


class Values(Protocol):
    """The catalogue, as far as objects and blobs are read from it."""

    def get(self, key: bytes) -> bytes | None: ...

    def scan(self, first: bytes, end: bytes | None = None) -> Iterator[tuple[bytes, bytes]]: ...


def objects_of(catalog: Values, prefix: str = "") -> Iterator[tuple[str, bytes]]:
    """(name, value) of all objects whose name begins with `prefix`, by name. VolumeDamaged."""
    first = layout.object_key(prefix)
    # No byte of UTF-8 is above 0xf4.
    for key, value in catalog.scan(first, first + b"\xff"):
        yield layout.name_of(key), value


def blobs_of(catalog: Values) -> Iterator[Blob]:
    """All blobs, wherever they lie. VolumeDamaged."""
    for key, value in catalog.scan(layout.BLOB_KEY, layout.object_key("")):
        yield layout.decode_blob(value, int.from_bytes(key[1:], "big"))
    for name, value in objects_of(catalog):
        if ObjectHead.decode(value, name).flags & layout.INLINE:
            blob = ObjectValue.decode(value, name).blob
            assert blob is not None
            yield blob
