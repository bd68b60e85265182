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
from headrace.torch.save.stager import Copy, find_copy
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


@dataclass
class _Item:
    """Where the bytes of one item lie: `length` of them from `home[at]`, which become those from `start` on."""

    name: str
    start: int
    length: int
    home: memoryview = field(default_factory=lambda: memoryview(b""))
    at: int = 0
    #: Of a staged state.
    copy: Copy | None = None
    #: Written from the memory that training uses.
    live: bool = False
    #: Why it is copied for this save, and what; None where it is not.
    why: str | None = None
    tensor: torch.Tensor | None = None


class Staging:
    """Finds the bytes that a save writes, and copies those alone that are not to be written from where they are.

    Those copies lie in a buffer that outlives saves, as fresh pages cost more than the copy into them: pages for the
    most that a save has copied so far, pinned where there is CUDA, until `release`.
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
        found = [self._find(staged, position, planner) for position in range(len(staged.items))]
        copied: dict[str, int] = {}
        moved = [one for one in found if one.why is not None]
        memory_of: dict[int, memoryview] = {}
        hurry: threading.Event | None = None
        if moved:
            buffer = self._copy_all(moved)
            home = as_bytes(buffer)
            for one in moved:
                assert one.why is not None
                copied[one.why] = copied.get(one.why, 0) + one.length
                one.home = home
        for one in found:
            if one.copy is not None:
                one.copy.complete()
                hurry = one.copy.hurry
                one.home = memory_of.setdefault(id(one.copy), as_bytes(one.copy.memory))
            if one.length:
                runs.add(one.start, one.home, one.at, one.length)
                sum = None if one.copy is None else one.copy.seals.get((one.at, one.length))
                seals.add(one.name, one.start, one.home[one.at : one.at + one.length], sum)
        live = any(one.live for one in found)
        if seal == "copy" or (seal == "behind" and not live):
            seals.take()
        return Gathered(parts=runs.parts(staged.total_bytes), seals=seals, hurry=hurry, copied=copied)

    @staticmethod
    def _find(staged: StagedPlan, position: int, planner: SavePlanner) -> _Item:
        item = staged.items[position]
        one = _Item(item.index.fqn, staged.offsets[position], staged.lengths[position])
        if not one.length:
            return one
        if position in staged.blobs:
            one.home = staged.blobs[position].getbuffer()
            return one
        tensor = _checked(planner.resolve_data(item), item)
        one.why = why_copied(tensor)
        if one.why is not None:
            one.tensor = tensor
        elif (found := find_copy(tensor)) is not None:
            one.copy, one.at = found
        else:
            one.live, one.home = True, as_bytes(tensor)
        return one

    def _copy_all(self, items: list[_Item]) -> torch.Tensor:
        """Into the buffer, one behind the other: neighbours in the object as far apart as they are there."""
        end = last = 0
        for one in items:
            gap = one.start - last
            one.at = end + (gap if 0 <= gap < ITEM_ALIGNMENT else -end % ITEM_ALIGNMENT)
            end, last = one.at + one.length, one.start + one.length
        buffer = self._reserve(end)
        to_wait_for: set[torch.device] = set()
        end = 0
        for one in items:
            assert one.tensor is not None
            # Gaps are written too: what was here before belongs to nobody else's checkpoint.
            buffer[end : one.at].zero_()
            end = one.at + one.length
            if _copy(buffer[one.at : end], one.tensor):
                to_wait_for.add(one.tensor.device)
            one.tensor = None
        for device in to_wait_for:
            torch.accelerator.synchronize(device)
        return buffer

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
