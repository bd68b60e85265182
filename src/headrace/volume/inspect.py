"""One object from the inside: what `headrace volume stat` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.volume.data.extents import used_space
from headrace.volume.data.objects import StoredBlob

if TYPE_CHECKING:
    from headrace.volume.volume import Volume


@dataclass(frozen=True, kw_only=True)
class BlobExtent:
    """Contiguous space on one member. `holds`: "data", or "checksums" of the table."""

    member: int
    offset: int
    length_bytes: int
    holds: str


@dataclass(frozen=True, kw_only=True)
class BlobDetails:
    """An allocation. Sizes in bytes."""

    birth: int
    length_bytes: int
    stored_bytes: int
    checksum_block_bytes: int
    checksum_count: int
    #: 0: the checksums lie in the catalogue, and are the roots.
    table_page_bytes: int
    roots: list[int]
    extents: list[BlobExtent]


@dataclass(frozen=True, kw_only=True)
class SliceDetails:
    """Bytes `start` to `start + length_bytes` of blob `birth`."""

    birth: int
    start: int
    length_bytes: int


@dataclass(frozen=True, kw_only=True)
class ObjectDetails:
    """All that the catalogue has of an object."""

    name: str
    length_bytes: int
    created_s: float
    sequence: int
    #: The object's bytes are these, one after another.
    slices: list[SliceDetails]
    #: What they are slices of; of a packed or composed object others have slices, too.
    blobs: list[BlobDetails]
    #: No other object has bytes of its blobs: they end with it.
    own: bool


def details_of(volume: Volume, name: str) -> ObjectDetails:
    """ObjectNotFound."""
    info = volume.stat(name)
    stored = volume.stored(info)
    if stored.value.blob is not None:
        rows = [(stored.value.blob.birth, 0, stored.length_bytes)]
    else:
        rows = stored.value.slices.tolist()
    return ObjectDetails(
        name=info.name,
        length_bytes=info.length_bytes,
        created_s=info.created_s,
        sequence=info.sequence,
        slices=[SliceDetails(birth=birth, start=start, length_bytes=length) for birth, start, length in rows],
        blobs=[_blob(blob, volume.stripe_bytes) for blob in stored.blobs],
        own=stored.value.blob is not None,
    )


def _blob(stored: StoredBlob, stripe_bytes: int) -> BlobDetails:
    blob = stored.entry
    extents = [
        BlobExtent(member=member, offset=offset, length_bytes=length, holds=holds)
        for runs, columns, holds in (
            (blob.runs, blob.columns, "data"),
            (blob.table_runs, blob.table_columns, "checksums"),
        )
        for member, offset, length in used_space(runs, columns, stripe_bytes)
    ]
    return BlobDetails(
        birth=blob.birth,
        length_bytes=blob.length_bytes,
        stored_bytes=blob.stored_bytes,
        checksum_block_bytes=blob.checksum_block_bytes,
        checksum_count=stored.block_count,
        table_page_bytes=blob.table_page_bytes,
        roots=blob.roots.tolist(),
        extents=extents,
    )
