"""What a member says about its volume and itself."""

from __future__ import annotations

import struct
from dataclasses import dataclass
from typing import NamedTuple

from headrace.device import crc32c
from headrace.errors import NotAVolume, VolumeDamaged, VolumeTooNew
from headrace.volume.layout.base import (
    ALIGN,
    END_OF_COUNTS,
    END_OF_EPOCHS,
    KNOWN_INCOMPAT,
    LOG_COPIES,
    MAX_MEMBERS,
    RESERVED_BYTES,
    VERSION,
)

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
#   60  member_index            4 |                          | 3328 epoch_count         4
#                                                            | 3332 area_count; 0: 2     4
#                                                            | 3336 reserved            8
#  epoch: number 4 | copies 2 | flags 2 | began (ns) 8 |     | 3344 epochs        23 x 32
#         identity 16                                        | 4080 reserved           12
#                                                            | 4092 crc of 0..4091      4

SUPERBLOCK_BYTES = 4096
_SUPERBLOCK = struct.Struct("<8sIIQQ16sQIIQQQQQIIII8x128s")
_MEMBER = struct.Struct("<16sQQQ8x")
assert _SUPERBLOCK.size == 256 and _MEMBER.size == 48
assert _SUPERBLOCK.size + MAX_MEMBERS * _MEMBER.size == 3328 <= SUPERBLOCK_BYTES - 4
MAGIC = b"HEADRACE"
_EPOCHS_AT = 3328
_EPOCHS = struct.Struct("<II8x")
_EPOCH = struct.Struct("<IHHQ16s")
MAX_EPOCHS = 23
assert _EPOCHS_AT + _EPOCHS.size + MAX_EPOCHS * _EPOCH.size + 12 == SUPERBLOCK_BYTES - 4
BOTH_COPIES = (1 << LOG_COPIES) - 1


class Member(NamedTuple):
    """One row of the member table; offsets and sizes in bytes."""

    id: bytes
    size_bytes: int
    data_offset: int
    data_end: int


#: An epoch of members that went on without those that have it here, and that was given up by hand.
GIVEN_UP = 1


class Epoch(NamedTuple):
    """A time in which the same copies of the log counted, and no commit was acknowledged that is not on each of them.

    `copies`: bit k for copy k. `identity`: random, so that two epochs of one number are told apart; zeros where the
    volume is older than identities are.
    """

    number: int
    copies: int = BOTH_COPIES
    flags: int = 0
    began_ns: int = 0
    identity: bytes = bytes(16)

    def counts(self, copy: int) -> bool:
        return bool(self.copies >> copy & 1)

    def same(self, other: Epoch) -> bool:
        return (self.number, self.identity) == (other.number, other.identity)


@dataclass(frozen=True, kw_only=True)
class Superblock:
    """What a member says about its volume and itself. `epochs`: the log's, as far as they are kept, the current one
    first."""

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
    epochs: tuple[Epoch, ...] = (Epoch(1),)
    #: Of a log copy: two, or two pairs.
    area_count: int = 2
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
        table = b"".join(_MEMBER.pack(*member) for member in self.members)
        epochs = _EPOCHS.pack(len(self.epochs), self.area_count if self.area_count != 2 else 0) + b"".join(
            _EPOCH.pack(*epoch) for epoch in self.epochs
        )
        body = ((head + table).ljust(_EPOCHS_AT, b"\0") + epochs).ljust(SUPERBLOCK_BYTES - 4, b"\0")
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
        crc, (said,) = crc32c(data[: SUPERBLOCK_BYTES - 4]), struct.unpack_from("<I", data, SUPERBLOCK_BYTES - 4)
        if crc != said:
            raise VolumeDamaged(
                "the superblock does not match its checksum",
                where=where,
                expected=f"crc32c {said:#010x}",
                found=f"{crc:#010x}",
            )
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
            if generation >= END_OF_COUNTS:
                raise ValueError(f"generation {generation}")
            if stripe < ALIGN or stripe & (stripe - 1) or area < 2 * ALIGN or area % ALIGN:
                raise ValueError(f"stripe {stripe}, area {area}")
            members = tuple(
                Member(*_MEMBER.unpack_from(data, _SUPERBLOCK.size + i * _MEMBER.size)) for i in range(count)
            )
            for member in members:
                if not member.data_offset <= member.data_end <= member.size_bytes:
                    raise ValueError(f"data {member.data_offset}..{member.data_end} of {member.size_bytes}")
            text = name[:name_bytes].decode()
            epochs, areas = _epochs(data, epoch, created)
            for holder, offset in ((log_member0, log_offset0), (log_member1, log_offset1)):
                # Before anybody takes memory for an area.
                if offset % ALIGN or offset + RESERVED_BYTES + areas * area > members[holder].size_bytes:
                    raise ValueError(f"log at {offset} with {areas} areas of {area}, member {holder}")
        except ValueError as error:
            raise VolumeDamaged("a field of the superblock is out of range", where=where, found=str(error)) from error
        return cls(
            volume_id=volume_id, name=text, generation=generation, member_index=index, members=members,
            stripe_bytes=stripe, area_bytes=area, created_ns=created, log_offset=(log_offset0, log_offset1),
            log_member=(log_member0, log_member1), epochs=epochs, area_count=areas, version=version,
            incompat=incompat, compat=compat,
        )  # fmt: skip

    @property
    def epoch(self) -> Epoch:
        """The current one, as this member knows it."""
        return self.epochs[0]

    @property
    def log_epoch(self) -> int:
        return self.epoch.number

    def area_offset(self, copy: int, area: int) -> int:
        """Where area `area` of log copy `copy` begins on its member."""
        return self.log_offset[copy] + RESERVED_BYTES + area * self.area_bytes

    @property
    def area_blocks(self) -> int:
        return self.area_bytes // ALIGN


def _epochs(data: bytes, number: int, created_ns: int) -> tuple[tuple[Epoch, ...], int]:
    """And how many areas a log copy has. ValueError where they make no sense."""
    count, areas = _EPOCHS.unpack_from(data, _EPOCHS_AT)
    if count > MAX_EPOCHS or areas not in (0, 2, 4):
        raise ValueError(f"{count} epochs, {areas} areas")
    at = _EPOCHS_AT + _EPOCHS.size
    rows = tuple(Epoch(*_EPOCH.unpack_from(data, at + row * _EPOCH.size)) for row in range(count))
    if not rows:
        # Of a volume that is older than they are.
        rows = (Epoch(number, began_ns=created_ns),)
    if rows[0].number != number or any(
        not 0 < row.copies <= BOTH_COPIES or row.number >= END_OF_EPOCHS for row in rows
    ):
        raise ValueError(f"epoch {number}, and {rows[0]}")
    return rows, areas or 2


def superblock_offsets(size_bytes: int) -> tuple[int, int]:
    """Both places of a member's superblock."""
    return 0, size_bytes // ALIGN * ALIGN - SUPERBLOCK_BYTES
