"""The manifest of one save: everything a restore needs besides the data, in an encoding of our own.

No pickle: the bytes may come from anywhere, so they are bounded, parsed and checked against the volume before a single
offset is used. Facts that are few (names, shapes) are JSON, facts that are many (one row a chunk) are columns:

    offset  size
    0       8     magic "HRCKPT\\r\\n"
    8       4     version, u32 little-endian, 1
    12      4     summary_bytes, u32: JSON, with the fixed part at most 4096 bytes, so a listing reads only that
    16      8     tables_bytes, u64: JSON: objects, tensors, blobs, planner
    24      8     item_count, u64
    32      8     coordinate_count, u64: sum over the items of the dimensions of their tensor
    40      24    zero
    64            summary, tables, zero bytes up to a multiple of 8, then the columns, each without a gap:
                  key u64[items]        index into tensors, or tensor count + index into blobs
                  object u64[items]     index into objects
                  offset u64[items]     bytes from the start of the object
                  length u64[items]     bytes
                  chunk_offset u64[coordinates], chunk_size u64[coordinates]   elements, item after item

Items are sorted by key, and the chunks of a tensor keep the order in which DCP numbers them.
"""

from __future__ import annotations

import json
import math
import struct
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NoReturn, TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.names import CheckpointId
from headrace.errors import CheckpointFailed, UsageError
from headrace.units import GIB, MIB

U64: TypeAlias = npt.NDArray[np.uint64]
Json: TypeAlias = Any

MAGIC = b"HRCKPT\r\n"
VERSION = 1
#: What a listing reads of a manifest.
SUMMARY_END = 4096
#: A manifest beyond this is refused unread; it would describe about ten million chunks.
MANIFEST_LIMIT = GIB
TABLES_LIMIT = 256 * MIB
DIMENSION_LIMIT = 64

_FIXED = struct.Struct("<8sIIQQQ24x")
assert _FIXED.size == 64

#: torch's names of dtypes and the bytes of one element.
DTYPE_BYTES: dict[str, int] = {
    "bool": 1, "uint8": 1, "int8": 1, "uint16": 2, "int16": 2, "uint32": 4, "int32": 4, "uint64": 8, "int64": 8,
    "float8_e4m3fn": 1, "float8_e4m3fnuz": 1, "float8_e5m2": 1, "float8_e5m2fnuz": 1, "float8_e8m0fnu": 1,
    "float4_e2m1fn_x2": 1, "float16": 2, "bfloat16": 2, "float32": 4, "float64": 8,
    "complex32": 4, "complex64": 8, "complex128": 16,
}  # fmt: skip


@dataclass(frozen=True, kw_only=True)
class Summary:
    """What a listing shows."""

    run: str
    step: int
    #: Seconds since 1970, on the coordinator's clock.
    created_unix: float
    ranks: int
    item_count: int
    #: Bytes of items, without the gaps between them.
    data_bytes: int

    @property
    def id(self) -> CheckpointId:
        return CheckpointId(self.run, self.step)


@dataclass(frozen=True, kw_only=True)
class ObjectEntry:
    """One data object of the save."""

    name: str
    length_bytes: int


@dataclass(frozen=True, kw_only=True)
class TensorEntry:
    """One tensor: the whole of it, of which the items are chunks. `properties` is the framework's, JSON."""

    fqn: str
    dtype: str
    shape: tuple[int, ...]
    properties: Mapping[str, Json]

    @property
    def element_bytes(self) -> int:
        return DTYPE_BYTES[self.dtype]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """See the module text. The columns are uint64 arrays; `coordinates` cuts the chunk columns by item."""

    summary: Summary
    objects: tuple[ObjectEntry, ...]
    tensors: tuple[TensorEntry, ...]
    #: Names of the items that are bytes (pickles of the framework's making).
    blobs: tuple[str, ...]
    #: The planner's own data, JSON.
    planner: Json
    key: U64
    object: U64
    offset: U64
    length: U64
    chunk_offset: U64
    chunk_size: U64

    def __post_init__(self) -> None:
        check(self)

    def coordinates(self) -> U64:
        """uint64[items + 1]: item i owns chunk coordinates [c[i], c[i+1])."""
        return _coordinates(self.key, self.tensors, len(self.blobs))


def _coordinates(key: U64, tensors: tuple[TensorEntry, ...], blob_count: int) -> U64:
    dimensions = np.array([len(t.shape) for t in tensors] + [0] * blob_count, np.uint64)
    bounds = np.zeros(len(key) + 1, np.uint64)
    if len(key):
        np.cumsum(dimensions[key], out=bounds[1:])
    return bounds


def _refuse(what: str, *, expected: object = None, found: object = None) -> NoReturn:
    raise CheckpointFailed(
        f"this manifest cannot be used: {what}",
        expected=None if expected is None else str(expected),
        found=None if found is None else str(found),
    )


def check(manifest: Manifest) -> None:
    """Raise CheckpointFailed unless every number points inside what it points into, and every length fits its shape."""
    m = manifest
    items = len(m.key)
    for name in ("key", "object", "offset", "length", "chunk_offset", "chunk_size"):
        column = getattr(m, name)
        if column.dtype != np.uint64 or column.ndim != 1:
            _refuse(f"column {name}", expected="uint64[n]", found=f"{column.dtype}{list(column.shape)}")
    if not len(m.object) == len(m.offset) == len(m.length) == items == m.summary.item_count:
        _refuse("its columns differ in length", expected=m.summary.item_count, found=items)
    names = [t.fqn for t in m.tensors] + list(m.blobs)
    if len(set(names)) != len(names):
        _refuse("two entries have one name", found=next(n for n in names if names.count(n) > 1))
    prefix = f"{m.summary.id}/"
    for entry in m.objects:
        if not entry.name.startswith(prefix):
            _refuse("an object lies outside of this checkpoint", expected=f"{prefix}...", found=entry.name)
    for tensor in m.tensors:
        if tensor.dtype not in DTYPE_BYTES:
            _refuse(f"the dtype of tensor {tensor.fqn!r} is not known", found=tensor.dtype)
        # A total beyond 2**59 elements could overflow the vectorised checks below.
        if (
            len(tensor.shape) > DIMENSION_LIMIT
            or min(tensor.shape, default=0) < 0
            or math.prod(tensor.shape) >= 1 << 59
        ):
            _refuse(f"tensor {tensor.fqn!r} has an impossible shape", found=list(tensor.shape)[:8])
    if not items:
        if len(m.chunk_offset) or len(m.chunk_size):
            _refuse("there are chunks of no item")
        return
    if int(m.key.max()) >= len(names) or bool((m.key[1:] < m.key[:-1]).any()):
        _refuse("an item belongs to no entry, or the items are not sorted")
    if int(m.object.max()) >= len(m.objects):
        _refuse("an item lies in no object", expected=f"below {len(m.objects)}", found=int(m.object.max()))
    ends = np.array([entry.length_bytes for entry in m.objects], np.uint64)[m.object]
    outside = (m.length > ends) | (m.offset > ends - np.minimum(m.length, ends))
    if bool(outside.any()):
        _refuse(f"item {int(np.argmax(outside))} reaches beyond the end of its object")
    bounds = m.coordinates()
    if not len(m.chunk_offset) == len(m.chunk_size) == int(bounds[-1]):
        _refuse("chunk coordinates", expected=int(bounds[-1]), found=f"{len(m.chunk_offset)}, {len(m.chunk_size)}")
    if len(set(m.key[m.key >= len(m.tensors)].tolist())) != int((m.key >= len(m.tensors)).sum()):
        _refuse("one name has two items of bytes")
    _check_chunks(m, bounds)


def _check_chunks(m: Manifest, bounds: U64) -> None:
    tensor_items = int(np.searchsorted(m.key, np.uint64(len(m.tensors))))
    if not tensor_items:
        return
    key = m.key[:tensor_items]
    dimensions = (bounds[1:] - bounds[:-1])[:tensor_items].astype(np.int64)
    # The extent of each coordinate's dimension, by walking all shapes flattened.
    starts = np.zeros(len(m.tensors) + 1, np.int64)
    np.cumsum([len(t.shape) for t in m.tensors], out=starts[1:])
    extents = np.array([d for t in m.tensors for d in t.shape], np.uint64)
    owner = np.repeat(np.arange(tensor_items), dimensions)
    within = np.arange(len(owner)) - bounds[:-1][:tensor_items].astype(np.int64)[owner]
    extent = extents[starts[key.astype(np.int64)][owner] + within] if len(owner) else np.zeros(0, np.uint64)
    bad = (m.chunk_size > extent) | (m.chunk_offset > extent - np.minimum(m.chunk_size, extent))
    if bool(bad.any()):
        tensor = m.tensors[int(key[owner[int(np.argmax(bad))]])]
        _refuse(f"a chunk reaches beyond tensor {tensor.fqn!r}", expected=f"within {list(tensor.shape)}")
    element = np.array([t.element_bytes for t in m.tensors], np.uint64)[key]
    volume = np.ones(tensor_items, np.uint64)
    if len(owner):
        np.multiply.at(volume, owner, m.chunk_size)
    wrong = volume * element != m.length[:tensor_items]
    if bool(wrong.any()):
        at = int(np.argmax(wrong))
        _refuse(
            f"the length of a chunk of tensor {m.tensors[int(key[at])].fqn!r}",
            expected=f"{int(volume[at] * element[at])} bytes",
            found=f"{int(m.length[at])} bytes",
        )


def encode(manifest: Manifest) -> bytes:
    """The bytes of the object `RUN/step-N/manifest`."""
    m = manifest
    s = m.summary
    summary = _dump(
        {
            "run": s.run,
            "step": s.step,
            "created_unix": s.created_unix,
            "ranks": s.ranks,
            "item_count": s.item_count,
            "data_bytes": s.data_bytes,
        }
    )
    tables = _dump(
        {
            "objects": [[o.name, o.length_bytes] for o in m.objects],
            "tensors": [[t.fqn, t.dtype, list(t.shape), dict(t.properties)] for t in m.tensors],
            "blobs": list(m.blobs),
            "planner": m.planner,
        }
    )
    if _FIXED.size + len(summary) > SUMMARY_END:
        raise UsageError(
            "the summary of a checkpoint is too long", expected=f"{SUMMARY_END} bytes", found=str(len(summary))
        )
    fixed = _FIXED.pack(MAGIC, VERSION, len(summary), len(tables), len(m.key), len(m.chunk_offset))
    head = fixed + summary + tables
    columns = [m.key, m.object, m.offset, m.length, m.chunk_offset, m.chunk_size]
    encoded = b"".join([head, bytes(-len(head) % 8), *(c.astype("<u8", copy=False).tobytes() for c in columns)])
    if len(encoded) > MANIFEST_LIMIT or len(tables) > TABLES_LIMIT:
        raise CheckpointFailed(
            "the manifest of this checkpoint is too large",
            expected=f"{MANIFEST_LIMIT} bytes, tables {TABLES_LIMIT}",
            found=f"{len(encoded)} bytes, tables {len(tables)}",
        )
    return encoded


def _dump(value: Json) -> bytes:
    # A lone surrogate in a name survives as \ud800 in ASCII, where UTF-8 would refuse it.
    return json.dumps(value, separators=(",", ":"), allow_nan=False).encode("ascii")


def _fixed(data: bytes | memoryview) -> tuple[int, int, int, int]:
    if len(data) < _FIXED.size:
        _refuse("it is too short", expected=f"{_FIXED.size} bytes", found=len(data))
    magic, version, summary_bytes, tables_bytes, items, coordinates = _FIXED.unpack_from(data)
    if magic != MAGIC:
        _refuse("it does not begin as one", expected=MAGIC, found=magic)
    if version != VERSION:
        raise CheckpointFailed(
            "this checkpoint has another version",
            expected=str(VERSION),
            found=str(version),
            next_step="a newer headrace wrote it: upgrade",
        )
    if _FIXED.size + summary_bytes > SUMMARY_END or tables_bytes > TABLES_LIMIT:
        _refuse("a section is too long", found=f"summary {summary_bytes} bytes, tables {tables_bytes} bytes")
    return summary_bytes, tables_bytes, items, coordinates


def _load(data: bytes | memoryview, what: str) -> dict[str, Json]:
    try:
        value = json.loads(bytes(data))
    except (ValueError, RecursionError) as error:
        _refuse(f"its {what} is not JSON", found=error)
    if not isinstance(value, dict):
        _refuse(f"its {what}", expected="an object", found=type(value).__name__)
    return value


def _field(value: Mapping[str, Json], name: str, kind: type | tuple[type, ...]) -> Json:
    found = value.get(name)
    if not isinstance(found, kind) or isinstance(found, bool):
        _refuse(f"its field {name!r}", expected=getattr(kind, "__name__", "a number"), found=repr(found)[:80])
    return found


def _natural(value: Json, what: str) -> int:
    if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 63:
        _refuse(what, expected="a whole number", found=repr(value)[:80])
    return value


def decode_summary(data: bytes | memoryview) -> Summary:
    """The summary, from the first `SUMMARY_END` bytes (or all) of a manifest."""
    summary_bytes, _, _, _ = _fixed(data)
    if len(data) < _FIXED.size + summary_bytes:
        _refuse("it is cut off in the summary")
    raw = _load(data[_FIXED.size : _FIXED.size + summary_bytes], "summary")
    try:
        summary = Summary(
            run=_field(raw, "run", str),
            step=_natural(raw.get("step"), "its step"),
            created_unix=float(_field(raw, "created_unix", (int, float))),
            ranks=_natural(raw.get("ranks"), "its ranks"),
            item_count=_natural(raw.get("item_count"), "its item count"),
            data_bytes=_natural(raw.get("data_bytes"), "its bytes"),
        )
        _ = summary.id
    except (UsageError, OverflowError) as error:
        _refuse(str(error))
    return summary


def decode(data: bytes | memoryview) -> Manifest:
    """Manifest from the bytes of its object, every field checked; CheckpointFailed says what is wrong."""
    if len(data) > MANIFEST_LIMIT:
        _refuse("it is too long", expected=f"{MANIFEST_LIMIT} bytes", found=len(data))
    summary_bytes, tables_bytes, items, coordinates = _fixed(data)
    tables_at = _FIXED.size + summary_bytes
    columns_at = -(-(tables_at + tables_bytes) // 8) * 8
    total = columns_at + 8 * (4 * items + 2 * coordinates)
    if total != len(data):
        _refuse("its length", expected=f"{total} bytes", found=f"{len(data)} bytes")
    summary = decode_summary(data)
    raw = _load(data[tables_at : tables_at + tables_bytes], "tables")
    objects = []
    for row in _field(raw, "objects", list):
        if not (isinstance(row, list) and len(row) == 2 and isinstance(row[0], str)):
            _refuse("an entry of objects", expected="[name, length]", found=repr(row)[:80])
        objects.append(ObjectEntry(name=row[0], length_bytes=_natural(row[1], "the length of an object")))
    tensors = []
    for row in _field(raw, "tensors", list):
        if not (isinstance(row, list) and len(row) == 4 and isinstance(row[0], str) and isinstance(row[1], str)):
            _refuse("an entry of tensors", expected="[name, dtype, shape, properties]", found=repr(row)[:80])
        if not isinstance(row[2], list) or not isinstance(row[3], dict):
            _refuse("an entry of tensors", expected="[name, dtype, shape, properties]", found=repr(row)[:80])
        shape = tuple(_natural(d, f"the shape of {row[0]!r}") for d in row[2])
        tensors.append(TensorEntry(fqn=row[0], dtype=row[1], shape=shape, properties=row[3]))
    blobs = _field(raw, "blobs", list)
    if not all(isinstance(b, str) for b in blobs):
        _refuse("an entry of blobs", expected="a name")

    at = columns_at
    columns = []
    for count in (items, items, items, items, coordinates, coordinates):
        columns.append(np.frombuffer(data, "<u8", count, at).astype(np.uint64, copy=False))
        at += 8 * count
    key, object_, offset, length, chunk_offset, chunk_size = columns
    return Manifest(
        summary=summary,
        objects=tuple(objects),
        tensors=tuple(tensors),
        blobs=tuple(blobs),
        planner=raw.get("planner"),
        key=key,
        object=object_,
        offset=offset,
        length=length,
        chunk_offset=chunk_offset,
        chunk_size=chunk_size,
    )
