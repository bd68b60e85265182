"""DCP's load plans as JSON, for planners that see those of all ranks.

Not as pickles: they go through the store of the job, where others may write too. What a planner adds to a plan goes
along where it is plain values (`headrace.torch.metadata.encode_plain`), else it is refused.
"""

from __future__ import annotations

import json
from typing import Any

import torch
from torch.distributed.checkpoint.metadata import MetadataIndex
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, ReadItem

from headrace.errors import CheckpointFailed
from headrace.torch.metadata import decode_plain, encode_plain


def encode_plan(plan: LoadPlan) -> bytes:
    """CheckpointFailed where it holds what is not plain."""
    items = [
        [
            item.type.name,
            _index(item.dest_index),
            list(item.dest_offsets),
            _index(item.storage_index),
            list(item.storage_offsets),
            list(item.lengths),
        ]
        for item in plan.items
    ]
    return json.dumps([items, encode_plain(plan.storage_data), encode_plain(plan.planner_data)]).encode()


def decode_plan(data: bytes) -> LoadPlan:
    """CheckpointFailed for what `encode_plan` never makes."""
    try:
        items, storage, planner = json.loads(data)
        found = [
            ReadItem(
                type=LoadItemType[kind],
                dest_index=_index_of(into),
                dest_offsets=torch.Size(at),
                storage_index=_index_of(source),
                storage_offsets=torch.Size(begin),
                lengths=torch.Size(lengths),
            )
            for kind, into, at, source, begin, lengths in items
        ]
        return LoadPlan(items=found, storage_data=decode_plain(storage), planner_data=decode_plain(planner))
    except (ValueError, TypeError, LookupError, OverflowError, RecursionError) as error:
        raise CheckpointFailed("what a rank sent is not a plan", found=f"{type(error).__name__}: {error}") from None


def _index(index: MetadataIndex) -> list[Any]:
    return [index.fqn, None if index.offset is None else list(index.offset), index.index]


def _index_of(raw: list[Any]) -> MetadataIndex:
    fqn, offset, index = raw
    if not isinstance(fqn, str) or not isinstance(index, int | None):
        raise ValueError("an index that names nothing")
    return MetadataIndex(fqn, None if offset is None else torch.Size(offset), index)
