"""Models as torch state dicts: every dtype that safetensors knows, straight into the tensors."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

import torch

from headrace.errors import ModelError, UsageError
from headrace.model import Header, ModelFile, RawTensor, open_safetensors, write_safetensors
from headrace.torch.tensors import as_bytes
from headrace.volume import Session, Transaction, Volume

_NAMES = {
    "BOOL": "bool", "U8": "uint8", "I8": "int8", "U16": "uint16", "I16": "int16", "U32": "uint32", "I32": "int32",
    "U64": "uint64", "I64": "int64", "F16": "float16", "BF16": "bfloat16", "F32": "float32", "F64": "float64",
    "C64": "complex64", "F8_E4M3": "float8_e4m3fn", "F8_E5M2": "float8_e5m2", "F8_E8M0": "float8_e8m0fnu",
    "F8_E4M3FNUZ": "float8_e4m3fnuz", "F8_E5M2FNUZ": "float8_e5m2fnuz",
}  # fmt: skip
_DTYPES = {key: dtype for key, name in _NAMES.items() if isinstance(dtype := getattr(torch, name, None), torch.dtype)}
_KEYS = {dtype: key for key, dtype in _DTYPES.items()}


class _OnHost(Mapping[str, RawTensor]):
    """The tensors as raw bytes, one at a time: what is on an accelerator comes to the host when its turn comes."""

    def __init__(self, tensors: Mapping[str, torch.Tensor]) -> None:
        self._tensors = tensors

    def __getitem__(self, name: str) -> RawTensor:
        tensor = self._tensors[name].detach()
        host = tensor.resolve_conj().resolve_neg().to("cpu").contiguous()
        return RawTensor(dtype=_KEYS[tensor.dtype], shape=tuple(tensor.shape), data=as_bytes(host))

    def __iter__(self) -> Any:
        return iter(self._tensors)

    def __len__(self) -> int:
        return len(self._tensors)


def save_model(
    target: Session | Transaction,
    name: str,
    state_dict: Mapping[str, torch.Tensor],
    metadata: Mapping[str, str] | None = None,
) -> Header:
    """Publish a state dict as one safetensors object, visible whole or not at all.

    Tensors that share memory (tied weights) are each written in full, so that every key is in the file. Needs, beyond
    the state dict, host memory for one tensor. UsageError for a sharded tensor (gather it with `full_tensor()`
    first), a sparse one, or a dtype that safetensors does not know.
    """
    for key, tensor in state_dict.items():
        if not isinstance(tensor, torch.Tensor):
            raise UsageError(f"{key!r} is not a tensor", found=type(tensor).__name__)
        if hasattr(tensor, "full_tensor"):
            raise UsageError(f"tensor {key!r} is sharded", next_step="gather it with full_tensor() first")
        if tensor.layout != torch.strided or tensor.dtype not in _KEYS:
            raise UsageError(f"safetensors cannot hold tensor {key!r}", found=f"{tensor.layout}, {tensor.dtype}")
    return write_safetensors(target, name, _OnHost(state_dict), metadata)


def load_model(
    volume: Volume, name: str, device: str | torch.device = "cpu", keys: Iterable[str] | None = None
) -> dict[str, torch.Tensor]:
    """The tensors of a safetensors object (or those of `keys`), read at once and verified.

    On the CPU the bytes go straight into the tensors. For an accelerator they pass through one host copy of the whole.
    ModelError for a damaged header, or a dtype that this torch lacks; ChecksumMismatch names the tensor.
    """
    model = open_safetensors(volume, name)
    host = {key: _empty(model, key) for key in (model.keys() if keys is None else keys)}
    model.read_into({key: as_bytes(tensor) for key, tensor in host.items()})
    target = torch.device(device)
    return host if target.type == "cpu" else {key: tensor.to(target) for key, tensor in host.items()}


def _empty(model: ModelFile, key: str) -> torch.Tensor:
    info = model.info(key)
    dtype = _DTYPES.get(info.dtype)
    if dtype is None:
        raise ModelError(
            f"this torch ({torch.__version__}) has no dtype for tensor {key!r}", where=model.name, found=info.dtype
        )
    return torch.empty(info.shape, dtype=dtype)
