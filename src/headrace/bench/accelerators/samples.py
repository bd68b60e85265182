"""Which bytes the next batch of an accelerator is.

What is read is taken as one row of samples, item after item; files of `samples_per_file` samples come in an order by
chance (a permutation by the seed), the samples of one in their order. Accelerator i of n has files i, i + n, ... of it:
no two read the same before all was read once. After the last file it begins again.

`WholeFiles` are samples that are files: one each, or several of one name (an image and its caption).
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence

import numpy as np

from headrace.bench.places.protocol import I64, Item, Ranges
from headrace.errors import UsageError
from headrace.units import GIB, format_bytes

#: A file that is longer is cut into as many shorter ones: what lies together is read in one go anyway.
_MOST_FILES = 1 << 22
#: A longer file is no sample: it would be held in memory, as often as files are under way.
_MOST_WHOLE = 1 * GIB


class Samples:
    """Batches of one accelerator, as ranges of the items; endless."""

    def __init__(
        self,
        lengths: Sequence[int],
        *,
        batch: int,
        sample_bytes: int,
        samples_per_file: int,
        accelerator: int,
        accelerators: int,
        seed: int,
    ) -> None:
        """`lengths`: bytes of each item. UsageError: they hold not one sample for each accelerator."""
        self._ends: I64 = np.cumsum(np.asarray(lengths, dtype=np.int64))
        self._begins: I64 = self._ends - np.asarray(lengths, dtype=np.int64)
        total = int(self._ends[-1]) if len(self._ends) else 0
        count = total // sample_bytes
        # With fewer files than accelerators some would read nothing: files are shorter then.
        self._per_file = max(1, min(samples_per_file, count // max(1, accelerators)))
        self._per_file = max(self._per_file, -(-count // _MOST_FILES))
        files = count // self._per_file
        if files < accelerators:
            raise UsageError(
                "too little to be read", expected=f"{accelerators} samples of {sample_bytes} bytes and more",
                found=f"{total} bytes", next_step="let it prepare more, or name a larger dataset",
            )  # fmt: skip
        order = np.random.default_rng(seed).permutation(files)
        self._files: I64 = order[accelerator::accelerators].astype(np.int64)
        self._batch = batch
        self._sample_bytes = sample_bytes
        self._next = 0

    @property
    def before_again(self) -> int:
        """Batches until something is read a second time."""
        return len(self._files) * self._per_file // self._batch

    def next(self, most_ranges: int, request_bytes: int) -> Iterator[Ranges]:
        """The next batch, in pieces of at most `most_ranges`, each of at most `request_bytes`."""
        items: list[int] = []
        offsets: list[int] = []
        lengths: list[int] = []
        for begin, length in self._stretches():
            while length:
                item = int(np.searchsorted(self._ends, begin, side="right"))
                piece = min(length, int(self._ends[item]) - begin, request_bytes)
                items.append(item)
                offsets.append(begin - int(self._begins[item]))
                lengths.append(piece)
                begin, length = begin + piece, length - piece
                if len(items) == most_ranges:
                    yield _ranges(items, offsets, lengths)
                    items, offsets, lengths = [], [], []
        if items:
            yield _ranges(items, offsets, lengths)

    def _stretches(self) -> list[tuple[int, int]]:
        """Where the samples of the next batch lie, those that lie together as one."""
        found: list[tuple[int, int]] = []
        left = self._batch
        while left:
            turn, within = divmod(self._next, self._per_file)
            count = min(left, self._per_file - within)
            file = int(self._files[turn % len(self._files)])
            found.append(((file * self._per_file + within) * self._sample_bytes, count * self._sample_bytes))
            self._next += count
            left -= count
        return found


class WholeFiles:
    """Batches of one accelerator, as whole files; endless. A sample is what has one name up to the last dot."""

    def __init__(self, items: Sequence[Item], *, batch: int, accelerator: int, accelerators: int, seed: int) -> None:
        """UsageError: not one sample for each accelerator, or a file that is too long to be one."""
        longest = max(items, key=lambda item: item.length_bytes, default=Item("", 0))
        if longest.length_bytes > _MOST_WHOLE:
            raise UsageError(
                "too long to be read whole", where=longest.name, expected=f"at most {format_bytes(_MOST_WHOLE)}",
                found=format_bytes(longest.length_bytes), next_step="leave out --whole-files: files are read in pieces",
            )  # fmt: skip
        self._lengths = [item.length_bytes for item in items]
        self._samples = samples_of(items)
        if len(self._samples) < accelerators:
            raise UsageError(
                "too few files to be read", expected=f"{accelerators} samples and more",
                found=f"{len(self._samples)}", next_step="name a folder with more, or a larger --size",
            )  # fmt: skip
        order = np.random.default_rng(seed).permutation(len(self._samples))
        self._order: list[int] = order[accelerator::accelerators].tolist()
        self._batch = batch
        self._next = 0

    @property
    def before_again(self) -> int:
        """Batches until something is read a second time."""
        return len(self._order) // self._batch

    def next(self, most_ranges: int, request_bytes: int) -> Iterator[Ranges]:
        """The next batch, a file at a time: each is asked for in one go, and does not wait for others."""
        del most_ranges, request_bytes
        for _ in range(self._batch):
            for item in self._samples[self._order[self._next % len(self._order)]]:
                yield _ranges([item], [0], [self._lengths[item]])
            self._next += 1


def samples_of(items: Sequence[Item]) -> list[list[int]]:
    """Which items each sample is, where samples are files: those of one name up to the last dot."""
    found: dict[str, list[int]] = {}
    for number, item in enumerate(items):
        found.setdefault(os.path.splitext(item.name)[0], []).append(number)  # noqa: PTH122
    return list(found.values())


def _ranges(items: list[int], offsets: list[int], lengths: list[int]) -> Ranges:
    return Ranges(np.array(items, np.int64), np.array(offsets, np.int64), np.array(lengths, np.int64))
