"""Reads of byte ranges: the native engine finds the segments of each, and the checksums of their blocks, by itself.

A **source** is a row of bytes that is dealt out over devices, with its checksums: at hand, or in a table on the devices
whose pages are read when they are first needed. What a batch (`headrace.device.batch`) needs a dozen passes of numpy
for is here a few divisions a range.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headrace import _native
from headrace.device.native import buffer_error
from headrace.device.protocol import U32, BlockDevice, Buffer
from headrace.device.transfer import Transfer, native_handles

#: A source in the hands of the native engine. Immutable.
Source: TypeAlias = _native.Source
#: Pages of checksum tables that were read, of many sources; `kept_bytes`. Thread-safe, and of one process.
ChecksumPages: TypeAlias = _native.ChecksumPages

I64: TypeAlias = npt.NDArray[np.int64]
#: Length and width of each run, member and offset of each column.
Rows: TypeAlias = tuple[npt.NDArray[np.uint64], U32, U32, npt.NDArray[np.uint64]]


def make_source(
    *,
    birth: int,
    length_bytes: int,
    block_bytes: int,
    stripe_bytes: int,
    rows: Rows,
    sums: U32,
    table: tuple[int, Rows] | None,
) -> Source:
    """`rows`: of the bytes; `sums`: the checksum of each block, or, with `table` (bytes of a page, rows), of each page
    of that. UsageError where they contradict each other.
    """
    return _native.Source(birth, length_bytes, block_bytes, stripe_bytes, rows, sums, table)


def submit_ranges(
    devices: Sequence[BlockDevice],
    volume_id: bytes,
    sources: Sequence[Source],
    source: U32 | None,
    start: I64,
    length: I64,
    buffers: Sequence[Buffer],
    buffer: U32 | None,
    buffer_offset: I64,
    pages: ChecksumPages | None,
    room_bytes: int = 0,
) -> Transfer | None:
    """Start to read `length` bytes from `start` on of each `sources[source]` (uint32[n]; None: of the first) to
    `buffer_offset` of `buffers[buffer]` (likewise). Every block is verified, unless `pages` is None.

    `room_bytes`: before and behind the place of each range so much of its buffer (as far as it goes) may be
    overwritten, too, and those places do not meet: then what lies in the same blocks as the range needs no copy.

    None where a device has no native engine. All sources have checksum blocks of one size. `UsageError`, before
    anything moves, where a range leaves its source or its buffer.
    """
    handles = native_handles(devices)
    if handles is None:
        return None
    try:
        return Transfer(
            _native.submit_ranges(
                handles, volume_id, sources, source, start, length, buffers, buffer, buffer_offset, pages, room_bytes
            )
        )
    except (BufferError, TypeError, ValueError) as error:
        raise buffer_error(error, writable=True) from error
