"""The reference engine: batches in plain Python and numpy.

It serves devices that are not native and is the oracle of the native engine. It expects batches that
`headrace.device.check` has seen: its callers, `submit_read` and `submit_write`, see to that.

CRC32C without a loop per byte
==============================
CRC is linear over GF(2). Let `raw(m)` be the CRC of m with start value zero and no final inversion. Then

    raw(a || b) = shift(raw(a), len(b)) ^ raw(b)            shift(state, n): the state after n more zero bytes

Four bytes as a little-endian word w satisfy raw(w) = shift(w, 4), so a message of 2^k words folds pairwise in k steps
over arrays: `v[even] -> shift(v[even], 4 * 2^level) ^ v[odd]`, and one shift by 4 at the end. Zero bytes in *front* do
not change `raw`, so any message is padded there to 2^k words. `shift` by 2^j bytes is a linear map of 32 bits: four
tables of 256 entries. 200 MiB/s on one core: enough for tests, far from enough for training.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from headrace.device.batch import Batch
from headrace.device.protocol import U32, U64, BlockDevice, Buffer
from headrace.errors import ChecksumMismatch, UsageError

U8 = npt.NDArray[np.uint8]

#: CRC32C (Castagnoli, RFC 3720 section 12.1), reflected.
_POLYNOMIAL = 0x82F63B78


def as_bytes(buffer: Buffer) -> U8:
    """A flat uint8 view of anything with the buffer protocol; never a copy."""
    if isinstance(buffer, np.ndarray):
        if not buffer.flags.c_contiguous:
            raise UsageError("a buffer must be C-contiguous", found=f"strides {buffer.strides}")
        return buffer.reshape(-1).view(np.uint8)
    return np.frombuffer(memoryview(buffer).cast("B"), np.uint8)


def apply_map(tables: U32, state: U32) -> U32:
    result: U32 = tables[0][state & 0xFF]
    result ^= tables[1][(state >> 8) & 0xFF]
    result ^= tables[2][(state >> 16) & 0xFF]
    result ^= tables[3][state >> 24]
    return result


def _tables_of(columns: U32) -> U32:
    """The linear map that sends bit i to columns[i], as four tables of 256."""
    tables = np.zeros((4, 256), np.uint32)
    for bit in range(32):
        byte, inner = divmod(bit, 8)
        tables[byte][(np.arange(256) >> inner) & 1 == 1] ^= columns[bit]
    return tables


@cache
def shift_tables(log2_bytes: int) -> U32:
    """`shift(state, 2**log2_bytes)`."""
    if log2_bytes == 0:
        state = np.uint32(1) << np.arange(32, dtype=np.uint32)
        for _ in range(8):
            state = np.where(state & 1, (state >> np.uint32(1)) ^ np.uint32(_POLYNOMIAL), state >> np.uint32(1))
        return _tables_of(state.astype(np.uint32))
    half = shift_tables(log2_bytes - 1)
    once = apply_map(half, np.uint32(1) << np.arange(32, dtype=np.uint32))
    return _tables_of(apply_map(half, once))


def _shift(state: U32, length: int) -> U32:
    bit = 0
    while length >> bit:
        if length >> bit & 1:
            state = apply_map(shift_tables(bit), state)
        bit += 1
    return state


def crc32c_rows(rows: U8, seeds: U32) -> U32:
    """CRC32C of every row of `rows` (uint8[n, length]), each going on from its own seed (uint32[n])."""
    count, length = rows.shape
    state: U32 = np.asarray(seeds, np.uint32) ^ np.uint32(0xFFFFFFFF)
    if length == 0 or count == 0:
        return np.array(seeds, np.uint32)
    words = 1 << max(0, (-(-length // 4) - 1).bit_length())
    if words * 4 == length and rows.flags.c_contiguous:
        padded = rows
    else:
        padded = np.zeros((count, words * 4), np.uint8)
        padded[:, words * 4 - length :] = rows
    value = padded.view("<u4").astype(np.uint32, copy=False)
    level = 2
    while value.shape[1] > 1:
        value = apply_map(shift_tables(level), value[:, 0::2]) ^ value[:, 1::2]
        level += 1
    raw = apply_map(shift_tables(2), value[:, 0])
    result: U32 = raw ^ _shift(state, length) ^ np.uint32(0xFFFFFFFF)
    return result


def crc32c(data: Buffer, seed: int = 0) -> int:
    """CRC32C of `data`, going on from `seed`: `crc32c(b, crc32c(a)) == crc32c(a + b)`."""
    view = as_bytes(data)
    # Rows of 1 MiB bound the working memory.
    for start in range(0, len(view), 1 << 20):
        part = view[start : start + (1 << 20)]
        seed = int(crc32c_rows(part.reshape(1, -1), np.array([seed], np.uint32))[0])
    return seed


def identity_seeds(volume_id: bytes, birth: U64, block: U64) -> U32:
    """CRC32C of `volume_id || birth || block` for every pair, the seed of that block's checksum."""
    rows = np.empty((len(block), 32), np.uint8)
    rows[:, :16] = np.frombuffer(volume_id, np.uint8)
    rows[:, 16:24] = np.ascontiguousarray(birth, "<u8").view(np.uint8).reshape(-1, 8)
    rows[:, 24:] = np.ascontiguousarray(block, "<u8").view(np.uint8).reshape(-1, 8)
    return crc32c_rows(rows, np.zeros(len(block), np.uint32))


def block_checksums(data: U8, block_bytes: int, *, volume_id: bytes, birth: int, first_block: int) -> U32:
    """The checksums of one segment: one for each `block_bytes` of `data`, the last one may be shorter."""
    whole, rest = divmod(len(data), block_bytes)
    count = whole + (rest > 0)
    blocks = np.arange(first_block, first_block + count, dtype=np.uint64)
    seeds = identity_seeds(volume_id, np.full(count, birth, np.uint64), blocks)
    result = np.empty(count, np.uint32)
    # Groups of about 8 MiB bound the working memory.
    group = max(1, (8 << 20) // block_bytes)
    for start in range(0, whole, group):
        end = min(whole, start + group)
        rows = data[start * block_bytes : end * block_bytes].reshape(end - start, block_bytes)
        result[start:end] = crc32c_rows(rows, seeds[start:end])
    if rest:
        result[whole:] = crc32c_rows(data[whole * block_bytes :].reshape(1, -1), seeds[whole:])
    return result


def read(devices: Sequence[BlockDevice], batch: Batch, buffers: Sequence[Buffer], checksums: U32 | None = None) -> None:
    """Read every segment; with `checksums` (uint32[batch.checksum_count]) verify every block before it is handed on.

    Raises the first error of the batch once all segments were tried.
    """
    views = [as_bytes(buffer) for buffer in buffers]
    verify = batch.checksum_block_bytes if checksums is not None else 0
    first_error: Exception | None = None
    position = 0
    for i in range(len(batch)):
        device = devices[int(batch.member[i])]
        offset, length = int(batch.offset[i]), int(batch.length[i])
        count = -(-length // verify) if verify else 0
        expected = checksums[position : position + count] if checksums is not None else None
        position += count
        data = np.empty(-(-length // device.block_bytes) * device.block_bytes, np.uint8)
        try:
            device.read_into(offset, data)
            if expected is not None and verify:
                first = int(batch.first_block[i])
                found = block_checksums(
                    data[:length], verify, volume_id=batch.volume_id, birth=int(batch.birth[i]), first_block=first
                )
                wrong = np.flatnonzero(found != expected)
                if len(wrong):
                    k = int(wrong[0])
                    raise ChecksumMismatch(
                        f"block {first + k} does not match its checksum",
                        where=f"{device.uri} offset {offset + k * verify}",
                        expected=f"{int(expected[k]):08x}",
                        found=f"{int(found[k]):08x}",
                    )
        except Exception as error:
            first_error = first_error or error
            continue
        skip, take, into = int(batch.skip[i]), int(batch.take[i]), int(batch.buffer_offset[i])
        views[int(batch.buffer[i])][into : into + take] = data[skip : skip + take]
    if first_error is not None:
        raise first_error


def write(
    devices: Sequence[BlockDevice], batch: Batch, buffers: Sequence[Buffer], checksums: U32 | None = None
) -> None:
    """Write every segment, padded with zeros to logical blocks; fill `checksums` (uint32[batch.checksum_count])."""
    views = [as_bytes(buffer) for buffer in buffers]
    first_error: Exception | None = None
    position = 0
    for i in range(len(batch)):
        device = devices[int(batch.member[i])]
        length, start = int(batch.length[i]), int(batch.buffer_offset[i])
        data = views[int(batch.buffer[i])][start : start + length]
        if checksums is not None and batch.checksum_block_bytes:
            sums = block_checksums(
                data,
                batch.checksum_block_bytes,
                volume_id=batch.volume_id,
                birth=int(batch.birth[i]),
                first_block=int(batch.first_block[i]),
            )
            checksums[position : position + len(sums)] = sums
            position += len(sums)
        padded = np.zeros(-(-length // device.block_bytes) * device.block_bytes, np.uint8)
        padded[:length] = data
        try:
            device.write(int(batch.offset[i]), padded)
        except Exception as error:
            first_error = first_error or error
    if first_error is not None:
        raise first_error
