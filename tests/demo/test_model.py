"""The model is causal, and its loss is a sum, so that a step can be cut into micro batches at will."""

from __future__ import annotations

import math

import pytest
import torch

from headrace.demo.model import Gpt, GptOptions
from headrace.errors import UsageError

OPTIONS = GptOptions(vocabulary=64, sequence=16, width=24, heads=2, layers=2)


@pytest.fixture
def gpt() -> Gpt:
    torch.manual_seed(1)
    return Gpt(OPTIONS)


@pytest.fixture
def tokens() -> torch.Tensor:
    return torch.randint(0, 64, (8, 17), generator=torch.Generator().manual_seed(2))


def test_a_new_model_knows_nothing(gpt: Gpt, tokens: torch.Tensor) -> None:
    assert gpt(tokens).item() / (8 * 16) == pytest.approx(math.log(64), rel=0.02)


def test_the_loss_is_a_sum_over_positions(gpt: Gpt, tokens: torch.Tensor) -> None:
    whole = gpt(tokens)
    assert float(whole) == pytest.approx(sum(float(gpt(part)) for part in tokens.split(2)), rel=1e-5)


def test_no_position_sees_the_future(gpt: Gpt, tokens: torch.Tensor) -> None:
    # The loss of a prefix is the same whatever follows it.
    changed = tokens.clone()
    changed[:, 12:] = (changed[:, 12:] + 1) % 64
    assert torch.equal(gpt(tokens[:, :12]), gpt(changed[:, :12]))
    whole, other = float(gpt(tokens)), float(gpt(changed))
    assert whole != other
    suffix_free = gpt(tokens[:, :11])
    assert float(suffix_free) < whole


def test_order_matters(gpt: Gpt, tokens: torch.Tensor) -> None:
    assert float(gpt(tokens)) != pytest.approx(float(gpt(tokens.flip(1))), rel=1e-6)


def test_it_learns(gpt: Gpt, tokens: torch.Tensor) -> None:
    optimizer = torch.optim.AdamW(gpt.parameters(), lr=1e-2)
    first = float(gpt(tokens))
    for _ in range(30):
        optimizer.zero_grad()
        loss = gpt(tokens) / tokens[:, 1:].numel()
        loss.backward()
        optimizer.step()
    assert float(gpt(tokens)) < first / 2


def test_shapes_that_cannot_be_are_refused() -> None:
    with pytest.raises(UsageError, match="multiple of 2 x heads"):
        GptOptions(vocabulary=64, sequence=16, width=25, heads=2)
    with pytest.raises(UsageError, match="layers"):
        GptOptions(vocabulary=64, sequence=16, layers=0)
