"""The copy behind an asynchronous save outlives the save, whatever torch does to the stager it was handed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.staging import DefaultStager

from headrace.torch.staging import LastingStager


class _Plain:
    """An object that is copied by its parts, its class among them."""

    def __init__(self, step: int) -> None:
        self.step = step


@pytest.fixture(params=["as torch is", "as torch 2.11 is"])
def stager(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> LastingStager:
    if request.param == "as torch 2.11 is":
        kept = DefaultStager._stage

        def once(self: DefaultStager, *arguments: Any, **options: Any) -> Any:
            staged = kept(self, *arguments, **options)
            self._state_dict_stager.close()
            return staged

        monkeypatch.setattr(DefaultStager, "_stage", once)
    return LastingStager()


def test_a_stager_that_was_closed_after_a_save_serves_the_next(stager: LastingStager) -> None:
    weight = torch.zeros(1000)
    for step in range(3):
        weight.fill_(step)
        copy = stager.stage({"weight": weight, "plain": _Plain(step)})
        stager.close()
        weight.fill_(-1)
        assert isinstance(copy, dict)
        assert torch.equal(copy["weight"], torch.full((1000,), float(step)))
        assert copy["plain"].step == step
    stager.release()
