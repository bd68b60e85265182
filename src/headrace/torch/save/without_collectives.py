"""One checkpoint of ranks that planned apart: `dcp.save(..., use_collectives=False)`.

DCP takes no step together then: each rank plans what it has as if it were alone, and nobody sees all plans. What the
ranks wrote is put together from what each tells of its own. A tensor that several have whole was written by each of
them; that of the lowest rank is the one that is read.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata

from headrace.checkpoint import Manifest
from headrace.errors import CheckpointFailed
from headrace.torch.metadata import Place, from_manifest


def put_together(parts: Sequence[Manifest]) -> tuple[Metadata, dict[MetadataIndex, Place]]:
    """What all ranks have, and where it lies, from what each of them has. CheckpointFailed where that is no whole: a
    tensor of two shapes, or one of which something is missing."""
    entries: dict[str, Any] = {}
    places: dict[MetadataIndex, Place] = {}
    planner: dict[Any, Any] = {}
    for rank, part in enumerate(parts):
        metadata = from_manifest(part)
        if isinstance(metadata.planner_data, dict):
            planner = {**metadata.planner_data, **planner}
        for fqn, entry in metadata.state_dict_metadata.items():
            mine = entries.setdefault(fqn, entry)
            if mine is not entry:
                _join(fqn, rank, mine, entry)
        for index, place in (metadata.storage_data or {}).items():
            places.setdefault(index, place)
    for fqn, entry in entries.items():
        if isinstance(entry, TensorStorageMetadata):
            _refuse_holes(fqn, entry)
    return Metadata(state_dict_metadata=entries, planner_data=planner or None), places


def _join(fqn: str, rank: int, mine: Any, entry: Any) -> None:
    found = _kind(entry)
    if found != _kind(mine):
        raise CheckpointFailed(
            f"the ranks save different things as {fqn!r}", where=f"rank {rank}", expected=_kind(mine), found=found
        )
    if not isinstance(entry, TensorStorageMetadata):
        return
    sizes = {chunk.offsets: chunk.sizes for chunk in mine.chunks}
    for chunk in entry.chunks:
        if chunk.offsets not in sizes:
            sizes[chunk.offsets] = chunk.sizes
            mine.chunks.append(chunk)
        elif sizes[chunk.offsets] != chunk.sizes:
            raise CheckpointFailed(
                f"the ranks have cut tensor {fqn!r} in different ways",
                where=f"rank {rank}, at {list(chunk.offsets)}",
                expected=str(list(sizes[chunk.offsets])),
                found=str(list(chunk.sizes)),
            )


def _kind(entry: Any) -> str:
    if not isinstance(entry, TensorStorageMetadata):
        return "bytes"
    return f"a tensor of {entry.properties.dtype}{list(entry.size)}"


def _refuse_holes(fqn: str, entry: TensorStorageMetadata) -> None:
    found = sum(math.prod(chunk.sizes) for chunk in entry.chunks)
    # As many elements may still be some of them twice, and others not at all.
    overlap = _overlap(entry)
    if overlap or found != math.prod(entry.size):
        raise CheckpointFailed(
            f"the ranks together do not have tensor {fqn!r} once",
            expected=f"{math.prod(entry.size)} elements",
            found=f"{found} in {len(entry.chunks)} pieces{', two of which overlap' if overlap else ''}",
            next_step="each rank must save its own part, under the offsets that it has in the whole",
        )


def _overlap(entry: TensorStorageMetadata) -> bool:
    boxes = [
        (chunk.offsets, [low + size for low, size in zip(chunk.offsets, chunk.sizes, strict=True)])
        for chunk in entry.chunks
        if math.prod(chunk.sizes)
    ]
    if len(boxes) < 2:
        return False
    # Along the dimension in which most of them begin apart few are beside each other.
    along = max(range(len(entry.size)), key=lambda dimension: len({low[dimension] for low, _ in boxes}))
    beside: list[Any] = []
    for low, high in sorted(boxes, key=lambda box: box[0][along]):
        beside = [box for box in beside if box[1][along] > low[along]]
        for other_low, other_high in beside:
            if all(a < d and c < b for a, b, c, d in zip(low, high, other_low, other_high, strict=True)):
                return True
        beside.append((low, high))
    return False


__all__ = ["put_together"]
