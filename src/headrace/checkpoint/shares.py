"""Which rank reads what of a checkpoint, so that a job reads no block twice. Pure arithmetic over columns.

Each rank says which blocks it wants (`blocks_of`). Where several want the same, `share` makes messages of them: one of
those ranks reads a message and sends it to the others. Who reads is balanced by bytes, counted together with what each
rank reads for itself alone. Messages are in the order of the bytes in the checkpoint and have one order for all ranks,
so that any rank that handles its own in that order, a few at a time, waits for nobody in a circle.

A *rows* array is uint64[n, 3]: object (its number in the manifest), first byte, end.
"""

from __future__ import annotations

import io
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import CheckpointFailed

U64 = npt.NDArray[np.uint64]
I64 = npt.NDArray[np.int64]

#: Longest message: long enough that its way costs nothing beside its bytes, short enough that many ranks read at once.
MESSAGE_BYTES = 4 << 20
#: Messages of a share that is worth compressing.
_MANY = 1000
_NO_ROWS: U64 = np.zeros((0, 3), np.uint64)


def rows_of(objects: npt.ArrayLike, starts: npt.ArrayLike, ends: npt.ArrayLike) -> U64:
    columns = np.broadcast_arrays(*(np.asarray(column, np.uint64) for column in (objects, starts, ends)))
    return np.stack(columns, axis=1) if columns[0].size else _NO_ROWS


def blocks_of(rows: U64, lengths: npt.ArrayLike, block_bytes: int) -> U64:
    """The blocks that these ranges touch: rows without overlap, in order, cut at the ends of their objects.

    `lengths`: bytes of each object.
    """
    rows = rows[rows[:, 2] > rows[:, 1]]
    if not len(rows):
        return _NO_ROWS
    block = np.uint64(block_bytes)
    first = rows[:, 1] // block * block
    last = np.minimum((rows[:, 2] + block - np.uint64(1)) // block * block, np.asarray(lengths, np.uint64)[rows[:, 0]])
    order = np.lexsort((first, rows[:, 0]))
    number, first, last = rows[order, 0], first[order], last[order]
    # As far as any row so far has come, object by object: on one axis, so that one running maximum does.
    span = np.uint64(int(last.max()) + 1)
    reach = np.maximum.accumulate(number * span + last)
    begins = np.ones(len(number), bool)
    begins[1:] = number[1:] * span + first[1:] > reach[:-1]
    at = np.flatnonzero(begins)
    ends = reach[np.append(at[1:] - 1, len(number) - 1)] - number[at] * span
    return rows_of(number[at], first[at], ends)


@dataclass(frozen=True)
class Cut:
    """Ranges cut at pieces. Columns of equal length, in the order of the ranges."""

    #: What lies in a piece: number of the range, of the piece, first byte, end (in their object).
    range: I64
    piece: I64
    start: U64
    end: U64
    #: What lies in none: number of the range, first byte, end.
    rest_range: I64
    rest_start: U64
    rest_end: U64


def cut(ranges: U64, pieces: U64) -> Cut:
    """`ranges`: rows in any order; `pieces`: rows in order, without overlap."""
    span = np.uint64(int(max(ranges[:, 2].max(initial=0), pieces[:, 2].max(initial=0))) + 1)
    low, high = (ranges[:, 0] * span + ranges[:, column] for column in (1, 2))
    piece_low, piece_high = (pieces[:, 0] * span + pieces[:, column] for column in (1, 2))
    first = np.searchsorted(piece_high, low, "right")
    count = np.maximum(np.searchsorted(piece_low, high, "left") - first, 0)
    count[high <= low] = 0
    which = np.repeat(np.arange(len(ranges)), count)
    piece = np.arange(len(which)) - np.repeat(np.cumsum(count) - count, count) + np.repeat(first, count)
    start, end = np.maximum(low[which], piece_low[piece]), np.minimum(high[which], piece_high[piece])
    # Between the pieces of a range: from its start, or the end of one, to the start of the next, or its own end.
    owner = np.concatenate([np.arange(len(ranges)), which])
    order = np.argsort(owner, kind="stable")
    gap_start = np.concatenate([low, end])[order]
    last = np.zeros(len(owner), bool)
    last[np.cumsum(count + 1) - 1] = True
    gap_end = np.empty(len(owner), np.uint64)
    gap_end[last], gap_end[~last] = high, start
    owner = owner[order]
    keep = gap_end > gap_start
    owner, base = owner[keep], ranges[owner[keep], 0] * span
    return Cut(
        range=which,
        piece=piece,
        start=start - ranges[which, 0] * span,
        end=end - ranges[which, 0] * span,
        rest_range=owner,
        rest_start=gap_start[keep] - base,
        rest_end=gap_end[keep] - base,
    )


def met_twice(ranges: U64, block_bytes: int) -> U64:
    """The blocks that more than one of these ranges touches, as rows in order."""
    ranges = ranges[ranges[:, 2] > ranges[:, 1]]
    if len(ranges) < 2:
        return _NO_ROWS
    block = np.uint64(block_bytes)
    first, end = ranges[:, 1] // block, (ranges[:, 2] - np.uint64(1)) // block + np.uint64(1)
    order = np.lexsort((first, ranges[:, 0]))
    number, first, end = ranges[order, 0], first[order], end[order]
    span = np.uint64(int(end.max()) + 1)
    reach = np.maximum.accumulate(number * span + end)
    low, high = number[1:] * span + first[1:], np.minimum(reach[:-1], number[1:] * span + end[1:])
    twice = high > low
    number, low, high = number[1:][twice], low[twice], high[twice]
    rows = rows_of(number, (low - number * span) * block, (high - number * span) * block)
    return blocks_of(rows, np.full(int(number.max(initial=0)) + 1, np.iinfo(np.uint64).max >> 1), 1)


@dataclass(frozen=True, kw_only=True)
class Share:
    """The messages of one rank, in order: those that it reads and sends, and those that it gets."""

    #: int64[m]: its number in the job, who reads, and which set of ranks gets it.
    number: I64
    reader: I64
    group: I64
    #: uint64[k, 3], the bytes of the messages one after another; message i has rows bounds[i] to bounds[i + 1].
    rows: U64
    bounds: I64
    #: int64: the ranks of group j are members[starts[j]:starts[j + 1]], ascending.
    members: I64
    starts: I64

    def __len__(self) -> int:
        return len(self.reader)

    def ranks(self, message: int) -> list[int]:
        group = int(self.group[message])
        found: list[int] = self.members[self.starts[group] : self.starts[group + 1]].tolist()
        return found

    def encode(self) -> bytes:
        file = io.BytesIO()
        # Its columns are regular; of a large job they go to each rank, through one store.
        (np.savez_compressed if len(self) > _MANY else np.savez)(file, **vars(self))
        return file.getvalue()


def encode_shares(shares: Sequence[Share]) -> list[bytes]:
    """Each encoded; of ranks that have the same share it is one object, made once."""
    made = {number: one.encode() for number, one in {id(one): one for one in shares}.items()}
    return [made[id(one)] for one in shares]


def decode_share(data: bytes) -> Share:
    return Share(**_load(data))


def _load(data: bytes) -> dict[str, Any]:
    with np.load(io.BytesIO(data), allow_pickle=False) as columns:
        return dict(columns)


def share(
    wants: Sequence[U64], *, message_bytes: int = MESSAGE_BYTES, block_bytes: int = 65536, least_bytes: int = 0
) -> list[Share]:
    """Messages for each rank, out of what each rank wants (rows as `blocks_of` makes them).

    `least_bytes`: what the same ranks want in common is left to each of them where it is less.
    """
    axis = _Axis(wants)
    low, high, groups = axis.shared()
    members = axis.members(low, high, groups)
    load = np.array([int((rows[:, 2] - rows[:, 1]).sum()) for rows in wants], np.float64)
    sizes = np.bincount(groups, (high - low).astype(np.float64), len(members))
    for size, ranks in zip(sizes.tolist(), members, strict=True):
        load[ranks] -= size
    made: list[tuple[int, int, int, U64]] = []  # (place, group, reader, rows)
    for group in np.argsort(-sizes, kind="stable").tolist():
        ranks, size = members[group], float(sizes[group])
        if size < least_bytes:
            load[ranks] += size
            continue
        mine = groups == group
        length = int(min(message_bytes, max(block_bytes, size / len(ranks))) // block_bytes * block_bytes)
        room = _water(load[ranks], size)
        load[ranks] += room
        for place, rows in axis.messages(low[mine], high[mine], length, block_bytes):
            reader = int(np.argmax(room))
            room[reader] -= float((rows[:, 2] - rows[:, 1]).sum())
            made.append((place, group, int(ranks[reader]), rows))
    made.sort(key=lambda one: (one[0], one[1]))
    of_group: list[list[int]] = [[] for _ in members]
    for number, (_, group, _, _) in enumerate(made):
        of_group[group].append(number)
    groups_of: list[list[int]] = [[] for _ in wants]
    for group, ranks in enumerate(members):
        for rank in ranks.tolist() if of_group[group] else []:
            groups_of[rank].append(group)
    # Ranks that are in the same sets have the same messages.
    done: dict[tuple[int, ...], Share] = {}
    for key in map(tuple, groups_of):
        if key not in done:
            numbers = sorted(i for group in key for i in of_group[group])
            done[key] = _share_of(numbers, [made[i] for i in numbers], members)
    return [done[tuple(groups)] for groups in groups_of]


def _share_of(numbers: Sequence[int], made: Sequence[tuple[int, int, int, U64]], members: Sequence[I64]) -> Share:
    kept, group = np.unique(np.array([one[1] for one in made], np.int64), return_inverse=True)
    ranks = [members[number] for number in kept.tolist()]
    return Share(
        number=np.array(numbers, np.int64),
        reader=np.array([one[2] for one in made], np.int64),
        group=group.astype(np.int64),
        rows=np.concatenate([one[3] for one in made]) if made else _NO_ROWS,
        bounds=np.cumsum([0, *(len(one[3]) for one in made)]),
        members=np.concatenate(ranks) if ranks else np.zeros(0, np.int64),
        starts=np.cumsum([0, *(len(one) for one in ranks)]),
    )


def _water(load: npt.NDArray[np.float64], size: float) -> npt.NDArray[np.float64]:
    """`size` poured over what each has already, so that it stands as level as it can."""
    order = np.sort(load)
    # With the k lowest under water the level is (size + their sum) / k; the right k is the last whose level covers it.
    levels = (size + np.cumsum(order)) / np.arange(1, len(order) + 1)
    level = levels[np.flatnonzero(levels >= order)[-1]]
    room: npt.NDArray[np.float64] = np.maximum(level - load, 0.0)
    return room


class _Axis:
    """All objects one after another, so that a byte of the checkpoint is one number."""

    def __init__(self, wants: Sequence[U64]) -> None:
        every = np.concatenate([*wants, _NO_ROWS])
        count = int(every[:, 0].max(initial=0)) + 1
        extent = np.zeros(count, np.uint64)
        np.maximum.at(extent, every[:, 0].astype(np.int64), every[:, 2])
        self.base = np.zeros(count + 1, np.uint64)
        # A byte between them: what is at the end of one object does not touch the next.
        np.cumsum(extent + np.uint64(1), out=self.base[1:])
        self.wants = [tuple(self.base[rows[:, 0]] + rows[:, column] for column in (1, 2)) for rows in wants]
        for low, high in self.wants:
            if bool((high <= low).any()) or bool((low[1:] < high[:-1]).any()):
                raise CheckpointFailed("a rank wants ranges that are empty, out of order or overlap")

    def shared(self) -> tuple[U64, U64, I64]:
        """What more than one rank wants: first byte, end, and a number that is one for each set of ranks."""
        # A random word for each rank; the words of all that want a byte, xored, name their set.
        words = np.random.default_rng(1).integers(1, 1 << 63, len(self.wants), np.uint64)
        low, high = (np.concatenate([pair[side] for pair in self.wants] or [np.zeros(0, np.uint64)]) for side in (0, 1))
        word = np.repeat(words, [len(pair[0]) for pair in self.wants])
        at = np.concatenate([low, high])
        order = np.argsort(at, kind="stable")
        at = at[order]
        if not len(at):
            return at, at, np.zeros(0, np.int64)
        begins = np.flatnonzero(np.concatenate([[True], at[1:] != at[:-1]]))
        change = np.concatenate([np.ones(len(low), np.int64), -np.ones(len(high), np.int64)])[order]
        depth = np.cumsum(np.add.reduceat(change, begins))
        name = np.bitwise_xor.accumulate(np.bitwise_xor.reduceat(np.concatenate([word, word])[order], begins))
        at = at[begins]
        many = np.flatnonzero(depth >= 2)
        _, group = np.unique(name[many], return_inverse=True)
        return at[many], at[many + 1], group.astype(np.int64)

    def members(self, low: U64, high: U64, groups: I64) -> list[I64]:
        """The ranks of each set, by looking who wants its first bytes."""
        _, example = np.unique(groups, return_index=True)
        probe = low[example]
        inside = np.zeros((len(self.wants), len(probe)), bool)
        for rank, (start, end) in enumerate(self.wants):
            if len(start):
                at = np.searchsorted(start, probe, "right") - 1
                inside[rank] = (at >= 0) & (probe < end[np.maximum(at, 0)])
        return [np.flatnonzero(inside[:, number]) for number in range(len(probe))]

    def messages(self, low: U64, high: U64, length: int, block_bytes: int) -> list[tuple[int, U64]]:
        """These ranges, one after another, in messages of `length` (whole blocks): where each begins, and its rows."""
        block = np.uint64(block_bytes)
        # Counted in whole blocks, so that the cut is between two blocks also behind the end of an object.
        size = (high - low + block - np.uint64(1)) // block * block
        end = np.cumsum(size)
        begin = end - size
        cuts = np.arange(0, int(end[-1]), length, dtype=np.uint64)
        edges = np.union1d(begin, cuts)
        owner = np.searchsorted(begin, edges, "right") - 1
        start = low[owner] + edges - begin[owner]
        stop = np.minimum(np.append(edges[1:], end[-1]) - begin[owner] + low[owner], high[owner])
        number = np.searchsorted(self.base, start, "right") - 1
        rows = rows_of(number, start - self.base[number], stop - self.base[number])
        first = np.searchsorted(edges, cuts)
        return [
            (int(start[a]), rows[a:b]) for a, b in zip(first.tolist(), [*first[1:].tolist(), len(edges)], strict=True)
        ]


__all__ = ["Cut", "Share", "blocks_of", "cut", "decode_share", "encode_shares", "met_twice", "rows_of", "share"]
