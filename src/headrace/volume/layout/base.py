"""What every structure of a volume shares: alignment, limits, rows of extents, and the seed of its CRC."""

from __future__ import annotations

import struct

import numpy as np
import numpy.typing as npt

from headrace.device import crc32c

VERSION = 2
#: Incompatible feature: the log has had more than one epoch, so a copy of it may be there that does not count.
EPOCHS = 1 << 0
#: Incompatible feature: checksum tables may stand twice, and those of new blobs do.
PAIRED_CHECKSUMS = 1 << 1
#: Incompatible feature: a log copy has other than two areas.
AREAS = 1 << 2
#: Incompatible features that this version knows; any other bit in a superblock refuses the volume by name.
KNOWN_INCOMPAT = EPOCHS | PAIRED_CHECKSUMS | AREAS
#: Everything on a member is aligned to this, whatever its logical block.
ALIGN = 4096
MAX_MEMBERS = 64
MAX_NAME_BYTES = 1024
RESERVED_BYTES = 64 << 10
#: Numbers that count up (sequences, generations, beats) stay below: a volume that says otherwise was made by hand.
END_OF_COUNTS = 1 << 62
#: Sessions, which are half of a birth number, and epochs.
END_OF_SESSIONS = END_OF_EPOCHS = (1 << 32) - 1
LOG_COPIES = 2
#: Tables of at most this many checksums live in the object's entry and need no extent.
INLINE_CHECKSUMS = 16
#: A checksum table is read and verified by pages; big tables have bigger pages, so that an entry stays small.
MIN_TABLE_PAGE = 16 << 10
MAX_TABLE_PAGES = 1 << 16
#: Table pages are blocks of the same birth number, apart from the data by this bit of the block index.
TABLE_BLOCK = 1 << 63

#: One row a run of an object: `width` columns of stripe units, dealt out round-robin.
RUN = np.dtype([("length", "<u8"), ("width", "<u4"), ("reserved", "<u4")])
#: One row a column: the contiguous space on one member that holds every `width`-th unit of a run.
COLUMN = np.dtype([("member", "<u4"), ("reserved", "<u4"), ("offset", "<u8")])
#: One row a range of a member: allocation windows. `flags`: of the record, in its first row.
EXTENT = np.dtype([("member", "<u4"), ("flags", "<u4"), ("offset", "<u8"), ("length", "<u8")])
#: These rows stand instead of all that the session logged before, not beside them.
INSTEAD = 1
assert RUN.itemsize == 16 and COLUMN.itemsize == 16 and EXTENT.itemsize == 24

Rows = npt.NDArray[np.void]
U32 = npt.NDArray[np.uint32]


def align_up(value: int, unit: int = ALIGN) -> int:
    return -(-value // unit) * unit


def place_seed(volume_id: bytes, owner: int, place: int) -> int:
    """Where the CRC of a structure starts that belongs to `owner` (a generation) at `place` (a block index)."""
    return crc32c(volume_id + struct.pack("<QQ", owner, place))


def clip_utf8(text: str, limit: int) -> bytes:
    """At most `limit` bytes of UTF-8, never ending inside of a character."""
    return text.encode()[:limit].decode(errors="ignore").encode()
