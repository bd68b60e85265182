"""What is in the checkpoints of a volume, and whether every byte of one is good."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import closing
from dataclasses import dataclass

import numpy as np

from headrace.checkpoint.listing import read_manifest
from headrace.checkpoint.manifest import Manifest
from headrace.checkpoint.names import CheckpointId
from headrace.checkpoint.order import find
from headrace.checkpoint.ranges import DAMAGES, Piece, pieces_of, read_ahead
from headrace.errors import CheckpointFailed, HeadraceError, ObjectNotFound
from headrace.volume import ObjectInfo, Volume


@dataclass(frozen=True, kw_only=True)
class Look:
    """One committed checkpoint, as a listing shows it."""

    id: CheckpointId
    created_unix: float
    pinned: bool
    #: Space on the members, of all its objects.
    stored_bytes: int
    #: Of the commit that made it visible; and whether that was the last one of its run.
    sequence: int
    latest: bool
    #: None where the manifest does not say.
    ranks: int | None = None
    items: int | None = None
    data_bytes: int | None = None
    #: None: its manifest is good, and all objects that it names are there, each as long as it says.
    problem: HeadraceError | None = None


def look(volume: Volume, run: str | None = None) -> Iterator[Look]:
    """All committed checkpoints of a run (or of all runs), by run and in the order of their commits; those that are not
    whole say why."""
    volume.refresh()
    found = find(volume, run)
    last = {id.run: id for id in found.ids}
    for id in found.ids:
        objects = volume.list(f"{id}/")
        sequence = next((entry.sequence for entry in objects if entry.name == id.manifest), 0)
        latest = last[id.run] == id
        stored = sum(entry.stored_bytes for entry in objects)
        pinned = id in found.pinned
        try:
            summary = read_manifest(volume, id).summary
        except (CheckpointFailed, ObjectNotFound, *DAMAGES) as error:
            created = next((entry.created_s for entry in objects if entry.name == id.manifest), 0.0)
            yield Look(
                id=id,
                created_unix=created,
                pinned=pinned,
                stored_bytes=stored,
                sequence=sequence,
                latest=latest,
                problem=error,
            )
            continue
        yield Look(
            id=id,
            created_unix=summary.created_unix,
            pinned=pinned,
            stored_bytes=stored,
            sequence=sequence,
            latest=latest,
            ranks=summary.ranks,
            items=summary.item_count,
            data_bytes=summary.data_bytes,
        )


@dataclass(frozen=True, kw_only=True)
class TensorRow:
    """One tensor of a checkpoint. `shape` is that of all of it, `shards` how many chunks of it were saved."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    shards: int
    length_bytes: int


@dataclass(frozen=True, kw_only=True)
class BlobRow:
    """Something that is no tensor: bytes of the framework's making."""

    name: str
    length_bytes: int


def rows_of(manifest: Manifest) -> tuple[list[TensorRow], list[BlobRow]]:
    count = len(manifest.tensors)
    entries = count + len(manifest.blobs)
    shards = np.bincount(manifest.key.astype(np.int64), minlength=entries).tolist()
    lengths = [0] * entries
    for key, length in zip(manifest.key.tolist(), manifest.length.tolist(), strict=True):
        lengths[key] += length
    tensors = [
        TensorRow(name=t.fqn, dtype=t.dtype, shape=t.shape, shards=shards[i], length_bytes=lengths[i])
        for i, t in enumerate(manifest.tensors)
    ]
    return tensors, [BlobRow(name=name, length_bytes=lengths[count + i]) for i, name in enumerate(manifest.blobs)]


@dataclass(frozen=True, kw_only=True)
class Damage:
    """Something of a checkpoint that cannot be read as it was written."""

    #: Of the tensor, or of what else it is; None: between the items, or good when it was read again.
    name: str | None
    problem: HeadraceError


@dataclass(frozen=True, kw_only=True)
class Checked:
    """Bytes that were read now, and what is damaged among them."""

    length_bytes: int
    damages: tuple[Damage, ...] = ()


def verify(volume: Volume, manifest: Manifest) -> Iterator[Checked]:
    """Read every byte of a checkpoint's objects against its checksums; each damaged tensor is named once.

    Raises DeviceError where a device fails, ObjectNotFound where the checkpoint is deleted meanwhile.
    """
    infos = {entry.name: volume.stat(entry.name) for entry in manifest.objects}
    ranges = (piece for info in infos.values() for piece in pieces_of(info, 0, info.length_bytes))
    named: set[str] = set()
    with closing(read_ahead(volume, ranges)) as pieces:
        for piece in pieces:
            problem = piece.problem
            damages = () if problem is None else tuple(_damages(volume, manifest, piece, problem, named))
            yield Checked(length_bytes=piece.length, damages=damages)


def _damages(
    volume: Volume, manifest: Manifest, piece: Piece, problem: HeadraceError, named: set[str]
) -> Iterator[Damage]:
    """Which items of a damaged piece cannot be read, each of them tried."""
    number = next(i for i, entry in enumerate(manifest.objects) if entry.name == piece.info.name)
    end = np.uint64(piece.offset + piece.length)
    ends = manifest.offset + manifest.length
    inside = (manifest.object == number) & (manifest.offset < end) & (ends > np.uint64(piece.offset))
    anything = False
    for item in np.flatnonzero(inside).tolist():
        start = max(int(manifest.offset[item]), piece.offset)
        stop = min(int(ends[item]), piece.offset + piece.length)
        error = _tried(volume, piece.info, start, stop - start)
        if error is None:
            continue
        anything = True
        name = name_of(manifest, item)
        if name not in named:
            named.add(name)
            yield Damage(name=name, problem=error)
    if not anything:
        yield Damage(name=None, problem=problem)


def _tried(volume: Volume, info: ObjectInfo, offset: int, length: int) -> HeadraceError | None:
    buffer = np.empty(length, np.uint8)
    try:
        volume.submit_read(info, [offset], [length], [buffer], [0]).wait()
    except DAMAGES as error:
        return error
    return None


def name_of(manifest: Manifest, item: int) -> str:
    key = int(manifest.key[item])
    count = len(manifest.tensors)
    return manifest.tensors[key].fqn if key < count else manifest.blobs[key - count]
