"""Bytes where they lie, read behind the volume's back: which of them did late writes change?"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.device import BlockDevice, open_device
from headrace.volume import Grant
from headrace.volume.layout import RESERVED_BYTES, Superblock, align_up, superblock_offsets
from headrace.volume.media.members import close_all

#: Members that are no larger together are looked at whole.
WHOLE_BYTES = 256 << 20
_PIECE_BYTES = 1 << 20
#: What is compared, and counted where it differs.
_GRAIN_BYTES = 4096


class Place(NamedTuple):
    member: int
    offset: int
    length: int


@dataclass(frozen=True)
class Picture:
    """A hash of each 4 KiB."""

    digests: list[bytes]


class Media:
    """The members of a volume, and the places of them that are looked at."""

    def __init__(self, uris: Sequence[str], superblock: Superblock, grants: Sequence[Grant]) -> None:
        """Where all of it is too much: what `grants` gave away, and what the volume itself stands on."""
        self._uris = [*uris]
        sizes = [member.size_bytes for member in superblock.members]
        if sum(sizes) <= WHOLE_BYTES:
            self.places = [Place(index, 0, size) for index, size in enumerate(sizes)]
        else:
            self.places = sorted({*_structures(superblock), *_granted(grants)})

    @property
    def total_bytes(self) -> int:
        return sum(place.length for place in self.places)

    def look(self) -> Picture:
        """Read now, over new connections."""
        devices: list[BlockDevice] = []
        try:
            devices += [open_device(uri, read_only=True) for uri in self._uris]
            return Picture([hashlib.blake2b(grain.data, digest_size=16).digest() for grain in self._grains(devices)])
        finally:
            close_all(devices)

    def _grains(self, devices: Sequence[BlockDevice]) -> Iterator[npt.NDArray[np.uint8]]:
        buffer = np.empty(_PIECE_BYTES, np.uint8)
        for member, offset, length in self.places:
            for at in range(0, length, _PIECE_BYTES):
                piece = buffer[: min(_PIECE_BYTES, length - at)]
                devices[member].read_into(offset + at, piece)
                for start in range(0, len(piece), _GRAIN_BYTES):
                    yield piece[start : start + _GRAIN_BYTES]

    @staticmethod
    def moved_bytes(before: Picture, after: Picture) -> int:
        """In whole grains."""
        changed = sum(old != new for old, new in zip(before.digests, after.digests, strict=True))
        return changed * _GRAIN_BYTES


def _granted(grants: Sequence[Grant]) -> Iterator[Place]:
    for grant in grants:
        for extents in (grant.data_extents(), *grant.table_extents()):
            for member, offset, length in extents.used():
                yield Place(member, offset, align_up(length))


def _structures(superblock: Superblock) -> Iterator[Place]:
    """Superblocks, heartbeat block and log."""
    for index, member in enumerate(superblock.members):
        for offset in superblock_offsets(member.size_bytes):
            yield Place(index, offset, _GRAIN_BYTES)
        for copy, holder in enumerate(superblock.log_member):
            if holder == index:
                length = RESERVED_BYTES + superblock.area_count * superblock.area_bytes
                yield Place(index, superblock.log_offset[copy], length)
