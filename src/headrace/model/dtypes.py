"""safetensors dtypes and numpy's: which is which, and which numpy has no name for."""

from __future__ import annotations

from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.errors import UsageError

#: By numpy's name. `bfloat16` and `float8_*` exist where a package such as `ml_dtypes` registered them.
_BY_NAME: dict[str, str] = {
    "bool": "BOOL", "uint8": "U8", "int8": "I8", "uint16": "U16", "int16": "I16", "uint32": "U32", "int32": "I32",
    "uint64": "U64", "int64": "I64", "float16": "F16", "float32": "F32", "float64": "F64", "complex64": "C64",
    "bfloat16": "BF16", "float8_e4m3fn": "F8_E4M3", "float8_e5m2": "F8_E5M2", "float8_e8m0fnu": "F8_E8M0",
    "float8_e4m3fnuz": "F8_E4M3FNUZ", "float8_e5m2fnuz": "F8_E5M2FNUZ",
}  # fmt: skip
_NATIVE: dict[str, str] = {
    safetensors: name for name, safetensors in _BY_NAME.items() if not name.startswith(("bfloat", "float8"))
}


def safetensors_dtype(dtype: np.dtype[Any]) -> str:
    """`np.dtype("float32")` -> `"F32"`; UsageError for what the format cannot hold."""
    found = _BY_NAME.get(dtype.name)
    if found is None:
        raise UsageError("safetensors cannot hold this dtype", found=str(dtype))
    return found


def numpy_dtype(dtype: str) -> np.dtype[Any] | None:
    """`"F32"` -> little-endian `np.dtype("float32")`; None where numpy has no such type (BF16, F8_*, F4, F6_*)."""
    name = _NATIVE.get(dtype)
    return None if name is None else np.dtype(name).newbyteorder("<")


def little_endian_bytes(array: npt.NDArray[Any]) -> memoryview:
    """The row-major little-endian bytes of an array; a copy only where it is neither."""
    little = array.astype(array.dtype.newbyteorder("<"), copy=False) if array.dtype.byteorder == ">" else array
    return np.ascontiguousarray(little).reshape(-1).view(np.uint8).data
