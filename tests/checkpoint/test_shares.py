"""Which rank reads what: every byte that is wanted once, and by whom all ranks know. Held against masks of bytes."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from headrace.checkpoint.shares import U64, blocks_of, cut, decode_share, encode_shares, met_twice, share

BLOCK = 64


def counted(rows: U64, lengths: list[int], block: int = 1) -> list[npt.NDArray[np.int64]]:
    """How many of these rows touch each byte (or block) of each object."""
    found = [np.zeros(-(-length // block), np.int64) for length in lengths]
    for number, start, end in rows.tolist():
        if end > start:
            found[number][start // block : -(-end // block)] += 1
    return found


def ranges(chance: np.random.Generator, lengths: list[int], pool: list[tuple[int, int, int]]) -> U64:
    """Of one rank: some of its own, some that others have, too; empty ones, and such as overlap."""
    rows = []
    for _ in range(int(chance.integers(0, 8))):
        if pool and chance.random() < 0.5:
            rows.append(pool[int(chance.integers(len(pool)))])
            continue
        number = int(chance.integers(len(lengths)))
        start = int(chance.integers(lengths[number]))
        rows.append((number, start, int(chance.integers(start, lengths[number] + 1))))
        pool.append(rows[-1])
    return np.array(rows, np.uint64).reshape(-1, 3)


@pytest.mark.parametrize("seed", range(60))
def test_what_several_ranks_want_is_in_one_message_that_all_of_them_know(seed: int) -> None:
    chance = np.random.default_rng(seed)
    lengths = chance.integers(1, 700, int(chance.integers(1, 4))).tolist()
    pool: list[tuple[int, int, int]] = []
    wanted = [ranges(chance, lengths, pool) for _ in range(int(chance.integers(1, 7)))]
    blocks = [blocks_of(rows, lengths, BLOCK) for rows in wanted]
    for rows, of in zip(wanted, blocks, strict=True):
        whole = [np.repeat(each > 0, BLOCK)[:n] for each, n in zip(counted(rows, lengths, BLOCK), lengths, strict=True)]
        for each, expected in zip(counted(of, lengths), whole, strict=True):
            assert np.array_equal(each, expected)
    depth = [sum(of) for of in zip(*(counted(of, lengths) for of in blocks), strict=True)]
    shares = [decode_share(one) for one in encode_shares(share(blocks, message_bytes=256, block_bytes=BLOCK))]
    seen: dict[int, tuple[int, list[int], list[list[int]]]] = {}
    for rank, one in enumerate(shares):
        for got, mine, of in zip(counted(one.rows, lengths), counted(blocks[rank], lengths), depth, strict=True):
            assert np.array_equal(got, (mine > 0) & (of > 1))
        # One order for all ranks is why no circle of them waits.
        assert one.number.tolist() == sorted(set(one.number.tolist()))
        for i, number in enumerate(one.number.tolist()):
            rows = one.rows[one.bounds[i] : one.bounds[i + 1]].tolist()
            told = int(one.reader[i]), one.ranks(i), rows
            assert rank in told[1] and told[0] in told[1] and seen.setdefault(number, told) == told
    for number, (_, ranks, _) in seen.items():
        assert all(number in shares[rank].number for rank in ranks)
    # What a rank takes out of its messages, and what is left to it.
    pieces = shares[0].rows[np.lexsort((shares[0].rows[:, 1], shares[0].rows[:, 0]))]
    found = cut(wanted[0], pieces)
    for i, (number, start, end) in enumerate(wanted[0].tolist()):
        taken, left = found.range == i, found.rest_range == i
        inside = pieces[found.piece[taken]]
        assert (inside[:, 0] == number).all()
        assert (inside[:, 1] <= found.start[taken]).all() and (found.end[taken] <= inside[:, 2]).all()
        parts = np.concatenate([found.start[taken], found.rest_start[left]])
        ends = np.concatenate([found.end[taken], found.rest_end[left]])
        rows = np.stack([np.full(len(parts), number, np.uint64), parts, ends], axis=1)
        expected = np.zeros(lengths[number], np.int64)
        expected[start:end] = 1
        assert np.array_equal(counted(rows, lengths)[number], expected)
    twice = counted(met_twice(wanted[0], BLOCK), lengths, BLOCK)
    for got, of in zip(twice, counted(wanted[0], lengths, BLOCK), strict=True):
        assert np.array_equal(got, of > 1)


def test_readers_are_level() -> None:
    """Three ranks want all of it, and one of them twice as much for itself: it reads none of what is shared."""
    lengths = [300 * BLOCK, 400 * BLOCK]
    all_of = [(0, 0, lengths[0])]
    wants = [[*all_of, (1, 0, lengths[1])], all_of, all_of]
    found = share([np.array(rows, np.uint64) for rows in wants], message_bytes=4 * BLOCK, block_bytes=BLOCK)
    size = np.add.reduceat(found[0].rows[:, 2] - found[0].rows[:, 1], found[0].bounds[:-1])
    first, *others = (np.bincount(found[0].reader, size, 3) / BLOCK).tolist()
    assert first == 0 and sum(others) == 300 and max(others) <= 150 + 4


def test_ranks_that_want_the_same_get_one_answer_and_a_long_one_is_short() -> None:
    whole = blocks_of(np.array([[0, 0, 5000 * BLOCK]], np.uint64), [5000 * BLOCK], BLOCK)
    made = share([whole] * 1000, message_bytes=BLOCK, block_bytes=BLOCK)
    encoded = encode_shares(made)
    assert len({id(one) for one in encoded}) == 1
    assert len(made[0]) == 5000 and len(encoded[0]) < 16 * 5000
    found = decode_share(encoded[0])
    assert all(np.array_equal(of, getattr(made[0], name)) for name, of in vars(found).items())
