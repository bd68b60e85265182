"""DCP's `Metadata` to the manifest of a checkpoint and back, without pickle."""

from __future__ import annotations

import base64
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch.distributed.checkpoint.metadata import (
    BytesStorageMetadata,
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    TensorProperties,
    TensorStorageMetadata,
)

from headrace.checkpoint.manifest import Json, Manifest, ObjectEntry, Summary, TensorEntry
from headrace.errors import CheckpointFailed

_MEMORY_FORMATS = {
    "contiguous_format": torch.contiguous_format,
    "channels_last": torch.channels_last,
    "preserve_format": torch.preserve_format,
}


@dataclass(frozen=True)
class Place:
    """Where one item lies: `storage_data` of DCP's `WriteResult` and `Metadata`. Picklable and small."""

    #: Full name of the object in the volume.
    object: str
    offset: int
    length: int


def dtype_name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")


def dtype_of(name: str) -> torch.dtype:
    """The dtype of this torch has this name; CheckpointFailed where it has none (a checkpoint of a newer torch)."""
    found = getattr(torch, name, None)
    if not isinstance(found, torch.dtype):
        raise CheckpointFailed(
            f"this torch ({torch.__version__}) has no dtype {name!r}",
            next_step="load the checkpoint with a newer torch",
        )
    return found


def to_manifest(
    summary: Summary, metadata: Metadata, places: dict[MetadataIndex, Place], objects: Sequence[ObjectEntry]
) -> Manifest:
    """What the coordinator commits. CheckpointFailed where a chunk of the plan was written by no rank, or a plan holds
    what the manifest cannot."""
    tensors: list[TensorEntry] = []
    blobs: list[str] = []
    rows: list[tuple[int, Place]] = []
    chunk_offset: list[int] = []
    chunk_size: list[int] = []
    for fqn, entry in metadata.state_dict_metadata.items():
        if isinstance(entry, BytesStorageMetadata):
            blobs.append(fqn)
            continue
        for chunk in entry.chunks:
            rows.append((len(tensors), _place(places, fqn, MetadataIndex(fqn, chunk.offsets))))
            chunk_offset += chunk.offsets
            chunk_size += chunk.sizes
        tensors.append(
            TensorEntry(
                fqn=fqn,
                dtype=dtype_name(entry.properties.dtype),
                shape=tuple(entry.size),
                properties=_encode_properties(fqn, entry.properties),
            )
        )
    rows += [(len(tensors) + i, _place(places, fqn, MetadataIndex(fqn))) for i, fqn in enumerate(blobs)]
    number = {entry.name: i for i, entry in enumerate(objects)}
    return Manifest(
        summary=summary,
        objects=tuple(objects),
        tensors=tuple(tensors),
        blobs=tuple(blobs),
        planner=encode_plain(metadata.planner_data),
        key=_column(key for key, _ in rows),
        # A rank all of whose items are empty has no object: they lie anywhere, at the beginning.
        object=_column(number.get(place.object, 0) if not place.length else number[place.object] for _, place in rows),
        offset=_column(place.offset if place.length else 0 for _, place in rows),
        length=_column(place.length for _, place in rows),
        chunk_offset=_column(chunk_offset),
        chunk_size=_column(chunk_size),
    )


def from_manifest(manifest: Manifest) -> Metadata:
    """The same `Metadata`, with `storage_data` mapping each chunk's index to its `Place`."""
    entries: dict[str, TensorStorageMetadata | BytesStorageMetadata] = {}
    storage: dict[MetadataIndex, Place] = {}
    for tensor in manifest.tensors:
        entries[tensor.fqn] = TensorStorageMetadata(
            properties=_decode_properties(tensor), size=torch.Size(tensor.shape), chunks=[]
        )
    for fqn in manifest.blobs:
        entries[fqn] = BytesStorageMetadata()
    bounds = manifest.coordinates().tolist()
    offsets, sizes = manifest.chunk_offset.tolist(), manifest.chunk_size.tolist()
    columns = (manifest.key, manifest.object, manifest.offset, manifest.length)
    for i, (key, number, offset, length) in enumerate(zip(*(c.tolist() for c in columns), strict=True)):
        place = Place(manifest.objects[number].name, offset, length)
        if key >= len(manifest.tensors):
            storage[MetadataIndex(manifest.blobs[key - len(manifest.tensors)])] = place
            continue
        fqn = manifest.tensors[key].fqn
        start = torch.Size(offsets[bounds[i] : bounds[i + 1]])
        entry = entries[fqn]
        assert isinstance(entry, TensorStorageMetadata)
        entry.chunks.append(ChunkStorageMetadata(offsets=start, sizes=torch.Size(sizes[bounds[i] : bounds[i + 1]])))
        storage[MetadataIndex(fqn, start)] = place
    missing = [fqn for fqn in manifest.blobs if MetadataIndex(fqn) not in storage]
    if missing:
        raise CheckpointFailed(
            "this manifest cannot be used: it says nothing about where an item lies", found=missing[0]
        )
    return Metadata(state_dict_metadata=entries, planner_data=decode_plain(manifest.planner), storage_data=storage)


def _column(values: Iterable[int]) -> np.ndarray[Any, np.dtype[np.uint64]]:
    return np.fromiter(values, np.uint64)


def _place(places: dict[MetadataIndex, Place], fqn: str, index: MetadataIndex) -> Place:
    place = places.get(index)
    if place is None:
        at = "" if index.offset is None else f" at {list(index.offset)}"
        raise CheckpointFailed(f"no rank wrote {fqn!r}{at}", next_step="please report it, with the planner in use")
    return place


def _encode_properties(fqn: str, properties: TensorProperties) -> dict[str, Json]:
    if properties.layout != torch.strided:
        raise CheckpointFailed(f"tensor {fqn!r} is not dense", expected="torch.strided", found=str(properties.layout))
    formats = [name for name, value in _MEMORY_FORMATS.items() if value == properties.memory_format]
    strides = getattr(properties, "strides", None)
    return {
        "requires_grad": bool(properties.requires_grad),
        "memory_format": formats[0] if formats else "contiguous_format",
        "pin_memory": bool(properties.pin_memory),
        "strides": None if strides is None else list(strides),
    }


def _decode_properties(tensor: TensorEntry) -> TensorProperties:
    raw = tensor.properties
    properties = TensorProperties(
        dtype=dtype_of(tensor.dtype),
        layout=torch.strided,
        requires_grad=raw.get("requires_grad") is True,
        memory_format=_MEMORY_FORMATS.get(str(raw.get("memory_format")), torch.contiguous_format),
        pin_memory=raw.get("pin_memory") is True,
    )
    strides = raw.get("strides")
    # Older torch has no such field.
    if hasattr(properties, "strides") and isinstance(strides, list) and all(isinstance(s, int) for s in strides):
        properties.strides = tuple(strides)
    return properties


def encode_plain(value: Any) -> Json:
    """None, bool, int, float, str, bytes and lists, tuples and dicts of them, to JSON that keeps the types apart."""
    if value is None or isinstance(value, bool | int | float | str):
        return value
    if isinstance(value, bytes):
        return ["b", base64.b64encode(value).decode()]
    if isinstance(value, tuple):
        return ["t", *map(encode_plain, value)]
    if isinstance(value, list):
        return ["l", *map(encode_plain, value)]
    if isinstance(value, dict):
        return ["d", *([encode_plain(k), encode_plain(v)] for k, v in value.items())]
    raise CheckpointFailed(
        "the planner keeps data that the manifest cannot hold",
        expected="None, bool, int, float, str, bytes, list, tuple, dict",
        found=type(value).__name__,
        next_step="put it into the state dict instead",
    )


def decode_plain(value: Json) -> Any:
    """The inverse of `encode_plain`; CheckpointFailed for JSON that it never makes."""
    if not isinstance(value, list):
        if isinstance(value, dict):
            raise CheckpointFailed("this manifest cannot be used: the planner's data", found=repr(value)[:80])
        return value
    tag, *rest = value or [None]
    if tag == "b" and len(rest) == 1 and isinstance(rest[0], str):
        return base64.b64decode(rest[0])
    if tag == "t":
        return tuple(map(decode_plain, rest))
    if tag == "l":
        return list(map(decode_plain, rest))
    if tag == "d" and all(isinstance(pair, list) and len(pair) == 2 for pair in rest):
        return {decode_plain(k): decode_plain(v) for k, v in rest}
    raise CheckpointFailed("this manifest cannot be used: the planner's data", found=repr(value)[:80])
