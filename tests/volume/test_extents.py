"""Ranges to segments, against the plainest way to say the same."""

from __future__ import annotations

from itertools import pairwise

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.errors import VolumeDamaged, VolumeFull
from headrace.volume.data.extents import Extents, column_bytes, make_runs
from headrace.volume.space.allocator import Allocator, FreeSpace, TableSpace
from tests.volume.support import KIB, STRIPE

BLOCK = 4096


def byte_places(extents: Extents) -> list[tuple[int, int]]:
    """(member, offset) of every BLOCK of the object, one after another, by the format's text."""
    result = []
    base = 0
    for length, width, _ in extents.runs.tolist():
        unit = STRIPE if width > 1 else length
        for start in range(0, length, BLOCK):
            k, inner = divmod(start, unit)
            member, _, offset = extents.columns[base + k % width].tolist()
            result.append((member, offset + k // width * unit + inner))
        base += width
    return result


@st.composite
def objects(draw: st.DrawFn) -> Extents:
    rows = []
    place = 0
    count = draw(st.integers(1, 4))
    for i in range(count):
        width = draw(st.integers(1, 4))
        length = draw(st.integers(1, 40)) * BLOCK
        if i == count - 1:
            length -= draw(st.integers(0, BLOCK - 1))
        columns = []
        for column in range(width):
            columns.append((column, place))
            place += max(BLOCK, column_bytes(length, width, STRIPE if width > 1 else length, column))
        rows.append((length, columns))
    runs, columns_ = make_runs(rows)
    return Extents(
        runs, columns_, length_bytes=sum(length for length, _ in rows), block_bytes=BLOCK, stripe_bytes=STRIPE
    )


@settings(max_examples=150, deadline=None)
@given(objects(), st.data())
def test_pieces_are_what_the_format_says(extents: Extents, data: st.DataObject) -> None:
    size = extents.length_bytes
    ranges = data.draw(
        st.lists(st.integers(0, size).flatmap(lambda s: st.tuples(st.just(s), st.integers(0, size - s))), max_size=5)
    )
    starts = np.array([start for start, _ in ranges], np.int64)
    lengths = np.array([length for _, length in ranges], np.int64)
    places = byte_places(extents)
    pieces = extents.pieces(starts, lengths)
    covered: list[list[int]] = [[] for _ in ranges]
    for i in range(len(pieces.member)):
        start, length = int(pieces.start[i]), int(pieces.length[i])
        assert start % BLOCK == 0 and (length % BLOCK == 0 or start + length == size)
        for block in range(start // BLOCK, -(-(start + length) // BLOCK)):
            expected = places[block]
            assert (int(pieces.member[i]), int(pieces.offset[i]) + block * BLOCK - start) == expected
        source = int(pieces.source[i])
        first = start + int(pieces.skip[i])
        assert first - int(starts[source]) == int(pieces.within[i])
        covered[source] += range(first, first + int(pieces.take[i]))
    for (start, length), bytes_ in zip(ranges, covered, strict=True):
        assert bytes_ == list(range(start, start + length))


def test_contradictions_are_damage() -> None:
    runs, columns = make_runs([(BLOCK, [(0, 0)])])
    for length, r, c in ((BLOCK + 1, runs, columns), (BLOCK, runs, columns[:0]), (0, runs, columns)):
        with pytest.raises(VolumeDamaged, match="contradict"):
            Extents(r, c, length_bytes=length, block_bytes=BLOCK, stripe_bytes=STRIPE)


# ---- space ---------------------------------------------------------------------------------------------------------


@settings(max_examples=100, deadline=None)
@given(st.lists(st.tuples(st.booleans(), st.integers(0, 60), st.integers(1, 20)), max_size=40))
def test_free_space_against_a_set(steps: list[tuple[bool, int, int]]) -> None:
    space, model = FreeSpace(), set[int]()
    for add, start, length in steps:
        cells = set(range(start, start + length))
        if add:
            if not cells & model:
                space.add(start, start + length)
                model |= cells
        else:
            space.remove(start, start + length)
            model -= cells
        assert {cell for low, high in space.ranges() for cell in range(low, high)} == model
        assert space.total == len(model)
        ranges = space.ranges()
        assert all(a[1] < b[0] for a, b in pairwise(ranges))
        front = space.front(3)
        assert front is None or (set(range(front[0], sum(front))) <= model and front[1] >= 3)
        if front is None:
            assert all(high - low < 3 for low, high in ranges) or space.cursor


def new_allocator(
    members: int, size: int, most_ranges: int = 1000
) -> tuple[Allocator, list[list[tuple[int, int, int]]]]:
    windows: list[list[tuple[int, int, int]]] = []
    spaces = [FreeSpace([(0, size)]) for _ in range(members)]
    return Allocator(spaces, stripe_bytes=STRIPE, log_window=windows.append, most_ranges=most_ranges), windows


def test_where_a_late_command_may_hit_nothing_is_handed_out_and_the_log_says_so() -> None:
    ghosts: list[tuple[int, int, int]] = []
    windows: list[list[tuple[int, int, int]]] = []
    spaces = [FreeSpace([(0, 4 << 20)])]
    allocator = Allocator(spaces, stripe_bytes=STRIPE, log_window=windows.append, ghosts=lambda: ghosts)
    space = used(allocator, 4 * STRIPE)
    allocator.commit(space)
    allocator.free(space)
    [(member, start, length)] = allocator.take_freed(space)
    # The deallocation was sent again.
    ghosts.append((member, start, STRIPE))
    allocator.renew([(member, start, length)])
    assert allocator.take_freed([(member, start, STRIPE)]) == []
    tables = TableSpace(allocator, lambda: None)
    first, second = tables.take(STRIPE, STRIPE)
    ghosts.append(first)
    tables.give_back([first, second])
    taken = FreeSpace()
    with pytest.raises(VolumeFull):
        while True:
            for _, low, size in used(allocator, STRIPE):
                taken.add(low, low + size)
    assert taken.total == (4 << 20) - 2 * STRIPE
    for _, low, size in ghosts:
        assert not any(begin < low + size and low < end for begin, end in taken.ranges())
        assert any(begin <= low and low + size <= begin + count for _, begin, count in windows[-1])


def used(allocator: Allocator, length: int, block: int = BLOCK) -> list[tuple[int, int, int]]:
    runs, columns = allocator.allocate(length, block)
    return Extents(runs, columns, length_bytes=length, block_bytes=block, stripe_bytes=STRIPE).used()


def pair(allocator: Allocator, length: int, block: int) -> list[tuple[int, int, int]]:
    copies = [
        Extents(runs, columns, length_bytes=length, block_bytes=block, stripe_bytes=STRIPE)
        for runs, columns in allocator.allocate_pair(length, block)
    ]
    assert copies[0].runs.tolist() == copies[1].runs.tolist(), "both are cut alike"
    return [one for extents in copies for one in extents.used()]


@settings(max_examples=60, deadline=None)
@given(
    st.integers(1, 4),
    st.sampled_from([1, 2, 5, 1000]),
    st.lists(st.tuples(st.sampled_from(["put", "pair", "free", "back"]), st.integers(1, 600 * KIB)), max_size=30),
)
def test_space_is_never_handed_out_twice(members: int, most_ranges: int, steps: list[tuple[str, int]]) -> None:
    allocator, windows = new_allocator(members, 1024 * KIB, most_ranges)
    total = allocator.available
    held: list[list[tuple[int, int, int]]] = []
    for what, size in steps:
        if what in ("put", "pair") or not held:
            try:
                held.append((used if what == "put" else pair)(allocator, size, 64 * KIB if size % 2 else BLOCK))
            except Exception as error:
                assert "full" in str(error)
        else:
            ranges = held.pop(size % len(held))
            (allocator.free if what == "free" else allocator.give_back)(ranges)
        cells = [(m, c) for ranges in held for m, o, n in ranges for c in range(o // BLOCK, (o + n) // BLOCK)]
        assert len(cells) == len(set(cells))
        # The last one alone says where writes may be on their way to.
        logged = {(m, c) for m, o, n in (windows or [[]])[-1] for c in range(o // BLOCK, (o + n) // BLOCK)}
        assert set(cells) <= logged and len((windows or [[]])[-1]) <= max(most_ranges, members)
        assert allocator.available + len(cells) * BLOCK == total


def test_copies_of_a_pair_are_on_two_members_while_two_have_room() -> None:
    allocator, _ = new_allocator(3, 1024 * KIB)
    for _ in range(20):
        (one, _, _), (other, _, _) = pair(allocator, 50_000, BLOCK)
        assert one != other
    before = allocator.available
    with pytest.raises(VolumeFull, match="the volume is full"):
        pair(allocator, before, BLOCK)
    assert allocator.available == before
    alone, _ = new_allocator(1, 1024 * KIB)
    (_, low, _), (_, high, _) = pair(alone, 50_000, BLOCK)
    assert high - low > 512 * KIB, "far apart"


def test_big_objects_are_spread_over_all_members_and_small_ones_take_turns() -> None:
    allocator, _ = new_allocator(4, 8 << 20)
    big = used(allocator, 16 * STRIPE)
    assert sorted((member, length) for member, _, length in big) == [(m, 4 * STRIPE) for m in range(4)]
    assert sorted(used(allocator, 100)[0][0] for _ in range(8)) == [0, 0, 1, 1, 2, 2, 3, 3]
    assert used(allocator, 100)[0][2] == BLOCK


def test_freed_space_is_used_last() -> None:
    allocator, _ = new_allocator(1, 64 * BLOCK)
    first = used(allocator, 10 * BLOCK)
    allocator.free(first)
    for _ in range(5):
        assert all(o + n <= first[0][1] or o >= first[0][1] + first[0][2] for _, o, n in used(allocator, 10 * BLOCK))
    assert used(allocator, 10 * BLOCK)  # Now there is nothing else.


def test_a_failed_window_takes_nothing() -> None:
    def refuse(ranges: list[tuple[int, int, int]]) -> None:
        raise RuntimeError

    allocator = Allocator([FreeSpace([(0, 1 << 20)])], stripe_bytes=STRIPE, log_window=refuse)
    with pytest.raises(RuntimeError):
        allocator.allocate(1000, BLOCK)
    assert allocator.available == 1 << 20

    def once(ranges: list[tuple[int, int, int]]) -> None:
        asked.append(ranges)
        if len(asked) > 1:
            raise RuntimeError

    asked: list[list[tuple[int, int, int]]] = []
    # The pool holds most of the first piece of free space; the second needs another window.
    allocator = Allocator([FreeSpace([(0, 1 << 20), (2 << 20, 3 << 20)])], stripe_bytes=STRIPE, log_window=once)
    allocator.allocate(BLOCK, BLOCK)
    with pytest.raises(RuntimeError):
        allocator.allocate(3 << 19, BLOCK)
    assert allocator.available == (2 << 20) - BLOCK
