"""Lightning on a volume: each checkpoint is one commit, and is found, rotated and resumed where Lightning looks for it.

    io = VolumeCheckpointIO("nvme+tcp://...")
    saves = VolumeModelCheckpoint(dirpath="headrace://runs/a", every_n_train_steps=500, save_last=True)
    Trainer(plugins=[io], callbacks=[saves], ...).fit(model, batches, ckpt_path="last")

The checkpoint that Lightning calls `headrace://runs/a/last.ckpt` is one of the run `runs/a/last.ckpt`, as `headrace
checkpoint` knows them: its tensors by their names (`state_dict.layer.weight`), and beside them what Lightning keeps of
a job besides. A save under a name that is there replaces what it was in the same commit.

Made for `lightning` and for `pytorch_lightning`, whichever was imported before this module, else whichever is there.
"""

from __future__ import annotations

import importlib
import importlib.util
import io
import logging
import os
import re
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torch.distributed.checkpoint.planner import ReadItem

from headrace.checkpoint import CheckpointId
from headrace.checkpoint.names import check_run
from headrace.checkpoint.order import find
from headrace.checkpoint.retention import delete_checkpoints
from headrace.errors import CheckpointFailed, ObjectExists, UsageError
from headrace.settings import VOLUME, volume_addresses
from headrace.torch.apart import put_together, take_apart
from headrace.torch.load.reader import VolumeReader
from headrace.torch.ranks.attachment import Attachment
from headrace.torch.save.writer import VolumeWriter, WriterOptions
from headrace.volume.media.members import addresses as list_addresses

_log = logging.getLogger("headrace")
#: What is no tensor, beside the tensors.
_REST = "lightning"
_URL = re.compile(r"headrace:/{1,2}")


def _flavour() -> tuple[Any, Any, Any]:
    """Lightning's modules of plugins, callbacks and strategies: `lightning` has another copy of all that
    `pytorch_lightning` has, and each takes only its own."""
    both = {
        "lightning": ("lightning.fabric", "lightning.pytorch"),
        "pytorch_lightning": ("lightning_fabric", "pytorch_lightning"),
    }
    there = [name for name in both if name in sys.modules] or [n for n in both if importlib.util.find_spec(n)]
    if not there:
        raise ImportError("headrace.torch.lightning needs `lightning` or `pytorch_lightning`, and none is installed")
    fabric, trainer = both[there[0]]
    names = f"{fabric}.plugins", f"{trainer}.callbacks", f"{trainer}.strategies"
    return importlib.import_module(names[0]), importlib.import_module(names[1]), importlib.import_module(names[2])


_plugins, _callbacks, _strategies = _flavour()
_CheckpointIO: Any = _plugins.CheckpointIO
_ModelCheckpoint: Any = _callbacks.ModelCheckpoint
#: Of the Lightning that this module is made for.
Callback: Any = _callbacks.Callback


class VolumeCheckpointIO(_CheckpointIO):  # type: ignore[misc]
    """Lightning's `CheckpointIO` over a volume, for strategies that save on rank 0 (one device, DDP).

    Strategies that write by themselves (FSDP, DeepSpeed, `ModelParallelStrategy`) do not ask a `CheckpointIO`: with
    these, save by `Checkpointer` or `VolumeWriter` from a callback.

    Args:
        volume: address of the volume, or several for several members. `headrace://` means this volume from now on in
            this process: Lightning looks for checkpoints by fsspec.
        run_id: who writes, for the session: a restart under the same id takes over from a dead predecessor.
        options: of the `VolumeWriter`; retention and `overwrite` are Lightning's business.
        together: the ranks load together, so that what all of them want is read once. False: each rank by itself.
        asynchronous: saving returns when the checkpoint is copied in host memory. What is saved and removed behind it
            comes in the same order, one at a time, and what failed is raised by the next call; nothing is removed
            behind a save that failed. (Lightning's `AsyncCheckpointIO` removes before what takes its place is there.)
    """

    def __init__(
        self,
        volume: str | Sequence[str],
        *,
        run_id: str = "lightning",
        options: WriterOptions | None = None,
        together: bool = True,
        asynchronous: bool = False,
    ) -> None:
        options = options or WriterOptions()
        if options.retention is not None:
            raise UsageError("keep_last and keep_every", next_step="set ModelCheckpoint(save_top_k=...) instead")
        # One step under a name: the one before goes with the commit of the next.
        self._options = replace(options, overwrite=True, keep_last=1)
        self._volume = list_addresses(volume)
        self._together = together
        self._behind = _Behind() if asynchronous else None
        self._attachment = Attachment(self._volume, run_id=run_id, takeover=options.takeover, unfenced=options.unfenced)
        _make_known(self._volume)

    def save_checkpoint(self, checkpoint: dict[str, Any], path: Any, storage_options: Any = None) -> None:
        """One commit. Lightning calls it on rank 0, with all of the checkpoint."""
        if storage_options is not None:
            raise UsageError("storage_options mean nothing for a volume", found=repr(storage_options))
        run = _run(path)
        self._settle()
        tensors, rest = take_apart(checkpoint, reserved={_REST})
        packed = io.BytesIO()
        torch.save(rest, packed)
        state: dict[str, Any] = {**tensors, _REST: packed.getvalue()}
        id = CheckpointId(run, int(checkpoint.get("global_step", 0)))
        if self._behind is None:
            self._save(id, state)
            return
        copy = {name: value.to("cpu", copy=True) for name, value in tensors.items()}
        self._behind.put(lambda: self._save(id, {**state, **copy}))

    def _save(self, id: CheckpointId, state: dict[str, Any]) -> None:
        session = self._attachment.session()
        if id.run in session.volume:
            raise ObjectExists(
                "a file has the name of this checkpoint",
                where=f"headrace://{id.run}",
                next_step="delete it (`headrace volume rm`), or save under another name",
            )
        with VolumeWriter(session.volume, id.run, session=session, no_dist=True, options=self._options) as writer:
            writer.save(state, str(id))

    def load_checkpoint(
        self, path: Any, map_location: Any = None, weights_only: bool | None = None, **unused: Any
    ) -> dict[str, Any]:
        """All of it, verified. All ranks of the job call it together, unless `together` is false."""
        run = _run(path)
        self._settle()
        planner = _Everything()
        alone = not (self._together and dist.is_available() and dist.is_initialized())
        with VolumeReader(self._volume, run) as reader:
            reader.load({}, planner=planner, no_dist=alone)
        packed = planner.found.pop(_REST, None)
        if packed is None:
            raise CheckpointFailed("this checkpoint was not saved by Lightning", where=f"headrace://{run}")
        rest = torch.load(io.BytesIO(packed), map_location=map_location, weights_only=weights_only)
        loaded: dict[str, Any] = put_together(rest, planner.found, map_location)
        return loaded

    def remove_checkpoint(self, path: Any) -> None:
        """In one commit. What somebody has pinned stays."""
        run = _run(path)
        if self._behind is None:
            self._remove(run)
        else:
            self._behind.put(lambda: self._remove(run))

    def _remove(self, run: str) -> None:
        session = self._attachment.session()
        found = find(session.volume, run)
        for id in found.pinned:
            _log.warning("headrace: %s is pinned, and stays", id)
        delete_checkpoints(session, [id for id in found.ids if id not in found.pinned])
        if run in session.volume:
            with session.transaction() as tx:
                tx.delete(run)

    def _settle(self) -> None:
        if self._behind is not None:
            self._behind.settle()

    def teardown(self) -> None:
        """Let others write, when all is committed. The next save begins a session anew."""
        try:
            self._settle()
        finally:
            self._attachment.renew()


class _Behind:
    """What is done behind training, one thing after another, on a thread that ends with them. Behind a failure nothing
    is done until somebody has heard of it."""

    def __init__(self) -> None:
        self._thread: ThreadPoolExecutor | None = None
        self._failure: BaseException | None = None

    def put(self, work: Callable[[], None]) -> None:
        self._thread = self._thread or ThreadPoolExecutor(1, thread_name_prefix="headrace-lightning")
        self._thread.submit(self._do, work)

    def _do(self, work: Callable[[], None]) -> None:
        if self._failure is None:
            try:
                work()
            except BaseException as error:
                self._failure = error

    def settle(self) -> None:
        """When all of it is done; what one of them failed with."""
        thread, self._thread = self._thread, None
        if thread is not None:
            thread.shutdown()
        failure, self._failure = self._failure, None
        if failure is not None:
            raise failure


class VolumeModelCheckpoint(_ModelCheckpoint):  # type: ignore[misc]
    """`ModelCheckpoint` whose `ckpt_path="last"` is found in a volume: Lightning looks on the local disk for what it
    has found behind a URL. UsageError where training begins with a strategy, or `save_last="link"`, that would write
    to the local disk."""

    def setup(self, trainer: Any, *args: Any, **options: Any) -> None:
        save = type(trainer.strategy).save_checkpoint
        if save is not _strategies.Strategy.save_checkpoint:
            raise UsageError(
                "this strategy saves by itself, to the local disk",
                expected="one that saves by a CheckpointIO on rank 0: a single device, DDP",
                found=type(trainer.strategy).__name__,
                next_step="save from a callback by headrace.torch.Checkpointer, which knows sharded models",
            )
        if self.save_last == "link":
            raise UsageError("a volume has no symbolic links", expected="save_last=True", found='save_last="link"')
        super().setup(trainer, *args, **options)

    def _find_last_checkpoints(self, trainer: Any) -> set[str]:
        found = super()._find_last_checkpoints(trainer)
        return {f"headrace://{_URL.sub('', str(path)).lstrip('/')}" for path in found}


class _Everything(DefaultLoadPlanner):
    """Asks for all that a checkpoint has."""

    def __init__(self) -> None:
        super().__init__()
        self.found: dict[str, Any] = {}

    def set_up_planner(
        self, state_dict: dict[str, Any], metadata: Metadata | None = None, is_coordinator: bool = False
    ) -> None:
        assert metadata is not None
        for name, entry in metadata.state_dict_metadata.items():
            self.found[name] = b""
            if isinstance(entry, TensorStorageMetadata):
                self.found[name] = torch.empty(entry.size, dtype=entry.properties.dtype)
        super().set_up_planner(self.found, metadata, is_coordinator)

    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        self.found[read_item.dest_index.fqn] = torch.load(value, weights_only=True)


def _run(path: Any) -> str:
    """The run that a path of Lightning means."""
    text = os.fspath(path)
    url = _URL.match(text)
    if url is None:
        raise UsageError(
            "VolumeCheckpointIO saves into a volume",
            expected='ModelCheckpoint(dirpath="headrace://RUN")',
            found=text,
        )
    if text[url.end() - 2 : url.end()] != "//":
        raise UsageError(
            "this strategy takes addresses for local paths, and does not save by VolumeCheckpointIO",
            found=text,
            next_step="save from a callback by headrace.torch.Checkpointer, which knows sharded models",
        )
    return check_run(text[url.end() :].strip("/"))


def _make_known(addresses: Sequence[str]) -> None:
    """`headrace://` of fsspec means this volume, where it means none yet. UsageError where it means another."""
    from fsspec.config import conf

    known = conf.get("headrace", {}).get("volume") or volume_addresses()
    if known is None:
        conf.setdefault("headrace", {})["volume"] = ",".join(addresses)
        return
    before = list_addresses(known)
    if sorted(before) != sorted(addresses):
        raise UsageError(
            "headrace:// means another volume in this process",
            expected=", ".join(before),
            found=", ".join(addresses),
            next_step=f"see fsspec.config.conf, and {VOLUME}",
        )
