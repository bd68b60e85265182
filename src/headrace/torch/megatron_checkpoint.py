"""megatron-core's `dist_checkpointing` in a volume: a `torch_dist` checkpoint of all ranks is one commit.

    checkpoints = MegatronCheckpoints("nvme+tcp://...", "pretrain")          # on every rank
    checkpoints.save(sharded_state_dict, step)
    state = checkpoints.load(sharded_state_dict)                             # of the latest step, or of `step`

Its own `save` and `load` run, with its own checks of what the ranks hold, over strategies of ours: sharded tensors and
objects go through `VolumeWriter` and `VolumeReader`, with its planners. It wants a folder for two small files beside
them (`common.pt`, what is not sharded, and `metadata.json`): it gets one that is gone afterwards, and `common.pt` is in
the same commit as all else. Nothing has to be on a file system that ranks share.

Where its default strategy runs, this does, and more: that one ends a save with a tensor on "cuda".
"""

from __future__ import annotations

import io
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from megatron.core import dist_checkpointing
from megatron.core.dist_checkpointing.core import CheckpointingConfig, save_config
from megatron.core.dist_checkpointing.mapping import ShardedObject, ShardedTensor
from megatron.core.dist_checkpointing.strategies import torch as theirs
from megatron.core.dist_checkpointing.strategies.base import SaveShardedStrategy
from megatron.core.dist_checkpointing.strategies.common import COMMON_STATE_FNAME
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from headrace.checkpoint import latest
from headrace.errors import ObjectNotFound
from headrace.torch.load.reader import LoadReport, VolumeReader
from headrace.torch.ranks.attachment import VolumeLike
from headrace.torch.save.options import SaveReport, WriterOptions
from headrace.torch.save.writer import VolumeWriter

_BACKEND, _VERSION = "torch_dist", 1
#: The item that holds what is not sharded: no key of megatron-core's ends so.
_COMMON = f"headrace/{COMMON_STATE_FNAME}"


class MegatronCheckpoints:
    """See the module text. Construct it on every rank, collectively; `torch.distributed` is initialised.

    Args:
        volume: address of the volume, of each member, or an open `Volume`.
        run: checkpoints are `run/step-N`; `headrace checkpoint` lists and verifies them as any other.
        options: `keep_last`, `overwrite` and so on, of the writer; loads have the same `stall_s` and `deadline_s`.
    """

    def __init__(
        self, volume: VolumeLike, run: str, *, run_id: str | None = None, options: WriterOptions | None = None
    ) -> None:
        self._run = run
        options = options or WriterOptions()
        self._writer = VolumeWriter(volume, run, run_id=run_id, options=options)
        self._reader = VolumeReader(volume, run, timeout_s=options.deadline_s, stall_s=options.stall_s)
        self.last_save: SaveReport | None = None
        self.last_load: LoadReport | None = None

    def save(self, sharded_state_dict: dict[str, Any], step: int, **options: Any) -> SaveReport:
        """`dist_checkpointing.save`, which takes the `options` (`content_metadata`, `validate_access_integrity`).
        HeadraceError on all ranks where it did not happen."""
        with tempfile.TemporaryDirectory(prefix="headrace-megatron-") as folder:
            strategy = _Save(self._writer, f"{self._run}/step-{step}")
            dist_checkpointing.save(sharded_state_dict, folder, sharded_strategy=strategy, **options)
        assert strategy.report is not None
        self.last_save = strategy.report
        return strategy.report

    def load(self, sharded_state_dict: dict[str, Any], step: int | None = None, **options: Any) -> Any:
        """`dist_checkpointing.load`: its result. `options`: `strict`, `validate_access_integrity`. ObjectNotFound."""
        self._reader.reset(self._run if step is None else f"{self._run}/step-{step}")
        strategy = _Load(self._reader)
        with strategy.folder() as folder:
            loaded = dist_checkpointing.load(sharded_state_dict, folder, sharded_strategy=strategy, **options)
        self.last_load = strategy.report
        return loaded

    def latest(self) -> int | None:
        """The last step that is committed; None where there is none."""
        volume = self._reader._attachment.open()
        volume.refresh()
        found = latest(volume, self._run)
        return None if found is None else found.step

    def close(self) -> None:
        """Give up the session, so that others may write."""
        self._reader.close()
        self._writer.close()

    def __enter__(self) -> MegatronCheckpoints:
        return self

    def __exit__(self, *exc: object) -> None:
        self.close()


class _Save(SaveShardedStrategy):  # type: ignore[misc]  # it has no types
    """Its state dict as DCP knows it, over our writer."""

    def __init__(self, writer: VolumeWriter, checkpoint_id: str) -> None:
        super().__init__(_BACKEND, _VERSION)
        self._writer = writer
        self._id = checkpoint_id
        self.report: SaveReport | None = None

    @property
    def can_handle_sharded_objects(self) -> bool:
        return True

    def save(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> None:
        by_key, _, _ = theirs._replace_state_dict_keys_with_sharded_keys(sharded_state_dict, True)
        state = dict(theirs.mcore_to_pyt_state_dict(by_key, False))
        if dist.get_rank() == 0:
            # Its common strategy has written it just now.
            state[_COMMON] = io.BytesIO((Path(checkpoint_dir) / COMMON_STATE_FNAME).read_bytes())
        planner = theirs.MCoreSavePlanner(dedup_replicated_tensors=False, flatten_state_dict=False)
        self.report = self._writer.save(state, self._id, planner=planner)


class _Load(theirs.TorchDistLoadShardedStrategy):  # type: ignore[misc]
    """From our reader what theirs takes from files."""

    def __init__(self, reader: VolumeReader) -> None:
        super().__init__()
        self._reader = reader
        self._sequence = 0
        self.report: LoadReport | None = None

    @contextmanager
    def folder(self) -> Iterator[str]:
        """What it looks into before it asks a strategy: the two small files, on each rank."""
        planner = _Raw(flatten_state_dict=False)
        # Each load of a run looks for its latest step; what comes behind this one is of the same commit.
        self._reader.reset(self._reader.load({_COMMON: io.BytesIO()}, planner=planner).checkpoint_id)
        self._sequence = self._reader.sequence
        with tempfile.TemporaryDirectory(prefix="headrace-megatron-") as folder:
            (Path(folder) / COMMON_STATE_FNAME).write_bytes(planner.found)
            save_config(CheckpointingConfig(_BACKEND, _VERSION), folder)
            yield folder

    def load(self, sharded_state_dict: dict[str, Any], checkpoint_dir: str | Path) -> dict[str, Any]:
        tensors = [one for one in theirs.nested_values(sharded_state_dict) if isinstance(one, ShardedTensor)]
        original = sharded_state_dict
        by_key, flat, names = theirs._replace_state_dict_keys_with_sharded_keys(sharded_state_dict)
        state = dict(theirs.mcore_to_pyt_state_dict(by_key, True))
        planner = theirs.MCoreLoadPlanner(
            shapes_validation_sharded_tensors=[one for one in tensors if not one.allow_shape_mismatch],
            allow_shape_mismatch_sharded_tensors={one.key: one for one in tensors if one.allow_shape_mismatch},
        )
        self.report = self._reader.load(state, planner=planner)
        self._check()
        unwrapped = {key: theirs._unwrap_pyt_sharded_tensor(value) for key, value in state.items()}
        loaded: dict[str, Any] = theirs._replace_sharded_keys_with_state_dict_keys(unwrapped, flat, names)
        theirs._restore_dict_types(loaded, original)
        return loaded

    def _check(self) -> None:
        # All ranks load one manifest: they agree about this.
        if self._reader.sequence != self._sequence:
            raise ObjectNotFound(
                f"checkpoint {self._reader.checkpoint_id} was replaced while it was loaded", next_step="load it again"
            )

    def _read_metadata(self) -> Metadata:
        metadata = self._reader.read_metadata()
        self._check()
        return metadata

    def load_tensors_metadata(self, checkpoint_dir: str | Path, metadata: Metadata | None = None) -> Any:
        # Theirs gives `torch.empty` all that torch knows of a tensor, which of newer ones is more than that takes.
        return {
            key: ShardedTensor.from_rank_offsets(
                key, torch.empty(entry.size, dtype=entry.properties.dtype, device="meta")
            ).without_data()
            for key, entry in (metadata or self._read_metadata()).state_dict_metadata.items()
            if isinstance(entry, TensorStorageMetadata)
        }

    def load_sharded_metadata(self, checkpoint_dir: str | Path) -> Any:
        metadata = self._read_metadata()
        found = self.load_tensors_metadata(checkpoint_dir, metadata)
        for key, entry in metadata.state_dict_metadata.items():
            if isinstance(entry, BytesStorageMetadata) and key != _COMMON:
                found[key] = ShardedObject.empty_from_unique_key(key)
        return found


class _Raw(DefaultLoadPlanner):
    """One item of bytes, as it is: what is in it is for others to read."""

    found = b""

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found = value.getvalue()
