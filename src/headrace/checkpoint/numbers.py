"""Elements of torch's dtypes as numpy has them, without torch: the bits, and the numbers that they mean."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.checkpoint.manifest import DTYPE_BYTES

#: Of those that numpy knows itself, its name; of the others the bits.
_STORED = {"bool": "u1", "bfloat16": "<u2", "complex32": "<u4", "complex64": "<c8", "complex128": "<c16"}
#: Bits of exponent and mantissa, bias, and what the highest exponents mean.
_SMALL_FLOATS = {
    "float8_e4m3fn": (4, 3, 7, "nan-last"),
    "float8_e4m3fnuz": (4, 3, 8, "nan-zero"),
    "float8_e5m2": (5, 2, 15, "ieee"),
    "float8_e5m2fnuz": (5, 2, 16, "nan-zero"),
    "float4_e2m1fn_x2": (2, 1, 1, "finite"),
}


def stored_dtype(dtype: str) -> np.dtype[Any]:
    """What an element of torch's `dtype` is on media: a numpy dtype of as many bytes, little-endian."""
    if dtype in _STORED:
        return np.dtype(_STORED[dtype])
    if dtype.startswith(("float8", "float4")):
        return np.dtype("u1")
    return np.dtype(f"<{np.dtype(dtype).str[1:]}")


def bits(values: npt.NDArray[Any]) -> npt.NDArray[Any]:
    """Rows of bytes, one for each element of a flat array."""
    return np.ascontiguousarray(values).view(np.uint8).reshape(len(values), -1)


def distances(one: npt.NDArray[Any], other: npt.NDArray[Any], dtype: str) -> npt.NDArray[np.float64]:
    """|one - other| of flat arrays of `stored_dtype(dtype)`, in float64: whole numbers beyond 2^53 are rounded."""
    with np.errstate(invalid="ignore", over="ignore"):
        apart: npt.NDArray[np.float64] = np.abs(_numbers(one, dtype) - _numbers(other, dtype))
    return apart.reshape(-1)


def _numbers(values: npt.NDArray[Any], dtype: str) -> npt.NDArray[Any]:
    if dtype == "bfloat16":
        wide = np.left_shift(values.astype(np.uint32), np.uint32(16))
        return np.asarray(wide.view(np.float32), np.float64)
    if dtype == "complex32":
        pairs = np.ascontiguousarray(values).view("<f2").reshape(-1, 2).astype(np.float64)
        return np.ascontiguousarray(pairs).view(np.complex128).reshape(-1)
    if dtype == "float8_e8m0fnu":
        powers: npt.NDArray[np.float64] = np.exp2(values.astype(np.float64) - 127)
        powers[values == 255] = np.nan
        return powers
    if dtype == "float4_e2m1fn_x2":
        pair = [_table(dtype)[values & 15], _table(dtype)[values >> 4]]
        return np.asarray(np.stack(pair, axis=-1), np.float64)
    if dtype in _SMALL_FLOATS:
        return np.asarray(_table(dtype)[values], np.float64)
    return np.asarray(values, np.complex128 if values.dtype.kind == "c" else np.float64)


@cache
def _table(dtype: str) -> npt.NDArray[np.float64]:
    """The number of each pattern of bits."""
    exponent_bits, mantissa_bits, bias, highest = _SMALL_FLOATS[dtype]
    width = 1 + exponent_bits + mantissa_bits
    patterns = np.arange(1 << width)
    mantissa = patterns & ((1 << mantissa_bits) - 1)
    exponent = (patterns >> mantissa_bits) & ((1 << exponent_bits) - 1)
    sign = np.where(patterns >> (width - 1), -1.0, 1.0)
    normal = (1 + mantissa / (1 << mantissa_bits)) * np.exp2(exponent - float(bias))
    small = mantissa / (1 << mantissa_bits) * np.exp2(1.0 - bias)
    numbers: npt.NDArray[np.float64] = sign * np.where(exponent > 0, normal, small)
    last = (1 << exponent_bits) - 1
    if highest == "ieee":
        numbers = np.where(exponent == last, np.where(mantissa > 0, np.nan, sign * np.inf), numbers)
    elif highest == "nan-last":
        full = (exponent == last) & (mantissa == (1 << mantissa_bits) - 1)
        numbers = np.where(full, np.nan, numbers)
    elif highest == "nan-zero":
        numbers[1 << (width - 1)] = np.nan
    return numbers


assert all(stored_dtype(dtype).itemsize == size for dtype, size in DTYPE_BYTES.items())
