"""The index of a dataset of records: `NAME.records.idx`, which says where each lies in `NAME.records`.

A record has a key and some fields, each of a kind: `("000017", {"jpg": ..., "cls": ...})`. Whatever is asked of the
index is a few small ranges of it, wherever they lie; nobody has to load it.

    offset        bytes
         0            8  "HRRECIDX"
         8            4  version, u32: 1
        12            4  kinds K, u32
        16            8  records R, u64
        24            8  fields F, u64
        32            8  bytes of keys B, u64
        40            8  bytes of `NAME.records`, u64
        48            4  bits of the bucket table b, u32
        52           12  zero
        64       64 * K  kinds: UTF-8, padded with zeros
         :  16 * (R+1)   records: first field u64, begin of the key u64; those of record R are F and B
         :      24 * F   fields: offset u64, length u64, kind u32, zero u32
         :  8 * (2^b+1)  buckets: where in the next table hashes with these b bits on top begin, u64; the last R
         :      16 * R   by hash of the key: hash u64, record u64, in this order
         :           B   keys

Little-endian. The hash is the first eight bytes of BLAKE2b of the key. Keys are the bytes of names, mostly UTF-8, and
no two records have the same.
"""

from __future__ import annotations

import hashlib
import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.errors import DatasetError

MAGIC = b"HRRECIDX"
VERSION = 1
_FIELDS = struct.Struct("<8sIIQQQQI12x")
HEADER_BYTES = _FIELDS.size
assert HEADER_BYTES == 64
KIND_BYTES = 64
MOST_KINDS = 4096
MOST_KEY_BYTES = 4096
#: Of counts: far above what can be, and their sums are far below 2^63.
_MOST = 1 << 48
#: Hashes in a bucket, about.
_BUCKET = 64

RECORD = np.dtype([("first", "<u8"), ("key", "<u8")])
FIELD = np.dtype([("offset", "<u8"), ("length", "<u8"), ("kind", "<u4"), ("zero", "<u4")])
HASHED = np.dtype([("hash", "<u8"), ("record", "<u8")])

U64: TypeAlias = npt.NDArray[np.uint64]
Rows: TypeAlias = npt.NDArray[Any]


@dataclass(frozen=True, kw_only=True)
class RecordHeader:
    """The first 64 bytes, and where the tables are."""

    kinds: int
    records: int
    fields: int
    key_bytes: int
    data_bytes: int
    bucket_bits: int

    @property
    def records_at(self) -> int:
        return HEADER_BYTES + KIND_BYTES * self.kinds

    @property
    def fields_at(self) -> int:
        return self.records_at + RECORD.itemsize * (self.records + 1)

    @property
    def buckets_at(self) -> int:
        return self.fields_at + FIELD.itemsize * self.fields

    @property
    def hashed_at(self) -> int:
        return self.buckets_at + 8 * ((1 << self.bucket_bits) + 1)

    @property
    def keys_at(self) -> int:
        return self.hashed_at + HASHED.itemsize * self.records

    @property
    def length_bytes(self) -> int:
        """Of the whole index."""
        return self.keys_at + self.key_bytes

    def encode(self) -> bytes:
        return _FIELDS.pack(
            MAGIC, VERSION, self.kinds, self.records, self.fields, self.key_bytes, self.data_bytes, self.bucket_bits
        )


def decode_header(data: bytes, length_bytes: int, data_bytes: int, where: str) -> RecordHeader:
    """The header of an index of `length_bytes`, of records of `data_bytes`. DatasetError where it cannot be one."""
    if len(data) < HEADER_BYTES or not data.startswith(MAGIC):
        raise DatasetError("not an index of records", where=where, expected=repr(MAGIC), found=repr(data[:8]))
    _, version, *numbers = _FIELDS.unpack(data[:HEADER_BYTES])
    if version != VERSION:
        raise DatasetError("an index of records of a newer version", where=where, expected="1", found=str(version))
    kinds, records, fields, key_bytes, said, bits = numbers
    if kinds > MOST_KINDS or max(records, fields, key_bytes) > _MOST or bits > 40:
        raise DatasetError("an index of records that cannot be", where=where, found=f"{records} of {kinds} kinds")
    header = RecordHeader(
        kinds=kinds, records=records, fields=fields, key_bytes=key_bytes, data_bytes=said, bucket_bits=bits
    )
    if header.length_bytes != length_bytes or said != data_bytes:
        raise DatasetError(
            "an index of records has a wrong size", where=where, expected=f"{header.length_bytes} bytes of {said}",
            found=f"{length_bytes} bytes of {data_bytes}",
        )  # fmt: skip
    return header


def bucket_bits(records: int) -> int:
    return max(0, (records // _BUCKET).bit_length() - 1) if records else 0


def hash_key(key: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(key, digest_size=8).digest(), "little")


def encode_kinds(kinds: list[str]) -> bytes:
    return b"".join(kind.encode().ljust(KIND_BYTES, b"\0") for kind in kinds)


def decode_kinds(data: bytes, where: str) -> list[str]:
    try:
        kinds = [data[at : at + KIND_BYTES].rstrip(b"\0").decode() for at in range(0, len(data), KIND_BYTES)]
    except UnicodeDecodeError:
        raise DatasetError("an index of records has a kind that is no text", where=where) from None
    return kinds


def buckets_of(hashes: U64, bits: int) -> U64:
    """Where in these ascending hashes each bucket begins, and their number: uint64[2^bits + 1]."""
    if not bits:
        return np.array([0, len(hashes)], np.uint64)
    edges = np.arange(1 << bits, dtype=np.uint64) << np.uint64(64 - bits)
    return np.append(np.searchsorted(hashes, edges), len(hashes)).astype(np.uint64)


def blocks_of(array: Rows, rows: int = 1 << 18) -> Iterator[Rows]:
    for start in range(0, len(array), rows):
        yield array[start : start + rows]
