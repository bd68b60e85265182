"""The memory of tensors."""

from __future__ import annotations

import torch

from headrace.errors import CheckpointFailed


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, writable, no copy: memoryview of uint8[nbytes]."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise CheckpointFailed("only a contiguous tensor in host memory can be read into or written from directly")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data
