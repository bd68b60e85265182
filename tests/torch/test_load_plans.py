"""Plans that go through the store of the job: nothing that lies there is carried out."""

from __future__ import annotations

import json
import os
import pickle
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from headrace.errors import CheckpointFailed
from headrace.torch.load.plans import decode_plan, encode_plan


def plan(planner_data: Any = None) -> LoadPlan:
    items = [
        ReadItem(
            type=kind,
            dest_index=MetadataIndex("a", offset, 3),
            dest_offsets=torch.Size((1, 2)),
            storage_index=MetadataIndex("b", torch.Size((4, 0))),
            storage_offsets=torch.Size((0, 1)),
            lengths=torch.Size((5, 6)),
        )
        for kind, offset in ((LoadItemType.TENSOR, torch.Size((7, 8))), (LoadItemType.BYTE_IO, None))
    ]
    return LoadPlan(items, planner_data=planner_data)


@pytest.mark.parametrize("data", [None, {"a": (1, [b"x", 2.5])}])
def test_there_and_back(data: Any) -> None:
    again = decode_plan(encode_plan(plan(data)))
    assert again == plan(data)
    # An index finds its chunk by its hash.
    assert {again.items[0].dest_index: 1}[plan().items[0].dest_index] == 1


def test_what_is_not_plain_is_refused() -> None:
    with pytest.raises(CheckpointFailed, match="planner keeps data"):
        encode_plan(plan(object()))


class Evil:
    def __init__(self, path: Path) -> None:
        self.path = path

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.path),)


def test_what_others_write_there_is_refused(tmp_path: Path) -> None:
    good = json.loads(encode_plan(plan()))
    bad: list[Any] = [[], {}, [1, 2, 3], [[[1]], None, None], [good[0], {"a": 1}, None], [good[0], None, ["x"]]]
    for at, value in ((0, "NO_SUCH_TYPE"), (1, ["a"]), (1, [1, None, None]), (2, "x"), (5, [-1.5])):
        bad.append([[[*good[0][0][:at], value, *good[0][0][at + 1 :]]], None, None])
    for data in (
        pickle.dumps(Evil(tmp_path / "made")),
        b"",
        b"[" * 100_000,
        *(json.dumps(one).encode() for one in bad),
    ):
        with pytest.raises(CheckpointFailed):
            decode_plan(data)
    assert not list(tmp_path.iterdir())
