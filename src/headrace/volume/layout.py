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

import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.device import crc32c
from headrace.errors import NotAVolume, VolumeDamaged, VolumeTooNew

VERSION = 1
#: Incompatible features that this version knows; any other bit in a superblock refuses the volume by name.
KNOWN_INCOMPAT = 0
#: Everything on a member is aligned to this, whatever its logical block.
ALIGN = 4096
MAX_MEMBERS = 64
MAX_NAME_BYTES = 1024
RESERVED_BYTES = 64 << 10
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


# ---- superblock ------------------------------------------------------------------------------------------------------
#
#    0  magic "HEADRACE"        8 |  64  stripe_bytes      8 | 120  reserved             8
#    8  version                 4 |  72  area_bytes        8 | 128  name, UTF-8        128
#   12  superblock_bytes = 4096 4 |  80  created (ns)      8 | 256  member table   64 x 48
#   16  incompat flags          8 |  88  log_offset[2]    16 |        id              16
#   24  compat flags            8 | 104  log_member[2]     8 |        size_bytes       8
#   32  volume id              16 | 112  log epoch         4 |        data_offset      8
#   48  generation              8 | 116  name_bytes        4 |        data_end         8
#   56  member_count            4 |                          |        reserved         8
#   60  member_index            4 |                          | 3328 reserved          764
#                                                            | 4092 crc of 0..4091      4

SUPERBLOCK_BYTES = 4096
_SUPERBLOCK = struct.Struct("<8sIIQQ16sQIIQQQQQIIII8x128s")
_MEMBER = struct.Struct("<16sQQQ8x")
assert _SUPERBLOCK.size == 256 and _MEMBER.size == 48
assert _SUPERBLOCK.size + MAX_MEMBERS * _MEMBER.size == 3328 <= SUPERBLOCK_BYTES - 4
MAGIC = b"HEADRACE"


class Member(NamedTuple):
    """One row of the member table; offsets and sizes in bytes."""

    id: bytes
    size_bytes: int
    data_offset: int
    data_end: int


@dataclass(frozen=True, kw_only=True)
class Superblock:
    """What a member says about its volume and itself."""

    volume_id: bytes
    name: str
    generation: int
    member_index: int
    members: tuple[Member, ...]
    stripe_bytes: int
    area_bytes: int
    created_ns: int
    log_offset: tuple[int, int]
    log_member: tuple[int, int]
    log_epoch: int = 1
    version: int = VERSION
    incompat: int = 0
    compat: int = 0

    def encode(self) -> bytes:
        name = self.name.encode()
        head = _SUPERBLOCK.pack(
            MAGIC, self.version, SUPERBLOCK_BYTES, self.incompat, self.compat, self.volume_id, self.generation,
            len(self.members), self.member_index, self.stripe_bytes, self.area_bytes, self.created_ns, *self.log_offset,
            *self.log_member, self.log_epoch, len(name), name,
        )  # fmt: skip
        body = (head + b"".join(_MEMBER.pack(*member) for member in self.members)).ljust(SUPERBLOCK_BYTES - 4, b"\0")
        return body + struct.pack("<I", crc32c(body))

    @classmethod
    def decode(cls, data: bytes, where: str) -> Superblock:
        """Raises NotAVolume (no magic), VolumeDamaged (its checksum or a field is wrong), VolumeTooNew."""
        if data[:8] != MAGIC:
            raise NotAVolume(
                "this is not a headrace volume",
                where=where,
                next_step="check the address, or make one with `headrace volume create`",
            )
        if struct.unpack_from("<I", data, SUPERBLOCK_BYTES - 4)[0] != crc32c(data[: SUPERBLOCK_BYTES - 4]):
            raise VolumeDamaged("the superblock does not match its checksum", where=where)
        (
            _, version, _, incompat, compat, volume_id, generation, count, index, stripe, area, created,
            log_offset0, log_offset1, log_member0, log_member1, epoch, name_bytes, name,
        ) = _SUPERBLOCK.unpack_from(data)  # fmt: skip
        if version > VERSION:
            raise VolumeTooNew(
                "the volume was written by a newer headrace",
                where=where,
                expected=f"format version {VERSION} at most",
                found=f"version {version}",
                next_step="upgrade headrace on this machine",
            )
        if incompat & ~KNOWN_INCOMPAT:
            raise VolumeTooNew(
                "the volume uses features that this headrace does not know",
                where=where,
                expected=f"feature flags within {KNOWN_INCOMPAT:#x}",
                found=f"{incompat:#x}",
                next_step="upgrade headrace on this machine",
            )
        try:
            if (
                not 1 <= count <= MAX_MEMBERS
                or index >= count
                or name_bytes > 128
                or max(log_member0, log_member1) >= count
            ):
                raise ValueError(f"{count} members, index {index}, log on {log_member0} and {log_member1}")
            if stripe < ALIGN or stripe & (stripe - 1) or area < 2 * ALIGN or area % ALIGN:
                raise ValueError(f"stripe {stripe}, area {area}")
            members = tuple(
                Member(*_MEMBER.unpack_from(data, _SUPERBLOCK.size + i * _MEMBER.size)) for i in range(count)
            )
            for member in members:
                if not member.data_offset <= member.data_end <= member.size_bytes:
                    raise ValueError(f"data {member.data_offset}..{member.data_end} of {member.size_bytes}")
            text = name[:name_bytes].decode()
        except ValueError as error:
            raise VolumeDamaged("a field of the superblock is out of range", where=where, found=str(error)) from error
        return cls(
            volume_id=volume_id, name=text, generation=generation, member_index=index, members=members,
            stripe_bytes=stripe, area_bytes=area, created_ns=created, log_offset=(log_offset0, log_offset1),
            log_member=(log_member0, log_member1), log_epoch=epoch, version=version, incompat=incompat, compat=compat,
        )  # fmt: skip

    def area_offset(self, copy: int, area: int) -> int:
        """Where area `area` (0 or 1) of log copy `copy` begins on its member."""
        return self.log_offset[copy] + RESERVED_BYTES + area * self.area_bytes

    @property
    def area_blocks(self) -> int:
        return self.area_bytes // ALIGN


def superblock_offsets(size_bytes: int) -> tuple[int, int]:
    """Both places of a member's superblock."""
    return 0, size_bytes // ALIGN * ALIGN - SUPERBLOCK_BYTES


# ---- area header -----------------------------------------------------------------------------------------------------
#
#    0  magic "HRLOGHDR"   8 | 24  base sequence    8 | 40  session        8
#    8  generation         8 | 32  snapshot_records 4 | 48  created (ns)   8
#   16  log epoch          4 | 36  reserved         4 | 56  reserved    4036
#   20  reserved           4 |                        | 4092 crc, from place_seed(id, 0, area index)
#
# Block 0 of an area. It is written last, so an area is there whole or not at all.

_AREA = struct.Struct("<8sQI4xQI4xQQ")
assert _AREA.size == 56
_AREA_MAGIC = b"HRLOGHDR"


class AreaHeader(NamedTuple):
    generation: int
    epoch: int
    base_sequence: int
    snapshot_records: int
    session: int
    created_ns: int

    def encode(self, volume_id: bytes, area: int) -> bytes:
        body = _AREA.pack(_AREA_MAGIC, *self).ljust(ALIGN - 4, b"\0")
        return body + struct.pack("<I", crc32c(body, place_seed(volume_id, 0, area)))

    @classmethod
    def decode(cls, data: bytes, volume_id: bytes, area: int) -> AreaHeader | None:
        """None where there is no valid header."""
        if data[:8] != _AREA_MAGIC:
            return None
        if struct.unpack_from("<I", data, ALIGN - 4)[0] != crc32c(data[: ALIGN - 4], place_seed(volume_id, 0, area)):
            return None
        return cls(*_AREA.unpack_from(data)[1:])


# ---- record ----------------------------------------------------------------------------------------------------------
#
#    0  magic "HRLR"     4 | 16  sequence     8 | 48  previous: header crc of the record before   4
#    4  kind             2 | 24  durable      8 | 52  reserved                                    8
#    6  flags            2 | 32  generation   8 | 60  crc of 0..59, from place_seed(id, generation, block)
#    8  payload_bytes    4 | 40  session      8 | 64  payload, then zeros up to a multiple of 4096
#   12  payload crc      4 |
#
# `durable` is the highest sequence that was durable on every log copy before this record was written. A reader believes
# record N when it has seen a record with durable >= N.

_RECORD = struct.Struct("<4sHHIIQQQQI8x")
RECORD_BYTES = 64
assert _RECORD.size == RECORD_BYTES - 4
_RECORD_MAGIC = b"HRLR"

COMMIT = 1
SNAPSHOT = 2
SESSION = 3
WINDOW = 4
MARKER = 5
MOVED = 6


class Record(NamedTuple):
    """A record of the log; `crc` is its header's, the link of the chain."""

    kind: int
    sequence: int
    durable: int
    generation: int
    session: int
    previous: int
    payload: bytes
    crc: int = 0

    @property
    def blocks(self) -> int:
        return record_blocks(len(self.payload))

    def encode(self, volume_id: bytes, block: int) -> tuple[bytes, int]:
        """The whole blocks, and the header's crc."""
        head = _RECORD.pack(
            _RECORD_MAGIC, self.kind, 0, len(self.payload), crc32c(self.payload), self.sequence, self.durable,
            self.generation, self.session, self.previous,
        )  # fmt: skip
        crc = crc32c(head, place_seed(volume_id, self.generation, block))
        return (head + struct.pack("<I", crc) + self.payload).ljust(self.blocks * ALIGN, b"\0"), crc


class RecordHead(NamedTuple):
    kind: int
    payload_bytes: int
    payload_crc: int
    sequence: int
    durable: int
    generation: int
    session: int
    previous: int
    crc: int

    @property
    def blocks(self) -> int:
        return record_blocks(self.payload_bytes)

    @classmethod
    def decode(cls, data: bytes, volume_id: bytes, block: int) -> RecordHead | None:
        """None where there is no valid header; `data` holds at least RECORD_BYTES."""
        if data[:4] != _RECORD_MAGIC:
            return None
        _, kind, _, payload_bytes, payload_crc, sequence, durable, generation, session, previous = _RECORD.unpack_from(
            data
        )
        crc = struct.unpack_from("<I", data, RECORD_BYTES - 4)[0]
        if crc != crc32c(data[: RECORD_BYTES - 4], place_seed(volume_id, generation, block)):
            return None
        return cls(kind, payload_bytes, payload_crc, sequence, durable, generation, session, previous, crc)

    def with_payload(self, payload: bytes) -> Record | None:
        if crc32c(payload) != self.payload_crc:
            return None
        return Record(
            self.kind, self.sequence, self.durable, self.generation, self.session, self.previous, payload, self.crc
        )


def record_blocks(payload_bytes: int) -> int:
    return align_up(RECORD_BYTES + payload_bytes) // ALIGN


# ---- heartbeat -------------------------------------------------------------------------------------------------------
#
#    0  magic "HRHEART\0"  8 | 40  beat            8 |  72  run id, UTF-8   184
#    8  version            4 | 48  interval (ns)   8 | 256  host, UTF-8     128
#   12  state              4 | 56  started (ns)    8 | 384  reserved        124
#   16  session            8 | 64  pid             4 | 508  crc, from place_seed(id, 0, 2^32)
#   24  nonce             16 | 68  run/host bytes 2+2 | 512  zeros
#
# Within 512 bytes, the smallest logical block, so that a write of it is never torn.

_HEARTBEAT = struct.Struct("<8sIIQ16sQQQIHH184s128s")
assert _HEARTBEAT.size == 384
_HEARTBEAT_MAGIC = b"HRHEART\0"
_HEARTBEAT_BYTES = 512
_HEARTBEAT_PLACE = 1 << 32

ACTIVE = 1
#: Closed, and every command of the session has ended.
CLOSED = 2
#: Closed, but grants were out whose writers never answered: their space stays quarantined.
CLOSED_OUTSTANDING = 3


class Heartbeat(NamedTuple):
    """Who holds the volume for writing. Times in ns; the wall clock is for people only."""

    state: int
    session: int
    nonce: bytes
    beat: int
    interval_ns: int
    started_ns: int
    pid: int
    run_id: str
    host: str

    def encode(self, volume_id: bytes) -> bytes:
        run_id, host = clip_utf8(self.run_id, 184), clip_utf8(self.host, 128)
        body = _HEARTBEAT.pack(
            _HEARTBEAT_MAGIC, VERSION, self.state, self.session, self.nonce, self.beat, self.interval_ns,
            self.started_ns, self.pid, len(run_id), len(host), run_id, host,
        ).ljust(_HEARTBEAT_BYTES - 4, b"\0")  # fmt: skip
        crc = crc32c(body, place_seed(volume_id, 0, _HEARTBEAT_PLACE))
        return (body + struct.pack("<I", crc)).ljust(ALIGN, b"\0")

    @classmethod
    def decode(cls, data: bytes, volume_id: bytes) -> Heartbeat | None:
        """None where there is no valid one."""
        body = data[: _HEARTBEAT_BYTES - 4]
        crc = struct.unpack_from("<I", data, _HEARTBEAT_BYTES - 4)[0]
        if data[:8] != _HEARTBEAT_MAGIC or crc != crc32c(body, place_seed(volume_id, 0, _HEARTBEAT_PLACE)):
            return None
        _, _, state, session, nonce, beat, interval, started, pid, run_n, host_n, run_id, host = _HEARTBEAT.unpack_from(
            data
        )
        return cls(
            state, session, nonce, beat, interval, started, pid,
            run_id[:run_n].decode(errors="replace"), host[:host_n].decode(errors="replace"),
        )  # fmt: skip


def clip_utf8(text: str, limit: int) -> bytes:
    """At most `limit` bytes of UTF-8, never ending inside of a character."""
    return text.encode()[:limit].decode(errors="ignore").encode()


# ---- entries of COMMIT and SNAPSHOT payloads -------------------------------------------------------------------------
#
# payload:  0 entry_count 4 | 4 reserved 4 | 8 commit sequence 8 (SNAPSHOT: of the last commit in it) | 16 entries
#
# entry:    0  entry_bytes (multiple of 8)        4 | 12 run_count (data)         4 | 32 length_bytes   8
#           4  operation: 1 put, 2 delete         1 | 16 column_count (data)      4 | 40 birth          8
#           5  log2 of checksum_block_bytes       1 | 20 run_count (table)        4 | 48 sequence       8
#           6  log2 of table page; 0: inline      1 | 24 column_count (table)     4 | 56 created (ns)   8
#           7  flags                              1 | 28 root_count               4 | 64 runs 16 each, data then table
#           8  name_bytes                         2 |                               |    columns 16 each, same
#          10  reserved                           2 |                               |    roots 4 each; name; zeros

PAYLOAD_HEAD = struct.Struct("<I4xQ")
_ENTRY = struct.Struct("<IBBBBH2xIIIIIQQQQ")
assert PAYLOAD_HEAD.size == 16 and _ENTRY.size == 64
PUT = 1
DELETE = 2


@dataclass(frozen=True, kw_only=True, eq=False)
class Entry:
    """An object as the log has it, or (`operation` DELETE) its end.

    `runs`, `columns`: RUN[r], COLUMN[c] of the data; `table_*`: of the checksum table, empty where it is inline.
    `roots`: uint32: the checksums themselves (inline), or those of the table's pages.
    """

    name: str
    operation: int
    length_bytes: int
    birth: int
    sequence: int
    created_ns: int
    checksum_block_bytes: int
    table_page_bytes: int
    runs: Rows
    columns: Rows
    table_runs: Rows
    table_columns: Rows
    roots: U32

    @property
    def encoded_bytes(self) -> int:
        """What `encode` gives, in bytes."""
        rows = len(self.runs) + len(self.columns) + len(self.table_runs) + len(self.table_columns)
        return align_up(_ENTRY.size + 16 * rows + 4 * len(self.roots) + len(self.name.encode()), 8)

    @property
    def stored_bytes(self) -> int:
        """Space on the members, in bytes: every run is rounded up once, at its last unit."""
        return sum(align_up(run[0]) for run in (*self.runs.tolist(), *self.table_runs.tolist()))

    def encode(self) -> bytes:
        name = self.name.encode()
        body = (
            self.runs.tobytes() + self.table_runs.tobytes() + self.columns.tobytes() + self.table_columns.tobytes()
            + self.roots.astype("<u4").tobytes() + name
        )  # fmt: skip
        total = align_up(_ENTRY.size + len(body), 8)
        head = _ENTRY.pack(
            total, self.operation, self.checksum_block_bytes.bit_length() - 1,
            self.table_page_bytes.bit_length() - 1 if self.table_page_bytes else 0, 0, len(name),
            len(self.runs), len(self.columns), len(self.table_runs), len(self.table_columns), len(self.roots),
            self.length_bytes, self.birth, self.sequence, self.created_ns,
        )  # fmt: skip
        return (head + body).ljust(total, b"\0")


def decode_entries(payload: bytes, where: str) -> tuple[int, list[Entry]]:
    """Commit sequence and entries of a COMMIT or SNAPSHOT payload. Raises VolumeDamaged: never reads beyond the
    payload.
    """
    try:
        count, sequence = PAYLOAD_HEAD.unpack_from(payload)
        entries = []
        position = PAYLOAD_HEAD.size
        for _ in range(count):
            entry, position = _decode_entry(payload, position)
            entries.append(entry)
    except (struct.error, ValueError) as error:
        raise VolumeDamaged("a record of the log makes no sense", where=where, found=str(error)) from error
    return sequence, entries


def _decode_entry(payload: bytes, start: int) -> tuple[Entry, int]:
    (
        total, operation, log2_block, log2_page, _flags, name_bytes, runs, columns, table_runs, table_columns, roots,
        length, birth, sequence, created,
    ) = _ENTRY.unpack_from(payload, start)  # fmt: skip
    need = _ENTRY.size + 16 * (runs + columns + table_runs + table_columns) + 4 * roots + name_bytes
    if total != align_up(need, 8) or start + total > len(payload) or not 12 <= log2_block <= 24 or log2_page > 40:
        raise ValueError(f"entry of {total} bytes at {start} of {len(payload)}")
    position = start + _ENTRY.size

    def rows(dtype: Any, count: int) -> Any:
        nonlocal position
        array = np.frombuffer(payload, dtype, count, position)
        position += array.nbytes
        return array

    data_runs, more_runs = rows(RUN, runs), rows(RUN, table_runs)
    data_columns, more_columns = rows(COLUMN, columns), rows(COLUMN, table_columns)
    root_array = rows("<u4", roots)
    name = payload[position : position + name_bytes].decode()
    entry = Entry(
        name=name, operation=operation, length_bytes=length, birth=birth, sequence=sequence, created_ns=created,
        checksum_block_bytes=1 << log2_block, table_page_bytes=1 << log2_page if log2_page else 0,
        runs=data_runs, columns=data_columns, table_runs=more_runs, table_columns=more_columns, roots=root_array,
    )  # fmt: skip
    return entry, start + total


def number_entry(entry: bytes, sequence: int) -> bytes:
    """An encoded entry with its sequence filled in."""
    return entry[:48] + struct.pack("<Q", sequence) + entry[56:]


def encode_entries(entries: list[bytes], commit_sequence: int) -> bytes:
    """The payload of encoded entries."""
    return PAYLOAD_HEAD.pack(len(entries), commit_sequence) + b"".join(entries)


# ---- session records -------------------------------------------------------------------------------------------------
#
#    0  number   8 |  8  flags (1: the predecessor did not end cleanly)  8 | 16  nonce  16 | 32  started (ns)  8
#   40  run id bytes 2, host bytes 2, reserved 4 | 48  run id, host

_SESSION = struct.Struct("<QQ16sQHH4x")
assert _SESSION.size == 48
UNCLEAN_PREDECESSOR = 1


class SessionEntry(NamedTuple):
    number: int
    flags: int
    nonce: bytes
    started_ns: int
    run_id: str
    host: str

    def encode(self) -> bytes:
        run_id, host = clip_utf8(self.run_id, 184), clip_utf8(self.host, 128)
        head = _SESSION.pack(self.number, self.flags, self.nonce, self.started_ns, len(run_id), len(host))
        return head + run_id + host

    @classmethod
    def decode(cls, payload: bytes, where: str) -> SessionEntry:
        try:
            number, flags, nonce, started, run_n, host_n = _SESSION.unpack_from(payload)
            run_id = payload[48 : 48 + run_n].decode()
            host = payload[48 + run_n : 48 + run_n + host_n].decode()
        except (struct.error, ValueError) as error:
            raise VolumeDamaged("a session record makes no sense", where=where, found=str(error)) from error
        return cls(number, flags, nonce, started, run_id, host)


def decode_extents(payload: bytes, where: str) -> Rows:
    """EXTENT[n] of a WINDOW payload."""
    if len(payload) % EXTENT.itemsize:
        raise VolumeDamaged("a window record makes no sense", where=where, found=f"{len(payload)} bytes")
    return np.frombuffer(payload, EXTENT)
