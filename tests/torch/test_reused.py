"""Memory of batches is used again, and never while somebody has any part of it."""

from __future__ import annotations

import gc
import threading

import numpy as np
import torch

from headrace.torch.feed.reused import Reused

VALUES = np.arange(12, dtype=np.int32).reshape(3, 4)


def test_memory_comes_back_with_the_last_that_shares_it() -> None:
    made = Reused((3, 4))
    first = made.tensor(VALUES)
    assert first.dtype == torch.int64 and first.tolist() == VALUES.tolist()
    place = first.data_ptr()
    # A view, an array of it, what a backward pass keeps.
    column, array = first[:, 1], first[0].numpy()
    weight = torch.ones(3, 4, requires_grad=True)
    kept = (weight * first).sum()
    for gone in ("first", "column", "array", "kept"):
        assert made.tensor(VALUES + 100).data_ptr() != place, gone
        assert column is None or column.tolist() == [1, 5, 9]
        if gone == "first":
            del first
        elif gone == "column":
            column = None
        elif gone == "array":
            assert array.tolist() == [0, 1, 2, 3]
            del array
        else:
            kept.backward()
            assert weight.grad is not None and weight.grad.tolist() == VALUES.tolist()
            del kept
    gc.collect()
    places = [made.tensor(VALUES) for _ in range(3)]
    assert place in {each.data_ptr() for each in places}
    assert all(each.tolist() == VALUES.tolist() for each in places)


def test_at_most_two_are_kept_and_any_thread_may_let_go() -> None:
    made = Reused((3, 4))
    held = [made.tensor(VALUES + n) for n in range(6)]
    assert [int(each[0, 0]) for each in held] == list(range(6))
    thread = threading.Thread(target=held.clear)
    thread.start()
    thread.join()
    memory = made.memory
    assert memory.made_bytes == 3 * memory.free_bytes() > 0
    held = [made.tensor(VALUES + n) for n in range(3)]
    assert not memory.free_bytes() and memory.made_bytes == 7 * 96
    del made
    assert [int(each[0, 0]) for each in held] == [0, 1, 2]
