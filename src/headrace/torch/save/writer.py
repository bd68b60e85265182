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

import contextlib
import os
import threading
import time
from collections.abc import Sequence
from concurrent.futures import Future as ConcurrentFuture
from concurrent.futures import wait
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed.checkpoint.api import CheckpointException
from torch.distributed.checkpoint.default_planner import DefaultSavePlanner
from torch.distributed.checkpoint.metadata import Metadata, StorageMeta
from torch.distributed.checkpoint.planner import SavePlan, SavePlanner
from torch.distributed.checkpoint.state_dict_saver import async_save, save
from torch.distributed.checkpoint.storage import StorageWriter
from torch.futures import Future

from headrace.checkpoint import parse_checkpoint_id
from headrace.checkpoint.names import parse_path
from headrace.device.waiting import troubled_paths
from headrace.errors import CheckpointBusy, CheckpointFailed, DeviceError, HeadraceError, SessionLost, UsageError
from headrace.torch.ranks.attachment import Attachment, VolumeLike
from headrace.torch.ranks.coordination import Exchange, SoloExchange
from headrace.torch.ranks.failures import translated
from headrace.torch.ranks.groups import leave
from headrace.torch.save.group import (
    Turns,
    join,
    join_checkpoint_process,
)
from headrace.torch.save.kept import refuse_left_out
from headrace.torch.save.one_save import OneSave
from headrace.torch.save.options import SaveReport, WriterOptions
from headrace.torch.save.pacing import Awaited
from headrace.torch.save.planning import Planned, Plans, plain
from headrace.torch.save.room import reserve_room
from headrace.torch.save.skeleton import Survey
from headrace.torch.save.stager import MemoryNeed, Stager
from headrace.torch.save.staging import Staging
from headrace.volume import Session
from headrace.volume.writing.parts import PEAK_BYTES


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
        self._run, self._id = parse_path(path)
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
        self._plans = Plans()
        self._stager: Stager | None = None
        self._under_way: ConcurrentFuture[SaveReport] | None = None
        self._current = OneSave()
        #: The ranks plan each for itself (`use_collectives=False`), and each of them comes to `finish`.
        self._apart = False
        #: Private gloo group of the saving ranks, for `dcp.save(process_group=...)`. None where there is one process.
        self.process_group: dist.ProcessGroup | None = None
        self._exchange: Exchange | None = SoloExchange()
        self._turns = Turns()
        if not no_dist and dist.is_available() and dist.is_initialized():
            self.process_group, self._exchange, self._turns = join(process_group, self.options)

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
                planned = Planned(state_dict, planner, self._plans)
                save({}, checkpoint_id=checkpoint_id, storage_writer=self, planner=planned, **self._where())
            finally:
                self._current.owner = None
        assert self.last_save is not None
        return self.last_save

    def async_save(
        self,
        state_dict: dict[str, Any],
        checkpoint_id: str,
        *,
        planner: SavePlanner | None = None,
        next_s: float | None = None,
    ) -> ConcurrentFuture[SaveReport]:
        """`dcp.async_save` in a thread, over the private group. Returns when the state is copied to host memory: the
        parameters may change from then on. Copies from an accelerator are only begun then: call `wait_for_staging`
        before the parameters change. The future gives the report, or raises HeadraceError. `next_s`: in so many seconds
        the next save is due, and this one is committed, however it gives way to reads; None: nobody knows.

        One save at a time: `WriterOptions.when_busy` says what becomes of one that comes while another is under way.
        The copy is kept for the next save (copying into memory that is there already takes a fraction of the time), so
        the writer holds the bytes of the state: `memory` says how many.
        """
        if self.options.when_busy != "wait" and self._turns.decide(self._busy()):
            if self.options.when_busy == "raise":
                raise CheckpointBusy(
                    "the save before this one is under way",
                    where=checkpoint_id,
                    next_step='wait for its future, or set WriterOptions(when_busy="wait") or "skip"',
                )
            return self._skipped(checkpoint_id)
        self._wait_for_async()
        self.stager.next_s = next_s
        with translated("save", self._failure):
            try:
                response = async_save(
                    state_dict,
                    checkpoint_id=checkpoint_id,
                    storage_writer=self,
                    planner=Planned(None, planner, self._plans),
                    async_stager=self.stager,
                    **self._where(),
                )
            except Exception as error:
                self._fail_together(checkpoint_id, error)
                raise
        # Where the copy is not made yet there are two futures.
        inner = getattr(response, "upload_completion", response)
        copy = self.stager.copy
        outer: ConcurrentFuture[SaveReport] = Awaited(self.hurry)
        outer.set_running_or_notify_cancel()

        def done(finished: ConcurrentFuture[Any]) -> None:
            self._current.owner = None
            if copy is not None:
                copy.released.set()
            try:
                with translated("save", self._failure):
                    finished.result()
                assert self.last_save is not None
            except BaseException as error:
                # Whatever ended the thread of the save: who holds the future must not wait for ever.
                outer.set_exception(error)
            else:
                outer.set_result(self.last_save)

        assert isinstance(inner, ConcurrentFuture)
        self._under_way = outer
        inner.add_done_callback(done)
        return outer

    def _fail_together(self, checkpoint_id: str, error: Exception) -> None:
        """This rank could not copy its state. The others plan this save already: they would wait for this rank, and
        meet it in its next one. So it comes, with its reason."""
        if self.process_group is None:
            return
        told = CheckpointFailed(
            f"rank {dist.get_rank(self.process_group)} could not copy its state",
            found=f"{type(error).__name__}: {error}",
        )
        # What it failed with is told by who calls; that the others heard of it comes as an error, too.
        with contextlib.suppress(Exception, CheckpointException):
            save({}, checkpoint_id=checkpoint_id, storage_writer=self, planner=_Failed(told), **self._where())

    def wait_for_staging(self) -> None:
        """Until the state of the last `async_save` is copied: before the optimizer's step. At once where all of it was
        in host memory."""
        if self._stager is not None:
            self._stager.synchronize_staging()

    @property
    def stager(self) -> Stager:
        """Makes the copy that an asynchronous save is written from: `dcp.async_save(..., async_stager=writer.stager)`.

        One of its own for each writer. It waits for the save before, whatever `when_busy` says.
        """
        if self._stager is None:
            self._stager = Stager(
                limit_s=3 * self.options.deadline_s, shared=self.options.shared_copy, seal=self.options.integrity
            )
        return self._stager

    def memory(self, state_dict: dict[str, Any]) -> MemoryNeed:
        """What saving this state will take on this rank's host, besides the state itself. Nothing is taken yet."""
        survey = Survey(plain(state_dict))
        return MemoryNeed(
            state_bytes=survey.state_bytes,
            copy_bytes=survey.total_bytes,
            writing_bytes=min(PEAK_BYTES, survey.total_bytes),
            pinned=torch.cuda.is_available(),
        )

    def prepare(self, state_dict: dict[str, Any]) -> MemoryNeed:
        """Before training: take the memory of the copy, so that the first asynchronous save is as fast as the others,
        and open the volume. What it took and will take."""
        need = self.memory(state_dict)
        self._attachment.open(writable=True)
        self.stager.prepare(plain(state_dict))
        return need

    def describe(self) -> dict[str, Any]:
        """Of now; any thread may ask. `pacing`: how the save under way gives way to reads (`Pacer.describe`), None
        where none does; `copy`: what asynchronous saves are copied to (`Stager.describe`)."""
        pacer = self._current.pacer
        return {
            "pacing": None if pacer is None else pacer.describe(),
            "copy": {"bytes": 0} if self._stager is None else self._stager.describe(),
        }

    def _busy(self) -> bool:
        return self._under_way is not None and not self._under_way.done()

    def _skipped(self, checkpoint_id: str) -> ConcurrentFuture[SaveReport]:
        exchange = self._exchange_of_this_process()
        future: ConcurrentFuture[SaveReport] = ConcurrentFuture()
        future.set_result(
            SaveReport(
                checkpoint_id=str(parse_checkpoint_id(checkpoint_id, run=self._run)),
                rank=exchange.rank,
                ranks=exchange.world,
                data_bytes=0,
                object_bytes=0,
                rewritten_bytes=0,
                grant_seconds=0.0,
                stage_seconds=0.0,
                write_seconds=0.0,
                wait_seconds=0.0,
                skipped=True,
            )
        )
        return future

    def hurry(self) -> None:
        """Somebody waits for the save under way: this rank's part of it gives way to nobody any more. Said by itself
        where the future of `async_save` is waited for, by the next save and by `close`; who waits for a future of
        `dcp.async_save` says so here, as that one cannot. Any thread may; nothing where no save is under way."""
        copy = None if self._stager is None else self._stager.copy
        if copy is not None:
            copy.hurry.set()

    def _wait_for_async(self) -> None:
        # Two rounds and a commit, each with its own deadline.
        limit_s = 3 * self.options.deadline_s
        self.hurry()
        if self._under_way is not None and not wait([self._under_way], limit_s).done:
            raise CheckpointFailed(
                f"the save before this one did not end within {limit_s:.0f} s", found=self.held_up_by()
            )
        self._under_way = None

    def held_up_by(self) -> str:
        """What this rank does of the save under way, for how long, and which paths to the volume are in trouble."""
        paths = [path for device in self._attachment.devices for path in troubled_paths(device)]
        return "; ".join([f"{self.checkpoint_id}: {self._current.doing}", *paths])

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
        if self._stager is not None and self._stager.copy is not None:
            self._stager.copy.taken()
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
        self._apart = not kwargs.get("use_collectives", True)
        exchange = self._exchange_of_this_process()
        if is_coordinator != (exchange.rank == 0):
            raise UsageError(
                "DCP and the writer disagree about who coordinates",
                expected=f"rank {exchange.rank} of {exchange.world}",
                found="the coordinator" if is_coordinator else "not the coordinator",
                next_step="pass process_group=writer.process_group to dcp.save",
            )
        self._current.abandon()
        self._current = OneSave(threading.current_thread())

    def prepare_local_plan(self, plan: SavePlan) -> SavePlan:
        self._plans.part.went(plan)
        return plan

    def prepare_global_plan(self, plans: list[SavePlan]) -> list[SavePlan]:
        refuse_left_out(plans)
        # The plans stay as they are. What belongs to this save alone goes its own way, because DCP may cache plans.
        if not self._apart:
            self._exchange_of_this_process().announce()
        return plans

    def write_data(self, plan: SavePlan, planner: SavePlanner) -> Future[Any]:
        exchange = self._exchange_of_this_process()
        assert self._id is not None
        try:
            results = self._current.write(
                plan,
                planner,
                id=self._id,
                options=self.options,
                exchange=exchange,
                attachment=self._attachment,
                staging=self._staging,
                stager=self._stager,
                apart=self._apart,
            )
        except HeadraceError as error:
            self._gave_up(error)
            raise
        except BaseException:
            self._current.abandon()
            raise
        self.last_save = self._current.report
        future: Future[Any] = Future()
        future.set_result(results)
        return future

    def finish(self, metadata: Metadata, results: list[Any]) -> None:
        try:
            if self._apart:
                self.last_save = self._current.commit_apart(metadata, results, self._exchange_of_this_process())
            else:
                self.last_save = self._current.commit(metadata, results, self._plans.whole)
        except HeadraceError as error:
            self._gave_up(error)
            raise
        finally:
            self._current.abandon()

    @classmethod
    def validate_checkpoint_id(cls, checkpoint_id: str | os.PathLike[str]) -> bool:
        try:
            parse_checkpoint_id(os.fspath(checkpoint_id))
        except UsageError:
            return False
        return True

    # ---- whose turn it is ------------------------------------------------------------------------------------------

    def _gave_up(self, error: HeadraceError) -> None:
        self._current.failure = error
        self._current.abandon()
        if isinstance(error, DeviceError | SessionLost):
            self._attachment.renew()

    def _wait_for_previous(self) -> None:
        """A save that is under way in another thread is waited for: both use one group and one staging buffer.

        DCP still talks over the group when our last method has returned, so a save ends with its thread (DCP makes one
        for each `async_save`), or where `save` and `async_save` above say so.
        """
        end = time.monotonic() + self.options.deadline_s
        owner = self._current.owner
        if owner is None or owner is threading.current_thread() or owner is threading.main_thread():
            return
        self.hurry()
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

    def session(self) -> Session:
        """The one that this writer saves with; begun now if it was not yet. The coordinator's alone."""
        return self._attachment.session()

    def open(self) -> VolumeWriter:
        """Open the volume now instead of at the first save, so that a wrong address shows at once."""
        self._attachment.open(writable=True)
        return self

    def close(self) -> None:
        """End the session and close the volume, where they are the writer's own; wait for a save under way first."""
        self._wait_for_async()
        self._wait_for_previous()
        self._current.abandon()
        self._staging.release()
        if self._stager is not None:
            self._stager.release()
            self._stager = None
        self._attachment.close()
        self._turns.close()
        group, self.process_group = self.process_group, None
        leave(group)

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
        self._plans = Plans()
        self._stager = None
        self._under_way = None
        self._current = OneSave()
        self._apart = False
        self.process_group = None
        self._turns = Turns()
        self._exchange = SoloExchange() if state["solo"] else None


class _Failed(DefaultSavePlanner):
    """The plan of a rank that has none."""

    def __init__(self, error: HeadraceError) -> None:
        super().__init__()
        self._error = error

    def set_up_planner(
        self, state_dict: dict[str, Any], storage_meta: StorageMeta | None = None, is_coordinator: bool = False
    ) -> None:
        raise self._error


__all__: Sequence[str] = ["SaveReport", "VolumeWriter", "WriterOptions"]
