"""The safetensors format, exactly: https://github.com/huggingface/safetensors, "Format".

    8 bytes             length N of the header, unsigned little-endian
    N bytes             JSON: {"NAME": {"dtype": "F32", "shape": [..], "data_offsets": [begin, end]},
                        "__metadata__": {..}}, beginning with "{", filled up with spaces to a multiple of 8
    the rest            the tensors, little-endian, row-major; offsets count from here; no hole and no overlap

A header is bounded before it is read, and believed only when its tensors tile the data exactly. Written headers are
byte for byte those of the `safetensors` library: the largest elements first, then by name, so every tensor is aligned.
"""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn

from headrace.errors import ModelError, UsageError

#: The library refuses longer headers; so do we, before a byte of it is allocated.
HEADER_LIMIT = 100_000_000
PREFIX_BYTES = 8
METADATA_KEY = "__metadata__"
DIMENSION_LIMIT = 64
OFFSET_LIMIT = 1 << 63

#: Bits of one element, in the order in which the library sorts dtypes (see `Dtype` in its tensor.rs).
DTYPE_BITS: dict[str, int] = {
    "BOOL": 8, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6, "U8": 8, "I8": 8, "F8_E5M2": 8, "F8_E4M3": 8, "F8_E8M0": 8,
    "F8_E4M3FNUZ": 8, "F8_E5M2FNUZ": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32, "U32": 32, "F32": 32,
    "C64": 64, "F64": 64, "I64": 64, "U64": 64,
}  # fmt: skip
_ORDER = {name: position for position, name in enumerate(DTYPE_BITS)}


@dataclass(frozen=True, kw_only=True)
class TensorInfo:
    """One tensor of a file: `begin` and `end` are bytes from the start of the data, not of the file."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    begin: int
    end: int

    @property
    def length_bytes(self) -> int:
        return self.end - self.begin


@dataclass(frozen=True, kw_only=True)
class Header:
    """A parsed header. `tensors` are in the order of their data; `data_offset` is where the data begins in the file."""

    tensors: tuple[TensorInfo, ...]
    metadata: Mapping[str, str]
    data_offset: int

    @property
    def data_bytes(self) -> int:
        return self.tensors[-1].end if self.tensors else 0

    @property
    def file_bytes(self) -> int:
        return self.data_offset + self.data_bytes


def _refuse(what: str, *, expected: object = None, found: object = None) -> NoReturn:
    raise ModelError(
        f"this is not a valid safetensors file: {what}",
        expected=None if expected is None else str(expected),
        found=None if found is None else str(found)[:200],
    )


def tensor_bytes(dtype: str, shape: Sequence[int]) -> int:
    """Bytes of a tensor; ModelError for a dtype that the format does not know, or elements that do not fill bytes."""
    bits = DTYPE_BITS.get(dtype)
    if bits is None:
        _refuse("its dtype is not known", expected=" ".join(DTYPE_BITS), found=dtype)
    total = bits * math.prod(shape)
    if total % 8:
        _refuse(f"{dtype}{list(shape)} does not fill whole bytes")
    return total // 8


def parse_prefix(prefix: bytes, file_bytes: int) -> int:
    """The length of the header, from the first 8 bytes; ModelError unless it is bounded and lies within the file."""
    if len(prefix) < PREFIX_BYTES or file_bytes < PREFIX_BYTES:
        _refuse(
            "it is too short", expected=f"at least {PREFIX_BYTES} bytes", found=f"{min(len(prefix), file_bytes)} bytes"
        )
    length = int.from_bytes(prefix[:PREFIX_BYTES], "little")
    if length > HEADER_LIMIT:
        _refuse("its header is too long", expected=f"at most {HEADER_LIMIT} bytes", found=f"{length} bytes")
    if length > file_bytes - PREFIX_BYTES:
        _refuse(
            "its header is longer than the file", expected=f"{file_bytes - PREFIX_BYTES} bytes", found=f"{length} bytes"
        )
    return length


def _no_duplicates(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    result = dict(pairs)
    if len(result) != len(pairs):
        names = [name for name, _ in pairs]
        _refuse("two entries have one name", found=next(n for n in names if names.count(n) > 1))
    return result


def _no_constant(text: str) -> NoReturn:
    _refuse("its header holds a number that is not one", found=text)


def parse(header: bytes, file_bytes: int) -> Header:
    """Header from its bytes (without the 8 of the prefix). ModelError names the first thing that is wrong.

    `file_bytes`: length of the whole file, which the tensors must fill exactly.
    """
    if not header.startswith(b"{"):
        _refuse("its header does not begin with '{'", found=header[:8])
    try:
        raw = json.loads(header.decode("utf-8"), object_pairs_hook=_no_duplicates, parse_constant=_no_constant)
    except (ValueError, RecursionError) as error:
        _refuse("its header is not JSON", found=error)
    # `object_pairs_hook` and the leading brace together make this a dict.
    metadata = raw.pop(METADATA_KEY, None)
    if metadata is None:
        metadata = {}
    if not isinstance(metadata, dict) or not all(isinstance(value, str) for value in metadata.values()):
        _refuse(f"{METADATA_KEY} maps names to something other than text")
    tensors = sorted((_entry(name, value) for name, value in raw.items()), key=lambda t: (t.begin, t.end))
    end = 0
    for tensor in tensors:
        if tensor.begin != end:
            kind = "overlaps the one before it" if tensor.begin < end else "leaves a hole before it"
            _refuse(f"tensor {tensor.name!r} {kind}", expected=f"offset {end}", found=f"offset {tensor.begin}")
        end = tensor.end
    data_offset = PREFIX_BYTES + len(header)
    if data_offset + end != file_bytes:
        _refuse("its tensors do not fill the file", expected=f"{file_bytes - data_offset} bytes", found=f"{end} bytes")
    return Header(tensors=tuple(tensors), metadata=metadata, data_offset=data_offset)


def _entry(name: str, value: Any) -> TensorInfo:
    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        _refuse(f"the entry of tensor {name!r}", expected="dtype, shape, data_offsets", found=value)
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str):
        _refuse(f"the dtype of tensor {name!r}", expected="text", found=dtype)
    if not isinstance(shape, list) or len(shape) > DIMENSION_LIMIT or not all(_natural(d) for d in shape):
        _refuse(f"the shape of tensor {name!r}", expected="whole numbers", found=shape)
    if not isinstance(offsets, list) or len(offsets) != 2 or not all(_natural(o) for o in offsets):
        _refuse(f"the offsets of tensor {name!r}", expected="two whole numbers", found=offsets)
    begin, end = offsets
    needed = tensor_bytes(dtype, shape)
    if end - begin != needed:
        _refuse(
            f"the offsets of tensor {name!r}",
            expected=f"{needed} bytes for {dtype}{shape}",
            found=f"{end - begin} bytes",
        )
    return TensorInfo(name=name, dtype=dtype, shape=tuple(shape), begin=begin, end=end)


def _natural(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < OFFSET_LIMIT


def build(
    tensors: Iterable[tuple[str, str, Sequence[int]]], metadata: Mapping[str, str] | None = None
) -> tuple[bytes, Header]:
    """The first bytes of a file (prefix and header) for tensors `(name, dtype, shape)`, and the header they say.

    The order of the data is that of `Header.tensors`: by dtype, the widest first, then by name.
    UsageError for names and metadata that the format cannot hold.
    """
    wanted = [(name, dtype, tuple(shape)) for name, dtype, shape in tensors]
    for name, dtype, _ in wanted:
        if not isinstance(name, str) or name == METADATA_KEY:
            raise UsageError("this cannot be the name of a tensor", found=repr(name))
        if dtype not in _ORDER:
            raise UsageError(f"tensor {name!r} has a dtype that safetensors does not know", found=dtype)
    wanted.sort(key=lambda t: (-_ORDER[t[1]], t[0].encode("utf-8", "surrogatepass")))
    infos = []
    end = 0
    for name, dtype, shape in wanted:
        begin, end = end, end + tensor_bytes(dtype, shape)
        infos.append(TensorInfo(name=name, dtype=dtype, shape=shape, begin=begin, end=end))
    entries: dict[str, Any] = {}
    if metadata is not None:
        if not all(isinstance(k, str) and isinstance(v, str) for k, v in metadata.items()):
            raise UsageError("safetensors metadata maps text to text", found=repr(dict(metadata))[:200])
        # Sorted, so that equal models are equal bytes.
        entries[METADATA_KEY] = dict(sorted(metadata.items()))
    for info in infos:
        if info.name in entries:
            raise UsageError("two tensors have one name", found=info.name)
        entries[info.name] = {"dtype": info.dtype, "shape": list(info.shape), "data_offsets": [info.begin, info.end]}
    try:
        text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode("utf-8")
    except UnicodeEncodeError as error:
        raise UsageError("the name of a tensor is not text that UTF-8 can hold", found=str(error)) from None
    text += b" " * (-len(text) % 8)
    if len(text) > HEADER_LIMIT:
        raise UsageError(
            "there are too many tensors for one safetensors file",
            expected=f"{HEADER_LIMIT} bytes",
            found=f"{len(text)}",
        )
    prefix = len(text).to_bytes(PREFIX_BYTES, "little") + text
    return prefix, Header(tensors=tuple(infos), metadata=dict(metadata or {}), data_offset=len(prefix))
