"""A state dict as what it is made of: a skeleton without tensors, and the places in memory that its tensors need.

Tensors that share memory share a place: tied weights, and views that overlap. A tensor that wraps others (a DTensor and
its local one) stays what it is around a copy of those. Everything else is copied as torch's own stager copies it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from headrace.checkpoint.layout import pack
from headrace.errors import CheckpointFailed

_ATOMS = frozenset({type(None), bool, int, float, complex, str, bytes, torch.dtype, torch.device, torch.Size})
_PLAIN = (torch.Tensor, torch.nn.Parameter)


@dataclass(frozen=True)
class View:
    """A tensor of the copy: so many bytes of the memory of all places, from `offset` on."""

    offset: int
    length: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class _Leaf:
    number: int


@dataclass(frozen=True)
class _Wrapped:
    kind: Any
    inner: dict[str, Any]
    context: Any
    size: tuple[int, ...]
    stride: tuple[int, ...]


@dataclass
class _Place:
    """What is copied in one go: a tensor, or a piece of a storage that holds several."""

    source: torch.Tensor
    leaves: list[int]
    length: int
    #: Of a piece of a storage: where it begins there.
    start: int = 0


class Survey:
    """See the module text. Nothing is copied but what is no tensor.

    CheckpointFailed for tensors that are not dense, or have no memory.
    """

    def __init__(self, state: dict[str, Any]) -> None:
        self._tensors: list[torch.Tensor] = []
        self._numbers: dict[Any, int] = {}
        self.skeleton = {key: self._walk(value, (key,)) for key, value in state.items()}
        places = self._places()
        self.lengths = [place.length for place in places]
        self.offsets, self.total_bytes = pack(self.lengths)
        self.sources = [place.source for place in places]
        views: dict[int, View] = {}
        for place, offset in zip(places, self.offsets, strict=True):
            for number in place.leaves:
                tensor = self._tensors[number]
                inside = _start(tensor) - place.start if len(place.leaves) > 1 else 0
                views[number] = View(offset + inside, tensor.nbytes, tensor.dtype, tuple(tensor.shape))
        empty = ((n, t) for n, t in enumerate(self._tensors) if n not in views)
        views.update({number: View(0, 0, tensor.dtype, tuple(tensor.shape)) for number, tensor in empty})
        self.views = [views[number] for number in range(len(self._tensors))]

    @property
    def state_bytes(self) -> int:
        """Of all tensors, those that share memory once."""
        return sum(self.lengths)

    @property
    def layout(self) -> tuple[tuple[int, ...], tuple[int, ...]]:
        return tuple(self.offsets), tuple(self.lengths)

    def copy_into(self, memory: torch.Tensor, device: torch.device, *, non_blocking: bool) -> None:
        """Every place of this device into uint8[total_bytes]; the gaps between them stay as they are."""
        for source, offset, length in zip(self.sources, self.offsets, self.lengths, strict=True):
            if source.device != device:
                continue
            place = memory[offset : offset + length]
            if source.dtype != torch.uint8 or source.dim() != 1:
                place = place.view(source.dtype).view(source.shape)
            place.copy_(source, non_blocking=non_blocking)

    def zero_gaps(self, memory: torch.Tensor) -> None:
        end = 0
        for offset, length in zip(self.offsets, self.lengths, strict=True):
            if offset > end:
                memory[end:offset].zero_()
            end = offset + length

    def _walk(self, value: Any, path: tuple[Any, ...]) -> Any:
        kind = type(value)
        if kind in _ATOMS:
            return value
        if isinstance(value, torch.Tensor):
            return self._tensor(value, path)
        if isinstance(value, dict):
            return {key: self._walk(inner, (*path, key)) for key, inner in value.items()}
        if kind is list:
            return [self._walk(inner, (*path, number)) for number, inner in enumerate(value)]
        if kind is tuple:
            return tuple(self._walk(inner, (*path, number)) for number, inner in enumerate(value))
        # A stager for each: some versions of torch (2.11 is one) can stage only once with one.
        return DefaultStager(_IN_HOST_MEMORY).stage({"value": value})["value"]  # type: ignore[index]

    def _tensor(self, tensor: torch.Tensor, path: tuple[Any, ...]) -> Any:
        # What a collective is under way into (`AsyncCollectiveTensor`, also within a DTensor): its memory has its
        # content only when that was waited for, and what it wraps does not wait.
        arrive = getattr(tensor, "trigger_wait", None)
        if arrive is not None:
            return self._tensor(arrive(), path)
        if type(tensor) not in _PLAIN:
            flatten = getattr(tensor, "__tensor_flatten__", None)
            if flatten is None:
                return DefaultStager(_IN_HOST_MEMORY).stage({"value": tensor})["value"]  # type: ignore[index]
            names, context = flatten()
            inner = {name: getattr(tensor, name) for name in names}
            found = {
                name: self._tensor(part, path) if isinstance(part, torch.Tensor) else part
                for name, part in inner.items()
            }
            return _Wrapped(type(tensor), found, context, tuple(tensor.shape), tuple(tensor.stride()))
        strided = tensor.layout == torch.strided and tensor.device.type != "meta"
        # Memory that was let go (`resize_(0)`) would be made again by whoever looks at it, with anything in it.
        freed = strided and tensor.numel() and not tensor.untyped_storage().nbytes()
        if not strided or freed:
            raise CheckpointFailed(
                f"{'.'.join(map(str, path))!r} is not a dense tensor",
                expected="torch.strided, with memory",
                found=f"{tensor.layout} on {tensor.device}{', its memory let go' if freed else ''}",
            )
        tensor = tensor.detach()
        storage = tensor.untyped_storage().data_ptr()
        key: tuple[Any, ...] = (storage, tensor.device, _start(tensor), tensor.dtype, tensor.shape, tensor.stride())
        # An empty one shares nothing with anybody.
        key += (tensor.is_conj(), tensor.is_neg()) if tensor.numel() else (len(self._tensors),)
        number = self._numbers.get(key)
        if number is None:
            number = self._numbers[key] = len(self._tensors)
            self._tensors.append(tensor)
        return _Leaf(number)

    def _places(self) -> list[_Place]:
        alone: list[_Place] = []
        storages: dict[tuple[torch.device, int], list[int]] = {}
        for number, tensor in enumerate(self._tensors):
            if not tensor.numel():
                continue
            if tensor.is_contiguous() and not (tensor.is_conj() or tensor.is_neg()):
                where = tensor.device, tensor.untyped_storage().data_ptr()
                storages.setdefault(where, []).append(number)
            else:
                alone.append(_Place(tensor, [number], tensor.nbytes))
        for numbers in storages.values():
            alone += self._pieces(numbers)
        # In the order of the state: that of the plan, too, so that what is written lies in one run.
        return sorted(alone, key=lambda place: min(place.leaves))

    def _pieces(self, numbers: list[int]) -> list[_Place]:
        """Pieces of one storage: of tensors that overlap, one."""
        result: list[_Place] = []
        end = -1
        for number in sorted(numbers, key=lambda n: (_start(self._tensors[n]), -self._tensors[n].nbytes)):
            tensor = self._tensors[number]
            start = _start(tensor)
            if start < end and (start - result[-1].start) % tensor.dtype.itemsize == 0:
                last = result[-1]
                last.leaves.append(number)
                last.length = max(last.length, start + tensor.nbytes - last.start)
                end = max(end, start + tensor.nbytes)
            else:
                result.append(_Place(tensor, [number], tensor.nbytes, start))
                end = start + tensor.nbytes
        for place in result:
            # One address may be that of several storages, as where numpy stands between: the longest holds all.
            first = max((self._tensors[n] for n in place.leaves), key=lambda tensor: tensor.untyped_storage().nbytes())
            place.source = torch.empty(0, dtype=torch.uint8, device=first.device).set_(
                first.untyped_storage(), place.start, (place.length,), (1,)
            )
        return result


def build(skeleton: Any, views: Sequence[View], memory: torch.Tensor) -> dict[str, Any]:
    """The state again, its tensors in `memory`."""
    tensors: dict[int, torch.Tensor] = {}

    def tensor_of(number: int) -> torch.Tensor:
        if number not in tensors:
            view = views[number]
            place = memory[view.offset : view.offset + view.length].view(view.dtype)
            tensors[number] = place.view(view.shape) if view.length else torch.empty(view.shape, dtype=view.dtype)
        return tensors[number]

    return {key: _clothe(value, tensor_of) for key, value in skeleton.items()}


def _clothe(value: Any, tensor_of: Callable[[int], torch.Tensor]) -> Any:
    kind = type(value)
    if kind is _Leaf:
        return tensor_of(value.number)
    if kind is _Wrapped:
        inner = {name: _clothe(part, tensor_of) for name, part in value.inner.items()}
        return value.kind.__tensor_unflatten__(inner, value.context, torch.Size(value.size), value.stride)
    if kind is dict:
        return {key: _clothe(inner, tensor_of) for key, inner in value.items()}
    if kind is list:
        return [_clothe(inner, tensor_of) for inner in value]
    if kind is tuple:
        return tuple(_clothe(inner, tensor_of) for inner in value)
    return value


def _start(tensor: torch.Tensor) -> int:
    """In its storage, in bytes."""
    return int(tensor.storage_offset()) * tensor.dtype.itemsize


_IN_HOST_MEMORY = StagingOptions(False, False, False, False)
