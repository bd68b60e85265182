"""States of frameworks, taken apart into named tensors and the rest, and put together again."""

from __future__ import annotations

import io
from collections import OrderedDict
from typing import Any

import pytest
import torch

from headrace.errors import CheckpointFailed, UsageError
from headrace.torch.apart import put_together, take_apart


def _state() -> dict[str, Any]:
    module = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2))
    tied = torch.arange(6.0).reshape(2, 3)
    return {
        "state_dict": module.state_dict(),
        "optimizer_states": [{"state": {0: {"step": torch.tensor(3.0), "m": tied.t()}}, "groups": [(0, 1), "x"]}],
        "tied": {"a": tied, "b": tied},
        "a.b": torch.ones(1),
        "a": {"b": torch.zeros(1)},
        "mine": torch.ones(2, dtype=torch.bfloat16),
        "nothing": torch.zeros(0, 4),
        "epoch": 2,
    }


def _through_bytes(rest: Any) -> Any:
    data = io.BytesIO()
    torch.save(rest, data)
    return torch.load(io.BytesIO(data.getvalue()), weights_only=True)


def test_there_and_back() -> None:
    state = _state()
    tensors, rest = take_apart(state, reserved={"mine"})
    assert {"state_dict.0.weight", "optimizer_states.0.state.0.step", "a.b", "a.b#2", "mine#2"} <= set(tensors)
    # What is one and the same is written once; nothing is copied, and the state is left as it was.
    assert "tied.a" in tensors and "tied.b" not in tensors
    assert tensors["tied.a"].data_ptr() == state["tied"]["a"].data_ptr() and state["epoch"] == 2
    assert isinstance(state["tied"]["a"], torch.Tensor)

    again = put_together(_through_bytes(rest), {name: tensor.clone() for name, tensor in tensors.items()})
    assert again["tied"]["a"] is again["tied"]["b"]
    assert isinstance(again["state_dict"], OrderedDict)
    # By which a module knows how old its state is.
    assert again["state_dict"]._metadata == state["state_dict"]._metadata
    assert again["optimizer_states"][0]["groups"] == [(0, 1), "x"] and again["epoch"] == 2
    torch.testing.assert_close(take_apart(again)[0], take_apart(state)[0], rtol=0, atol=0)


def test_places_are_those_of_torch_load() -> None:
    tensors, rest = take_apart({"w": torch.arange(4.0)})
    seen: list[str] = []

    def there(storage: torch.UntypedStorage, location: str) -> torch.UntypedStorage | None:
        seen.append(location)
        return storage.clone() if len(seen) == 1 else None

    moved = put_together(_through_bytes(rest), tensors, there)["w"]
    assert torch.equal(moved, tensors["w"]) and moved.data_ptr() != tensors["w"].data_ptr()
    assert put_together(_through_bytes(rest), tensors, there)["w"].device.type == "cpu" and seen == ["cpu", "cpu"]
    for place in ("meta", torch.device("meta"), {"cpu": "meta"}):
        assert put_together(_through_bytes(rest), tensors, place)["w"].is_meta


def test_a_tensor_that_is_not_there_and_a_part_of_one() -> None:
    _, rest = take_apart({"w": torch.ones(1)})
    with pytest.raises(CheckpointFailed, match=r"does not hold a tensor that it names.*w"):
        put_together(rest, {})

    class ShardedTensor(torch.Tensor):
        pass

    with pytest.raises(UsageError, match=r"a part of a sharded tensor is not a checkpoint.*model\.w"):
        take_apart({"model": {"w": torch.ones(1).as_subclass(ShardedTensor)}})
