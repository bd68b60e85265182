"""The CRC32C of bytes that were checksummed in pieces, by arithmetic alone: no byte is looked at again.

CRC is linear over GF(2) (`headrace.device.reference` has the theory). With `raw(m)` the CRC of m that starts at zero
and ends without the inversion, and `shift(state, n)` the state after n more zero bytes:

    crc32c(m, seed) = ~(shift(~seed, len m) ^ raw(m))
    raw(a || b)     = shift(raw(a), len b) ^ raw(b)

so pieces of one message, each from any seed, and zeros between them, have one raw CRC together.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from headrace.device.protocol import U32, U64
from headrace.device.reference import apply_map, identity_seeds, shift_tables


def raw_of(
    sums: npt.ArrayLike, seeds: npt.ArrayLike, ends: npt.ArrayLike, lengths: npt.ArrayLike, total_bytes: int
) -> int:
    """`raw` of a message of `total_bytes` in which piece i stands, `lengths[i]` bytes that end at `ends[i]`, with
    CRC32C `sums[i]` from `seeds[i]`; zeros elsewhere. Pieces do not overlap."""
    length = np.asarray(lengths, np.uint64)
    crc, seed = np.asarray(sums, np.uint32), np.broadcast_to(np.asarray(seeds, np.uint32), length.shape)
    raw = ~crc ^ _shift_each(~seed, length)
    behind = np.uint64(total_bytes) - np.asarray(ends, np.uint64)
    return int(np.bitwise_xor.reduce(_shift_each(raw, behind), initial=np.uint32(0)))


def raw_of_blocks(checksums: U32, *, block_bytes: int, total_bytes: int, volume_id: bytes, birth: int) -> int:
    """`raw` of a blob's bytes, of the checksums of its blocks."""
    blocks = np.arange(len(checksums), dtype=np.uint64)
    seeds = identity_seeds(volume_id, np.full(len(blocks), birth, np.uint64), blocks)
    ends = np.minimum((blocks + np.uint64(1)) * np.uint64(block_bytes), np.uint64(total_bytes))
    return raw_of(checksums, seeds, ends, ends - blocks * np.uint64(block_bytes), total_bytes)


def _shift_each(states: U32, lengths: U64) -> U32:
    result = np.array(states, np.uint32)
    longest = int(lengths.max()) if len(lengths) else 0
    for bit in range(longest.bit_length()):
        chosen = np.flatnonzero(lengths >> np.uint64(bit) & np.uint64(1))
        if len(chosen):
            result[chosen] = apply_map(shift_tables(bit), result[chosen])
    return result
