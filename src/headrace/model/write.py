"""Publishing a model: one safetensors object, visible whole or not at all."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from headrace.device.protocol import Buffer
from headrace.errors import UsageError
from headrace.model.dtypes import little_endian_bytes, safetensors_dtype
from headrace.model.header import Header, build, tensor_bytes
from headrace.volume import Session, Transaction

CHECKSUM_BLOCK_BYTES = 65536


@dataclass(frozen=True, kw_only=True)
class RawTensor:
    """A tensor as its bytes: for dtypes that numpy does not know, and frameworks. `data`: row-major, little-endian."""

    dtype: str
    shape: tuple[int, ...]
    data: Buffer

    def __post_init__(self) -> None:
        needed, found = tensor_bytes(self.dtype, self.shape), memoryview(cast(bytes, self.data)).nbytes
        if needed != found:
            raise UsageError(
                f"the data of a {self.dtype}{list(self.shape)}", expected=f"{needed} bytes", found=f"{found} bytes"
            )


def write_safetensors(
    target: Session | Transaction,
    name: str,
    tensors: Mapping[str, Any],
    metadata: Mapping[str, str] | None = None,
) -> Header:
    """Write a safetensors file as object `name`; the header that it got.

    Args:
        target: a session, for a commit of its own; or an open transaction, to be seen together with what else is in it.
        tensors: numpy arrays, anything with `__array__`, or `RawTensor`.
        metadata: text to text, into `__metadata__`.

    Tensors are streamed one after another: beyond the tensors themselves this needs the buffers of the volume's stream,
    and a copy of one tensor at a time where it is not contiguous. The bytes are those that the `safetensors` library
    writes.
    Raises UsageError for a name, dtype or metadata that the format cannot hold; VolumeError from the volume.
    """
    # Items of a mapping may be made when asked for: none is kept.
    described = []
    for key in tensors:
        value = tensors[key]
        if isinstance(value, RawTensor):
            described.append((key, value.dtype, value.shape))
        else:
            array = value if isinstance(value, np.ndarray) else np.asarray(value)
            described.append((key, safetensors_dtype(array.dtype), array.shape))
    prefix, header = build(described, metadata)

    def pieces() -> Iterator[Buffer]:
        yield prefix
        for info in header.tensors:
            value = tensors[info.name]
            if isinstance(value, RawTensor):
                yield value.data
            else:
                yield little_endian_bytes(np.asarray(value))

    if isinstance(target, Transaction):
        _stream(target, name, pieces(), header)
    else:
        with target.transaction() as tx:
            _stream(tx, name, pieces(), header)
    return header


def _stream(tx: Transaction, name: str, pieces: Iterator[Buffer], header: Header) -> None:
    tx.write_stream(name, pieces, length_bytes=header.file_bytes, checksum_block_bytes=CHECKSUM_BLOCK_BYTES)
