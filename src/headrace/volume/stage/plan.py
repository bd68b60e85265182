"""What is to be staged: the blobs of some objects, which chunks of them these have bytes in, and where they go."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

import numpy as np
import numpy.typing as npt

from headrace.errors import VolumeFull
from headrace.units import format_bytes
from headrace.volume.data.objects import ObjectInfo, StoredBlob, StoredObject
from headrace.volume.layout import ObjectValue, align_up
from headrace.volume.stage.layout import BLOB, CHUNK_BYTES, MOST_CHUNKS, Facts, map_place

if TYPE_CHECKING:
    from headrace.volume.volume import Volume

Bools = npt.NDArray[np.bool_]


@dataclass(frozen=True)
class Chunk:
    """A part of a blob that is there or not."""

    number: int
    #: Index of the blob in the plan.
    blob: int
    #: In the blob.
    start: int
    length: int


class Plan:
    """Made by `plan_of`. Immutable, but for `limit`."""

    def __init__(self, facts: Facts, parts: Sequence[tuple[str, int, StoredBlob]], wanted: Bools) -> None:
        self.facts = facts
        #: Of each blob: an object that has bytes of it, the sequence of that, and where it is in the volume.
        self.parts = parts
        #: Chunks that are to be there.
        self.wanted = wanted

    @property
    def table_bytes(self) -> int:
        return int(self.facts.blobs["table_bytes"].sum())

    @property
    def need_bytes(self) -> int:
        """Of the medium."""
        return self.facts.base + self.table_bytes + self.facts.wanted_bytes

    @cached_property
    def _lengths(self) -> npt.NDArray[np.int64]:
        return _chunk_lengths(self.facts.blobs, self.facts.chunk_bytes)

    def bytes_of(self, chunks: Bools) -> int:
        """Of the chunks that are set, of those that are wanted."""
        return int(self._lengths[chunks & self.wanted].sum())

    def limited(self, room_bytes: int, end_bytes: int | None, *, partial: bool, where: str) -> Plan:
        """The same, with no more than fits: the first chunks. VolumeFull where that is not all, unless `partial`.

        `end_bytes`: nothing can be behind that.
        """
        fits = end_bytes is None or self.facts.size_bytes <= end_bytes
        if self.need_bytes <= room_bytes and fits:
            return self
        over = room_bytes - self.facts.base - self.table_bytes
        keep = self.wanted & (np.cumsum(np.where(self.wanted, self._lengths, 0)) <= over)
        if end_bytes is not None:
            keep &= self.facts.base + self.ends <= end_bytes
        if not partial or not keep.any():
            raise VolumeFull(
                "the stage has no room for this",
                where=where,
                expected=f"{format_bytes(self.need_bytes)} for dataset {self.facts.dataset}",
                found=format_bytes(max(0, room_bytes)),
                next_step="free space, allow more, or stage as much as fits (--partial)",
            )
        facts = replace(self.facts, wanted_chunks=int(keep.sum()), wanted_bytes=int(self._lengths[keep].sum()))
        return Plan(facts, self.parts, keep)

    @property
    def ends(self) -> npt.NDArray[np.int64]:
        """Where each chunk ends, behind the map."""
        blobs = self.facts.blobs
        counts = -(-blobs["length"] // self.facts.chunk_bytes)
        within = np.arange(int(counts.sum()), dtype=np.int64) - np.repeat(blobs["first_chunk"], counts)
        result: npt.NDArray[np.int64] = np.repeat(blobs["data_at"], counts) + within * self.facts.chunk_bytes
        return -(-(result + self._lengths) // 4096) * 4096

    def chunks(self, missing: Bools) -> Iterator[Chunk]:
        """Those that are wanted and missing, blob by blob."""
        blobs = self.facts.blobs
        for number in np.flatnonzero(missing & self.wanted).tolist():
            blob = int(np.searchsorted(blobs["first_chunk"], number, side="right")) - 1
            start = (number - int(blobs["first_chunk"][blob])) * self.facts.chunk_bytes
            yield Chunk(number, blob, start, int(self._lengths[number]))

    def view(self, blob: int, stripe_bytes: int) -> StoredObject:
        """A blob as an object of its own, to be read; errors name one that has bytes of it."""
        name, sequence, stored = self.parts[blob]
        entry = stored.entry
        value = ObjectValue(sequence=sequence, created_ns=0, length_bytes=entry.length_bytes, blob=entry)
        return StoredObject(name, value, lambda birth: stored, stripe_bytes)


def plan_of(volume: Volume, dataset: str, infos: Sequence[ObjectInfo]) -> Plan:
    """Everything that these objects have bytes in, in their order. ObjectNotFound where one was replaced meanwhile."""
    parts: list[tuple[str, int, StoredBlob]] = []
    index: dict[int, int] = {}
    used: list[tuple[int, int, int]] = []
    for info in infos:
        stored = volume.stored(info)
        blobs = {blob.entry.birth: blob for blob in stored.blobs}
        for birth, start, length in stored.slices(0, stored.length_bytes):
            if birth not in index:
                index[birth] = len(parts)
                parts.append((info.name, info.sequence, blobs[birth]))
            used.append((index[birth], start, length))
    rows = np.zeros(len(parts), BLOB)
    total = sum(blob.entry.length_bytes for _, _, blob in parts)
    chunk_bytes = CHUNK_BYTES
    while total // chunk_bytes > MOST_CHUNKS:
        chunk_bytes *= 2
    at = chunk = 0
    for row, (_, _, blob) in zip(rows, parts, strict=True):
        length = blob.entry.length_bytes
        table_bytes = blob.block_count * 4 if blob.tables else 0
        table_at, data_at = at, at + align_up(table_bytes)
        at = data_at + align_up(length)
        row["birth"], row["length"], row["data_at"] = blob.entry.birth, length, data_at
        row["table_at"], row["table_bytes"], row["first_chunk"] = table_at, table_bytes, chunk
        chunk += -(-length // chunk_bytes)
    wanted = np.zeros(chunk, np.bool_)
    for blob_index, start, length in used:
        first = int(rows["first_chunk"][blob_index])
        wanted[first + start // chunk_bytes : first + (start + length - 1) // chunk_bytes + 1] = True
    wanted_chunks, wanted_bytes = int(wanted.sum()), int(_chunk_lengths(rows, chunk_bytes)[wanted].sum())
    facts = Facts(
        volume_id=volume.id,
        volume=volume.name[:128],
        dataset=dataset,
        objects={info.name: (info.sequence, info.length_bytes) for info in infos},
        chunk_bytes=chunk_bytes,
        blobs=rows,
        wanted_chunks=wanted_chunks,
        wanted_bytes=wanted_bytes,
        dataset_chunks=wanted_chunks,
        dataset_bytes=wanted_bytes,
        data_bytes=at,
        map_at=0,
    )
    return Plan(replace(facts, map_at=map_place(facts.encode())), parts, wanted)


def _chunk_lengths(blobs: npt.NDArray[Any], chunk_bytes: int) -> npt.NDArray[np.int64]:
    """Of every chunk of these blobs."""
    counts = -(-blobs["length"] // chunk_bytes)
    lengths = np.full(int(counts.sum()), chunk_bytes, np.int64)
    ends = np.cumsum(counts)
    lengths[ends - 1] = blobs["length"] - (counts - 1) * chunk_bytes
    return lengths
