"""`VolumeReader`: torch.distributed.checkpoint loads from a volume, every byte verified, straight into the tensors.

    dcp.load(state, storage_reader=VolumeReader("nvme+tcp://...", "pretrain/step-00000100"))

A saved chunk is row-major bytes, so what a rank wants of it is byte ranges. Where the destination is contiguous host
memory of the same dtype, ranges are read into it directly; otherwise (accelerator memory, other dtype, a column slice)
through a bounce buffer. All ranges of one object go to the engine in one call.
"""

from __future__ import annotations

import contextlib
import io
import math
import os
import time
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from torch.distributed.checkpoint.metadata import (
    ChunkStorageMetadata,
    Metadata,
    MetadataIndex,
    StorageMeta,
    TensorStorageMetadata,
)
from torch.distributed.checkpoint.planner import LoadItemType, LoadPlan, LoadPlanner, ReadItem
from torch.distributed.checkpoint.state_dict_loader import load
from torch.distributed.checkpoint.storage import StorageReader
from torch.futures import Future

from headrace.checkpoint import CheckpointId, latest, parse_checkpoint_id, read_manifest
from headrace.checkpoint.layout import box_runs
from headrace.errors import CheckpointFailed, ChecksumMismatch, HeadraceError, ObjectNotFound, UsageError
from headrace.torch.attachment import Attachment, VolumeLike
from headrace.torch.failures import translated
from headrace.torch.metadata import Place, from_manifest
from headrace.torch.staging import as_bytes
from headrace.torch.writer import _parse_path
from headrace.units import MIB
from headrace.volume import ObjectInfo, VolumeTransfer

#: Runs shorter than a checksum block would each read a whole one; below this the rows that cover them are read at once.
SHORTEST_RUN = 65536
#: Bytes of bounce buffers under way at a time; the next lot is read while this one is copied to its destination.
BOUNCE_BYTES = 256 * MIB


@dataclass(frozen=True, kw_only=True)
class _Wanted:
    """One read item, resolved: byte ranges of an object into one buffer, and what to do when they are there."""

    item: ReadItem
    object: str
    #: uint64[n] each: bytes in the object, bytes of the range, bytes in `buffer`.
    offsets: np.ndarray[Any, np.dtype[np.uint64]]
    lengths: np.ndarray[Any, np.dtype[np.uint64]]
    at: np.ndarray[Any, np.dtype[np.uint64]]
    buffer: memoryview
    #: Where the tensor is to be in the end; None for bytes.
    target: torch.Tensor | None
    #: What was read as a tensor of the wanted box, where it must be copied to `target`.
    bounce: torch.Tensor | None


@dataclass(frozen=True, kw_only=True)
class LoadReport:
    """What one load did, as this rank saw it."""

    checkpoint_id: str
    step: int
    #: Bytes of items that this rank wanted, and bytes that it asked the volume for (rows around columns count).
    wanted_bytes: int
    read_bytes: int
    #: Wall clock, planning and exchange of the ranks included.
    seconds: float


class VolumeReader(StorageReader):
    """DCP's `StorageReader` over a volume.

    Args:
        volume: address of the volume (a URI, several of them for several members), or an open `Volume`.
        path: a checkpoint id, `"pretrain/step-100"`, or a run, `"pretrain"`: its latest committed step at that time.
        timeout_s: the longest that one lot of reads may take.

    Raises HeadraceError: ObjectNotFound for a step that was never committed, ChecksumMismatch with the name of the
    damaged tensor. `dcp.load` wraps those into `CheckpointException`, which is *not* an `Exception`.
    """

    def __init__(self, volume: VolumeLike, path: str = "run", *, timeout_s: float = 600.0) -> None:
        super().__init__()
        if not timeout_s > 0:
            raise UsageError("timeout_s", expected="above 0", found=str(timeout_s))
        self._attachment = Attachment(volume)
        self._run, self._id = _parse_path(path)
        self._timeout_s = timeout_s
        self._metadata: Metadata | None = None
        self._places: dict[MetadataIndex, Place] = {}
        self._loaded: CheckpointId | None = None
        self._objects: dict[str, ObjectInfo] = {}
        #: The commit that this rank read; must be the same on all ranks of a load.
        self._seen = ""
        self._failure: HeadraceError | None = None
        #: Bytes of items that the last load wanted, and bytes that it asked the volume for.
        self.wanted_bytes = 0
        self.read_bytes = 0

    def load(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str | None = None,
        *,
        planner: LoadPlanner | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
    ) -> LoadReport:
        """`dcp.load` with errors that `except Exception` catches: HeadraceError in its own kind. `state_dict` is filled
        in place. `no_dist`: this process loads alone although torch.distributed is initialised."""
        began = time.perf_counter()
        with translated("load", lambda: self._failure, lambda: str(self._loaded) if self._loaded else None):
            load(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_reader=self,
                planner=planner,
                process_group=process_group,
                no_dist=no_dist or not (dist.is_available() and dist.is_initialized()),
            )
        assert self._loaded is not None
        return LoadReport(
            checkpoint_id=str(self._loaded),
            step=self._loaded.step,
            wanted_bytes=self.wanted_bytes,
            read_bytes=self.read_bytes,
            seconds=time.perf_counter() - began,
        )

    @property
    def checkpoint_id(self) -> str:
        return self._run if self._id is None else str(self._id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._metadata, self._places = None, {}
        if checkpoint_id:
            self._run, self._id = _parse_path(os.fspath(checkpoint_id))

    # Not `**kwargs`: DCP looks for that very name, and would come again for metadata of one rank, which we never have.
    def read_metadata(self, *args: Any, **unused: Any) -> Metadata:
        self._failure = None
        try:
            volume = self._attachment.open()
            id = self._id if self._id is not None else self._latest()
            manifest = read_manifest(volume, id)
            metadata = from_manifest(manifest)
            # These very objects, not what may have their names by the time they are read.
            self._objects = {item.name: volume.stat(item.name) for item in manifest.objects}
            self._seen = f"{id} of commit {volume.stat(id.manifest).sequence}"
        except HeadraceError as error:
            # DCP turns it into an AssertionError.
            self._failure = error
            raise
        self._loaded = id
        self.wanted_bytes = self.read_bytes = 0
        metadata.storage_meta = StorageMeta(checkpoint_id=str(id))
        return metadata

    def _latest(self) -> CheckpointId:
        found = latest(self._attachment.open(), self._run)
        if found is None:
            raise ObjectNotFound(
                f"there is no committed checkpoint of run {self._run!r}",
                next_step="`headrace volume ls` lists what is there, as RUN/step-N/manifest",
            )
        return found.id

    def set_up_storage_reader(self, metadata: Metadata, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._metadata = metadata
        self._places = metadata.storage_data

    def prepare_local_plan(self, plan: LoadPlan) -> LoadPlan:
        return replace(plan, storage_data=self._seen)

    def prepare_global_plan(self, plans: list[LoadPlan]) -> list[LoadPlan]:
        # Every rank looks by itself, and a commit between two looks would give some of them another state.
        seen = sorted({str(plan.storage_data) for plan in plans})
        if len(seen) > 1:
            raise CheckpointFailed(
                "the ranks found different checkpoints: one was committed while they looked",
                where=f"run {self._run!r}",
                expected="one",
                found=", ".join(seen),
                next_step="let one rank find the step, and name it to all: RUN/step-N",
            )
        return plans

    def read_data(self, plan: LoadPlan, planner: LoadPlanner) -> Future[None]:
        before: list[tuple[_Wanted, VolumeTransfer]] = []
        under_way: list[tuple[_Wanted, VolumeTransfer]] = []
        # By place, so that neighbours on the media are neighbours in the batch.
        items = sorted(plan.items, key=lambda item: (self._place(item).object, self._place(item).offset))
        try:
            for lot in _lots(self._resolve(item, planner) for item in items):
                under_way = self._submit(lot)
                self._finish(before, planner)
                before, under_way = under_way, []
            self._finish(before, planner)
        except BaseException:
            # The caller gets its tensors back with the error: nothing may still be read into them.
            self._settle(transfer for _, transfer in [*before, *under_way])
            raise
        future: Future[None] = Future()
        future.set_result(None)
        return future

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            parse_checkpoint_id(os.fspath(checkpoint_id))
        except UsageError:
            return False
        return True

    def close(self) -> None:
        """Close the volume, where it is the reader's own."""
        self._attachment.close()

    def __enter__(self) -> VolumeReader:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    # ---- one load --------------------------------------------------------------------------------------------------

    def _place(self, item: ReadItem) -> Place:
        place = self._places.get(item.storage_index)
        if place is None:
            raise CheckpointFailed(f"the plan wants a chunk of {item.storage_index.fqn!r} that was never saved")
        return place

    def _resolve(self, item: ReadItem, planner: LoadPlanner) -> _Wanted:
        place = self._place(item)
        if item.type == LoadItemType.BYTE_IO:
            data = bytearray(place.length)
            self.wanted_bytes += place.length
            return _wanted(item, place, [place.offset], [place.length], [0], memoryview(data))
        assert self._metadata is not None
        entry = self._metadata.state_dict_metadata[item.storage_index.fqn]
        if not isinstance(entry, TensorStorageMetadata):
            raise CheckpointFailed(f"{item.storage_index.fqn!r} is bytes in the checkpoint, not a tensor")
        dtype, chunk = entry.properties.dtype, _chunk(entry, item.storage_index)
        target = planner.resolve_tensor(item).detach()
        if target.shape != item.lengths:
            raise CheckpointFailed(
                f"the destination of {item.dest_index.fqn!r}",
                expected=str(list(item.lengths)),
                found=str(list(target.shape)),
            )
        runs = box_runs(chunk.sizes, item.storage_offsets, item.lengths, dtype.itemsize)
        self.wanted_bytes += runs.total
        direct = target.device.type == "cpu" and target.dtype == dtype and target.is_contiguous()
        if len(runs.offsets) <= 1 or runs.length >= SHORTEST_RUN:
            buffer = target if direct else torch.empty(item.lengths, dtype=dtype)
            starts = runs.offsets + np.uint64(place.offset)
            at = np.arange(len(starts), dtype=np.uint64) * np.uint64(runs.length)
            lengths = np.full(len(starts), runs.length, np.uint64)
            return _wanted(item, place, starts, lengths, at, as_bytes(buffer), target, None if direct else buffer)
        # Many short runs: the rows of the chunk that hold them, whole, then the columns by a view.
        rows = torch.empty([item.lengths[0], *chunk.sizes[1:]], dtype=dtype)
        row_bytes = math.prod(chunk.sizes[1:]) * dtype.itemsize
        view = rows
        for dimension in range(1, rows.dim()):
            view = view.narrow(dimension, item.storage_offsets[dimension], item.lengths[dimension])
        start = place.offset + item.storage_offsets[0] * row_bytes
        return _wanted(item, place, [start], [item.lengths[0] * row_bytes], [0], as_bytes(rows), target, view)

    def _submit(self, lot: list[_Wanted]) -> list[tuple[_Wanted, VolumeTransfer]]:
        volume = self._attachment.open()
        by_object: dict[str, list[_Wanted]] = {}
        for wanted in lot:
            if len(wanted.offsets):
                by_object.setdefault(wanted.object, []).append(wanted)
        transfers: dict[str, VolumeTransfer] = {}
        try:
            for name, of_object in by_object.items():
                lengths = np.concatenate([w.lengths for w in of_object])
                self.read_bytes += int(lengths.sum())
                transfers[name] = volume.submit_read(
                    self._objects[name],
                    np.concatenate([w.offsets for w in of_object]),
                    lengths,
                    [w.buffer for w in of_object],
                    np.concatenate([w.at for w in of_object]),
                    np.repeat(np.arange(len(of_object), dtype=np.uint32), [len(w.offsets) for w in of_object]),
                )
        except BaseException:
            self._settle(transfers.values())
            raise
        # A range of nothing belongs to no transfer.
        return [(w, transfers[w.object] if len(w.offsets) else _NOTHING) for w in lot]

    def _settle(self, transfers: Iterable[VolumeTransfer]) -> None:
        """Wait until no read is under way, whatever became of it: the error that brought us here is the one to tell."""
        for transfer in transfers:
            with contextlib.suppress(HeadraceError):
                transfer.wait(self._timeout_s)

    def _finish(self, under_way: list[tuple[_Wanted, VolumeTransfer]], planner: LoadPlanner) -> None:
        waited: set[int] = set()
        for _, transfer in under_way:
            if id(transfer) in waited:
                continue
            waited.add(id(transfer))
            try:
                transfer.wait(self._timeout_s)
            except ChecksumMismatch as error:
                raise self._name_the_damage([w for w, t in under_way if t is transfer], error) from error
        for wanted, _ in under_way:
            if wanted.target is None:
                planner.load_bytes(wanted.item, io.BytesIO(wanted.buffer))
                continue
            if wanted.bounce is not None:
                wanted.target.copy_(wanted.bounce)
            planner.commit_tensor(wanted.item, wanted.target)

    def _name_the_damage(self, suspects: list[_Wanted], error: ChecksumMismatch) -> ChecksumMismatch:
        """The batch says which object and where; people think in tensors. So read one by one and see which fails."""
        volume = self._attachment.open()
        for wanted in suspects:
            one = volume.submit_read(
                self._objects[wanted.object],
                wanted.offsets,
                wanted.lengths,
                [wanted.buffer],
                wanted.at,
                np.zeros(len(wanted.at), np.uint32),
            )
            try:
                one.wait(self._timeout_s)
            except ChecksumMismatch as again:
                kind = "item" if wanted.target is None else "tensor"
                return ChecksumMismatch(
                    f"{kind} {wanted.item.storage_index.fqn!r} of a checkpoint is damaged: {again.what}",
                    where=again.where or wanted.object,
                    expected=again.expected,
                    found=again.found,
                    next_step="load the checkpoint before it",
                )
        # The second reading was good: the damage was on the way, not at rest.
        return ChecksumMismatch(
            f"bytes of a checkpoint were damaged on the way, a second reading was good: {error.what}",
            where=error.where,
            next_step="try again; if it stays, look at the network and enable digests (hdgst=1, ddgst=1)",
        )


class _Nothing:
    def wait(self, timeout_s: float | None = None) -> None:
        return None


_NOTHING: Any = _Nothing()


def _wanted(
    item: ReadItem,
    place: Place,
    offsets: Any,
    lengths: Any,
    at: Any,
    buffer: memoryview,
    target: torch.Tensor | None = None,
    bounce: torch.Tensor | None = None,
) -> _Wanted:
    columns = [np.asarray(column, np.uint64) for column in (offsets, lengths, at)]
    keep = columns[1] > 0
    offsets, lengths, at = (column[keep] for column in columns)
    return _Wanted(
        item=item,
        object=place.object,
        offsets=offsets,
        lengths=lengths,
        at=at,
        buffer=buffer,
        target=target,
        bounce=bounce,
    )


def _chunk(entry: TensorStorageMetadata, index: MetadataIndex) -> ChunkStorageMetadata:
    # The hint is right in every plan that DCP makes from our metadata.
    if index.index is not None and index.index < len(entry.chunks):
        hinted = entry.chunks[index.index]
        if hinted.offsets == index.offset:
            return hinted
    for chunk in entry.chunks:
        if chunk.offsets == index.offset:
            return chunk
    raise CheckpointFailed(f"the plan wants a chunk of {index.fqn!r} that was never saved")


def _lots(wanted: Iterable[_Wanted]) -> Iterable[list[_Wanted]]:
    """Lots whose bounce buffers stay within half of BOUNCE_BYTES (two lots are under way), or hold one item."""
    lot: list[_Wanted] = []
    bounced = 0
    for one in wanted:
        size = one.buffer.nbytes if one.bounce is not None or one.target is None else 0
        if lot and bounced + size > BOUNCE_BYTES // 2:
            yield lot
            lot, bounced = [], 0
        lot.append(one)
        bounced += size
    if lot:
        yield lot
