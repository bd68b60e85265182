"""The checker's reading of blobs: every page of every copy of a checksum table, every block of data."""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from itertools import repeat

import numpy as np

from headrace.device import crc32c
from headrace.errors import DeviceError
from headrace.volume import layout
from headrace.volume.layout import Blob, Superblock
from headrace.volume.repair.findings import PIECE_BYTES, Reader

#: Of a page of which no copy is good.
_UNKNOWN = -1


@dataclass
class Use:
    """A blob, and the objects that it is part of: (name, where in the object, where in the blob, bytes)."""

    blob: Blob
    slices: list[tuple[str, int, int, int]] = field(default_factory=list)

    def hit(self, low: int, high: int) -> list[tuple[str, int, int]]:
        """(object, from, to) of all that bytes `low` to `high` of the blob are in objects."""
        found = [
            (name, position + max(low - start, 0), position + min(high - start, length))
            for name, position, start, length in self.slices
            if start < high and low < start + length
        ]
        return found or [(f"blob {self.blob.birth:#x}", low, high)]


@dataclass(frozen=True)
class _Block:
    """A block, and where it stands; `data` None: it cannot be read, and `why`."""

    member: int
    offset: int
    data: bytes | None
    why: str = ""


def contradiction(superblock: Superblock, blob: Blob) -> str | None:
    """What a blob says that cannot be; None where it can. Looked at before anything is gone through."""
    capacity = sum(member.data_end - member.data_offset for member in superblock.members)
    count = -(-blob.length_bytes // blob.checksum_block_bytes)
    roots = -(-count * 4 // blob.table_page_bytes) if blob.table_page_bytes else count
    if blob.length_bytes > capacity:
        return f"{blob.length_bytes} bytes, on members of {capacity}"
    if len(blob.roots) != roots:
        return f"{len(blob.roots)} roots of {count} checksums"
    rows = [(blob.length_bytes, blob.checksum_block_bytes, blob.runs, blob.columns)]
    rows += [(4 * count, blob.table_page_bytes, *table) for table in blob.tables]
    for length, block_bytes, runs, columns in rows:
        lengths, widths = runs["length"].tolist(), runs["width"].tolist()
        if (
            sum(lengths) != length
            or sum(widths) != len(columns)
            or not all(lengths)
            or not all(widths)
            or any(one % block_bytes for one in lengths[:-1])
            or (block_bytes > superblock.stripe_bytes and max(widths) > 1)
        ):
            return f"runs {runs.tolist()[:4]} with {len(columns)} columns for {length} bytes"
    return None


def space(superblock: Superblock, runs: layout.Rows, columns: layout.Rows) -> Iterator[tuple[int, int, int]]:
    """(member, offset, bytes) of every column: its units, the last unit of a run in whole blocks."""
    base = 0
    for length, width, _ in runs.tolist():
        unit = superblock.stripe_bytes if width > 1 else length
        count = -(-length // unit)
        for column in range(min(width, count)):
            member, _, offset = columns[base + column].tolist()
            mine = (count - column + width - 1) // width * unit
            if (count - 1) % width == column:
                mine += layout.align_up(length - (count - 1) * unit) - unit
            yield member, offset, mine
        base += width


def units(superblock: Superblock, runs: layout.Rows, columns: layout.Rows) -> Iterator[tuple[int, int, int]]:
    """(member, offset, bytes) of every stripe unit, in the order of the bytes."""
    column_base = 0
    for length, width, _ in runs.tolist():
        unit = superblock.stripe_bytes if width > 1 else length
        for k in range(-(-length // unit)):
            member, _, offset = columns[column_base + k % width].tolist()
            yield member, offset + k // width * unit, min(unit, length - k * unit)
        column_base += width


def _blocks(
    superblock: Superblock, rows: tuple[layout.Rows, layout.Rows], block_bytes: int, read: Reader
) -> Iterator[_Block]:
    """Every checksum block in order. A run on one member is one unit, however long: it is read in pieces."""
    most = max(PIECE_BYTES, block_bytes)
    for member, start, length in units(superblock, *rows):
        for offset in range(start, start + length, most):
            size = min(most, start + length - offset)
            try:
                data, why = read(member, offset, size), ""
            except DeviceError as error:
                data, why = None, error.what
            for at in range(0, size, block_bytes):
                part = None if data is None else data[at : at + block_bytes]
                yield _Block(member, offset + at, part, why)


def _crc(superblock: Superblock, blob: Blob, place: int, data: bytes) -> int:
    return crc32c(data, crc32c(superblock.volume_id + struct.pack("<QQ", blob.birth, place)))


def check_blob(superblock: Superblock, use: Use, read: Reader, tell: Callable[[], None] = lambda: None) -> None:
    """A finding for every block of data, and every copy of a page of checksums, that is not as it should be."""
    blob = use.blob
    if contradiction(superblock, blob) is not None:
        # Said already, with the catalogue.
        return
    size = blob.checksum_block_bytes
    expected = _checksums(superblock, use, read, tell)
    for index, block in enumerate(_blocks(superblock, (blob.runs, blob.columns), size, read)):
        tell()
        wanted = next(expected, _UNKNOWN)
        low, high = index * size, min((index + 1) * size, blob.length_bytes)
        if block.data is None:
            _note(read, use, f"data cannot be read ({block.why})", block, low, high)
        elif wanted != _UNKNOWN and (crc := _crc(superblock, blob, index, block.data)) != wanted:
            _note(read, use, "data does not match its checksum", block, low, high, (wanted, crc))
    # What is left of the table, where the data ended early.
    for _ in expected:
        pass


def _note(
    read: Reader, use: Use, what: str, block: _Block, low: int, high: int, sums: tuple[int, int] | None = None
) -> None:
    for hit in use.hit(low, high):
        read.note(what, block.member, block.offset, fatal=True, sums=sums, hit=hit)


def _checksums(superblock: Superblock, use: Use, read: Reader, tell: Callable[[], None]) -> Iterator[int]:
    """The checksum of every block, from whichever copy of its page is good; _UNKNOWN where none is."""
    blob = use.blob
    roots = blob.roots.tolist()
    if not blob.table_page_bytes:
        yield from roots
        return
    count = -(-blob.length_bytes // blob.checksum_block_bytes)
    each = blob.table_page_bytes // 4
    copies = [_blocks(superblock, rows, blob.table_page_bytes, read) for rows in blob.tables]
    for page, root in enumerate(roots):
        good: bytes | None = None
        bad: list[tuple[int, _Block, tuple[int, int] | None]] = []
        for copy, blocks in enumerate(copies):
            block = next(blocks, None)
            tell()
            if block is None:
                continue
            crc = None if block.data is None else _crc(superblock, blob, layout.TABLE_BLOCK | page, block.data)
            if crc == root:
                good = block.data if good is None else good
            else:
                bad.append((copy, block, None if crc is None else (root, crc)))
        low = page * each * blob.checksum_block_bytes
        high = min(low + each * blob.checksum_block_bytes, blob.length_bytes)
        for copy, block, sums in bad:
            what = (
                f"copy {copy} of a page of the checksum table " if len(copies) > 1 else "a page of the checksum table "
            )
            what += "does not match its checksum" if block.data is not None else f"cannot be read ({block.why})"
            for hit in use.hit(low, high) if good is None else use.hit(low, high)[:1]:
                read.note(
                    what, block.member, block.offset, fatal=good is None, sums=sums, hit=hit,
                    page=(blob.birth, page),
                )  # fmt: skip
        yield from (
            np.frombuffer(good, "<u4").tolist()
            if good is not None
            else repeat(_UNKNOWN, min(each, count - page * each))
        )


def read_bytes(blob: Blob) -> int:
    """What reading a blob costs."""
    return blob.length_bytes + int(blob.table_runs["length"].sum())
