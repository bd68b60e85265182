"""One host copy: the items of a rank, gathered from wherever they are into one contiguous buffer."""

from __future__ import annotations

import io
import math
import time
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType
from torch.distributed.checkpoint.staging import DefaultStager, StagingOptions

from headrace.checkpoint.layout import pack
from headrace.errors import CheckpointFailed


@dataclass(frozen=True, kw_only=True)
class StagedPlan:
    """Where each item of a plan goes in the rank's object. Made afresh for every save."""

    items: tuple[WriteItem, ...]
    offsets: tuple[int, ...]
    lengths: tuple[int, ...]
    #: Length of the object, gaps included.
    total_bytes: int
    #: The items that are bytes, serialised already: their length is not known before.
    blobs: dict[int, io.BytesIO] = field(default_factory=dict)

    @property
    def data_bytes(self) -> int:
        return sum(self.lengths)


def lay_out(plan: SavePlan, planner: SavePlanner) -> StagedPlan:
    """Sizes and offsets of the items of `plan`. Tensors are not touched; items of bytes are serialised."""
    blobs: dict[int, io.BytesIO] = {}
    lengths: list[int] = []
    for position, item in enumerate(plan.items):
        if item.type == WriteItemType.BYTE_IO:
            data = planner.resolve_data(item)
            if not isinstance(data, io.BytesIO):
                raise CheckpointFailed(
                    f"the planner resolved {item.index.fqn!r} to something else",
                    expected="io.BytesIO",
                    found=type(data).__name__,
                )
            blobs[position] = data
            lengths.append(data.getbuffer().nbytes)
        else:
            if item.tensor_data is None:
                raise CheckpointFailed(f"the plan does not say how large {item.index.fqn!r} is")
            element = item.tensor_data.properties.dtype.itemsize
            lengths.append(math.prod(item.tensor_data.chunk.sizes) * element)
    offsets, total = pack(lengths)
    return StagedPlan(
        items=tuple(plan.items), offsets=tuple(offsets), lengths=tuple(lengths), total_bytes=total, blobs=blobs
    )


class Staging:
    """The buffer that outlives saves: fresh pages cost more than the copy into them.

    Holds the bytes of the largest save so far, pinned where there is CUDA, until `release`.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def gather(self, staged: StagedPlan, planner: SavePlanner) -> tuple[torch.Tensor, float]:
        """Copy every item to its place: a uint8[total_bytes] tensor, valid until the next gather, and the seconds.

        CheckpointFailed where an item is not what its plan says: another shape or dtype since, or a sparse tensor.
        """
        began = time.perf_counter()
        buffer = self._reserve(staged.total_bytes)
        end = 0
        copied_from_accelerator = False
        for position, item in enumerate(staged.items):
            start, length = staged.offsets[position], staged.lengths[position]
            # Gaps are written too: what was here before belongs to nobody else's checkpoint.
            buffer[end:start].zero_()
            end = start + length
            if not length:
                continue
            place = buffer[start:end]
            if position in staged.blobs:
                place.copy_(torch.frombuffer(staged.blobs[position].getbuffer(), dtype=torch.uint8))
                continue
            tensor = planner.resolve_data(item)
            copied_from_accelerator |= _copy_tensor(place, tensor, item)
        if copied_from_accelerator:
            torch.accelerator.synchronize()
        return buffer, time.perf_counter() - began

    def _reserve(self, total_bytes: int) -> torch.Tensor:
        if self._buffer is None or self._buffer.numel() < total_bytes:
            # Free the old one first: two at a time would double the peak.
            self._buffer = None
            self._buffer = torch.empty(total_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._buffer[:total_bytes]

    def release(self) -> None:
        self._buffer = None


def _copy_tensor(place: torch.Tensor, tensor: object, item: WriteItem) -> bool:
    """True where the copy runs on an accelerator and may not be finished yet."""
    assert item.tensor_data is not None
    chunk, dtype = item.tensor_data.chunk, item.tensor_data.properties.dtype
    if not isinstance(tensor, torch.Tensor) or tensor.layout != torch.strided:
        kind = tensor.layout if isinstance(tensor, torch.Tensor) else type(tensor).__name__
        raise CheckpointFailed(f"{item.index.fqn!r} is not a dense tensor", expected="torch.strided", found=str(kind))
    if tensor.dtype != dtype or tensor.shape != chunk.sizes:
        raise CheckpointFailed(
            f"tensor {item.index.fqn!r} changed since it was planned",
            expected=f"{dtype}{list(chunk.sizes)}",
            found=f"{tensor.dtype}{list(tensor.shape)}",
        )
    accelerated = tensor.device.type != "cpu"
    place.view(dtype).view(chunk.sizes).copy_(tensor.detach(), non_blocking=accelerated and place.is_pinned())
    return accelerated and place.is_pinned()


def as_bytes(tensor: torch.Tensor) -> memoryview:
    """The memory of a contiguous CPU tensor of any dtype, writable, no copy: memoryview of uint8[nbytes]."""
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        raise CheckpointFailed("only a contiguous tensor in host memory can be read into or written from directly")
    return tensor.detach().reshape(-1).view(torch.uint8).numpy().data


class LastingStager(DefaultStager):
    """The copy that an asynchronous save is made from, kept for the next one where torch allows that.

    Some versions of torch (2.11 is one) throw the copy away at the end of `stage` and can stage only once: there each
    save has a copy of its own, in fresh pages. Ended by `release` alone, whatever torch closes.
    """

    def __init__(self) -> None:
        super().__init__(_IN_HOST_MEMORY)
        self._reusable = _can_stage_twice()

    def stage(self, state_dict: dict[str, Any], **kwargs: Any) -> Any:
        if self._reusable:
            return super().stage(state_dict, **kwargs)
        return DefaultStager(_IN_HOST_MEMORY).stage(state_dict, **kwargs)

    def close(self) -> None:
        """Nothing: see `release`."""

    def release(self) -> None:
        super().close()


_IN_HOST_MEMORY = StagingOptions(False, False, False, False)


def _can_stage_twice() -> bool:
    """Tried, since no version number says it: a class among the values is copied through what `stage` may clear."""
    stager = DefaultStager(_IN_HOST_MEMORY)
    try:
        for _ in range(2):
            stager.stage({"a class": int})
    except KeyError:
        return False
    finally:
        stager.close()
    return True
