"""Which documents share a sample, computed from their lengths alone.

A sample has room for `sequence_length + 1` tokens: inputs, and one more for the last target. A document that is longer
is cut by a rule that the caller names (`LONG`); what is put into samples is a *piece*, a range of tokens of one
document.

    split     pieces of sequence_length + 1 tokens, each beginning with the last token of the one before, as windows
              do: every token but the document's first is a target once
    truncate  its first sequence_length + 1 tokens, the rest left out
    drop      left out

Documents of fewer than two tokens have no target and are left out.

Pieces are packed best fit decreasing: the longest first, each into the sample in which it leaves the least room. Pieces
of one length are placed together, so the work grows with the number of different lengths, not with that of documents.
Packing happens in chunks of `CHUNK_PIECES` pieces in the order of the stream: memory is bounded, and a chunk is large
enough that more would pack no better. Samples of a chunk are ordered by how many pieces they have (they are shuffled
anyway), so that where the pieces of a sample stand in the table is arithmetic over a few *runs*.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt

I64 = npt.NDArray[np.int64]

#: Pieces that are packed together.
CHUNK_PIECES = 1 << 18
#: Rules for documents that are longer than a sample.
LONG = ("split", "truncate", "drop")
#: How pieces become samples: each alone, padded; or several together.
LAYOUTS = ("padded", "packed")


@dataclass(frozen=True, kw_only=True)
class Pieces:
    """Pieces in the order of the stream."""

    #: int64[n], tokens: where in the stream.
    starts: I64
    #: int64[n], tokens.
    lengths: I64
    #: int64[n]: the how-manieth of its document, from 0.
    parts: I64


@dataclass(frozen=True, kw_only=True)
class Chunk:
    """Samples of one chunk: their pieces one after another, and runs of samples that have equally many."""

    pieces: Pieces
    #: int64[r]: samples of each run.
    run_samples: I64
    #: int64[r]: pieces of each sample of the run; they rise.
    run_pieces: I64


def piece_counts(lengths: I64, sequence_length: int, long: str) -> I64:
    """How many pieces documents of these lengths give: int64[n]."""
    whole = np.where(lengths >= 2, 1, 0)
    over = lengths > sequence_length + 1
    if long == "split":
        return np.where(over, -(-(lengths - 1) // sequence_length), whole)
    return np.where(over, 0 if long == "drop" else 1, whole)


def cut(starts: I64, sequence_length: int, long: str, chunk_pieces: int = CHUNK_PIECES) -> Iterator[Pieces]:
    """Documents `[starts[d], starts[d + 1])` in pieces, at most `chunk_pieces` at a time, whatever their lengths."""
    lengths = np.diff(starts)
    ends = np.cumsum(piece_counts(lengths, sequence_length, long))
    total = int(ends[-1]) if len(ends) else 0
    for first in range(0, total, chunk_pieces):
        number = np.arange(first, min(first + chunk_pieces, total), dtype=np.int64)
        document = np.searchsorted(ends, number, side="right")
        before = np.where(document > 0, ends[document - 1], 0)
        parts = number - before
        offsets = parts * sequence_length
        rest = lengths[document] - offsets
        yield Pieces(starts=starts[document] + offsets, lengths=np.minimum(rest, sequence_length + 1), parts=parts)


def pack(pieces: Pieces, capacity: int) -> Chunk:
    """Best fit decreasing; the same pieces give the same samples. Within a sample pieces keep the stream's order."""
    bins = best_fit(pieces.lengths, capacity)
    held = np.bincount(bins)
    by_count = np.argsort(held, kind="stable")
    rank = np.empty_like(by_count)
    rank[by_count] = np.arange(len(by_count))
    order = np.argsort(rank[bins], kind="stable")
    run_pieces, run_samples = np.unique(held, return_counts=True)
    return Chunk(
        pieces=Pieces(starts=pieces.starts[order], lengths=pieces.lengths[order], parts=pieces.parts[order]),
        run_samples=run_samples.astype(np.int64),
        run_pieces=run_pieces.astype(np.int64),
    )


def pad(pieces: Pieces) -> Chunk:
    """Each piece a sample of its own."""
    count = len(pieces.starts)
    return Chunk(pieces=pieces, run_samples=np.array([count], np.int64), run_pieces=np.array([1], np.int64))


def best_fit(lengths: I64, capacity: int) -> I64:
    """The bin of each item, numbered from 0: int64[n]. Lengths are 1 to `capacity`.

    Bins are opened in order, and those that were treated alike so far are one range of numbers: `room[r]` has the
    ranges with room for r more, and bit r of `rooms` says whether there are any.
    """
    order = np.argsort(-lengths, kind="stable")
    values, counts = np.unique(lengths, return_counts=True)
    room: dict[int, list[tuple[int, int]]] = {}
    rooms = opened = 0
    #: (first bin, bins, items in each), in the order of the items.
    steps: list[tuple[int, int, int]] = []
    for size, count in zip(values[::-1].tolist(), counts[::-1].tolist(), strict=True):
        while count:
            fitting = rooms >> size
            if fitting:
                left = size + (fitting & -fitting).bit_length() - 1
                first, bins = room[left].pop()
                if not room[left]:
                    rooms ^= 1 << left
            else:
                left, first, bins = capacity, opened, -(-count // (capacity // size))
                opened += bins
            # As long as a bin has room it stays the best fit for the next of this size.
            each = left // size
            full = min(bins, count // each)
            last = min(1, bins - full) if count > full * each else 0
            for alike, items in ((full, each), (last, count - full * each)):
                if alike:
                    steps.append((first, alike, items))
                    count -= alike * items
                    rooms |= _keep(room, left - items * size, first, alike)
                    first, bins = first + alike, bins - alike
            if bins:
                rooms |= _keep(room, left, first, bins)
    firsts, alikes, items_each = np.array(steps, np.int64).reshape(-1, 3).T
    items = alikes * items_each
    step = np.repeat(np.arange(len(items)), items)
    within = np.arange(len(lengths)) - np.repeat(np.cumsum(items) - items, items)
    result = np.empty(len(lengths), np.int64)
    result[order] = firsts[step] + within // items_each[step]
    return result


def _keep(room: dict[int, list[tuple[int, int]]], left: int, first: int, bins: int) -> int:
    """Note bins that have room for `left` more; the bit of `rooms` that says so."""
    if not left:
        return 0
    room.setdefault(left, []).append((first, bins))
    return 1 << left
