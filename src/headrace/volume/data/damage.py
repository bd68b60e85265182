"""Where exactly bytes do not match their checksum: found by a second look, for messages.

An engine says that a batch has a bad block. Whoever reads the message wants to know which bytes of which object, on
which member, where on it, and what was expected and found there. So the segment is read again, block by block.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import numpy as np

from headrace.device import BlockDevice, crc32c
from headrace.errors import DeviceError, VolumeDamaged
from headrace.volume import layout
from headrace.volume.data.extents import U32, Extents, Pieces

#: Read at once; a longer checksum block is read whole.
_LOOK_BYTES = 1 << 20


class BadBlock(NamedTuple):
    """A block that does not match its checksum: bytes `start` to `start + length` of what it is a block of."""

    start: int
    length: int
    member: int
    offset: int
    expected: int
    found: int

    @property
    def sums(self) -> tuple[str, str]:
        """What was expected and what was found, for an error."""
        return f"crc32c {self.expected:#010x}", f"{self.found:#010x}"


def misplaced(devices: Sequence[BlockDevice], extents: Extents, what: str) -> VolumeDamaged | None:
    """Where extents lie on no member, or leave theirs, which no engine reads: the error, of the first of them.

    An engine can only say that it was asked for what cannot be; that it is the volume which says so is known here.
    """
    for member, offset, length in extents.used():
        if member >= len(devices):
            return VolumeDamaged(
                "bytes are said to be on a member that there is not",
                where=f"{what}, member {member} offset {offset}",
                expected=f"a member below {len(devices)}",
                found=str(member),
            )
        device = devices[member]
        where = f"{what}, member {member} ({device.uri}) offset {offset}"
        if offset + length > device.size_bytes:
            return VolumeDamaged(
                "bytes are said to be behind the end of their member", where=where,
                expected=f"an end of at most {device.size_bytes}", found=f"{offset} + {length}",
            )  # fmt: skip
        if offset % device.block_bytes:
            return VolumeDamaged(
                "bytes are said to begin within a block of their member", where=where,
                expected=f"a multiple of {device.block_bytes}", found=str(offset),
            )  # fmt: skip
    return None


def find_bad(
    devices: Sequence[BlockDevice],
    pieces: Pieces,
    sums: U32,
    *,
    block_bytes: int,
    birth: int,
    volume_id: bytes,
    mark: int = 0,
    row: int | None = None,
) -> BadBlock | None:
    """The first block of these segments (`row`: of this one) that is bad at this look, too; None where there is none.

    `sums`: of all blocks of all segments, in their order.
    """
    first, counts = pieces.blocks(block_bytes)
    before = np.cumsum(counts) - counts
    for index in range(len(pieces.member)) if row is None else [row]:
        found = _find(
            devices,
            (int(pieces.member[index]), int(pieces.offset[index]), int(pieces.length[index])),
            int(first[index]),
            sums[int(before[index]) : int(before[index]) + int(counts[index])],
            block_bytes,
            (volume_id, birth, mark),
        )
        if found is not None:
            return found
    return None


def _find(
    devices: Sequence[BlockDevice],
    place: tuple[int, int, int],
    first_block: int,
    sums: U32,
    block_bytes: int,
    identity: tuple[bytes, int, int],
) -> BadBlock | None:
    member, offset, length = place
    volume_id, birth, mark = identity
    step = max(_LOOK_BYTES // block_bytes, 1) * block_bytes
    for at in range(0, length, step):
        size = min(step, length - at)
        buffer = np.empty(layout.align_up(size, devices[member].block_bytes), np.uint8)
        try:
            devices[member].read_into(offset + at, buffer)
        except DeviceError:
            # The first look could; the message does without.
            return None
        for begin in range(0, size, block_bytes):
            part = buffer[begin : min(begin + block_bytes, size)]
            number = (at + begin) // block_bytes
            block = first_block + number
            crc = crc32c(part, layout.place_seed(volume_id, birth, mark | block))
            if crc != sums[number]:
                return BadBlock(
                    block * block_bytes, len(part), member, offset + at + begin, int(sums[number]), crc
                )  # fmt: skip
    return None
