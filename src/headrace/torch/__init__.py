"""The PyTorch edge. Names are imported when used, so each costs only what it needs.

feed/          batches for a training loop
job/           checkpoints of a plain training loop
save/ load/    DCP's writer and reader
files/         models and checkpoints as files
ranks/         how the ranks of a job talk
metadata.py tensors.py          DCP's metadata as a manifest; the memory of tensors
huggingface.py huggingface_checkpoints.py lightning.py    for `Trainer` (feed; save), Lightning
megatron.py megatron_checkpoint.py dlio.py    for megatron-core (feed; save), the DLIO benchmark
torch_checkpointing.py paths.py    its storage; `headrace://` for all ranks
apart.py                        any state as named tensors and the rest
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace.torch.feed.dataset import TokenDataset as TokenDataset
    from headrace.torch.feed.epochs import Epochs as Epochs
    from headrace.torch.feed.epochs import causal as causal
    from headrace.torch.feed.iterable import TokenIterable as TokenIterable
    from headrace.torch.feed.loader import DocumentLoader as DocumentLoader
    from headrace.torch.feed.loader import Documents as Documents
    from headrace.torch.feed.loader import TokenLoader as TokenLoader
    from headrace.torch.feed.records import RecordLoader as RecordLoader
    from headrace.torch.feed.sampler import OrderSampler as OrderSampler
    from headrace.torch.files.export import ExportReport as ExportReport
    from headrace.torch.files.export import export_model as export_model
    from headrace.torch.files.export_folder import FolderReport as FolderReport
    from headrace.torch.files.export_folder import export_dcp as export_dcp
    from headrace.torch.files.export_folder import export_safetensors as export_safetensors
    from headrace.torch.files.import_folder import ImportReport as ImportReport
    from headrace.torch.files.import_folder import import_dcp as import_dcp
    from headrace.torch.files.model import load_model as load_model
    from headrace.torch.files.model import save_model as save_model
    from headrace.torch.huggingface import feed_trainer as feed_trainer
    from headrace.torch.huggingface_checkpoints import checkpoint_trainer as checkpoint_trainer
    from headrace.torch.job.certificate import RestartCertificate as RestartCertificate
    from headrace.torch.job.checkpointer import Checkpointer as Checkpointer
    from headrace.torch.job.preemption import Preemption as Preemption
    from headrace.torch.load.reader import LoadReport as LoadReport
    from headrace.torch.load.reader import VolumeReader as VolumeReader
    from headrace.torch.ranks.follow import Follower as Follower
    from headrace.torch.save.writer import SaveReport as SaveReport
    from headrace.torch.save.writer import VolumeWriter as VolumeWriter
    from headrace.torch.save.writer import WriterOptions as WriterOptions

#: Public name -> the module that defines it. Listed in the `if` above as well, for type checkers.
_HOMES = {
    "Checkpointer": "job.checkpointer",
    "DocumentLoader": "feed.loader",
    "Documents": "feed.loader",
    "Epochs": "feed.epochs",
    "ExportReport": "files.export",
    "FolderReport": "files.export_folder",
    "Follower": "ranks.follow",
    "ImportReport": "files.import_folder",
    "LoadReport": "load.reader",
    "OrderSampler": "feed.sampler",
    "RecordLoader": "feed.records",
    "Preemption": "job.preemption",
    "RestartCertificate": "job.certificate",
    "SaveReport": "save.writer",
    "TokenDataset": "feed.dataset",
    "TokenIterable": "feed.iterable",
    "TokenLoader": "feed.loader",
    "VolumeReader": "load.reader",
    "VolumeWriter": "save.writer",
    "WriterOptions": "save.writer",
    "causal": "feed.epochs",
    "checkpoint_trainer": "huggingface_checkpoints",
    "export_dcp": "files.export_folder",
    "export_model": "files.export",
    "export_safetensors": "files.export_folder",
    "feed_trainer": "huggingface",
    "import_dcp": "files.import_folder",
    "load_model": "files.model",
    "save_model": "files.model",
}

__all__ = sorted(_HOMES)


def __getattr__(name: str) -> Any:
    home = _HOMES.get(name)
    if home is None:
        raise AttributeError(f"module 'headrace.torch' has no attribute {name!r}")
    return getattr(importlib.import_module(f"headrace.torch.{home}"), name)


def __dir__() -> list[str]:
    return __all__
