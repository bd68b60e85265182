"""Salvage, the bytes: each checksum block of a blob, verified, or why it is lost."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np

from headrace.device import crc32c
from headrace.errors import VolumeDamaged
from headrace.volume import layout
from headrace.volume.data.extents import Extents
from headrace.volume.layout import U32, Blob, Superblock
from headrace.volume.repair.salvage_media import Media
from headrace.volume.repair.scrub_data import contradiction

#: Read at once.
_PIECE_BYTES = 1 << 20
#: Pages of checksum tables that are kept, of a blob; at least two.
_PAGES_BYTES = 4 << 20


@dataclass(frozen=True)
class Piece:
    """Bytes of an object from `offset` on; `data` None: they are lost, and `why` says how."""

    offset: int
    length: int
    data: bytes | None
    why: str = ""


class BlobReader:
    """Reads one blob. Many objects may be slices of it, so what is known of its checksums is kept."""

    def __init__(self, superblock: Superblock, media: Media, blob: Blob) -> None:
        """VolumeDamaged where the blob contradicts itself."""
        said = contradiction(superblock, blob)
        if said is not None:
            raise VolumeDamaged("a blob makes no sense", where=f"blob {blob.birth:#x}", found=said)
        self._volume_id = superblock.volume_id
        self._media = media
        self._blob = blob
        self._block = blob.checksum_block_bytes
        self._data = Extents(
            blob.runs, blob.columns,
            length_bytes=blob.length_bytes, block_bytes=self._block, stripe_bytes=superblock.stripe_bytes,
        )  # fmt: skip
        self._table_bytes = -(-blob.length_bytes // self._block) * 4
        self._tables = [
            Extents(
                runs, columns,
                length_bytes=self._table_bytes, block_bytes=blob.table_page_bytes,
                stripe_bytes=superblock.stripe_bytes,
            )
            for runs, columns in blob.tables
        ]  # fmt: skip
        self._pages: OrderedDict[int, tuple[U32 | None, str]] = OrderedDict()

    def pieces(self, start: int, length: int, position: int) -> Iterator[Piece]:
        """Bytes of the blob, which are those of an object from `position` on."""
        step = max(_PIECE_BYTES // self._block, 1) * self._block
        end = start + length
        for low in range(start // self._block * self._block, end, step):
            high = min(low + step, -(-end // self._block) * self._block, self._blob.length_bytes)
            for at, found, why in self._blocks(low, high):
                # A block may begin before what is wanted and end behind it.
                first, last = max(at, start), min(at + self._block, end)
                part = None if found is None else found[first - at : last - at]
                yield Piece(position + first - start, last - first, part, why)

    def _blocks(self, low: int, high: int) -> Iterator[tuple[int, bytes | None, str]]:
        """(start, bytes or None, why) of every checksum block of a range of them."""
        pieces = self._data.pieces(np.array([low]), np.array([high - low]))
        columns = (pieces.member, pieces.offset, pieces.start, pieces.length)
        for member, offset, start, size in zip(*(column.tolist() for column in columns), strict=True):
            found, why = self._media.read(member, offset, size)
            for at in range(0, size, self._block):
                if found is None:
                    yield start + at, None, why
                    continue
                data = found[at : at + self._block]
                index = (start + at) // self._block
                known, lost = self._checksum(index)
                if known is None:
                    yield start + at, None, f"its checksum is lost, with a page of the checksum table: {lost}"
                elif self._crc(index, data) != known:
                    where = f"member {member} offset {offset + at}"
                    yield start + at, None, f"it does not match its checksum ({where})"
                else:
                    yield start + at, data, ""

    def _crc(self, place: int, data: bytes) -> int:
        return crc32c(data, layout.place_seed(self._volume_id, self._blob.birth, place))

    def _checksum(self, index: int) -> tuple[int | None, str]:
        if not self._tables:
            return int(self._blob.roots[index]), ""
        page, rest = divmod(index * 4, self._blob.table_page_bytes)
        if page not in self._pages:
            self._pages[page] = self._page(page)
            while len(self._pages) > max(_PAGES_BYTES // self._blob.table_page_bytes, 2):
                self._pages.popitem(last=False)
        values, why = self._pages[page]
        return (None, why) if values is None else (int(values[rest // 4]), "")

    def _page(self, page: int) -> tuple[U32 | None, str]:
        """From whichever copy matches."""
        size, lost = self._blob.table_page_bytes, ""
        low = page * size
        for table in self._tables:
            pieces = table.pieces(np.array([low]), np.array([min(size, self._table_bytes - low)]))
            member, offset, length = int(pieces.member[0]), int(pieces.offset[0]), int(pieces.length[0])
            data, why = self._media.read(member, offset, length)
            if data is not None and self._crc(layout.TABLE_BLOCK | page, data) == int(self._blob.roots[page]):
                return np.frombuffer(data, "<u4"), ""
            lost = lost or why or f"it does not match its checksum (member {member} offset {offset})"
        return None, lost
