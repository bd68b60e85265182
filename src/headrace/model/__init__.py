"""Models in a volume: safetensors files, exactly, written in one commit and read in one submission. No torch."""

from headrace.model.compose import Composed, NewTensor, StoredTensor, compose_safetensors
from headrace.model.header import Header, TensorInfo
from headrace.model.read import ModelFile, open_safetensors
from headrace.model.write import RawTensor, write_safetensors

__all__ = [
    "Composed",
    "Header",
    "ModelFile",
    "NewTensor",
    "RawTensor",
    "StoredTensor",
    "TensorInfo",
    "compose_safetensors",
    "open_safetensors",
    "write_safetensors",
]
