"""Checksum tables: one uint32 for every checksum block of a blob, stored, paged in and verified.

A small table lies in the blob's entry. A larger one has its own extents, is cut into pages, and the pages' checksums
(`roots`) lie in the entry: so the chain of trust goes from the log record to every data block.
"""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Sequence

import numpy as np

from headrace.device import BlockDevice, read_batch
from headrace.volume import layout
from headrace.volume.data.extents import I64, U32
from headrace.volume.data.objects import StoredBlob

#: Loaded pages of all blobs together, by default: the tables of 1 TiB in 64 KiB blocks, or of 64 GiB in 4 KiB blocks.
CACHE_BYTES = 64 << 20


def table_page_bytes(block_count: int, stripe_bytes: int) -> int:
    """Page size of the table of so many checksums; 0: it lies in the entry."""
    if block_count <= layout.INLINE_CHECKSUMS:
        return 0
    page = layout.MIN_TABLE_PAGE
    while -(-block_count * 4 // page) > layout.MAX_TABLE_PAGES and page < stripe_bytes:
        page *= 2
    return page


class _Table:
    """One blob's checksums, loaded page by page; untouched pages take no memory."""

    def __init__(self, stored: StoredBlob) -> None:
        self.stored = stored
        self.values = np.zeros(stored.block_count, np.uint32)
        self.loaded = np.zeros(len(stored.entry.roots), np.bool_)
        self.loaded_bytes = 0


class ChecksumCache:
    """Checksums of blocks, from tables that are loaded when needed and forgotten, oldest first, beyond the limit."""

    def __init__(self, devices: Sequence[BlockDevice], volume_id: bytes, limit_bytes: int = CACHE_BYTES) -> None:
        self._devices = devices
        self._volume_id = volume_id
        self._limit_bytes = limit_bytes
        self._tables: OrderedDict[int, _Table] = OrderedDict()
        self._lock = threading.Lock()

    def gather(self, stored: StoredBlob, blocks: I64) -> U32:
        """Checksums of `blocks` (indices within the blob). ChecksumMismatch where the table itself is damaged."""
        if stored.table is None:
            return np.ascontiguousarray(stored.entry.roots[blocks], np.uint32)
        with self._lock:
            table = self._tables.get(stored.entry.birth)
            if table is None:
                table = self._tables[stored.entry.birth] = _Table(stored)
            self._tables.move_to_end(stored.entry.birth)
            pages = blocks * 4 // stored.entry.table_page_bytes
            missing = np.unique(pages[~table.loaded[pages]])
            if len(missing):
                self._load(table, missing)
            result: U32 = table.values[blocks]
            self._shrink()
        return result

    def _load(self, table: _Table, pages: I64) -> None:
        extents = table.stored.table
        assert extents is not None
        page_bytes = table.stored.entry.table_page_bytes
        starts = pages * page_bytes
        lengths = np.minimum(page_bytes, extents.length_bytes - starts)
        pieces = extents.pieces(starts, lengths)
        batch = pieces.batch(
            buffer=np.zeros(len(pages), np.uint32),
            buffer_offset=starts,
            birth=table.stored.entry.birth,
            block_bytes=page_bytes,
            volume_id=self._volume_id,
            mark=layout.TABLE_BLOCK,
        )
        roots = np.ascontiguousarray(table.stored.entry.roots[pieces.start // page_bytes], np.uint32)
        read_batch(self._devices, batch, [table.values.view(np.uint8)], roots)
        table.loaded[pages] = True
        table.loaded_bytes += int(lengths.sum())

    def _shrink(self) -> None:
        total = sum(table.loaded_bytes for table in self._tables.values())
        while total > self._limit_bytes and self._tables:
            _, table = self._tables.popitem(last=False)
            total -= table.loaded_bytes

    def after_fork(self) -> None:
        """In the child: the lock may have been held by a thread that it does not have."""
        self._lock = threading.Lock()
        self._tables.clear()
