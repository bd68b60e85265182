"""The order of samples: a permutation that is computed, never stored.

Sample `i` of epoch `e` is a pure function of `(seed, e, i)`: no index array, no file, no state but a counter. Any rank
computes any part of the order at any time, so epochs, resume and skipping cost nothing, and the order cannot depend on
the number of ranks.

How: a Feistel network over `[0, 2^k) x [0, b)`, the smallest such rectangle that holds `[0, n)`. Each round adds a hash
of one half to the other half, which can be undone, so the whole is a bijection of the rectangle:

    left  <- (left  + hash(round key, right)) mod 2^k
    right <- (right + hash(round key, left))  mod b

A result outside `[0, n)` is put in again until it lies inside ("cycle walking", Black and Rogaway, CT-RSA 2002), which
keeps it a bijection of `[0, n)`. The rectangle is larger than `n` by less than one column, so that is rare. `2^k` is at
least 2 and hence even: with odd sides every round would be an even permutation, and half of all orders out of reach.

The rounds' hash is the finalizer of splitmix64; the round keys come from BLAKE2b over seed and epoch, so that
neighbouring seeds and epochs have nothing in common. Sixteen rounds, because small `n` need them: with four, some
orders of 5 samples come up measurably more often than others (`tests/dataset/test_sampler.py` sees it).
"""

from __future__ import annotations

import hashlib
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.errors import UsageError

I64 = npt.NDArray[np.int64]
U64 = npt.NDArray[np.uint64]
RoundKeys: TypeAlias = "list[tuple[np.uint64, np.uint64]]"

#: Name of the order. A state that was saved under another name cannot be resumed: the order would differ.
ORDER = "feistel16-splitmix64-blake2b"
#: Largest number of samples: 2^48 windows of 8192 tokens are 2 * 10^18 tokens.
MAX_SAMPLES = 1 << 48

_ROUNDS = 16
_MIX_1 = np.uint64(0xBF58476D1CE4E5B9)
_MIX_2 = np.uint64(0x94D049BB133111EB)
_SHIFTS = (np.uint64(30), np.uint64(27), np.uint64(31))
_WEYL = np.uint64(0x9E3779B97F4A7C15)


class Sampler:
    """A seeded permutation of `[0, sample_count)` for every epoch.

    `sample_count`: 1 to 2^48. `seed`: 0 to 2^64 - 1. O(1) memory; `indices` is vectorised.
    """

    def __init__(self, sample_count: int, seed: int) -> None:
        if not 1 <= sample_count <= MAX_SAMPLES:
            raise UsageError("sample_count is out of range", expected="1 to 2^48", found=str(sample_count))
        if not 0 <= seed < 1 << 64:
            raise UsageError("seed is out of range", expected="0 to 2^64 - 1", found=str(seed))
        self.sample_count = sample_count
        self.seed = seed
        left_bits = max(1, ((sample_count - 1).bit_length() + 1) // 2)
        #: Right side of the rectangle: at most 2^24, as n is at most 2^48.
        right_count = -(-sample_count >> left_bits)
        self._left_bits = np.uint64(left_bits)
        self._left_mask = np.uint64((1 << left_bits) - 1)
        self._left_shift = np.uint64(64 - left_bits)
        self._right_count = np.uint64(right_count)
        # The top bits of the hash times `right_count` fill 64 bits: no division, and the least bias that 64 bits allow
        # (2^-14 of a place's share at 2^48 samples, nothing at usual sizes).
        right_bits = right_count.bit_length()
        self._right_drop = np.uint64(right_bits)
        self._right_shift = np.uint64(64 - right_bits)
        # Replaced as one, so that threads may share a sampler.
        self._cached: tuple[int, RoundKeys] = (-1, [])

    def indices(self, epoch: int, start: int, count: int) -> I64:
        """Samples at places `[start, start + count)` of `epoch`: int64[count].

        `UsageError` where the places are not all inside the epoch.
        """
        if epoch < 0:
            raise UsageError("epoch is negative", expected="0 or more", found=str(epoch))
        if start < 0 or count < 0 or start + count > self.sample_count:
            raise UsageError(
                "places outside the epoch",
                expected=f"within 0 to {self.sample_count}",
                found=f"{start} to {start + count}",
            )
        places = np.arange(start, start + count, dtype=np.uint64)
        return self._permute(epoch, places).astype(np.int64)

    def at(self, positions: npt.ArrayLike) -> I64:
        """Samples at global positions (epoch * sample_count + place), in any order: int64 of the same shape."""
        wanted = np.asarray(positions, np.int64)
        if wanted.size and int(wanted.min()) < 0:
            raise UsageError("a position is negative", expected="0 or more", found=str(int(wanted.min())))
        epochs, places = np.divmod(wanted, self.sample_count)
        result = np.empty(wanted.shape, np.int64)
        for epoch in np.unique(epochs):
            here = epochs == epoch
            result[here] = self._permute(int(epoch), places[here].astype(np.uint64)).astype(np.int64)
        return result

    def positions(self, start: int, count: int) -> I64:
        """Samples at global positions `[start, start + count)`, over the ends of epochs: int64[count]."""
        if start < 0 or count < 0:
            raise UsageError("positions are negative", expected="0 or more", found=f"{start}, {count} of them")
        parts = []
        while count:
            epoch, place = divmod(start, self.sample_count)
            here = min(count, self.sample_count - place)
            parts.append(self.indices(epoch, place, here))
            start += here
            count -= here
        return np.concatenate(parts) if parts else np.zeros(0, np.int64)

    def _round_keys(self, epoch: int) -> RoundKeys:
        cached_epoch, keys = self._cached
        if epoch != cached_epoch:
            identity = self.seed.to_bytes(8, "little") + epoch.to_bytes(8, "little")
            digests = [
                hashlib.blake2b(identity, person=b"headrace-order", salt=block.to_bytes(2, "little")).digest()
                for block in range(_ROUNDS * 16 // 64)
            ]
            words = np.frombuffer(b"".join(digests), "<u8").reshape(_ROUNDS, 2)
            keys = [(np.uint64(left), np.uint64(right)) for left, right in words]
            self._cached = (epoch, keys)
        return keys

    def _permute(self, epoch: int, places: U64) -> U64:
        keys = self._round_keys(epoch)
        result = self._cipher(keys, places)
        # Ends: the walk along a cycle of a bijection comes back to its start, which lies inside.
        outside = np.flatnonzero(result >= self.sample_count)
        while outside.size:
            result[outside] = self._cipher(keys, result[outside])
            outside = outside[result[outside] >= self.sample_count]
        return result

    def _cipher(self, keys: RoundKeys, places: U64) -> U64:
        left: U64 = places & self._left_mask
        right: U64 = places >> self._left_bits
        scratch = np.empty_like(places)
        for for_left, for_right in keys:
            mixed = _hash(right, for_left, scratch)
            mixed >>= self._left_shift
            left += mixed
            left &= self._left_mask
            mixed = _hash(left, for_right, scratch)
            mixed >>= self._right_drop
            mixed *= self._right_count
            mixed >>= self._right_shift
            right += mixed
            right -= self._right_count * (right >= self._right_count)
        right <<= self._left_bits
        right |= left
        return right


def _hash(values: U64, key: np.uint64, scratch: U64) -> U64:
    """splitmix64's finalizer of `values * odd + key`; wraps modulo 2^64 as meant."""
    mixed: U64 = values * _WEYL
    mixed += key
    np.right_shift(mixed, _SHIFTS[0], out=scratch)
    mixed ^= scratch
    mixed *= _MIX_1
    np.right_shift(mixed, _SHIFTS[1], out=scratch)
    mixed ^= scratch
    mixed *= _MIX_2
    np.right_shift(mixed, _SHIFTS[2], out=scratch)
    mixed ^= scratch
    return mixed
