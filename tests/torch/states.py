"""States that are awkward to save, and what two of them must have in common."""

from __future__ import annotations

from typing import Any

import torch


def awkward_state() -> dict[str, Any]:
    """Tied, sliced, transposed, empty, without dimensions, of dtypes that numpy lacks, and what is no tensor."""
    generator = torch.Generator().manual_seed(3)
    weight = torch.randn(700, 300, generator=generator)
    flat = torch.randn(100_003, generator=generator)
    return {
        "model": {
            "weight": weight,
            "tied": weight,
            "transposed": weight.t(),
            "rows": weight[10:20],
            "column": weight[:, 7],
            "first": flat[:50_001],
            "second": flat[50_001:],
            "half": weight.to(torch.bfloat16),
            "fp8": weight[:3].to(torch.float8_e4m3fn),
            "bytes": torch.arange(77, dtype=torch.uint8)[5:],
            "scalar": torch.tensor(2.5),
            "empty": torch.zeros(0, 4),
            "expanded": torch.ones(1).expand(5000),
            "conjugate": torch.randn(9, dtype=torch.complex64, generator=generator).conj(),
        },
        "optimizer": {"steps": [torch.tensor(3), torch.tensor(4)], "lr": 0.1},
        "step": 5,
        "note": ("a", b"\x00", None),
    }


def leaves(state: Any) -> Any:
    """Comparable: every tensor as its dtype, shape and bytes."""
    if isinstance(state, torch.Tensor):
        plain = state.detach().resolve_conj().contiguous().clone().reshape(-1).view(torch.uint8)
        return str(state.dtype), tuple(state.shape), plain.numpy().tobytes()
    if isinstance(state, dict):
        return {key: leaves(value) for key, value in state.items()}
    if isinstance(state, (list, tuple)):
        return [leaves(value) for value in state]
    return state
