"""Many transfers in one call: the shape of every plan above the device.

A `Batch` is a table with one row a segment, each column one numpy array. It is built by vector arithmetic, handed to
the native engine once, and no Python runs per segment or per block.

    member   offset        length      skip   take      buffer  buffer_offset   birth   first_block
    uint32   uint64        uint64      uint64 uint64    uint32  uint64          uint64  uint64
      |        |             |           |      |          |       |              |        |
      |        +-- on the member, a multiple of its block_bytes    |     identity of the allocation, mixed into
      +-- index into `devices`           |      |          |       |     the checksums
                             |           |      |          +-------+-- which buffer of `buffers`, and where in it
                             |           +------+-- reads: the part of the segment that is wanted
                             +-- bytes of data; may end inside a block (reads are cut, writes padded with zeros)

Checksums: CRC32C over each `checksum_block_bytes` of a segment's data (the last one may be shorter), seeded with the
identity `volume_id (16 bytes) || birth (u64 LE) || first_block + k (u64 LE)`, so that a stale or misdirected block
cannot match.
They lie in one flat uint32 array in segment order: segment i owns ceil(length[i] / checksum_block_bytes) of them.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from headrace.device.protocol import U32, U64
from headrace.errors import UsageError


def _u64_empty() -> U64:
    return np.zeros(0, np.uint64)


def _u32_empty() -> U32:
    return np.zeros(0, np.uint32)


@dataclass(frozen=True, kw_only=True)
class Batch:
    """See the module text for the columns. `skip`/`take` default to the whole segment; identity columns to zero."""

    member: U32
    offset: U64
    length: U64
    buffer_offset: U64
    #: Index into `buffers`; zero by default.
    buffer: U32 = field(default_factory=_u32_empty)
    skip: U64 = field(default_factory=_u64_empty)
    take: U64 = field(default_factory=_u64_empty)
    birth: U64 = field(default_factory=_u64_empty)
    first_block: U64 = field(default_factory=_u64_empty)
    #: 0: no checksums.
    checksum_block_bytes: int = 0
    volume_id: bytes = bytes(16)

    def __post_init__(self) -> None:
        n = len(self.member)
        for name in ("skip", "take", "buffer", "birth", "first_block"):
            if len(getattr(self, name)) == 0 and n:
                zeros = np.zeros(n, np.uint32 if name == "buffer" else np.uint64)
                object.__setattr__(self, name, self.length if name == "take" else zeros)
        for name in ("member", "offset", "length", "buffer_offset", "buffer", "skip", "take", "birth", "first_block"):
            column = getattr(self, name)
            dtype = np.uint32 if name in ("member", "buffer") else np.uint64
            if column.dtype != dtype or column.ndim != 1 or len(column) != n or not column.flags.c_contiguous:
                raise UsageError(
                    f"Batch.{name} has the wrong shape",
                    expected=f"contiguous {np.dtype(dtype).name}[{n}]",
                    found=f"{column.dtype.name}{list(column.shape)}",
                )
        if len(self.volume_id) != 16:
            raise UsageError("Batch.volume_id", expected="16 bytes", found=f"{len(self.volume_id)} bytes")

    def __len__(self) -> int:
        return len(self.member)

    @property
    def checksum_count(self) -> int:
        """Length of the flat checksum array that belongs to this batch."""
        if not self.checksum_block_bytes:
            return 0
        block = np.uint64(self.checksum_block_bytes)
        return int(((self.length + block - np.uint64(1)) // block).sum())
