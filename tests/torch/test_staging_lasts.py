"""The copy behind an asynchronous save: made once, kept, whatever torch does to the stager it was handed."""

from __future__ import annotations

import gc
import threading
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager

from headrace.errors import CheckpointFailed
from headrace.torch.save.stager import Stager, find_copy
from tests.torch.states import awkward_state, leaves


class _Plain:
    """An object that is copied by its parts, its class among them."""

    def __init__(self, step: int) -> None:
        self.step = step
        self.kind = type(self)


@pytest.fixture(params=["as torch is", "as torch 2.11 is"])
def stager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> Iterator[Stager]:
    if request.param == "as torch 2.11 is":
        kept = DefaultStager._stage

        def once(self: DefaultStager, *arguments: Any, **options: Any) -> Any:
            staged = kept(self, *arguments, **options)
            self._state_dict_stager.close()
            return staged

        monkeypatch.setattr(DefaultStager, "_stage", once)
    stager = Stager(limit_s=20)
    yield stager
    stager.release()


def test_a_stager_that_was_closed_after_a_save_serves_the_next_from_the_same_memory(stager: Stager) -> None:
    weight = torch.zeros(1000)
    addresses = set()
    for step in range(3):
        weight.fill_(step)
        copy = stager.stage({"weight": weight, "plain": _Plain(step)})
        stager.close()
        weight.fill_(-1)
        assert isinstance(copy, dict)
        assert torch.equal(copy["weight"], torch.full((1000,), float(step)))
        assert (copy["plain"].step, copy["plain"].kind) == (step, _Plain)
        addresses.add(copy["weight"].data_ptr())
        # As DCP does when the save has ended, well or not.
        del copy
    assert len(addresses) == 1


def test_every_tensor_is_copied_as_it_is_and_shared_memory_once() -> None:
    stager = Stager()
    state = awkward_state()
    before = leaves(state)
    copy = stager.stage(state)
    for tensor in state["model"].values():
        if tensor.numel() and not tensor.is_conj() and tensor.is_contiguous():
            tensor.view(torch.uint8).fill_(0xFF) if tensor.dim() else tensor.fill_(-1)
    state["optimizer"]["steps"][0].fill_(99)
    state["optimizer"]["lr"] = 9
    assert leaves(copy) == before
    model = copy["model"]
    weight = model["weight"].data_ptr()
    assert model["tied"].data_ptr() == weight
    assert model["rows"].data_ptr() == weight + 10 * 300 * 4
    # The copy takes what the tensors take, those that share memory once: besides gaps, no more.
    distinct = 700 * 300 * 4 * 2 + 700 * 4 + 100_003 * 4 + 700 * 300 * 2 + 3 * 300 + 72 + 4 + 5000 * 4 + 72 + 16
    assert distinct <= stager.describe()["bytes"] <= distinct + 64 * 20
    found = find_copy(model["rows"])
    assert found is not None and found[0] is copy.copy
    stager.release()
    assert find_copy(model["rows"]) is None


def test_what_was_there_before_is_not_in_the_gaps() -> None:
    stager = Stager()
    stager.stage({"a": torch.full((500,), 255, dtype=torch.uint8)})
    copy = stager.stage({name: torch.zeros(1, dtype=torch.uint8) for name in "abcdefg"})
    assert not copy.copy.memory.any()
    stager.release()


def test_the_next_copy_waits_until_nobody_reads_the_one_before() -> None:
    stager = Stager(limit_s=0.05)
    first = stager.stage({"a": torch.zeros(10)})
    with pytest.raises(CheckpointFailed, match="did not end"):
        stager.stage({"a": torch.ones(10)})
    # Taken by a thread that ended without a word, as a save that failed early does; its exception may keep the state.
    thread = threading.Thread(target=first.copy.taken)
    thread.start()
    thread.join()
    second = stager.stage({"a": torch.ones(10)})
    # Let go by the thread that saves it, which lives on, for its commit.
    hold, taken = threading.Event(), threading.Event()

    def save() -> None:
        second.copy.taken()
        second.copy.let_go()
        taken.set()
        hold.wait(20)

    thread = threading.Thread(target=save)
    thread.start()
    assert taken.wait(20)
    third = stager.stage({"a": torch.full((10,), 2.0)})
    hold.set()
    thread.join()
    # Nobody knows it any more.
    del third
    gc.collect()
    stager.stage({"a": torch.zeros(10)})
    stager.release()


@pytest.mark.parametrize("bad", [torch.eye(3).to_sparse(), torch.empty(3, device="meta")])
def test_what_has_no_bytes_is_refused_by_name(bad: torch.Tensor) -> None:
    with pytest.raises(CheckpointFailed, match=r"'model\.odd' is not a dense tensor"):
        Stager().stage({"model": {"odd": bad}})
