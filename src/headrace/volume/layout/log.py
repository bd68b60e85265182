"""The log: headers of its areas, and the records in them."""

from __future__ import annotations

import struct
from typing import NamedTuple

import numpy as np

from headrace.device import crc32c
from headrace.errors import VolumeDamaged
from headrace.volume.layout.base import (
    ALIGN,
    END_OF_COUNTS,
    END_OF_EPOCHS,
    END_OF_SESSIONS,
    EXTENT,
    Rows,
    align_up,
    place_seed,
)

# ---- area header -----------------------------------------------------------------------------------------------------
#
#    0  magic "HRLOGHDR"   8 | 24  base sequence    8 | 40  session        8
#    8  generation         8 | 32  snapshot_records 4 | 48  created (ns)   8
#   16  log epoch          4 | 36  reserved         4 |
#   20  reserved           4 |                        | 56  mover          8
#                            |                        | 64  reserved    4028
#                            |                        | 4092 crc, from place_seed(id, 0, area index)
#
# Block 0 of an area. It is written last, so an area is there whole or not at all.

_AREA = struct.Struct("<8sQI4xQI4xQQQ")
assert _AREA.size == 64
_AREA_MAGIC = b"HRLOGHDR"


class AreaHeader(NamedTuple):
    generation: int
    epoch: int
    base_sequence: int
    snapshot_records: int
    session: int
    created_ns: int
    #: The session that moved here. Above `session`: it had no SESSION record yet.
    mover: int = 0

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
        header = cls(*_AREA.unpack_from(data)[1:])
        counts = max(header.generation, header.base_sequence) < END_OF_COUNTS and header.epoch < END_OF_EPOCHS
        return header if counts and max(header.session, header.mover) < END_OF_SESSIONS else None


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
#: Version 2: the tables of the catalogue (`table.py`).
TABLES = 7
TABLES_CHANGED = 8


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
        if max(sequence, durable, generation) >= END_OF_COUNTS or session >= END_OF_SESSIONS:
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


def decode_extents(payload: bytes, where: str) -> Rows:
    """EXTENT[n] of a WINDOW payload."""
    if len(payload) % EXTENT.itemsize:
        raise VolumeDamaged("a window record makes no sense", where=where, found=f"{len(payload)} bytes")
    return np.frombuffer(payload, EXTENT)
