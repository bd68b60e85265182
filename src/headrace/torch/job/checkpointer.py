"""`Checkpointer`: checkpoints of a plain training loop, in four lines.

    with Checkpointer(uris, "pretrain", interval=500, preemption=Preemption()) as checkpointer:
        done = checkpointer.restore("latest", model, optimizer, loader) or 0
        for step, batch in enumerate(loader, done + 1):
            ...                                      # forward, backward, optimizer.step()
            if checkpointer.step(step):              # saves where a save is due; true: told to stop, and saved
                break

Model, optimizer, position in the data, random number generators of every rank and extras are one commit. All methods
are called by all ranks, in the same order, in the main thread. Under it are `VolumeWriter` and `VolumeReader`; what the
parts are is in `training_state`, how a restore goes in `restoring`.
"""

from __future__ import annotations

import contextlib
import logging
import math
import os
import sys
import time
from collections.abc import Mapping
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import replace
from types import TracebackType
from typing import TYPE_CHECKING, Any, Literal

import torch
import torch.distributed as dist

from headrace.checkpoint import CheckpointId
from headrace.checkpoint.order import find
from headrace.checkpoint.retention import pin_alone, unpin_above
from headrace.errors import CheckpointFailed, HeadraceError, UsageError
from headrace.torch.job.certificate import RestartCertificate
from headrace.torch.job.preemption import Preemption, SignalWatch
from headrace.torch.job.restoring import OnDamage, restore
from headrace.torch.job.saving import Cost, Costs, Every, SaveUnderWay, Schedule, say_what_became
from headrace.torch.job.training_state import Optimizers, Parts, collect
from headrace.torch.ranks.agreement import Ranks
from headrace.torch.ranks.attachment import Attachment, VolumeLike
from headrace.torch.save.writer import SaveReport, VolumeWriter, WriterOptions

if TYPE_CHECKING:
    from typing_extensions import Self

_log = logging.getLogger("headrace")


class Checkpointer:
    """See the module text. Constructed on every rank of the job, after `init_process_group`: it makes private groups.

    Args:
        volume: address of the volume (a URI, several for several members), or an open `Volume`.
        run: name of the run; its checkpoints are `RUN/step-N`.
        interval: steps between two saves, "auto" (needs `mtbf_s`; `headrace.checkpoint.interval`), or None: `due` is
            only true when the job is told to stop.
        mtbf_s: mean time between failures of the whole job, in seconds.
        preemption: signals that tell the job to stop; None: none is listened to.
        wait_s: seconds that `wait`, `close` and the next save wait at most for the save under way. None: three times
            `options.deadline_s`, half an hour by default, as two rounds and a commit of a save have a deadline each.
        on_failure: "raise" what an asynchronous save failed with, at the next `save` or `wait`, or only "log" it.
        certificate: file to write the restart certificate to, as JSON, by rank 0; None: none.
        options: of the `VolumeWriter`. A step that is saved again always replaces the one before.
        process_group: the ranks that train together, default all.
    """

    def __init__(
        self,
        volume: VolumeLike,
        run: str,
        *,
        interval: Every = None,
        mtbf_s: float | None = None,
        preemption: Preemption | None = None,
        wait_s: float | None = None,
        on_failure: Literal["raise", "log"] = "raise",
        certificate: str | os.PathLike[str] | None = None,
        options: WriterOptions | None = None,
        process_group: dist.ProcessGroup | None = None,
    ) -> None:
        if on_failure not in ("raise", "log"):
            raise UsageError("on_failure", expected='"raise" or "log"', found=repr(on_failure))
        self.run = run
        self._volume = volume
        self._on_failure = on_failure
        self._costs = Costs()
        self._schedule = Schedule(interval, mtbf_s, self._costs)
        # A commit that was under way when the job died may become visible only behind the restore: this run then comes
        # by that step again.
        self._options = replace(options or WriterOptions(), overwrite=True)
        self._wait_s = 3 * self._options.deadline_s if wait_s is None else wait_s
        if not self._wait_s > 0:
            raise UsageError("wait_s", expected="above 0", found=str(wait_s))
        self._writer = VolumeWriter(volume, run, options=self._options, process_group=process_group)
        self._ranks = Ranks(process_group, deadline_s=self._options.deadline_s)
        self._parts = Parts()
        self._under_way: SaveUnderWay | None = None
        self._last: SaveReport | None = None
        #: Step of the save that was begun last and has not failed.
        self._begun: int | None = None
        #: The step that the ranks agreed about last, whether they were told to stop, and whether a save is due.
        self._agreed: tuple[int, bool, bool] | None = None
        #: Where told to stop: when, by the monotonic clock, the grace period is over.
        self._stop_by: float | None = None
        self._stopping = False
        self._certificate_file = certificate
        self._certificate: RestartCertificate | None = None
        self._certified = True
        self._restored_at = 0.0
        #: Extras of the checkpoint that was restored, by name; of those that have a state, the state.
        self.extra: dict[str, Any] = {}
        self._watch = SignalWatch(preemption) if preemption is not None else None

    # ---- restoring -------------------------------------------------------------------------------------------------

    def restore(
        self,
        which: int | Literal["latest"] = "latest",
        model: torch.nn.Module | None = None,
        optimizer: Optimizers = None,
        loader: Any = None,
        extra: Mapping[str, Any] | None = None,
        *,
        on_damage: OnDamage = "raise",
    ) -> int | None:
        """Put back what is given, out of the step that was committed last or a step that is named. The step; None where
        "latest" is asked for and there is none: then nothing was touched.

        A run that goes back to an earlier step goes on from there: what it saves next is "latest", and a step that it
        comes by again replaces the one that was left behind, in the same commit, unless that is pinned.

        What is given here is what `save` and `step` save where they are given nothing. Values of `extra` that have
        `state_dict` and `load_state_dict` (schedulers, scalers) are put back, too; all are in `self.extra`.

        Random number generators are put back where the number of ranks is the one that saved, else the certificate says
        that they are not. Where `options` say how many checkpoints stay, room for them is kept now: VolumeFull comes
        before training begins. Every byte is verified. ChecksumMismatch names the tensor that is damaged; with
        `on_damage="previous"` all ranks go back to the step that it went on from, and certificate and log say so. After
        an error model and optimizer may hold some of a checkpoint.
        """
        self._settle()
        parts = Parts.of(model, optimizer, loader, extra)
        self._parts = parts
        done = restore(self._volume, self.run, which, parts, self._ranks, on_damage, self._options)
        if self._options.retention is not None and parts.model is not None:
            self._writer.reserve(collect(parts, 0, self._ranks))
        if done is None:
            return None
        self.extra = done.extra
        self._certificate, self._certified = done.certificate, False
        self._restored_at = time.monotonic()
        # It may come by the step that was saved last again.
        self._agreed = self._begun = None
        return done.certificate.step

    @property
    def certificate(self) -> RestartCertificate | None:
        """Of the last restore; None where there was none."""
        return self._certificate

    def first_step(self) -> None:
        """The first step behind a restore is done: the certificate is complete, and told. `step`, `due`, `should_stop`
        and `save` say so by themselves. Not collective."""
        if not self._certified and self._certificate is not None:
            since = time.monotonic() - self._restored_at
            self._schedule.restart_s = self._certificate.process_to_restored_s + since
            self._certificate = replace(self._certificate, first_step_s=self._schedule.restart_s)
            self._certify()

    def _certify(self) -> None:
        certificate, self._certified = self._certificate, True
        if certificate is None or self._ranks.rank != 0:
            return
        print(f"headrace: {certificate.line}", file=sys.stderr, flush=True)
        if self._certificate_file is not None:
            try:
                certificate.write(self._certificate_file)
            except OSError as error:
                # Training must not end for want of a piece of paper.
                _log.error("headrace: the restart certificate was not written: %s", error)

    def latest(self) -> int | None:
        """The step that was committed last, None where there is none. Collective."""
        return self._ranks.told(self._latest, "looking for the latest checkpoint")

    def _latest(self) -> int | None:
        attachment = Attachment(self._volume)
        try:
            volume = attachment.open()
            volume.refresh()
            ids = find(volume, self.run).ids
        finally:
            attachment.close()
        return ids[-1].step if ids else None

    # ---- when ------------------------------------------------------------------------------------------------------

    def step(self, step: int) -> bool:
        """Step `step` is done: save what `restore` was given, where a save is due. True: told to stop, and saved."""
        if self.due(step):
            self.save(step)
        return self.stopping

    def due(self, step: int) -> bool:
        """Whether to save behind this step: the interval says so, or the job was told to stop. All ranks have the same
        answer. Collective, unless the interval is a number of steps and there is no preemption."""
        self.first_step()
        if self._begun == step:
            return False
        if self._watch is None and not self._schedule.by_time:
            return self._schedule.due(step)
        stop, due = self._agree(step)
        return stop or due

    def should_stop(self, step: int) -> bool:
        """Whether some rank was told to stop by now. All ranks have the same answer; what comes next is `save`."""
        self.first_step()
        return self._agree(step)[0] if self._watch is not None else False

    @property
    def stopping(self) -> bool:
        """The job was told to stop, and what could be saved for that is: leave the loop."""
        return self._stopping

    def _agree(self, step: int) -> tuple[bool, bool]:
        """Told to stop; a save is due: once for each step, over a group that is neither training's nor the saves'."""
        if self._agreed is not None and self._agreed[0] == step:
            return self._agreed[1:]
        left_s = self._watch.left_s if self._watch is not None else None
        stop = left_s is not None
        due = self._ranks.rank == 0 and self._schedule.due(step)
        late_s = math.inf if left_s is None else left_s
        mine = [stop, due, step, -step, -late_s, *self._schedule.mine(self._ranks.rank)]
        highest = self._ranks.highest(mine, f"agreeing on what to do behind step {step}")
        self._schedule.agreed(*highest[5:])
        if highest[2] != -highest[3]:
            raise UsageError(
                "the ranks are at different steps",
                where=f"rank {self._ranks.rank}, step {step}",
                expected="one step",
                found=f"steps {-highest[3]:.0f} to {highest[2]:.0f}",
            )
        if highest[0] and self._stop_by is None:
            self._stop_by = time.monotonic() - highest[4]
            came = self._watch.came if self._watch is not None else None
            if came is not None or self._ranks.rank == 0:
                _log.warning(
                    "headrace: told to stop by %s, %.1f s of grace are left: saving step %d",
                    "another rank" if came is None else came.name, -highest[4], step,
                )  # fmt: skip
        self._agreed = (step, bool(highest[0]), bool(highest[1]))
        return self._agreed[1:]

    # ---- saving ----------------------------------------------------------------------------------------------------

    def save(
        self,
        step: int,
        model: torch.nn.Module | None = None,
        optimizer: Optimizers = None,
        loader: Any = None,
        extra: Mapping[str, Any] | None = None,
        *,
        wait: bool = False,
    ) -> None:
        """Save all of it as `RUN/step-N`, in one commit. Returns when it is copied: training may go on, and change it.

        What is left out is what `restore` or the save before was given; where all is, a step whose save has begun is
        not saved again. One save at a time: this waits for the one under way first, and raises what that failed with
        (`on_failure`). `wait`: return when it is committed. Where the
        job was told to stop, that is so by itself, within the grace period, and `stopping` is true afterwards.
        """
        self.first_step()
        again = model is None and optimizer is None and loader is None and extra is None
        model = self._parts.model if model is None else model
        parts = _with(self._parts, Parts.of(model, optimizer, loader, extra))
        stop = self._watch is not None and self._agree(step)[0]
        try:
            if not (self._begun == step and (again or stop)):
                # Told to stop, this is the last chance: what the save before failed with was logged, and must do.
                self._settle(self._stop_by if stop else None, quietly=stop)
                self._begin(step, parts)
            if stop or wait:
                self._settle(self._stop_by if stop else None)
        finally:
            # Whatever came of it: there is no time for another.
            self._stopping = self._stopping or stop

    def _begin(self, step: int, parts: Parts) -> None:
        began = time.perf_counter()
        self._schedule.begun()
        measures = self._schedule.measures
        state = collect(parts, step, self._ranks)
        self._parts = parts
        future = self._writer.async_save(state, str(CheckpointId(self.run, step)), next_s=self._schedule.left_s)
        if measures:
            self._writer.hurry()
        # The next thing may be the optimizer's step: where a copy from an accelerator was only begun, it is waited for.
        self._writer.wait_for_staging()
        save = SaveUnderWay(step=step, future=future, began=began, blocked_s=time.perf_counter() - began)
        self._under_way, self._begun = save, step

        def done(_: object) -> None:
            if future.exception() is None:
                self._costs.note(Cost.of(future.result(), save.blocked_s, time.perf_counter() - began))
            if self._ranks.rank == 0:
                say_what_became(save, self.run)

        future.add_done_callback(done)

    def wait(self, timeout_s: float | None = None) -> SaveReport | None:
        """Wait for the save under way, `wait_s` of the Checkpointer by default. What the last save did; None where
        there was none.

        HeadraceError with what it failed with, unless `on_failure` is "log". CheckpointFailed where the time passes: it
        names this rank, and what it waits for.
        """
        self._settle(None if timeout_s is None else time.monotonic() + timeout_s)
        return self._last

    def _settle(self, by: float | None = None, *, quietly: bool = False) -> None:
        save = self._under_way
        if save is None:
            return
        left_s = self._wait_s if by is None else max(0.0, by - time.monotonic())
        try:
            self._last = save.result(left_s)
        except FutureTimeoutError:
            raise CheckpointFailed(
                f"the save of step {save.step} is not committed in time",
                where=f"rank {self._ranks.rank}",
                expected=f"within {left_s:.0f} s",
                found=self._writer.held_up_by(),
                next_step="it may be yet, if this process lives on; what was committed before it is untouched",
            ) from None
        except HeadraceError:
            self._under_way = self._begun = None
            if self._on_failure == "raise" and not quietly:
                raise
        self._under_way = None

    def keep(self, step: int, note: str) -> None:
        """Pin this step, which is committed, and unpin others that were pinned with this note: retention lets go of
        them. Waits for the save under way. Collective.
        """
        self._settle()
        session = self._writer.session
        self._ranks.told(lambda: pin_alone(session(), CheckpointId(self.run, step), note), "pinning a checkpoint")

    def let_go(self, note: str, *, above: int) -> None:
        """Unpin the steps above this one that were pinned with this note: a run that went back comes by them again.
        Collective."""
        self._settle()
        session = self._writer.session
        self._ranks.told(lambda: unpin_above(session(), CheckpointId(self.run, above), note), "unpinning checkpoints")

    # ---- life ------------------------------------------------------------------------------------------------------

    def close(self) -> None:
        """Wait for the save under way (`wait_s` at most), raise what it failed with, and let go of the volume and the
        signals. A save that hangs keeps its volume until the process ends."""
        with contextlib.ExitStack() as stack:
            stack.callback(self._ranks.close)
            stack.callback(self._close_writer)
            if self._watch is not None:
                stack.callback(self._watch.close)
            if not self._certified:
                self._certify()
            self._settle()

    def _close_writer(self) -> None:
        # One that hangs was waited for: it still uses what would be closed.
        if self._under_way is None or self._under_way.future.done():
            self._writer.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is None:
            self.close()
            return
        # What broke the loop is what matters; a save that failed besides was logged.
        with contextlib.suppress(HeadraceError):
            self.close()


def _with(before: Parts, given: Parts) -> Parts:
    """What is given, and what was given before where nothing is."""
    return Parts(
        model=given.model,
        optimizers=given.optimizers or before.optimizers,
        loader=before.loader if given.loader is None else given.loader,
        extra=given.extra or before.extra,
    )
