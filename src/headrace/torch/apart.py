"""A state of dictionaries, lists and tensors as named tensors and the rest, and back: for checkpoints of frameworks, of
which nobody knows beforehand what is in them.

The rest is the state with a mark in the place of each tensor. Tensors that are one and the same have one name, and are
one again afterwards. What hides in other objects stays there, and goes wherever they go.
"""

from __future__ import annotations

import copy
from collections import OrderedDict
from collections.abc import Collection
from typing import Any

import torch
from torch.distributed.tensor import DTensor

from headrace.errors import CheckpointFailed, UsageError

_NAME, _DEVICE = "headrace.tensor", "headrace.device"
_PLAIN = (torch.Tensor, torch.nn.Parameter)


def take_apart(state: Any, *, reserved: Collection[str] = ()) -> tuple[dict[str, torch.Tensor], Any]:
    """Tensors by name (their path, with dots; never one of `reserved`), not copied; and the rest.

    UsageError where there is a sharded one: this is for what one rank has whole.
    """
    tensors: dict[str, torch.Tensor] = {}
    names: dict[Any, str] = {}

    def walk(value: Any, path: tuple[str, ...]) -> Any:
        if isinstance(value, torch.Tensor):
            return tensor(value, path)
        kind = type(value)
        if kind in (dict, OrderedDict):
            # A copy of it: state dicts of modules carry their versions as an attribute.
            result = copy.copy(value)
            result.update((key, walk(inner, (*path, str(key)))) for key, inner in value.items())
            return result
        if kind in (list, tuple):
            return kind(walk(inner, (*path, str(number))) for number, inner in enumerate(value))
        return value

    def tensor(value: torch.Tensor, path: tuple[str, ...]) -> Any:
        if isinstance(value, DTensor) or "Sharded" in type(value).__name__:
            raise UsageError(
                "a part of a sharded tensor is not a checkpoint", where=".".join(path), found=type(value).__name__
            )
        dense = type(value) in _PLAIN and value.layout == torch.strided and not value.is_quantized
        if not dense or value.is_meta or not value.numel():
            return value
        plain = value.detach()
        memory = (plain.device, plain.data_ptr(), plain.dtype, plain.shape, plain.stride())
        key = (*memory, plain.is_conj(), plain.is_neg())
        if key not in names:
            first = name = ".".join(path)
            number = 1
            while name in tensors or name in reserved:
                number += 1
                name = f"{first}#{number}"
            names[key], tensors[name] = name, plain
        return {_NAME: names[key], _DEVICE: str(plain.device)}

    return tensors, walk(state, ())


def put_together(rest: Any, tensors: dict[str, torch.Tensor], map_location: Any = None) -> Any:
    """The state again. `map_location` is that of `torch.load`; None: in host memory.

    CheckpointFailed where the rest names a tensor that is not there.
    """
    placed: dict[str, torch.Tensor] = {}

    def walk(value: Any) -> Any:
        kind = type(value)
        if kind is dict and value.keys() == {_NAME, _DEVICE}:
            name = value[_NAME]
            if name not in placed:
                if name not in tensors:
                    raise CheckpointFailed("this checkpoint does not hold a tensor that it names", found=str(name))
                placed[name] = _place(tensors[name], value[_DEVICE], map_location)
            return placed[name]
        if kind in (dict, OrderedDict):
            for key, inner in value.items():
                value[key] = walk(inner)
            return value
        if kind in (list, tuple):
            return kind(map(walk, value))
        return value

    return walk(rest)


def _place(tensor: torch.Tensor, device: str, map_location: Any) -> torch.Tensor:
    if map_location is None:
        return tensor
    if callable(map_location):
        # A storage and where it was, to a storage where it shall be; None: where it was.
        moved = map_location(tensor.untyped_storage(), device)
        if moved is None:
            return tensor.to(device)
        return torch.empty(0, dtype=tensor.dtype, device=moved.device).set_(moved, 0, tensor.size(), tensor.stride())
    if isinstance(map_location, dict):
        return tensor.to(map_location.get(device, device))
    return tensor.to(map_location)
