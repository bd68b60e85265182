"""Checkpoints of a volume as folders of files: for `torch.distributed.checkpoint`, or as safetensors.

    export_dcp(volume, "pretrain/step-1000", Path("out"))            dcp.load(state, checkpoint_id="out")
    export_safetensors(volume, "pretrain/step-1000", Path("model"))  model.safetensors, or several and an index

A folder has its name when it is whole and durable (`headrace.checkpoint.folder`). Every byte is verified on its way;
one shard of a tensor is in memory at a time, of tensors that are put together for safetensors the whole one.
"""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Mapping
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path
from typing import BinaryIO

import torch
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta, TensorStorageMetadata

from headrace.checkpoint import parse_checkpoint_id, read_manifest
from headrace.checkpoint.folder import new_file, new_folder
from headrace.checkpoint.foreign import METADATA_NAME
from headrace.checkpoint.ranges import pieces_of, read_ahead
from headrace.errors import ChecksumMismatch
from headrace.model.header import build
from headrace.torch.files.export import (
    INDEX_NAME,
    SAFETENSORS_NAMES,
    SHARD_BYTES,
    ModelTensor,
    assembled,
    file_names,
    grouped,
    index_of,
    tensors_of,
)
from headrace.torch.metadata import Place, from_manifest
from headrace.torch.tensors import as_bytes
from headrace.volume import ObjectInfo, Volume

#: Of the layout that `FileSystemReader` reads.
_DCP_VERSION = "1.0.0"

Heard = Callable[[int, int], None]


@dataclass(frozen=True, kw_only=True)
class FolderReport:
    """What one export wrote."""

    checkpoint_id: str
    files: tuple[str, ...]
    tensors: int
    #: Of items, without headers and archives around them.
    data_bytes: int


def export_dcp(volume: Volume, checkpoint_id: str, target: Path, *, heard: Heard | None = None) -> FolderReport:
    """A folder that `dcp.load` reads with `FileSystemReader`; a file for each object, as many as ranks had written.

    `heard(done, total)`: bytes so far. UsageError where `target` is there already; ChecksumMismatch names a damaged
    item, and nothing is left then.
    """
    id = parse_checkpoint_id(checkpoint_id)
    manifest = read_manifest(volume, id)
    metadata = from_manifest(manifest)
    infos = {entry.name: volume.stat(entry.name) for entry in manifest.objects}
    shapes = _shapes(metadata)
    by_object: dict[str, list[tuple[MetadataIndex, Place]]] = {name: [] for name in infos}
    for index, place in metadata.storage_data.items():
        by_object[place.object].append((index, place))
    storage: dict[MetadataIndex, _StorageInfo] = {}
    done = 0
    with new_folder(target) as folder:
        for number, (name, items) in enumerate(by_object.items()):
            with new_file(folder / f"__{number}_0.distcp") as file:
                for index, place in sorted(items, key=lambda item: item[1].offset):
                    begin = file.tell()
                    _write_item(volume, infos[name], index, place, shapes.get(index), file)
                    storage[index] = _StorageInfo(f"__{number}_0.distcp", begin, file.tell() - begin)
                    done += place.length
                    if heard is not None:
                        heard(done, manifest.summary.data_bytes)
        metadata.storage_data = storage
        metadata.storage_meta = StorageMeta(checkpoint_id=str(id))
        if hasattr(metadata, "version"):
            metadata.version = _DCP_VERSION
        with new_file(folder / METADATA_NAME) as file:
            pickle.dump(metadata, file)
    return FolderReport(
        checkpoint_id=str(id),
        files=tuple(f"__{number}_0.distcp" for number in range(len(by_object))),
        tensors=len(manifest.tensors),
        data_bytes=done,
    )


def _shapes(metadata: Metadata) -> dict[MetadataIndex, tuple[torch.Size, torch.dtype]]:
    return {
        MetadataIndex(fqn, chunk.offsets): (chunk.sizes, entry.properties.dtype)
        for fqn, entry in metadata.state_dict_metadata.items()
        if isinstance(entry, TensorStorageMetadata)
        for chunk in entry.chunks
    }


def _write_item(
    volume: Volume,
    info: ObjectInfo,
    index: MetadataIndex,
    place: Place,
    shape: tuple[torch.Size, torch.dtype] | None,
    file: BinaryIO,
) -> None:
    if shape is None:
        for data in _ranges(volume, index.fqn, [(info, place.offset, place.length)]):
            file.write(data)
        return
    tensor = torch.empty(shape[0], dtype=shape[1])
    if place.length:
        try:
            volume.submit_read(info, [place.offset], [place.length], [as_bytes(tensor)], [0]).wait()
        except ChecksumMismatch as error:
            raise _named(index.fqn, error) from error
    try:
        torch.save(tensor, file)
    except RuntimeError as error:
        # Its archive wants to be ended although the disk is full, and tells of that instead.
        raise _disk_error(error) or error from error


def _disk_error(error: BaseException | None) -> OSError | None:
    while error is not None and not isinstance(error, OSError):
        error = error.__cause__ or error.__context__
    return error


def export_safetensors(
    volume: Volume,
    checkpoint_id: str,
    target: Path,
    *,
    prefix: str = "model.",
    dtype: torch.dtype | None = None,
    shard_bytes: int = SHARD_BYTES,
    metadata: Mapping[str, str] | None = None,
    heard: Heard | None = None,
) -> FolderReport:
    """The tensors whose names begin with `prefix`, without it, whole, as Hugging Face names the files. The arguments
    are those of `export_model`, which does the same within the volume and shares the bytes.
    """
    tensors = tensors_of(volume, checkpoint_id, prefix, dtype)
    groups = grouped(tensors, shard_bytes)
    names = file_names(len(groups))
    infos = {place.object: volume.stat(place.object) for t in tensors.values() for _, place in t.chunks}
    total = sum(tensor.length_bytes for tensor in tensors.values())
    said = {"format": "pt"} if metadata is None else metadata
    done = 0
    with new_folder(target) as folder:
        for name, keys in zip(names, groups, strict=True):
            described = [(key, SAFETENSORS_NAMES[tensors[key].wanted], tensors[key].shape) for key in keys]
            head, header = build(described, said)
            with new_file(folder / name) as file:
                file.write(head)
                for entry in header.tensors:
                    for data in _bytes_of(volume, entry.name, tensors[entry.name], infos):
                        done += file.write(data)
                        if heard is not None:
                            heard(done, total)
        if len(groups) > 1:
            with new_file(folder / INDEX_NAME) as file:
                file.write(index_of(tensors, groups, names))
    files = (*names, INDEX_NAME) if len(groups) > 1 else tuple(names)
    return FolderReport(checkpoint_id=checkpoint_id, files=files, tensors=len(tensors), data_bytes=done)


def _bytes_of(volume: Volume, name: str, tensor: ModelTensor, infos: Mapping[str, ObjectInfo]) -> Iterator[memoryview]:
    if tensor.why_copied() is None:
        yield from _ranges(volume, name, [(infos[p.object], p.offset, p.length) for _, p in tensor.chunks])
        return
    try:
        yield memoryview(assembled(volume, tensor, infos))  # type: ignore[arg-type]
    except ChecksumMismatch as error:
        raise _named(name, error) from error


def _ranges(volume: Volume, name: str, ranges: list[tuple[ObjectInfo, int, int]]) -> Iterator[memoryview]:
    with closing(read_ahead(volume, (piece for one in ranges for piece in pieces_of(*one)))) as pieces:
        for piece in pieces:
            if isinstance(piece.problem, ChecksumMismatch):
                raise _named(name, piece.problem)
            if piece.problem is not None:
                raise piece.problem
            yield piece.data.data


def _named(name: str, error: ChecksumMismatch) -> ChecksumMismatch:
    return ChecksumMismatch(
        f"{name!r} of a checkpoint is damaged: {error.what}", where=error.where, expected=error.expected,
        found=error.found, next_step="export the step before it",
    )  # fmt: skip
