"""`VolumeWriter`: torch.distributed.checkpoint saves into a volume, whole or not at all.

    writer = VolumeWriter("nvme+tcp://...", "pretrain", run_id="job-7")          # on every rank, in the main thread
    future = writer.async_save(state, "pretrain/step-00000100")                  # or dcp.async_save(state, ...)

What one save does, on rank R of W:

    DCP plans (its own exchange, over `writer.process_group`)
    write_data:  lay out the items -> round "grant": byte counts to the coordinator, extents of *this* save back
                 write the items from where they lie, checksum, flush on this rank's association
                 round "receipt": what was written to the coordinator; every rank learns here whether all wrote
    finish:      coordinator: manifest, and one commit record. Until then nothing is visible, to anybody, ever

Extents never travel in the plan: DCP caches plans, and a cached one would write over the save before.

**Everything of a training job in one commit.** A state dict may hold more than tensors; what DCP flattens out of it is
stored beside them:

    state = {"model": model.state_dict(), "optimizer": optimizer.state_dict(), "loader": loader.state_dict(),
             "rng": torch.get_rng_state(), "step": step}

**Which process holds the session.** With `dcp.save` and `dcp.async_save` (thread): the coordinator's, from its first
save until `close()`. With `AsyncCheckpointerType.PROCESS`, DCP pickles the writer to its own process for each save;
there it opens the volume by address, and the coordinator's *checkpoint process* holds the session until it ends. A
volume has one writing session, so the trainer itself must not save (or publish) through another one in the meantime.
"""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import wait
from dataclasses import dataclass, field
from typing import Any

import torch.distributed as dist
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import StorageWriter, WriteResult
from torch.futures import Future

from headrace.checkpoint import CheckpointId, Save, Summary, parse_checkpoint_id
from headrace.checkpoint.names import check_run
from headrace.errors import CheckpointFailed, DeviceError, HeadraceError, SessionLost, UsageError
from headrace.torch.attachment import Attachment, VolumeLike
from headrace.torch.coordination import Exchange, SoloExchange
from headrace.torch.failures import translated
from headrace.torch.metadata import Place, to_manifest
from headrace.torch.options import SaveReport, WriterOptions
from headrace.torch.ranks import (
    decode_grant,
    decode_receipt,
    encode_grant,
    encode_receipt,
    join,
    join_checkpoint_process,
)
from headrace.torch.room import reserve_room
from headrace.torch.staging import LastingStager, StagedPlan, Staging, lay_out
from headrace.volume import Grant, Session, Volume


@dataclass
class _Current:
    """The save under way. One at a time: a second one waits for it."""

    save: Save | None = None
    owner: threading.Thread | None = None
    report: SaveReport | None = None
    failure: HeadraceError | None = None


@dataclass(frozen=True)
class _Written:
    """What became of a rank's grant: its receipt, or why there is none."""

    answer: bytes | Exception
    stage_seconds: float = 0.0
    rewritten_bytes: int = 0
    copied: dict[str, int] = field(default_factory=dict)


class VolumeWriter(StorageWriter):
    """DCP's `StorageWriter` over a volume. Construct it on every rank of the job, in the main thread, collectively.

    Args:
        volume: address of the volume (a URI, several for several members), or an open `Volume` (of this process).
        path: the run, `"pretrain"`, or a whole checkpoint id, `"pretrain/step-100"`; a save of another one is refused.
        run_id: who writes, for the session: a restart under the same id takes over from a dead predecessor by itself.
            Default: the run's name.
        session: an open session of `volume` to use instead of one of the writer's own (coordinator only).
        process_group: the ranks that save together, default all; its rank 0 is the coordinator. No message of a save
            goes over it: `writer.process_group` is a private gloo group of the same ranks.
        no_dist: this process saves alone although torch.distributed is initialised.

    Raises, from its own methods, HeadraceError; `dcp.save` wraps those into `CheckpointException`, which is *not* an
    `Exception`. `writer.save` and `writer.async_save` raise them as they are.
    """

    def __init__(
        self,
        volume: VolumeLike,
        path: str = "run",
        *,
        run_id: str | None = None,
        session: Session | None = None,
        process_group: dist.ProcessGroup | None = None,
        no_dist: bool = False,
        options: WriterOptions | None = None,
    ) -> None:
        super().__init__()
        self.options = options or WriterOptions()
        self.last_save: SaveReport | None = None
        self._run, self._id = _parse_path(path)
        #: The one checkpoint that this writer may save, where it was constructed with more than a run.
        self._only = self._id
        self._attachment = Attachment(
            volume,
            run_id=run_id or self._run,
            takeover=self.options.takeover,
            unfenced=self.options.unfenced,
            session=session,
        )
        self._staging = Staging()
        self._stager: LastingStager | None = None
        self._under_way: ConcurrentFuture[SaveReport] | None = None
        self._current = _Current()
        #: Private gloo group of the saving ranks, for `dcp.save(process_group=...)`. None where there is one process.
        self.process_group: dist.ProcessGroup | None = None
        self._exchange: Exchange | None = SoloExchange()
        if not no_dist and dist.is_available() and dist.is_initialized():
            self.process_group, self._exchange = join(process_group, self.options)

    def reserve(self, state_dict: dict[str, Any]) -> int:
        """Before the first step, on every rank: keep room for what this job will save, states like this one. Bytes of
        one checkpoint; VolumeFull on all ranks where `keep_last` of them and one in the making (without `keep_last`:
        one more) do not fit. The coordinator's session holds the volume from here on, if it did not yet.
        """
        return reserve_room(state_dict, self._attachment, self._run, self.options.retention, self.process_group)

    # ---- one call instead of DCP's, with errors that `except Exception` catches ------------------------------------

    def save(self, state_dict: dict[str, Any], checkpoint_id: str, *, planner: SavePlanner | None = None) -> SaveReport:
        """`dcp.save` over the private group; returns what it did. HeadraceError where it did not happen."""
        self._wait_for_async()
        with translated("save", self._failure):
            try:
                save(state_dict, checkpoint_id=checkpoint_id, storage_writer=self, planner=planner, **self._where())
            finally:
                self._current.owner = None
        assert self.last_save is not None
        return self.last_save

    def async_save(
        self, state_dict: dict[str, Any], checkpoint_id: str, *, planner: SavePlanner | None = None
    ) -> ConcurrentFuture[SaveReport]:
        """`dcp.async_save` in a thread, over the private group. Returns when the state is copied to host memory: the
        parameters may change from then on. The future gives the report, or raises HeadraceError.

        One save at a time: this waits for the one under way first. The copy is kept for the next save (copying into
        memory that is there already takes a fraction of the time), so the writer holds the bytes of the state.
        """
        self._wait_for_async()
        if self._stager is None:
            self._stager = LastingStager()
        with translated("save", self._failure):
            inner = async_save(
                state_dict,
                checkpoint_id=checkpoint_id,
                storage_writer=self,
                planner=planner,
                async_stager=self._stager,
                **self._where(),
            )
        outer: ConcurrentFuture[SaveReport] = ConcurrentFuture()
        outer.set_running_or_notify_cancel()

        def done(finished: ConcurrentFuture[Any]) -> None:
            self._current.owner = None
            try:
                with translated("save", self._failure):
                    finished.result()
            except Exception as error:
                outer.set_exception(error)
            else:
                assert self.last_save is not None
                outer.set_result(self.last_save)

        assert isinstance(inner, ConcurrentFuture)
        self._under_way = outer
        inner.add_done_callback(done)
        return outer

    def _wait_for_async(self) -> None:
        # Two rounds and a commit, each with its own deadline.
        limit_s = 3 * self.options.deadline_s
        if self._under_way is not None and not wait([self._under_way], limit_s).done:
            raise CheckpointFailed(f"the save before this one did not end within {limit_s:.0f} s")
        self._under_way = None

    def _where(self) -> dict[str, Any]:
        return {"process_group": self.process_group, "no_dist": self.process_group is None}

    def _failure(self) -> HeadraceError | None:
        """What this rank knew before a collective broke behind it: told once."""
        failure, self._current.failure = self._current.failure, None
        return failure

    # ---- DCP's interface -------------------------------------------------------------------------------------------

    @property
    def checkpoint_id(self) -> str:
        """The id of the save under way or to come; the run where none was named yet."""
        return self._run if self._id is None else str(self._id)

    def reset(self, checkpoint_id: str | os.PathLike[str] | None = None) -> None:
        self._wait_for_previous()
        if checkpoint_id is not None:
            id = parse_checkpoint_id(os.fspath(checkpoint_id), run=self._run)
            if id.run != self._run or (self._only is not None and id != self._only):
                # Its session, its reservation and `keep_last` are of that run.
                raise UsageError(
                    "a save was named otherwise than its writer",
                    expected=str(self._only) if self._only is not None else f'"{self._run}/step-N"',
                    found=repr(str(id)),
                    next_step="name the run alone to the writer, and each step to its save; a writer for each run",
                )
            self._id = id

    def storage_meta(self) -> StorageMeta | None:
        return StorageMeta(checkpoint_id=self.checkpoint_id)

    def set_up_storage_writer(self, is_coordinator: bool, *args: Any, **kwargs: Any) -> None:
        self._wait_for_previous()
        if self._id is None:
            raise UsageError(
                "no step was named", next_step=f'pass checkpoint_id="{self._run}/step-N" to dcp.save', found=self._run
            )
        if not kwargs.get("use_collectives", True):
            raise UsageError("use_collectives=False is not supported: a checkpoint has one manifest and one commit")
        exchange = self._exchange_of_this_process()
        if is_coordinator != (exchange.rank == 0):
            raise UsageError(
                "DCP and the writer disagree about who coordinates",
                expected=f"rank {exchange.rank} of {exchange.world}",
                found="the coordinator" if is_coordinator else "not the coordinator",
                next_step="pass process_group=writer.process_group to dcp.save",
            )
        self._abandon()
        self._current = _Current(owner=threading.current_thread())

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        # The plans stay as they are. What belongs to this save alone goes its own way, because DCP may cache plans.
        self._exchange_of_this_process().announce()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[list[WriteResult]]:
        try:
            results = self._write(plan, planner)
        except HeadraceError as error:
            self._current.failure = error
            self._renew_after(error)
            raise
        except BaseException:
            self._abandon()
            raise
        future: Future[list[WriteResult]] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[list[WriteResult]]) -> None:
        save, report = self._current.save, self._current.report
        if save is None or report is None:
            raise CheckpointFailed("finish without a write before it")
        try:
            began = time.perf_counter()
            places: dict[MetadataIndex, Place] = {}
            for result in (r for of_rank in results for r in of_rank):
                places[result.index] = result.storage_data
            summary = Summary(
                run=save.id.run,
                step=save.id.step,
                created_unix=save.created_unix,
                ranks=report.ranks,
                item_count=len(places),
                data_bytes=sum(place.length for place in places.values()),
            )
            sequence = save.commit(to_manifest(summary, metadata, places, save.objects))
            self.last_save = SaveReport(
                **{
                    **vars(report),
                    "total_bytes": summary.data_bytes,
                    "commit_seconds": time.perf_counter() - began,
                    "sequence": sequence,
                }
            )
        except HeadraceError as error:
            self._current.failure = error
            self._renew_after(error)
            raise
        finally:
            self._abandon()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            parse_checkpoint_id(os.fspath(checkpoint_id))
        except UsageError:
            return False
        return True

    # ---- one save --------------------------------------------------------------------------------------------------

    def _write(self, plan: SavePlan, planner: SavePlanner) -> list[WriteResult]:
        exchange = self._exchange_of_this_process()
        assert self._id is not None
        with exchange.save():
            staged, mine = self._lay_out(plan, planner)
            began = time.perf_counter()
            grant = decode_grant(exchange.round("grant", mine, self._allocate))
            granted = time.perf_counter()
            # A round that returns had no exception in it, so this rank has a plan.
            assert staged is not None
            done = self._write_grant(grant, staged, planner)
            written = time.perf_counter()
            exchange.round("receipt", done.answer, self._accept, self._heard)
            ended = time.perf_counter()
        self._current.report = self.last_save = SaveReport(
            checkpoint_id=str(self._id),
            rank=exchange.rank,
            ranks=exchange.world,
            data_bytes=staged.data_bytes,
            object_bytes=staged.total_bytes,
            rewritten_bytes=done.rewritten_bytes,
            copied=done.copied,
            grant_seconds=granted - began,
            stage_seconds=done.stage_seconds,
            write_seconds=written - granted - done.stage_seconds,
            wait_seconds=ended - written,
        )
        name = self._id.data(exchange.rank)
        return [
            WriteResult(index=item.index, size_in_bytes=length, storage_data=Place(name, offset, length))
            for item, offset, length in zip(staged.items, staged.offsets, staged.lengths, strict=True)
        ]

    def _lay_out(self, plan: SavePlan, planner: SavePlanner) -> tuple[StagedPlan | None, bytes | Exception]:
        # An error of this rank must reach the others through the round: they wait for its byte count.
        try:
            self._attachment.open(writable=True)
            staged = lay_out(plan, planner)
        except Exception as error:
            return None, error
        return staged, json.dumps(staged.total_bytes).encode()

    def _write_grant(self, grant: Grant | None, staged: StagedPlan, planner: SavePlanner) -> _Written:
        if grant is None:
            return _Written(encode_receipt(None))
        stage_seconds = 0.0
        try:
            volume = self._attachment.open(writable=True)
            began = time.perf_counter()
            gathered = self._staging.gather(staged, planner)
            stage_seconds = time.perf_counter() - began
            losses = _losses(volume)
            receipt = volume.write_grant(grant, gathered.parts)
            rewritten = staged.total_bytes if _losses(volume) != losses else 0
        except Exception as error:
            return _Written(error, stage_seconds)
        return _Written(encode_receipt(receipt), stage_seconds, rewritten, gathered.copied)

    def _allocate(self, messages: list[bytes]) -> list[bytes]:
        """Coordinator: byte counts of all ranks to grants."""
        assert self._id is not None
        lengths = [json.loads(message) for message in messages]
        if not all(isinstance(length, int) and length >= 0 for length in lengths):
            raise CheckpointFailed("a rank asked for an impossible number of bytes", found=str(lengths)[:80])
        self._current.save = Save(
            self._attachment.session(), self._id, overwrite=self.options.overwrite, retention=self.options.retention
        )
        return [encode_grant(grant) for grant in self._current.save.allocate(lengths)]

    def _accept(self, messages: list[bytes]) -> list[bytes]:
        """Coordinator: what the ranks wrote."""
        assert self._current.save is not None
        self._current.save.accept([decode_receipt(message) for message in messages])
        return [b""] * len(messages)

    def _heard(self, messages: list[bytes]) -> None:
        """Coordinator: the save is given up, but these ranks have written, and their space need not wait for them."""
        if self._current.save is not None:
            self._current.save.settle([decode_receipt(message) for message in messages])

    def _renew_after(self, error: HeadraceError) -> None:
        self._abandon()
        if isinstance(error, DeviceError | SessionLost):
            self._attachment.renew()

    def _abandon(self) -> None:
        save, self._current.save = self._current.save, None
        if save is not None:
            save.abort()

    def _wait_for_previous(self) -> None:
        """A save that is under way in another thread is waited for: both use one group and one staging buffer.

        DCP still talks over the group when our last method has returned, so a save ends with its thread (DCP makes one
        for each `async_save`), or where `save` and `async_save` above say so.
        """
        end = time.monotonic() + self.options.deadline_s
        owner = self._current.owner
        if owner is None or owner is threading.current_thread() or owner is threading.main_thread():
            return
        while owner.is_alive() and self._current.owner is owner:
            if time.monotonic() > end:
                raise CheckpointFailed("the save before this one is still under way", where=owner.name)
            owner.join(0.02)

    def _exchange_of_this_process(self) -> Exchange:
        if self._exchange is None:
            # Unpickled in DCP's checkpoint process, whose one process group is for saving only.
            self._exchange = join_checkpoint_process(self.options)
        return self._exchange

    # ---- life ------------------------------------------------------------------------------------------------------

    def open(self) -> VolumeWriter:
        """Open the volume now instead of at the first save, so that a wrong address shows at once."""
        self._attachment.open(writable=True)
        return self

    def close(self) -> None:
        """End the session and close the volume, where they are the writer's own; wait for a save under way first."""
        self._wait_for_async()
        self._wait_for_previous()
        self._abandon()
        self._staging.release()
        if self._stager is not None:
            self._stager.release()
            self._stager = None
        self._attachment.close()
        if self.process_group is not None:
            if dist.is_initialized():
                dist.destroy_process_group(self.process_group)
            self.process_group = None

    def __enter__(self) -> VolumeWriter:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def __getstate__(self) -> dict[str, Any]:
        return {
            "attachment": self._attachment,
            "run": self._run,
            "id": self._id,
            "only": self._only,
            "options": self.options,
            "solo": isinstance(self._exchange, SoloExchange),
        }

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.options = state["options"]
        self.last_save = None
        self._run, self._id, self._only = state["run"], state["id"], state["only"]
        self._attachment = state["attachment"]
        self._staging = Staging()
        self._stager = None
        self._under_way = None
        self._current = _Current()
        self.process_group = None
        self._exchange = SoloExchange() if state["solo"] else None


def _parse_path(path: str) -> tuple[str, CheckpointId | None]:
    try:
        id = parse_checkpoint_id(path)
    except UsageError:
        return check_run(path.removesuffix("/")), None
    return id.run, id


def _losses(volume: Volume) -> int:
    """Associations that the members lost so far; where that moves during a write, the write was repeated."""
    return sum(device.loss_count() for device in volume.devices)


__all__: Sequence[str] = ["SaveReport", "VolumeWriter", "WriterOptions"]
