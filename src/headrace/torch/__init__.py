"""The PyTorch edge: loader, checkpoints, models. Names are imported when used, so each costs only what it needs."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.torch.certificate import RestartCertificate as RestartCertificate
    from headrace.torch.checkpointer import Checkpointer as Checkpointer
    from headrace.torch.dataset import TokenDataset as TokenDataset
    from headrace.torch.epochs import Epochs as Epochs
    from headrace.torch.epochs import causal as causal
    from headrace.torch.export import ExportReport as ExportReport
    from headrace.torch.export import export_model as export_model
    from headrace.torch.export_folder import FolderReport as FolderReport
    from headrace.torch.export_folder import export_dcp as export_dcp
    from headrace.torch.export_folder import export_safetensors as export_safetensors
    from headrace.torch.follow import Follower as Follower
    from headrace.torch.huggingface import feed_trainer as feed_trainer
    from headrace.torch.import_folder import ImportReport as ImportReport
    from headrace.torch.import_folder import import_dcp as import_dcp
    from headrace.torch.iterable import TokenIterable as TokenIterable
    from headrace.torch.loader import DocumentLoader as DocumentLoader
    from headrace.torch.loader import Documents as Documents
    from headrace.torch.loader import TokenLoader as TokenLoader
    from headrace.torch.model import load_model as load_model
    from headrace.torch.model import save_model as save_model
    from headrace.torch.preemption import Preemption as Preemption
    from headrace.torch.reader import LoadReport as LoadReport
    from headrace.torch.reader import VolumeReader as VolumeReader
    from headrace.torch.records import RecordLoader as RecordLoader
    from headrace.torch.sampler import OrderSampler as OrderSampler
    from headrace.torch.writer import SaveReport as SaveReport
    from headrace.torch.writer import VolumeWriter as VolumeWriter
    from headrace.torch.writer import WriterOptions as WriterOptions

#: Public name -> the module that defines it. Listed in the `if` above as well, for type checkers.
_HOMES = {
    "Checkpointer": "checkpointer",
    "DocumentLoader": "loader",
    "Documents": "loader",
    "Epochs": "epochs",
    "ExportReport": "export",
    "FolderReport": "export_folder",
    "Follower": "follow",
    "ImportReport": "import_folder",
    "LoadReport": "reader",
    "OrderSampler": "sampler",
    "RecordLoader": "records",
    "Preemption": "preemption",
    "RestartCertificate": "certificate",
    "SaveReport": "writer",
    "TokenDataset": "dataset",
    "TokenIterable": "iterable",
    "TokenLoader": "loader",
    "VolumeReader": "reader",
    "VolumeWriter": "writer",
    "WriterOptions": "writer",
    "causal": "epochs",
    "export_dcp": "export_folder",
    "export_model": "export",
    "export_safetensors": "export_folder",
    "feed_trainer": "huggingface",
    "import_dcp": "import_folder",
    "load_model": "model",
    "save_model": "model",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headrace.torch' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headrace.torch.{home}"), name)


def __dir__() -> list[str]:
    return __all__
