"""Where items lie, and which bytes a box of a chunk is: held against numpy's own slicing."""

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.checkpoint.layout import box_runs, pack
from headrace.errors import UsageError


@given(st.lists(st.integers(0, 300)), st.sampled_from([1, 64, 4096]))
def test_items_are_aligned_and_do_not_meet(lengths: list[int], alignment: int) -> None:
    offsets, total = pack(lengths, alignment)
    end = 0
    for offset, length in zip(offsets, lengths, strict=True):
        assert offset % alignment == 0
        assert end <= offset < end + alignment
        end = offset + length
    assert total == end


def test_pack_refuses_nonsense() -> None:
    with pytest.raises(UsageError):
        pack([1], 3)
    with pytest.raises(UsageError):
        pack([-1])


@st.composite
def boxes(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    shape = draw(st.lists(st.integers(0, 5), max_size=4))
    offsets = [draw(st.integers(0, extent)) for extent in shape]
    lengths = [draw(st.integers(0, extent - start)) for extent, start in zip(shape, offsets, strict=True)]
    return shape, offsets, lengths


@settings(max_examples=300, deadline=None)
@given(boxes(), st.sampled_from([1, 2, 8]))
def test_runs_are_the_bytes_that_numpy_slices(box: tuple[list[int], list[int], list[int]], element: int) -> None:
    shape, offsets, lengths = box
    # Every byte of the chunk holds its own offset.
    count = int(np.prod(shape, dtype=int)) * element
    chunk = np.arange(count, dtype=np.uint32).reshape([*shape, element])
    wanted = chunk[tuple(slice(o, o + n) for o, n in zip(offsets, lengths, strict=True))].reshape(-1)
    runs = box_runs(shape, offsets, lengths, element)
    found = [byte for start in runs.offsets.tolist() for byte in range(start, start + runs.length)]
    assert found == wanted.tolist()
    assert runs.total == len(found)
    if found:
        assert runs.span == (found[0], found[-1] + 1 - found[0])


def test_a_slice_of_rows_is_one_run() -> None:
    runs = box_runs([8, 3, 5], [2, 0, 0], [4, 3, 5], 4)
    assert runs.offsets.tolist() == [2 * 15 * 4]
    assert runs.length == 4 * 15 * 4


def test_a_box_beyond_the_chunk_is_refused() -> None:
    with pytest.raises(UsageError, match="leaves the chunk"):
        box_runs([4, 4], [2, 0], [3, 4], 4)
    with pytest.raises(UsageError, match="dimensions"):
        box_runs([4, 4], [0], [4], 4)
