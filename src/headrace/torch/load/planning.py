"""The plan of one rank's load, without what costs again for each tensor that is laid out as others are.

torch asks every DTensor where its shard lies, and looks for each which saved chunks that meets: an eighth of a
millisecond a tensor, on the way of a load and on each rank, before anything is read. The weights of a model are few
shapes, and its optimizer has each of them again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner, create_default_local_load_plan
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, TensorStorageMetadata
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.planner_helpers import create_read_items_for_chunk_list
from torch.distributed.tensor import DTensor


def create_local_plan(planner: LoadPlanner) -> LoadPlan:
    """`planner.create_local_plan()`, on a planner that was set up."""
    if type(planner) is not DefaultLoadPlanner or planner.metadata is None:
        return planner.create_local_plan()
    state, metadata = planner.state_dict, planner.metadata
    if not state.keys() >= metadata.state_dict_metadata.keys():
        # Keys of a checkpoint of an older torch, perhaps: those are the planner's to know.
        return planner.create_local_plan()
    known: dict[tuple[Any, ...], list[ReadItem]] = {}
    items: list[ReadItem] = []
    for name, value in state.items():
        found = _alike(name, value, metadata, known)
        if found is None:
            found = create_default_local_load_plan({name: value}, metadata, not planner.allow_partial_load).items
        items += found
    return LoadPlan(items)


def _alike(
    name: str, value: Any, metadata: Metadata, known: dict[tuple[Any, ...], list[ReadItem]]
) -> list[ReadItem] | None:
    """Of a DTensor around a plain tensor; None: the planner is to say."""
    saved = metadata.state_dict_metadata.get(name)
    if type(value) is not DTensor or type(value._local_tensor) is not torch.Tensor:
        return None
    if not isinstance(saved, TensorStorageMetadata) or saved.size != value.shape:
        return None
    mesh = value.device_mesh
    if mesh.get_coordinate() is None:
        return None
    key = (id(mesh), value.placements, value.shape, tuple((chunk.offsets, chunk.sizes) for chunk in saved.chunks))
    first = known.get(key)
    if first is None:
        chunks = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
        first = create_read_items_for_chunk_list(name, saved, chunks)
        known[key] = first
        return first
    return [
        ReadItem(
            LoadItemType.TENSOR,
            MetadataIndex(name, one.dest_index.offset, one.dest_index.index),
            one.dest_offsets,
            MetadataIndex(name, one.storage_index.offset, one.storage_index.index),
            one.storage_offsets,
            one.lengths,
        )
        for one in first
    ]


__all__ = ["create_local_plan"]
