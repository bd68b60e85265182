"""One object from the inside: what `headrace volume stat` shows."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from headrace.volume.extents import used_space

if TYPE_CHECKING:
    from headrace.volume.volume import Volume


@dataclass(frozen=True, kw_only=True)
class ObjectExtent:
    """Contiguous space on one member. `holds`: "data", or "checksums" of the table."""

    member: int
    offset: int
    length_bytes: int
    holds: str


@dataclass(frozen=True, kw_only=True)
class ObjectDetails:
    """All that the catalog has of an object. Sizes in bytes."""

    name: str
    length_bytes: int
    stored_bytes: int
    created_s: float
    sequence: int
    birth: int
    checksum_block_bytes: int
    checksum_count: int
    #: 0: the checksums lie in the object's entry, and are the roots.
    table_page_bytes: int
    roots: list[int]
    extents: list[ObjectExtent]


def details_of(volume: Volume, name: str) -> ObjectDetails:
    """ObjectNotFound."""
    info = volume.stat(name)
    entry = volume.entry(name)
    extents = [
        ObjectExtent(member=member, offset=offset, length_bytes=length, holds=holds)
        for runs, columns, holds in (
            (entry.runs, entry.columns, "data"),
            (entry.table_runs, entry.table_columns, "checksums"),
        )
        for member, offset, length in used_space(runs, columns, volume.stripe_bytes)
    ]
    return ObjectDetails(
        name=info.name,
        length_bytes=info.length_bytes,
        stored_bytes=info.stored_bytes,
        created_s=info.created_s,
        sequence=info.sequence,
        birth=info.birth,
        checksum_block_bytes=info.checksum_block_bytes,
        checksum_count=-(-info.length_bytes // info.checksum_block_bytes),
        table_page_bytes=entry.table_page_bytes,
        roots=entry.roots.tolist(),
        extents=extents,
    )
