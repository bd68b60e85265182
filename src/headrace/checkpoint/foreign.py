"""What a folder that DCP's `FileSystemWriter` wrote says is in it, checked before a byte of it is used. No torch."""

from __future__ import annotations

import math
import os
import posixpath
import re
import stat
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, NoReturn

import numpy as np

from headrace.checkpoint.layout import pack
from headrace.checkpoint.manifest import DIMENSION_LIMIT, DTYPE_BYTES, Json, Manifest, ObjectEntry, Summary, TensorEntry
from headrace.checkpoint.names import CheckpointId
from headrace.checkpoint.pickled import METADATA_LIMIT, Dtype, Record, load, plain
from headrace.errors import CheckpointFailed, UsageError

METADATA_NAME = ".metadata"


@dataclass(frozen=True, kw_only=True)
class ForeignItem:
    """One item: where it is in the folder, and what it is to be."""

    fqn: str
    #: Of its entry: tensors first, then what is bytes, each in the order of the metadata.
    key: int
    file: str
    at: int
    stored_bytes: int
    #: None: bytes as they stand in the file. Else a tensor that `torch.save` wrote.
    dtype: str | None
    offsets: tuple[int, ...]
    sizes: tuple[int, ...]

    @property
    def length_bytes(self) -> int:
        return self.stored_bytes if self.dtype is None else math.prod(self.sizes) * DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class ForeignFolder:
    folder: Path
    saved_unix: float
    tensors: tuple[TensorEntry, ...]
    blobs: tuple[str, ...]
    planner: Any
    #: By file, in the order in which they lie there.
    items: Mapping[str, tuple[ForeignItem, ...]]

    @property
    def ranks(self) -> int:
        """As the names of the files say, `__RANK_N.distcp`."""
        found = [re.match(r"__(\d+)_", name) for name in self.items]
        return len({int(match[1]) if match else name for match, name in zip(found, self.items, strict=True)})

    def laid_out(self) -> dict[str, tuple[list[int], int]]:
        """Of each file the offsets of its items in the object that it becomes, and the length of that."""
        found = {}
        for name, items in self.items.items():
            offsets, total = pack([item.length_bytes for item in items])
            # An object of nothing has nowhere for its items to lie.
            found[name] = offsets, max(total, 1)
        return found

    def manifest(self, id: CheckpointId, encode_plain: Any) -> Manifest:
        """The manifest of the same checkpoint in a volume. CheckpointFailed where its numbers do not fit together."""
        layout = self.laid_out()
        rows = [
            (item.key, number, offset, item.length_bytes, item)
            for number, (name, items) in enumerate(self.items.items())
            for item, offset in zip(items, layout[name][0], strict=True)
        ]
        # The chunks of a tensor in the order of their offsets, wherever they lie.
        rows.sort(key=lambda row: (row[0], row[4].offsets))
        columns = [np.array([row[i] for row in rows], np.uint64) for i in range(4)]
        return Manifest(
            summary=Summary(
                run=id.run,
                step=id.step,
                created_unix=self.saved_unix,
                ranks=self.ranks,
                item_count=len(rows),
                data_bytes=sum(row[3] for row in rows),
            ),
            objects=tuple(
                ObjectEntry(name=id.data(number), length_bytes=layout[name][1])
                for number, name in enumerate(self.items)
            ),
            tensors=self.tensors,
            blobs=self.blobs,
            planner=encode_plain(self.planner),
            key=columns[0],
            object=columns[1],
            offset=columns[2],
            length=columns[3],
            chunk_offset=np.array([c for row in rows for c in row[4].offsets], np.uint64),
            chunk_size=np.array([c for row in rows for c in row[4].sizes], np.uint64),
        )


def read_folder(folder: Path) -> ForeignFolder:
    """The metadata of a folder. UsageError where it is none of DCP's, CheckpointFailed for metadata that cannot be."""
    try:
        return _read_folder(folder)
    except CheckpointFailed as error:
        error.where = error.where or str(folder)
        raise


def _read_folder(folder: Path) -> ForeignFolder:
    with _opened_metadata(folder) as file:
        found = os.fstat(file.fileno())
        if found.st_size > METADATA_LIMIT:
            _refuse("it is too long", expected=f"at most {METADATA_LIMIT} bytes", found=f"{found.st_size} bytes")
        metadata = load(file.read(METADATA_LIMIT + 1))
    if type(metadata) is not Record or metadata.kind != "Metadata":
        _refuse("it is of something else", expected="Metadata", found=type(metadata).__name__)
    entries, storage = metadata.get("state_dict_metadata"), metadata.get("storage_data")
    if type(entries) is not dict or type(storage) is not dict or not all(type(name) is str for name in entries):
        _refuse("it says nothing about what was saved, or where")
    tensors, blobs, chunks = _entries(entries, len(storage))
    places = _places(storage)
    items: dict[str, list[ForeignItem]] = {}
    for key, (fqn, dtype, offsets, sizes) in chunks:
        place = places.get((fqn, None if dtype is None else offsets))
        if place is None:
            _refuse(f"it does not say where {fqn!r} lies", found=str(list(offsets)))
        name, at, length = place
        item = ForeignItem(
            fqn=fqn, key=key, file=name, at=at, stored_bytes=length, dtype=dtype, offsets=offsets, sizes=sizes
        )
        if item.length_bytes > length:
            _refuse(f"{fqn!r} is longer than what was stored of it", expected=f"{length} bytes", found=str(list(sizes)))
        items.setdefault(name, []).append(item)
    covered = [0] * len(tensors)
    for key, (_, dtype, _, sizes) in chunks:
        if dtype is not None:
            covered[key] += math.prod(sizes)
    for tensor, elements in zip(tensors, covered, strict=True):
        # A load would leave the rest of it as it was, and say nothing.
        if elements != math.prod(tensor.shape):
            _refuse(f"the shards of tensor {tensor.fqn!r} are not all of it", expected=str(list(tensor.shape)))
    for name, of_file in items.items():
        _check_inside(folder, name, of_file)
    return ForeignFolder(
        folder=folder,
        saved_unix=found.st_mtime,
        tensors=tuple(tensors),
        blobs=tuple(blobs),
        planner=plain(metadata.get("planner_data")),
        items={name: tuple(sorted(items[name], key=lambda item: item.at)) for name in sorted(items, key=_natural)},
    )


@contextmanager
def opened(folder: Path, name: str) -> Iterator[BinaryIO]:
    """A file of the folder, and of nothing outside of it."""
    # One name for each file: an item is found once.
    if name != posixpath.normpath(name) or name.startswith("/"):
        _refuse("the name of a file", found=repr(name)[:200])
    try:
        path = (folder / name).resolve(strict=True)
        if not path.is_relative_to(folder.resolve(strict=True)):
            _refuse("a file lies outside of the folder", found=repr(name)[:200])
        handle = os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK | os.O_NOCTTY)
    except FileNotFoundError:
        raise CheckpointFailed(
            "a file of the checkpoint is missing", where=str(folder), found=repr(name)[:200]
        ) from None
    except ValueError as error:
        _refuse("the name of a file", found=str(error))
    with os.fdopen(handle, "rb", buffering=0) as file:
        if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
            raise CheckpointFailed("this is no plain file", where=str(path))
        yield file


@contextmanager
def _opened_metadata(folder: Path) -> Iterator[BinaryIO]:
    if not folder.is_dir():
        raise UsageError("there is no such folder", where=str(folder))
    if not os.path.lexists(folder / METADATA_NAME):
        alone = next(folder.glob("__*.metadata"), None)
        if alone is not None:
            raise UsageError(
                "each rank has metadata of its own in this folder", where=str(folder),
                found=alone.name, next_step="save it with use_collectives=True",
            )  # fmt: skip
        raise UsageError(
            "this is no checkpoint of torch.distributed.checkpoint, or none that was finished", where=str(folder),
            expected=f"a file {METADATA_NAME}",
        )  # fmt: skip
    with opened(folder, METADATA_NAME) as file:
        yield file


def _refuse(what: str, *, expected: str | None = None, found: str | None = None) -> NoReturn:
    raise CheckpointFailed(f"this metadata cannot be used: {what}", expected=expected, found=found)


_Chunk = tuple[int, tuple[str, "str | None", tuple[int, ...], tuple[int, ...]]]


def _entries(entries: dict[str, Any], places: int) -> tuple[list[TensorEntry], list[str], list[_Chunk]]:
    tensors: list[TensorEntry] = []
    blobs: list[str] = []
    chunks: list[_Chunk] = []
    for fqn, entry in entries.items():
        kind = entry.kind if type(entry) is Record else None
        if kind == "BytesStorageMetadata":
            blobs.append(fqn)
            continue
        if kind != "TensorStorageMetadata":
            _refuse(f"the entry of {fqn!r}", expected="a tensor, or bytes", found=type(entry).__name__)
        dtype, properties = _properties(fqn, entry.get("properties"))
        listed = entry.get("chunks")
        # Each has a place of its own. One list may be said to be that of every tensor.
        if type(listed) is not list or len(listed) > places - len(chunks):
            _refuse(f"the chunks of {fqn!r}", expected=f"as many as there are places, {places} in all")
        for chunk in listed:
            if type(chunk) is not Record or chunk.kind != "ChunkStorageMetadata":
                _refuse(f"the chunks of {fqn!r}")
            place = (fqn, dtype, _shape(chunk.get("offsets")), _shape(chunk.get("sizes")))
            chunks.append((len(tensors), place))
        tensors.append(TensorEntry(fqn=fqn, dtype=dtype, shape=_shape(entry.get("size")), properties=properties))
    chunks += [(len(tensors) + i, (fqn, None, (), ())) for i, fqn in enumerate(blobs)]
    return tensors, blobs, chunks


def _properties(fqn: str, found: Any) -> tuple[str, dict[str, Json]]:
    state = found.state if type(found) is Record and found.kind == "TensorProperties" else None
    if type(state) is not tuple or len(state) not in (5, 6) or type(state[0]) is not Dtype:
        _refuse(f"the properties of {fqn!r}")
    strides = state[5] if len(state) == 6 else None
    known = (
        type(strides) is tuple
        and len(strides) <= DIMENSION_LIMIT
        and all(type(each) is int and abs(each) < 1 << 62 for each in strides)
    )
    return state[0].name, {
        "requires_grad": state[2] is True,
        "memory_format": "contiguous_format",
        "pin_memory": False,
        "strides": list(strides) if known and strides is not None else None,
    }


def _shape(value: Any) -> tuple[int, ...]:
    # What made it has looked at its numbers; a tuple that is no torch.Size has not been looked at.
    if type(value) is not tuple or len(value) > 64 or not all(type(d) is int and 0 <= d < 1 << 59 for d in value):
        _refuse("a shape", expected="a torch.Size")
    return value


def _places(storage: dict[Any, Any]) -> dict[tuple[str, tuple[int, ...] | None], tuple[str, int, int]]:
    found = {}
    for index, info in storage.items():
        if type(index) is not Record or type(info) is not Record or info.kind != "_StorageInfo":
            _refuse("it does not say where an item lies", found=type(info).__name__)
        fqn, offset = index.get("fqn"), index.get("offset")
        name, at, length = (info.get(field) for field in ("relative_path", "offset", "length"))
        if type(fqn) is not str or type(name) is not str:
            _refuse("the place of an item has no name")
        if not all(type(value) is int and 0 <= value < 1 << 62 for value in (at, length)):
            _refuse(f"the place of {fqn!r}", expected="whole numbers")
        if info.get("transform_descriptors"):
            raise CheckpointFailed(
                f"{fqn!r} was transformed when it was saved", expected="items as torch.save wrote them",
                next_step="save the checkpoint without stream extensions",
            )  # fmt: skip
        found[fqn, None if offset is None else _shape(offset)] = (name, at, length)
    return found


def _check_inside(folder: Path, name: str, items: list[ForeignItem]) -> None:
    with opened(folder, name) as file:
        size = os.fstat(file.fileno()).st_size
    for item in items:
        if item.stored_bytes > size or item.at > size - item.stored_bytes:
            raise CheckpointFailed(
                f"a file of the checkpoint is too short for {item.fqn!r}", where=str(folder / name),
                expected=f"{item.at + item.stored_bytes} bytes", found=f"{size} bytes",
            )  # fmt: skip
    if sum(item.stored_bytes for item in items) > size:
        _refuse("items lie in one another", found=repr(name)[:200])


def _natural(name: str) -> list[tuple[int, int | str]]:
    """`__2_0` before `__10_0`."""
    return [(0, int(part)) if part.isdecimal() else (1, part) for part in re.split(r"([0-9]{1,18})", name) if part]
