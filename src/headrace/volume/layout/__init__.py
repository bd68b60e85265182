"""The bytes of a volume: every structure drawn, defined and size-checked once. Normative text: `docs/volume-format.md`.

All integers are little-endian. `crc` is CRC32C. Where a structure has a place or an owner, its CRC starts from that
identity (`place_seed`), so that a stale or misdirected copy of the right kind does not match.

A member                                              A log copy (at `log_offset`, on two members where there are two)
========                                              ==========
0        superblock          4096                     0          heartbeat block   4096
4096     reserved            to 64 KiB                4096       reserved          to 64 KiB
64 KiB   log copy, if any                             64 KiB     area A            area_bytes
...      data                                         + area     area B            area_bytes
size-4K  superblock, again   4096
"""

from __future__ import annotations

from headrace.volume.layout.base import (
    ALIGN,
    COLUMN,
    EXTENT,
    INLINE_CHECKSUMS,
    INSTEAD,
    KNOWN_INCOMPAT,
    LOG_COPIES,
    MAX_MEMBERS,
    MAX_NAME_BYTES,
    MAX_TABLE_PAGES,
    MIN_TABLE_PAGE,
    RESERVED_BYTES,
    RUN,
    TABLE_BLOCK,
    U32,
    VERSION,
    Rows,
    align_up,
    clip_utf8,
    place_seed,
)
from headrace.volume.layout.entry import (
    BLOB_KEY,
    DELETE,
    INLINE,
    NO_SLICES,
    OBJECT_BYTES,
    OBJECT_KEY,
    PAYLOAD_BYTES,
    PUT,
    SLICE,
    Blob,
    ObjectHead,
    ObjectValue,
    Operation,
    Totals,
    blob_key,
    decode_blob,
    decode_operations,
    encode_operations,
    name_of,
    object_key,
    peek_blob,
)
from headrace.volume.layout.heartbeat import ACTIVE, CLOSED, CLOSED_OUTSTANDING, Heartbeat
from headrace.volume.layout.log import (
    COMMIT,
    MARKER,
    MOVED,
    RECORD_BYTES,
    SESSION,
    SNAPSHOT,
    WINDOW,
    AreaHeader,
    Record,
    RecordHead,
    decode_extents,
    record_blocks,
)
from headrace.volume.layout.session import UNCLEAN_PREDECESSOR, SessionEntry
from headrace.volume.layout.superblock import MAGIC, SUPERBLOCK_BYTES, Member, Superblock, superblock_offsets
from headrace.volume.layout.version1 import decode_version1

__all__ = [
    "ACTIVE",
    "ALIGN",
    "BLOB_KEY",
    "CLOSED",
    "CLOSED_OUTSTANDING",
    "COLUMN",
    "COMMIT",
    "DELETE",
    "EXTENT",
    "INLINE",
    "INLINE_CHECKSUMS",
    "INSTEAD",
    "KNOWN_INCOMPAT",
    "LOG_COPIES",
    "MAGIC",
    "MARKER",
    "MAX_MEMBERS",
    "MAX_NAME_BYTES",
    "MAX_TABLE_PAGES",
    "MIN_TABLE_PAGE",
    "MOVED",
    "NO_SLICES",
    "OBJECT_BYTES",
    "OBJECT_KEY",
    "PAYLOAD_BYTES",
    "PUT",
    "RECORD_BYTES",
    "RESERVED_BYTES",
    "RUN",
    "SESSION",
    "SLICE",
    "SNAPSHOT",
    "SUPERBLOCK_BYTES",
    "TABLE_BLOCK",
    "U32",
    "UNCLEAN_PREDECESSOR",
    "VERSION",
    "WINDOW",
    "AreaHeader",
    "Blob",
    "Heartbeat",
    "Member",
    "ObjectHead",
    "ObjectValue",
    "Operation",
    "Record",
    "RecordHead",
    "Rows",
    "SessionEntry",
    "Superblock",
    "Totals",
    "align_up",
    "blob_key",
    "clip_utf8",
    "decode_blob",
    "decode_extents",
    "decode_operations",
    "decode_version1",
    "encode_operations",
    "name_of",
    "object_key",
    "peek_blob",
    "place_seed",
    "record_blocks",
    "superblock_offsets",
]
