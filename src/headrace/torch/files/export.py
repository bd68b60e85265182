"""Model files out of a checkpoint, by writing headers: the tensors stay where the save put them.

    export_model(session, "pretrain/step-00090000", "models/pretrain-90000")
        models/pretrain-90000/model-00001-of-00002.safetensors     header written, tensors shared with the checkpoint
        models/pretrain-90000/model-00002-of-00002.safetensors
        models/pretrain-90000/model.safetensors.index.json         which tensor is in which file

A tensor is shared where the file wants it in the dtype that was saved, and its shards follow one another along
dimension 0 (FSDP's do), so that its row-major bytes are the shards' bytes. Else it is read, put together, converted,
and written; the report says which. Deleting the checkpoint afterwards frees what no file shares.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass

import torch
from torch.distributed.checkpoint.metadata import ChunkStorageMetadata, MetadataIndex, TensorStorageMetadata

from headrace.checkpoint import parse_checkpoint_id, read_manifest
from headrace.device.protocol import Buffer
from headrace.errors import CheckpointFailed, UsageError
from headrace.model import Composed, NewTensor, StoredTensor, compose_safetensors
from headrace.torch.files.model import _KEYS
from headrace.torch.metadata import Place, from_manifest
from headrace.torch.tensors import as_bytes
from headrace.volume import ObjectInfo, Session, Transaction, Volume

#: What the tools of Hugging Face cut files at, by default.
SHARD_BYTES = 5_000_000_000
#: Of dtypes.
SAFETENSORS_NAMES = _KEYS
INDEX_NAME = "model.safetensors.index.json"


@dataclass(frozen=True, kw_only=True)
class ExportReport:
    """What one export did."""

    checkpoint_id: str
    files: tuple[Composed, ...]
    #: Of the index; None where there is one file.
    index: str | None
    #: Bytes of tensors shared with the checkpoint, and bytes that had to be written.
    shared_bytes: int
    copied_bytes: int
    #: Why: name of the tensor in the file -> reason.
    copied: Mapping[str, str]


@dataclass(frozen=True, kw_only=True)
class ModelTensor:
    """One tensor of the checkpoint, and what the file is to have of it."""

    shape: tuple[int, ...]
    saved: torch.dtype
    wanted: torch.dtype
    #: In the order of their offsets.
    chunks: tuple[tuple[ChunkStorageMetadata, Place], ...]

    @property
    def length_bytes(self) -> int:
        return math.prod(self.shape) * self.wanted.itemsize

    def why_copied(self) -> str | None:
        """None where the shards' bytes, one after another, are the tensor's."""
        if self.saved != self.wanted:
            return f"{_name(self.saved)} to {_name(self.wanted)}"
        row = 0
        for chunk, _ in self.chunks:
            offsets, sizes = tuple(chunk.offsets), tuple(chunk.sizes)
            if self.shape and (offsets[0] != row or any(offsets[1:]) or sizes[1:] != self.shape[1:]):
                return "its shards do not follow one another along dimension 0"
            row += sizes[0] if sizes else 1
        return None


def export_model(
    target: Session | Transaction,
    checkpoint_id: str,
    folder: str,
    *,
    prefix: str = "model.",
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
) -> ExportReport:
    """Make safetensors files of the tensors of a committed checkpoint whose names begin with `prefix`, without it.

    Args:
        target: a session, for a commit of its own; or an open transaction.
        checkpoint_id: `"RUN/step-N"`.
        folder: where the files go: `FOLDER/model.safetensors`, or several and an index, as Hugging Face names them.
        dtype: of all floating point tensors in the files; None: as they were saved. Another one has to be written.
        shard_bytes: of tensors in one file; a larger tensor has a file of its own.
        metadata: into the files; default `{"format": "pt"}`, which transformers asks for.

    ObjectNotFound where there is no such checkpoint; CheckpointFailed where it holds no such tensor; UsageError for a
    dtype that safetensors does not know; ObjectExists where the files are there.
    """
    volume = target.session.volume if isinstance(target, Transaction) else target.volume
    id = parse_checkpoint_id(checkpoint_id)
    tensors = tensors_of(volume, checkpoint_id, prefix, dtype)
    infos: dict[str, ObjectInfo] = {}
    for tensor in tensors.values():
        for _, place in tensor.chunks:
            if place.object not in infos:
                infos[place.object] = volume.stat(place.object)
    groups = grouped(tensors, shard_bytes)
    names = file_names(len(groups))
    said = {"format": "pt"} if metadata is None else metadata
    if not isinstance(target, Transaction):
        with target.transaction() as tx:
            return _write(tx, volume, str(id), folder, names, groups, tensors, infos, said)
    return _write(target, volume, str(id), folder, names, groups, tensors, infos, said)


def _write(
    tx: Transaction,
    volume: Volume,
    id: str,
    folder: str,
    names: list[str],
    groups: list[list[str]],
    tensors: dict[str, ModelTensor],
    infos: dict[str, ObjectInfo],
    metadata: Mapping[str, str],
) -> ExportReport:
    files = []
    for name, keys in zip(names, groups, strict=True):
        entries = {key: _entry(volume, key, tensors[key], infos) for key in keys}
        files.append(compose_safetensors(tx, f"{folder}/{name}", entries, metadata))
    index = None
    if len(groups) > 1:
        index = f"{folder}/{INDEX_NAME}"
        tx.put(index, index_of(tensors, groups, names), checksum_block_bytes=4096)
    return ExportReport(
        checkpoint_id=id,
        files=tuple(files),
        index=index,
        shared_bytes=sum(file.shared_bytes for file in files),
        copied_bytes=sum(file.copied_bytes for file in files),
        copied={key: why for key, tensor in tensors.items() if (why := tensor.why_copied()) is not None},
    )


def tensors_of(volume: Volume, checkpoint_id: str, prefix: str, dtype: torch.dtype | None) -> dict[str, ModelTensor]:
    found = from_manifest(read_manifest(volume, parse_checkpoint_id(checkpoint_id)))
    tensors = {}
    for fqn, entry in found.state_dict_metadata.items():
        if not fqn.startswith(prefix) or not isinstance(entry, TensorStorageMetadata):
            continue
        saved = entry.properties.dtype
        wanted = dtype if dtype is not None and saved.is_floating_point else saved
        if wanted not in SAFETENSORS_NAMES:
            raise UsageError(f"safetensors cannot hold tensor {fqn!r}", found=_name(wanted))
        chunks = sorted(entry.chunks, key=lambda chunk: tuple(chunk.offsets))
        places = [(chunk, found.storage_data[MetadataIndex(fqn, chunk.offsets)]) for chunk in chunks]
        tensor = ModelTensor(shape=tuple(entry.size), saved=saved, wanted=wanted, chunks=tuple(places))
        if sum(math.prod(chunk.sizes) for chunk in chunks) != math.prod(tensor.shape):
            raise CheckpointFailed(f"the shards of tensor {fqn!r} are not all of it", where=checkpoint_id)
        tensors[fqn.removeprefix(prefix)] = tensor
    if not tensors:
        raise CheckpointFailed(
            f"the checkpoint holds no tensor whose name begins with {prefix!r}",
            where=checkpoint_id,
            found=", ".join(list(found.state_dict_metadata)[:4]),
        )
    return tensors


def grouped(tensors: dict[str, ModelTensor], shard_bytes: int) -> list[list[str]]:
    """Names of the tensors of each file, in the order in which the model has them."""
    if shard_bytes < 1:
        raise UsageError("shard_bytes", expected="1 or more", found=str(shard_bytes))
    groups: list[list[str]] = []
    filled = 0
    for key, tensor in tensors.items():
        if not groups or filled + tensor.length_bytes > shard_bytes:
            groups.append([])
            filled = 0
        groups[-1].append(key)
        filled += tensor.length_bytes
    return groups


def file_names(count: int) -> list[str]:
    """As Hugging Face names them."""
    if count == 1:
        return ["model.safetensors"]
    return [f"model-{i + 1:05}-of-{count:05}.safetensors" for i in range(count)]


def index_of(tensors: Mapping[str, ModelTensor], groups: list[list[str]], names: list[str]) -> bytes:
    """The bytes of INDEX_NAME."""
    total = sum(tensor.length_bytes for tensor in tensors.values())
    weights = {key: name for name, keys in zip(names, groups, strict=True) for key in keys}
    text = json.dumps({"metadata": {"total_size": total}, "weight_map": dict(sorted(weights.items()))}, indent=2)
    return text.encode() + b"\n"


def _entry(volume: Volume, key: str, tensor: ModelTensor, infos: dict[str, ObjectInfo]) -> StoredTensor | NewTensor:
    dtype = SAFETENSORS_NAMES[tensor.wanted]
    if tensor.why_copied() is not None:
        return NewTensor(dtype=dtype, shape=tensor.shape, make=lambda: assembled(volume, tensor, infos))
    parts = [(infos[place.object], place.offset, place.length) for _, place in tensor.chunks if place.length]
    return StoredTensor(dtype=dtype, shape=tensor.shape, parts=tuple(parts))


def assembled(volume: Volume, tensor: ModelTensor, infos: Mapping[str, ObjectInfo]) -> Buffer:
    """The bytes of the whole tensor, read and verified."""
    whole = torch.empty(tensor.shape, dtype=tensor.saved)
    for chunk, piece in _read(volume, tensor, infos):
        box = tuple(slice(start, start + size) for start, size in zip(chunk.offsets, chunk.sizes, strict=True))
        whole[box] = piece
    return as_bytes(whole.to(tensor.wanted))


def _read(
    volume: Volume, tensor: ModelTensor, infos: Mapping[str, ObjectInfo]
) -> Iterator[tuple[ChunkStorageMetadata, torch.Tensor]]:
    for chunk, place in tensor.chunks:
        piece = torch.empty(chunk.sizes, dtype=tensor.saved)
        if place.length:
            volume.submit_read(infos[place.object], [place.offset], [place.length], [as_bytes(piece)], [0]).wait()
        yield chunk, piece


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
