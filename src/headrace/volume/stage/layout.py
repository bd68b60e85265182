"""The bytes of a stage, which is one file or block device.

    offset      bytes
     0           4096  head: magic "HRSTAGE" and 0, version u32, bytes of the facts u32, their CRC32C u32, zero u32,
                       where the map is u64, nonce 16; then zeros
     4096              facts: JSON
     map            M  a bit for each chunk, the lowest of byte 0 first; padded with zeros to 4096
     map + M           copies of blobs and of their checksum tables, each at a multiple of 4096 from here

Little-endian. A chunk whose bit is set is there, and the checksum table of its blob is: both were durable before the
bit was. The head is written last, and taken away first where a stage becomes another one: as long as it is being made
it begins with "HRMAKES" and 0, so that whatever else begins with zeros is not taken for one. The nonce is new each
time. So a reader that has the facts of one nonce, and finds another, has to look again.

What is read here may be anything: it is bounded and checked for sense, and where it lies all the same, reads by it do
not verify.
"""

from __future__ import annotations

import json
import struct
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from headrace.device import crc32c
from headrace.errors import VolumeDamaged, VolumeTooNew
from headrace.volume.layout import ALIGN, align_up

I64 = npt.NDArray[np.int64]

MAGIC = b"HRSTAGE\0"
#: Of one that is being made.
MAKING = b"HRMAKES\0"
VERSION = 1
HEAD_BYTES = 4096
_HEAD = struct.Struct("<8sIIIIQ16s")
#: Far above what the catalogue can say of the blobs of one dataset.
MAX_FACTS_BYTES = 64 << 20
#: Chunks are this long, or longer where there would be more than `MOST_CHUNKS`: a look at the map stays cheap.
CHUNK_BYTES = 4 << 20
MOST_CHUNKS = 1 << 20
_MAX_BYTES = 1 << 62

#: One row a blob. `data_at`, `table_at`: behind the map; `table_bytes`: 0 where the table lies in the catalogue.
BLOB = np.dtype(
    [("birth", "<i8"), ("length", "<i8"), ("data_at", "<i8"), ("table_at", "<i8"), ("table_bytes", "<i8"),
     ("first_chunk", "<i8")]
)  # fmt: skip


@dataclass(frozen=True, kw_only=True, eq=False)
class Facts:
    """What a stage is of, and where in it what lies."""

    volume_id: str
    #: For people.
    volume: str
    dataset: str
    #: Name -> sequence and bytes of each object.
    objects: dict[str, tuple[int, int]]
    chunk_bytes: int
    #: BLOB[n], by where they lie.
    blobs: npt.NDArray[Any]
    #: Chunks that are to be there in the end, and their bytes.
    wanted_chunks: int
    wanted_bytes: int
    #: Of the whole dataset: more, where the stage is to have a part of it.
    dataset_chunks: int
    dataset_bytes: int
    #: Behind the map.
    data_bytes: int
    map_at: int
    nonce: bytes = b""

    @property
    def chunk_count(self) -> int:
        if not len(self.blobs):
            return 0
        last = self.blobs[-1]
        return int(last["first_chunk"]) + -(-int(last["length"]) // self.chunk_bytes)

    @property
    def map_bytes(self) -> int:
        return align_up(-(-self.chunk_count // 8))

    @property
    def base(self) -> int:
        """Where what is behind the map begins."""
        return self.map_at + self.map_bytes

    @property
    def size_bytes(self) -> int:
        """Of the whole stage."""
        return self.base + self.data_bytes

    def same_places(self, other: Facts) -> bool:
        """What is there of the one is there of the other."""
        alike = (self.volume_id, self.chunk_bytes) == (other.volume_id, other.chunk_bytes)
        return alike and np.array_equal(self.blobs, other.blobs)

    def encode(self) -> bytes:
        """JSON."""
        told = {
            "volume_id": self.volume_id,
            "volume": self.volume,
            "dataset": self.dataset,
            "objects": self.objects,
            "chunk_bytes": self.chunk_bytes,
            "blobs": self.blobs.tolist(),
            "wanted_chunks": self.wanted_chunks,
            "wanted_bytes": self.wanted_bytes,
            "dataset_chunks": self.dataset_chunks,
            "dataset_bytes": self.dataset_bytes,
            "data_bytes": self.data_bytes,
        }
        return json.dumps(told, separators=(",", ":")).encode()

    @staticmethod
    def decode(data: bytes, head: Head, where: str) -> Facts:
        """VolumeDamaged where they are none, or cannot be."""
        try:
            told = json.loads(data)
            facts = Facts(
                volume_id=_text(told["volume_id"]),
                volume=_text(told["volume"]),
                dataset=_text(told["dataset"]),
                objects={_text(k): (_count(v[0]), _count(v[1])) for k, v in told["objects"].items()},
                chunk_bytes=_count(told["chunk_bytes"]),
                blobs=np.array([tuple(map(_count, row)) for row in told["blobs"]], BLOB),
                wanted_chunks=_count(told["wanted_chunks"]),
                wanted_bytes=_count(told["wanted_bytes"]),
                # Stages that were made before there was a word of it say nothing of the rest.
                dataset_chunks=_count(told.get("dataset_chunks", told["wanted_chunks"])),
                dataset_bytes=_count(told.get("dataset_bytes", told["wanted_bytes"])),
                data_bytes=_count(told["data_bytes"]),
                map_at=head.map_at,
                nonce=head.nonce,
            )
            facts._check()
        except (ValueError, KeyError, TypeError, AttributeError, IndexError, RecursionError) as error:
            raise VolumeDamaged("a stage says of itself what cannot be", where=where, found=str(error)) from None
        return facts

    def _check(self) -> None:
        blobs = self.blobs
        if self.chunk_bytes < CHUNK_BYTES or self.chunk_bytes % CHUNK_BYTES:
            raise ValueError(f"chunks of {self.chunk_bytes} bytes")
        if len(self.volume_id) != 32 or bytes.fromhex(self.volume_id).hex() != self.volume_id:
            raise ValueError(f"volume {self.volume_id}")
        chunks = -(-blobs["length"] // self.chunk_bytes)
        if not np.array_equal(blobs["first_chunk"], np.cumsum(chunks) - chunks) or (blobs["length"] < 1).any():
            raise ValueError("chunks that do not follow one another")
        if self.chunk_count > 2 * MOST_CHUNKS + len(blobs) or len(np.unique(blobs["birth"])) != len(blobs):
            raise ValueError(f"{self.chunk_count} chunks of {len(blobs)} blobs")
        if (blobs["data_at"] % ALIGN).any() or (blobs["table_at"] % ALIGN).any():
            raise ValueError("places that are not aligned")
        ends = np.maximum(blobs["data_at"] + blobs["length"], blobs["table_at"] + blobs["table_bytes"])
        if ends.max(initial=0) > self.data_bytes:
            raise ValueError(f"places outside of {self.data_bytes} bytes")


class Head(NamedTuple):
    facts_bytes: int
    facts_crc: int
    map_at: int
    nonce: bytes

    def encode(self) -> bytes:
        head = _HEAD.pack(MAGIC, VERSION, self.facts_bytes, self.facts_crc, 0, self.map_at, self.nonce)
        return head.ljust(HEAD_BYTES, b"\0")

    @staticmethod
    def of(facts: bytes, map_at: int, nonce: bytes) -> Head:
        return Head(len(facts), crc32c(facts), map_at, nonce)

    @staticmethod
    def decode(data: bytes, where: str) -> Head | None:
        """None where this is no head of a stage. VolumeTooNew, VolumeDamaged."""
        magic, version, length, crc, _, at, nonce = _HEAD.unpack_from(data)
        if magic != MAGIC:
            return None
        if version != VERSION:
            raise VolumeTooNew("a stage of a newer version", where=where, expected=str(VERSION), found=str(version))
        if not 0 < length <= MAX_FACTS_BYTES or at % ALIGN or not HEAD_BYTES + length <= at < _MAX_BYTES:
            found = f"{length} bytes of facts, a map at {at}"
            raise VolumeDamaged("a stage says of itself what cannot be", where=where, found=found)
        return Head(length, crc, at, nonce)


def map_place(facts: bytes) -> int:
    """Where the map goes: numbers in the facts may become longer."""
    return HEAD_BYTES + align_up(len(facts) + 1024)


def _count(value: Any) -> int:
    if type(value) is not int or not 0 <= value < _MAX_BYTES:
        raise ValueError(f"{value!r} for a number")
    return value


def _text(value: Any) -> str:
    if not isinstance(value, str) or len(value) > 4096:
        raise ValueError(f"{value!r} for a text"[:80])
    return value
