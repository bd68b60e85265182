"""Checksum tables: one uint32 for every checksum block of a blob, stored, paged in and verified.

A small table lies in the blob's entry. A larger one has its own extents, is cut into pages, and the pages' checksums
(`roots`) lie in the entry: so the chain of trust goes from the log record to every data block. Without a page nobody
can say what of its data is good, so a table stands twice, on two members where there are two (in volumes made before
that, once): a bad page of one copy is read from the other, and reported.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import TypeAlias

import numpy as np

from headrace.device import BlockDevice, ChecksumPages, read_batch
from headrace.errors import ChecksumMismatch, DeviceError, UsageError, VolumeDamaged
from headrace.volume import layout
from headrace.volume.data.absent import refuse, solid
from headrace.volume.data.damage import BadBlock, find_bad, misplaced
from headrace.volume.data.extents import I64, U32, Pieces
from headrace.volume.data.objects import StoredBlob

#: Loaded pages of all blobs together, by default: the tables of 1 TiB in 64 KiB blocks, or of 64 GiB in 4 KiB blocks.
CACHE_BYTES = 64 << 20
#: Pages read at once; a longer one is read alone.
LOAD_BYTES = 8 << 20
#: What is said about single copies, at most: the first ones say it.
_MAX_FINDINGS = 100
#: What is wrong with one copy of a page, and says nothing of the other.
_NOT_READ = (ChecksumMismatch, DeviceError, VolumeDamaged)
#: Gives a page of a blob to the native engine.
Keep: TypeAlias = Callable[[int, int, U32], None]


def table_page_bytes(block_count: int, stripe_bytes: int) -> int:
    """Page size of the table of so many checksums; 0: it lies in the entry."""
    if block_count <= layout.INLINE_CHECKSUMS:
        return 0
    page = layout.MIN_TABLE_PAGE
    while -(-block_count * 4 // page) > layout.MAX_TABLE_PAGES and page < stripe_bytes:
        page *= 2
    return page


class TableMismatch(ChecksumMismatch):
    """No copy of a page of a checksum table is good: bytes `low` to `high` of blob `birth` cannot be verified."""

    birth = low = high = 0


class _Table:
    """One blob's checksums, filled page by page; untouched pages take no memory. The cache's lock guards it."""

    def __init__(self, stored: StoredBlob) -> None:
        self._page = stored.entry.table_page_bytes // 4
        self.values = np.zeros(stored.block_count, np.uint32)
        self.loaded = np.zeros(len(stored.entry.roots), np.bool_)
        self.loaded_bytes = 0

    def fill(self, pages: I64, numbers: U32) -> None:
        """Row i of `numbers` is page `pages[i]`, verified; the last page of a table may be shorter."""
        for row, page in enumerate(pages.tolist()):
            if not self.loaded[page]:
                place = self.values[page * self._page : (page + 1) * self._page]
                place[:] = numbers[row, : len(place)]
                self.loaded[page] = True
                self.loaded_bytes += place.nbytes


class ChecksumCache:
    """Checksums of blocks, from tables that are loaded when needed and forgotten, oldest first, beyond the limit.

    Its lock is never held for I/O: several threads that miss the same page each read it, and nobody waits for those of
    others. What is read stands beside the tables until it is verified.

    The native engine does that for itself, and keeps single `pages`; it reads the first copy of a table only. Where
    that is bad the page is read here, and given to it.
    """

    def __init__(self, devices: Sequence[BlockDevice], volume_id: bytes, limit_bytes: int = CACHE_BYTES) -> None:
        self._devices = devices
        self._volume_id = volume_id
        self._limit_bytes = limit_bytes
        self.pages = ChecksumPages(limit_bytes)
        self._tables: OrderedDict[int, _Table] = OrderedDict()
        self._lock = threading.Lock()
        #: What one copy of a table lacked and the other had.
        self.findings: list[str] = []

    def gather(self, stored: StoredBlob, blocks: I64) -> U32:
        """Checksums of `blocks` (indices within the blob). TableMismatch where the table itself is damaged,
        VolumeDamaged where it is said to be where nothing can be."""
        if not stored.tables:
            return np.ascontiguousarray(stored.entry.roots[blocks], np.uint32)
        pages = np.unique(blocks * 4 // stored.entry.table_page_bytes)
        with self._lock:
            # Those of this moment: what is read now is of no use after `clear`.
            keep = self.pages.keep
            table = self._tables.get(stored.entry.birth)
            if table is None:
                table = self._tables[stored.entry.birth] = _Table(stored)
            self._tables.move_to_end(stored.entry.birth)
            missing = pages[~table.loaded[pages]]
        step = max(1, LOAD_BYTES // stored.entry.table_page_bytes)
        for first in range(0, len(missing), step):
            some = missing[first : first + step]
            numbers = self._load(stored, some, keep)
            with self._lock:
                table.fill(some, numbers)
        with self._lock:
            result: U32 = table.values[blocks]
            self._shrink()
        return result

    def _load(self, stored: StoredBlob, pages: I64, keep: Keep) -> U32:
        """These pages, a row each, every one of them from a copy that is good."""
        numbers = np.zeros((len(pages), stored.entry.table_page_bytes // 4), np.uint32)
        try:
            self._read(stored, 0, pages, numbers)
        except _NOT_READ:
            for row, page in enumerate(pages.tolist()):
                self._page(stored, page, numbers[row : row + 1], keep)
        return numbers

    def _pieces(self, stored: StoredBlob, copy: int, pages: I64) -> tuple[Pieces, U32]:
        """Segments of these pages, and their checksums."""
        extents, size = stored.tables[copy], stored.entry.table_page_bytes
        starts = pages * size
        pieces = extents.pieces(starts, np.minimum(size, extents.length_bytes - starts))
        return pieces, np.ascontiguousarray(stored.entry.roots[pieces.start // size], np.uint32)

    def _read(self, stored: StoredBlob, copy: int, pages: I64, into: U32) -> None:
        entry = stored.entry
        pieces, roots = self._pieces(stored, copy, pages)
        batch = pieces.batch(
            buffer=np.zeros(len(pages), np.uint32),
            buffer_offset=np.arange(len(pages), dtype=np.int64) * entry.table_page_bytes,
            birth=entry.birth,
            block_bytes=entry.table_page_bytes,
            volume_id=self._volume_id,
            mark=layout.TABLE_BLOCK,
        )
        what = f"checksum table of blob {entry.birth:#x}"
        try:
            refuse(self._devices, pieces.member, what)
            read_batch(solid(self._devices), batch, [into.reshape(-1).view(np.uint8)], roots)
        except UsageError as error:
            raise misplaced(self._devices, stored.tables[copy], what) or error from error

    def _page(self, stored: StoredBlob, page: int, into: U32, keep: Keep) -> None:
        """One page, from whichever copy has it. TableMismatch; DeviceError where none can be read."""
        errors: list[ChecksumMismatch | DeviceError | VolumeDamaged] = []
        for copy in range(len(stored.tables)):
            try:
                self._read(stored, copy, np.array([page]), into)
            except _NOT_READ as error:
                errors.append(error)
                continue
            size = stored.entry.table_page_bytes // 4
            keep(stored.entry.birth, page, into[0, : min(size, stored.block_count - page * size)])
            for bad, wrong in enumerate(errors):
                self._report(
                    f"blob {stored.entry.birth:#x}: copy {bad} of page {page} of its checksum table is damaged at "
                    f"{self._where(stored, bad, page)}: {wrong.what}"
                )
            return
        for one in errors:
            if isinstance(one, VolumeDamaged):
                raise one
        if all(isinstance(one, DeviceError) for one in errors):
            raise errors[0]
        places = " and ".join(self._where(stored, copy, page) for copy in range(len(errors)))
        looks = [self._look(stored, copy, page) for copy in range(len(errors))]
        bad_looks = [look for look in looks if look is not None]
        covered = stored.entry.table_page_bytes // 4 * stored.entry.checksum_block_bytes
        mismatch = TableMismatch(
            "the checksum table is damaged",
            where=f"page {page} of it, {places}",
            expected=bad_looks[0].sums[0] if bad_looks else None,
            found=" and ".join(look.sums[1] for look in bad_looks) or None,
        )
        mismatch.birth = stored.entry.birth
        mismatch.low = page * covered
        mismatch.high = min((page + 1) * covered, stored.entry.length_bytes)
        raise mismatch

    def _where(self, stored: StoredBlob, copy: int, page: int) -> str:
        pieces, _ = self._pieces(stored, copy, np.array([page]))
        member = int(pieces.member[0])
        uri = self._devices[member].uri if member < len(self._devices) else "there is none"
        return f"member {member} ({uri}) offset {int(pieces.offset[0])}"

    def _look(self, stored: StoredBlob, copy: int, page: int) -> BadBlock | None:
        pieces, roots = self._pieces(stored, copy, np.array([page]))
        return find_bad(
            self._devices,
            pieces,
            roots,
            block_bytes=stored.entry.table_page_bytes,
            birth=stored.entry.birth,
            volume_id=self._volume_id,
            mark=layout.TABLE_BLOCK,
        )

    def _report(self, finding: str) -> None:
        with self._lock:
            if finding not in self.findings and len(self.findings) < _MAX_FINDINGS:
                self.findings.append(finding)

    def _shrink(self) -> None:
        total = sum(table.loaded_bytes for table in self._tables.values())
        while total > self._limit_bytes and self._tables:
            _, table = self._tables.popitem(last=False)
            total -= table.loaded_bytes

    def clear(self) -> None:
        """Forget all pages."""
        with self._lock:
            self._tables.clear()
            self.pages = ChecksumPages(self._limit_bytes)

    def forget(self) -> None:
        """The same in a forked child, where the lock may have been held by a thread that it does not have."""
        self._lock = threading.Lock()
        self.clear()
