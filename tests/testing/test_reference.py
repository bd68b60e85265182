"""The reference engine's CRC32C against known values and against the native one."""

from __future__ import annotations

import struct

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace import device
from headrace.device import Batch, reference
from headrace.errors import ChecksumMismatch
from headrace.testing import MemoryDevice

#: RFC 3720, B.4.
KNOWN = [
    (bytes(32), 0x8A9136AA),
    (b"\xff" * 32, 0x62A8AB43),
    (bytes(range(32)), 0x46DD794E),
    (b"123456789", 0xE3069283),
    (b"", 0),
]


@pytest.mark.parametrize(("data", "expected"), KNOWN)
def test_known_values(data: bytes, expected: int) -> None:
    assert reference.crc32c(data) == expected


@given(st.binary(max_size=3000), st.integers(0, 2**32 - 1), st.integers(0, 3000))
def test_it_agrees_with_the_native_engine(data: bytes, seed: int, cut: int) -> None:
    assert reference.crc32c(data, seed) == device.crc32c(data, seed)
    assert reference.crc32c(data[cut:], reference.crc32c(data[:cut], seed)) == reference.crc32c(data, seed)


def test_more_than_a_mebibyte() -> None:
    data = np.random.default_rng(0).integers(0, 256, (1 << 20) + 77).astype(np.uint8)
    assert reference.crc32c(data) == device.crc32c(data)


def test_the_identity_is_mixed_in() -> None:
    data = np.arange(10_000, dtype=np.uint64).view(np.uint8)
    volume_id = bytes(range(16))
    sums = reference.block_checksums(data, 4096, volume_id=volume_id, birth=7, first_block=1 << 63)
    for k, value in enumerate(sums.tolist()):
        block = data[k * 4096 : (k + 1) * 4096].tobytes()
        assert value == device.crc32c(volume_id + struct.pack("<QQ", 7, (1 << 63) + k) + block)


def test_write_read_and_mismatch() -> None:
    devices = [MemoryDevice(64 << 10), MemoryDevice(64 << 10, block_bytes=512)]
    batch = Batch(
        member=np.array([0, 1], np.uint32),
        offset=np.array([4096, 512], np.uint64),
        length=np.array([5000, 5000], np.uint64),
        buffer_offset=np.array([0, 5000], np.uint64),
        birth=np.array([1, 1], np.uint64),
        checksum_block_bytes=4096,
    )
    data = np.random.default_rng(0).integers(0, 256, 10_000).astype(np.uint8)
    sums = np.zeros(4, np.uint32)
    reference.write(devices, batch, [data], sums)
    out = np.zeros(10_000, np.uint8)
    reference.read(devices, batch, [out], sums)
    assert np.array_equal(out, data)
    devices[1].data[512 + 4096] ^= 1
    out[:] = 0
    with pytest.raises(ChecksumMismatch, match=devices[1].uri):
        reference.read(devices, batch, [out], sums)
    # The other segment was handed over, the damaged one was not.
    assert np.array_equal(out[:5000], data[:5000]) and not out[5000:].any()
