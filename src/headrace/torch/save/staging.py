"""Where the bytes of a rank's save lie: the layout of its object, and the memory that it is written from."""

from __future__ import annotations

import io
import math
import threading
from dataclasses import dataclass, field

import torch
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner, WriteItem, WriteItemType

from headrace.checkpoint.layout import ITEM_ALIGNMENT, pack
from headrace.errors import CheckpointFailed
from headrace.torch.save.seals import Seals
from headrace.torch.save.stager import find_copy
from headrace.torch.tensors import as_bytes
from headrace.volume import Parts


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


@dataclass(frozen=True, kw_only=True)
class Gathered:
    """All bytes of a rank's object, where they lie."""

    parts: Parts
    seals: Seals
    #: Of an asynchronous save: set where somebody waits for it.
    hurry: threading.Event | None
    #: Bytes that had to be copied for this save, and why: "on cuda:0", "not contiguous".
    copied: dict[str, int]


class Staging:
    """Finds the bytes that a save writes, and copies those alone that are not to be written from where they are.

    Those copies lie in a buffer that outlives saves, as fresh pages cost more than the copy into them: pages for the
    largest save so far, pinned where there is CUDA, until `release`.
    """

    def __init__(self) -> None:
        self._buffer: torch.Tensor | None = None

    def gather(self, staged: StagedPlan, planner: SavePlanner, *, seal: str) -> Gathered:
        """Every item, written from where it lies if that is contiguous host memory. Valid until the next gather, and as
        long as nobody changes the tensors.

        CheckpointFailed where an item is not what its plan says: another shape or dtype since, or a sparse tensor.
        `seal`: "copy": all of it is checksummed now, where it was not before; "behind": if all of it was copied.
        """
        runs = Runs()
        seals = Seals()
        copied: dict[str, int] = {}
        memory_of: dict[int, memoryview] = {}
        end = 0
        live = False
        hurry: threading.Event | None = None
        to_wait_for: set[torch.device] = set()
        for position, item in enumerate(staged.items):
            start, length = staged.offsets[position], staged.lengths[position]
            name = item.index.fqn
            if not length:
                continue
            if position in staged.blobs:
                blob = staged.blobs[position].getbuffer()
                runs.add(start, blob)
                seals.add(name, start, blob, None)
                continue
            tensor = _checked(planner.resolve_data(item), item)
            why = why_copied(tensor)
            if why is None and (found := find_copy(tensor)) is not None:
                copy, at = found
                copy.complete()
                hurry = copy.hurry
                home = memory_of.setdefault(id(copy), as_bytes(copy.memory))
                runs.add(start, home, at, length)
                seals.add(name, start, home[at : at + length], copy.seals.get((at, length)))
                continue
            if why is None:
                live = True
                home = as_bytes(tensor)
                runs.add(start, home)
                seals.add(name, start, home, None)
                continue
            buffer = self._reserve(staged.total_bytes)
            # Gaps are written too: what was here before belongs to nobody else's checkpoint.
            buffer[max(end, start - ITEM_ALIGNMENT) : start].zero_()
            end = start + length
            if _copy(buffer[start:end], tensor):
                to_wait_for.add(tensor.device)
            copied[why] = copied.get(why, 0) + length
            home = memory_of.setdefault(id(self), as_bytes(buffer))
            runs.add(start, home, start, length)
            seals.add(name, start, home[start:end], None)
        for device in to_wait_for:
            torch.accelerator.synchronize(device)
        if seal == "copy" or (seal == "behind" and not live):
            seals.take()
        return Gathered(parts=runs.parts(staged.total_bytes), seals=seals, hurry=hurry, copied=copied)

    def _reserve(self, total_bytes: int) -> torch.Tensor:
        if self._buffer is None or self._buffer.numel() < total_bytes:
            # Free the old one first: two at a time would double the peak.
            self._buffer = None
            self._buffer = torch.empty(total_bytes, dtype=torch.uint8, pin_memory=torch.cuda.is_available())
        return self._buffer[:total_bytes]

    def release(self) -> None:
        self._buffer = None


class Runs:
    """Items that lie in one piece of memory as they do in the object are one part of it, gaps and all, where those are
    zeros: between two views of one tensor there is the rest of it."""

    def __init__(self) -> None:
        self._found: list[tuple[int, memoryview, int, int]] = []

    def add(self, start: int, home: memoryview, at: int = 0, length: int | None = None) -> None:
        """Bytes `start ..` of the object are `home[at ..]`."""
        end = start + (len(home) - at if length is None else length)
        if self._found:
            first, last_home, last_at, last_end = self._found[-1]
            near = start - last_end < ITEM_ALIGNMENT and last_home is home
            if near and at - last_at == start - first and not any(home[last_at + last_end - first : at]):
                self._found[-1] = (first, last_home, last_at, end)
                return
        self._found.append((start, home, at, end))

    def parts(self, total_bytes: int) -> Parts:
        buffers = [home[at : at + end - start] for start, home, at, end in self._found]
        return Parts(buffers, [start for start, *_ in self._found], total_bytes)


def why_copied(tensor: torch.Tensor) -> str | None:
    """Why the bytes of a tensor cannot be written from where they are; None where they can."""
    if tensor.device.type != "cpu":
        return f"on {tensor.device}"
    if not tensor.is_contiguous():
        return "not contiguous"
    if tensor.is_conj() or tensor.is_neg():
        return "conjugated or negated when it is read"
    return None


def _checked(tensor: object, item: WriteItem) -> torch.Tensor:
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
    if type(tensor) in (torch.Tensor, torch.nn.Parameter) and tensor.numel() and not tensor.untyped_storage().nbytes():
        raise CheckpointFailed(f"tensor {item.index.fqn!r} has its memory let go", expected=f"{tensor.nbytes} bytes")
    return tensor.detach()


def _copy(place: torch.Tensor, tensor: torch.Tensor) -> bool:
    """True where the copy runs on an accelerator and may not be finished yet."""
    accelerated = tensor.device.type != "cpu" and place.is_pinned()
    place.view(tensor.dtype).view(tensor.shape).copy_(tensor, non_blocking=accelerated)
    return accelerated
