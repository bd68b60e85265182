"""A rank's plan is kept from save to save for as long as what it was made of stays as it is, and no longer."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint import DefaultSavePlanner

from headrace.torch import VolumeReader, VolumeWriter
from headrace.volume import Volume
from tests.torch.states import leaves

NEXT: list[dict[str, Any]] = [
    {"w": torch.arange(12.0).view(3, 4), "n": 1},
    {"w": torch.arange(12.0).view(3, 4) + 1, "n": 2},
    {"w": torch.arange(12.0).view(4, 3), "n": 3},
    {"w": torch.arange(12, dtype=torch.int32).view(4, 3), "n": 4},
    {"w": torch.arange(12, dtype=torch.int32).view(3, 4).t(), "n": 5},
    {"w": 6, "n": torch.ones(2)},
    {"w": 7, "n": torch.ones(2), "more": torch.zeros(5)},
    {"n": torch.ones(2), "more": torch.zeros(5)},
    {"n": torch.ones(2), "renamed": torch.zeros(5)},
    {"n": torch.ones(2), "renamed": {"deeper": torch.zeros(5)}},
]


@pytest.mark.parametrize("background", [False, True])
def test_a_plan_is_kept_until_what_it_was_made_of_changes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, background: bool
) -> None:
    planned = 0
    create = DefaultSavePlanner.create_local_plan

    def counted(self: DefaultSavePlanner) -> Any:
        nonlocal planned
        planned += 1
        return create(self)

    monkeypatch.setattr(DefaultSavePlanner, "create_local_plan", counted)
    uri = f"file:{tmp_path}/member"
    Volume.create([f"{uri}?create=64MiB"]).close()
    with VolumeWriter([uri], "run") as writer:
        for step, state in enumerate(NEXT):
            if background:
                writer.async_save(state, f"run/step-{step}").result(60)
            else:
                writer.save(state, f"run/step-{step}")
    # The staged copy of a tensor that is not contiguous is: it has the strides of the one before.
    assert planned == len(NEXT) - (2 if background else 1)
    with VolumeReader([uri], "run") as reader:
        for step, state in enumerate(NEXT):
            found = {key: _cleared(value) for key, value in state.items()}
            reader.load(found, f"run/step-{step}")
            assert leaves(found) == leaves(state)


def _cleared(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _cleared(inner) for key, inner in value.items()}
    return torch.full_like(value, 9) if isinstance(value, torch.Tensor) else None
