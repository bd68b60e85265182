"""A safetensors file out of bytes that the volume holds already: a new header, and shared ranges of other objects."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import numpy as np

from headrace.device.protocol import Buffer
from headrace.errors import UsageError
from headrace.model.dtypes import little_endian_bytes, safetensors_dtype
from headrace.model.header import Header, build, tensor_bytes
from headrace.model.write import CHECKSUM_BLOCK_BYTES, RawTensor
from headrace.volume import ObjectInfo, Transaction
from headrace.volume.writing.write import buffer_bytes


@dataclass(frozen=True, kw_only=True)
class StoredTensor:
    """A tensor that lies in the volume: row-major, little-endian, one range after another."""

    dtype: str
    shape: tuple[int, ...]
    #: (object, offset, length), bytes.
    parts: tuple[tuple[str | ObjectInfo, int, int], ...]

    def __post_init__(self) -> None:
        needed, found = tensor_bytes(self.dtype, self.shape), sum(length for _, _, length in self.parts)
        if needed != found:
            raise UsageError(
                f"the parts of a {self.dtype}{list(self.shape)}", expected=f"{needed} bytes", found=f"{found} bytes"
            )


@dataclass(frozen=True, kw_only=True)
class NewTensor:
    """A tensor that is made when its turn comes, so that one is in memory at a time. `make`: its bytes."""

    dtype: str
    shape: tuple[int, ...]
    make: Callable[[], Buffer]


@dataclass(frozen=True, kw_only=True)
class Composed:
    """What `compose_safetensors` wrote, and what it did not have to."""

    name: str
    header: Header
    #: Bytes of tensors that are shared with the objects that they come from.
    shared_bytes: int
    #: Bytes of tensors that were written, and which those are.
    copied_bytes: int
    copied: tuple[str, ...]


def compose_safetensors(
    tx: Transaction, name: str, tensors: Mapping[str, Any], metadata: Mapping[str, str] | None = None
) -> Composed:
    """Write a safetensors file as object `name` that shares what can be shared.

    Args:
        tx: what it is committed with.
        tensors: `StoredTensor`s are shared, not copied. All else is written: `NewTensor`, `RawTensor`, numpy arrays.
        metadata: text to text, into `__metadata__`.

    Its bytes are those that `write_safetensors` would write. What is shared stays alive with this object, whatever
    becomes of the one that it came from. Raises as `write_safetensors` and `Transaction.compose`.
    """
    described = []
    for key, value in tensors.items():
        if isinstance(value, StoredTensor | NewTensor | RawTensor):
            described.append((key, value.dtype, value.shape))
        else:
            described.append((key, safetensors_dtype(np.asarray(value).dtype), np.asarray(value).shape))
    prefix, header = build(described, metadata)
    parts: list[Any] = [prefix]
    copied = []
    for info in header.tensors:
        value = tensors[info.name]
        if isinstance(value, StoredTensor):
            parts.extend(value.parts)
            continue
        copied.append(info)
        parts.append(lambda value=value, length=info.length_bytes: _bytes_of(value, length))
    tx.compose(name, parts, checksum_block_bytes=CHECKSUM_BLOCK_BYTES if copied else 4096)
    copied_bytes = sum(info.length_bytes for info in copied)
    return Composed(
        name=name,
        header=header,
        shared_bytes=header.data_bytes - copied_bytes,
        copied_bytes=copied_bytes,
        copied=tuple(info.name for info in copied),
    )


def _bytes_of(value: Any, length: int) -> Buffer:
    if isinstance(value, RawTensor):
        return value.data
    data = value.make() if isinstance(value, NewTensor) else little_endian_bytes(np.asarray(value))
    if buffer_bytes(data) != length:
        raise UsageError("a tensor of a model has other bytes than its header says", expected=f"{length}")
    return data
