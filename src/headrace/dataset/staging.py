"""Staging: a copy of a dataset on a medium of this node, made while training reads, or before.

    stage(volume, "corpus", "/local/nvme")                     returns when all of it is there
    with Staging(volume, "corpus", "/local/nvme", options):    the same behind whatever is done meanwhile
    TokenLoader(volume, "corpus", ..., stage="/local/nvme")    reads what is there by then, else from the volume

All ranks of a node may call it: one copies, the others wait for that, and go on with it where it dies. Killed and
called again it goes on where it was. What a stage is, and why it cannot be taken for another: `headrace.volume.stage`.
"""

from __future__ import annotations

import logging
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.dataset.inspect import packings_of
from headrace.device import lock_file
from headrace.errors import (
    ChecksumMismatch,
    DeviceError,
    DeviceTimeout,
    HeadraceError,
    ObjectNotFound,
    UsageError,
    VolumeDamaged,
)
from headrace.volume import ObjectInfo, Volume
from headrace.volume.stage.fill import fill
from headrace.volume.stage.plan import Plan, plan_of
from headrace.volume.stage.store import Held, Stage, address_of, hold, names_itself, refuse_another, stages_in
from headrace.volume.stage.throttle import Throttle
from headrace.volume.stage.verify import verify
from headrace.volume.workers import Workers

_log = logging.getLogger("headrace")
#: Seconds that a staging which is stopped may take for what it has under way.
CLOSE_S = 60.0

if TYPE_CHECKING:
    from typing_extensions import Self

    from headrace.device import BlockDevice

#: Seconds between two looks at what another process stages.
_LOOK_S = 0.25


@dataclass(frozen=True, kw_only=True)
class StageOptions:
    """How a dataset is staged. What is in the stage in the end depends on none of it but `most_bytes`."""

    #: Bytes a second that are read from the volume, at most. None: as many as there are.
    limit_bytes_s: float | None = None
    #: Share of the time in which reads are under way, so that others have the rest of the link. 1: all of it.
    share: float = 1.0
    #: Threads that copy; each has a buffer of 4 MiB.
    workers: int = 4
    #: What the stage may take of its medium. None: all that is free.
    most_bytes: int | None = None
    #: Where that is less than the dataset, stage as much as fits, which is a part: the report is not `complete` then.
    #: Else nothing is staged, and VolumeFull says so.
    partial: bool = False
    #: Read everything back in the end, and hold it against the volume's checksums.
    verify: bool = False
    #: Use a file or a device that holds something else, or the stage of another dataset.
    force: bool = False
    #: Seconds in which another process that stages has to come on; longer than a flush of its medium.
    patience_s: float = 300.0

    def __post_init__(self) -> None:
        for name, good, expected in (
            ("limit_bytes_s", self.limit_bytes_s is None or 0 < self.limit_bytes_s < 1 << 50, "more than 0, or None"),
            ("share", 0.01 <= self.share <= 1, "0.01 to 1"),
            ("workers", type(self.workers) is int and 1 <= self.workers <= 256, "1 to 256"),
            ("most_bytes", self.most_bytes is None or 0 < self.most_bytes < 1 << 62, "more than 0, or None"),
            ("patience_s", self.patience_s > 0, "more than 0"),
        ):
            if not good:
                raise UsageError(f"{name} is out of range", expected=expected, found=repr(getattr(self, name)))


@dataclass(frozen=True, kw_only=True)
class StageProgress:
    """How far it is."""

    done_bytes: int
    total_bytes: int
    #: Of them by this call; 0 while another process stages.
    copied_bytes: int
    #: "staging", "waiting" (another process stages) or "verifying" (`done` and `total` count chunks then).
    doing: str = "staging"


@dataclass(frozen=True, kw_only=True)
class StageReport:
    """What is there now."""

    dataset: str
    where: str
    #: Of the stage; less than the dataset has where it is a part (`partial`).
    wanted_bytes: int
    dataset_bytes: int
    #: By this call.
    copied_bytes: int
    seconds: float
    #: All of the dataset is there; False where `stop` was set, and where only a part fits.
    complete: bool
    #: Another process has done it.
    by_another: bool
    #: Chunks that did not verify, and were staged again.
    mended_chunks: int
    #: Where all of it was read back from at last: "medium"; "memory", where the kernel has not let go of what it keeps
    #: of the medium there; None: it was not, or not to the end.
    verified: str | None = None


@dataclass(frozen=True, kw_only=True)
class StageStatus:
    """A stage that was found."""

    where: str
    #: A process holds it, and fills it.
    busy: bool
    dataset: str = ""
    volume_id: str = ""
    volume: str = ""
    wanted_chunks: int = 0
    there_chunks: int = 0
    wanted_bytes: int = 0
    #: Of the whole dataset: more than wanted where the stage is to have a part of it (`StageOptions.partial`).
    dataset_chunks: int = 0
    dataset_bytes: int = 0
    #: All of the dataset is there.
    complete: bool = False
    #: Why it cannot be used, where it is damaged.
    problem: str | None = None


@dataclass(frozen=True, kw_only=True)
class StagingMetrics:
    """Of a `Staging`, for `headrace.metrics`."""

    #: Bytes that are in the stage, and those that are to be there in the end; 0 as long as that is not known.
    there_bytes: int = 0
    wanted_bytes: int = 0
    #: Copied by this process. Only grows.
    copied_bytes: int = 0


Shown = Callable[[StageProgress], None]


def objects_of_dataset(volume: Volume, name: str) -> list[ObjectInfo]:
    """All objects of a dataset of tokens or records, what is small first. ObjectNotFound."""
    ends = (".json", ".tokenizer.json", ".idx", ".records.idx")
    names = [f"{name}{end}" for end in ends]
    for packing, _, _ in packings_of(volume, name):
        names += [f"{packing}.json", packing]
    data = [each for each in (f"{name}.bin", f"{name}.records") if each in volume]
    if not data:
        raise ObjectNotFound(
            "there is no such dataset", where=name, expected=f"{name}.bin or {name}.records in {volume!r}",
            next_step="`headrace dataset ls` lists what is there",
        )  # fmt: skip
    return [volume.stat(each) for each in [*(each for each in names if each in volume), *data]]


def stage(
    volume: Volume,
    name: str,
    where: str | os.PathLike[str],
    options: StageOptions | None = None,
    *,
    progress: Shown | None = None,
    stop: threading.Event | None = None,
) -> StageReport:
    """Copy the dataset `name` to a medium of this node, verified; returns when all is there (with `partial`: all that
    fits), or soon after `stop` is set. Where another process stages it, this waits for that, and takes over where it
    ends, also with a part only.

    `where`: a folder (made where there is none; each dataset is a file in it), `file:/PATH`, or a block device. What is
    there already is not copied again, as long as the dataset is the same.

    VolumeFull, before anything is copied: it does not fit. UsageError: something else is there. ChecksumMismatch: the
    volume's own bytes are damaged. DeviceError: the volume or the medium failed; what was staged by then stays.
    """
    options = options or StageOptions()
    started = time.monotonic()
    volume.refresh()
    plan = plan_of(volume, name, objects_of_dataset(volume, name))
    address = address_of(where, volume.id, name)
    sole = names_itself(os.fspath(where))
    stop = stop or threading.Event()
    held = hold(address)
    if held is None:
        watch = _Watch(plan, address.uri, options, refuse=sole and not options.force)
        while held is None:
            done = watch.look()
            if progress is not None:
                progress(StageProgress(done_bytes=done, total_bytes=watch.total, copied_bytes=0, doing="waiting"))
            if watch.done or stop.wait(_LOOK_S):
                return StageReport(
                    dataset=name, where=address.uri, wanted_bytes=watch.total, dataset_bytes=plan.facts.wanted_bytes,
                    copied_bytes=0, seconds=time.monotonic() - started, complete=watch.complete, by_another=True,
                    mended_chunks=0,
                )  # fmt: skip
            held = hold(address)
    with held:
        room, end = held.room(options.most_bytes)
        whole, plan = plan, plan.limited(room, end, partial=options.partial, where=address.uri)
        held.lay_out(plan, force=options.force, sole=sole)
        copied, mended, verified = _fill(volume, plan, held, options, progress, stop)
        return StageReport(
            dataset=name, where=address.uri, wanted_bytes=plan.facts.wanted_bytes,
            dataset_bytes=plan.facts.dataset_bytes, copied_bytes=copied, seconds=time.monotonic() - started,
            complete=bool(held.there[whole.wanted].all()), by_another=False, mended_chunks=mended,
            verified=verified,
        )  # fmt: skip


def _fill(
    volume: Volume, plan: Plan, held: Held, options: StageOptions, progress: Shown | None, stop: threading.Event
) -> tuple[int, int, str | None]:
    """Bytes that were copied, chunks that had to be copied again, and where they were read back from."""

    def shown(done: int, total: int, now: int) -> None:
        if progress is not None:
            progress(StageProgress(done_bytes=done, total_bytes=total, copied_bytes=copied + now))

    def checked(done: int, total: int) -> None:
        if progress is not None:
            progress(StageProgress(done_bytes=done, total_bytes=total, copied_bytes=copied, doing="verifying"))

    copied, mended = 0, 0
    verified: str | None = None
    bad: list[int] = []
    # What does not verify is copied once more, and then it has to.
    for attempt in range(2):
        try:
            throttle = Throttle(options.limit_bytes_s, options.share)
            copied += fill(
                volume, plan, held, throttle, workers=options.workers, progress=shown, stop=stop, bad=bad
            ).copied_bytes
        except DeviceError as error:
            raise _named(error, held.uri) from error
        if not options.verify or stop.is_set():
            break
        found = verify(volume, plan, held, progress=checked, stop=stop)
        bad = found.bad
        if stop.is_set():
            break
        if not bad:
            verified = "medium" if found.past_memory else "memory"
            break
        if attempt:
            raise ChecksumMismatch(
                "the stage does not keep what is written to it", where=held.uri,
                found=f"{len(bad)} chunks that do not verify", next_step="use another medium",
            )  # fmt: skip
        mended = len(bad)
    return copied, mended, verified


def _named(error: DeviceError, uri: str) -> DeviceError:
    """With what becomes of the stage."""
    steps = [error.next_step] if error.next_step else []
    steps.append(f"what is staged is used; to go on, stage it again ({uri})")
    return type(error)(
        error.what, where=error.where, expected=error.expected, found=error.found, next_step="; ".join(steps)
    )


class _Watch:
    """How another process comes on."""

    def __init__(self, plan: Plan, uri: str, options: StageOptions, *, refuse: bool) -> None:
        self._plan, self._uri, self._patience_s = plan, uri, options.patience_s
        self._partial, self._refuse = options.partial, refuse
        self.total = plan.facts.wanted_bytes
        #: All of the dataset is there; there is nothing to wait for: that, or a part where one is enough.
        self.complete = self.done = False
        self._last = -1
        self._since_s = time.monotonic()

    def look(self) -> int:
        """Bytes that are there. DeviceTimeout where that is the same for too long, UsageError where it is of another
        dataset."""
        done = 0
        try:
            found = Stage.open(self._uri)
        except VolumeDamaged:
            found = None  # It is being made anew.
        if found is not None:
            with found:
                if self._refuse:
                    refuse_another(found.facts, self._plan, self._uri)
                there = found.there()
                if there is not None and found.facts.same_places(self._plan.facts):
                    done = self._plan.bytes_of(there)
                    self.complete = self.done = bool(there[self._plan.wanted].all())
                    if self._partial:
                        self.total = found.facts.wanted_bytes
                        self.done |= int(there.sum()) >= found.facts.wanted_chunks
        if done != self._last:
            self._last, self._since_s = done, time.monotonic()
        if time.monotonic() - self._since_s > self._patience_s:
            raise DeviceTimeout(
                "another process holds the stage, and does not come on", where=self._uri,
                expected=f"something within {self._patience_s:g} s", next_step="see which: lslocks; end it",
            )  # fmt: skip
        return done


class Staging:
    """`stage` in a thread of its own, for `with`, over connections of its own: reads of the loader do not wait behind
    those of the staging. Its end stops it; what is there by then stays."""

    #: What it is of in `headrace.metrics`.
    section = "stagings"

    def __init__(
        self,
        volume: Volume,
        name: str,
        where: str | os.PathLike[str],
        options: StageOptions | None = None,
        *,
        progress: Shown | None = None,
    ) -> None:
        self.name = name
        self._arguments = (name, where, options)
        self._progress = progress
        self._metrics = StagingMetrics()
        self._stop = threading.Event()
        self._report: StageReport | None = None
        self._error: BaseException | None = None
        self._volume = Volume.open(volume.uris, degraded=volume.degraded)
        self._worker = Workers(self._run, "headrace-staging")
        self._worker.start()

    def _run(self) -> None:
        name, where, options = self._arguments
        try:
            with self._volume:
                self._report = stage(self._volume, name, where, options, progress=self._shown, stop=self._stop)
        except BaseException as error:
            self._error = error

    def _shown(self, now: StageProgress) -> None:
        if now.doing != "verifying":
            # Chunks are counted then.
            self._metrics = StagingMetrics(
                there_bytes=now.done_bytes, wanted_bytes=now.total_bytes, copied_bytes=now.copied_bytes
            )
        if self._progress is not None:
            self._progress(now)

    @property
    def devices(self) -> list[BlockDevice]:
        """That it reads from, over connections of its own."""
        return list(self._volume.devices)

    def metrics(self) -> StagingMetrics:
        """Of now; other threads may ask, too."""
        return self._metrics

    def done(self) -> bool:
        """It has ended, well or not."""
        return self._worker.wait(0)

    def wait(self, timeout_s: float | None = None) -> StageReport:
        """Until all is there. What went wrong is raised; DeviceTimeout when the time has passed, and it goes on."""
        if not self._worker.wait(timeout_s):
            raise DeviceTimeout("the staging did not end in time", where=self._arguments[0])
        if self._error is not None:
            raise self._error
        assert self._report is not None
        return self._report

    def close(self, timeout_s: float = CLOSE_S) -> None:
        """Stop, if it has not ended. Never raises what went wrong: training goes on without a stage.

        What it still reads of a volume that does not answer fails after `timeout_s`; a medium that does not answer then
        is left to the kernel, and the log says so.
        """
        self._stop.set()
        if self._worker.wait(timeout_s):
            return
        # Its own: nobody else reads by these connections.
        with suppress(HeadraceError):
            self._volume.close()
        if not self._worker.wait(timeout_s):
            _log.warning("headrace: the staging of %s does not end: its medium does not answer", self.name)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def stages(where: str | os.PathLike[str]) -> Iterator[StageStatus]:
    """What is staged in a folder, a file or a block device."""
    for uri in stages_in(where):
        busy = _busy(uri)
        try:
            found = Stage.open(uri)
            if found is None:
                problem = None if busy else "no stage, or one that was never begun"
                yield StageStatus(where=uri, busy=busy, problem=problem)
                continue
            with found:
                there, facts = found.there(), found.facts
        except HeadraceError as error:
            yield StageStatus(where=uri, busy=busy, problem=str(error))
            continue
        count = 0 if there is None else int(there.sum())
        yield StageStatus(
            where=uri,
            busy=busy,
            dataset=facts.dataset,
            volume_id=facts.volume_id,
            volume=facts.volume,
            wanted_chunks=facts.wanted_chunks,
            there_chunks=count,
            wanted_bytes=facts.wanted_bytes,
            dataset_chunks=facts.dataset_chunks,
            dataset_bytes=facts.dataset_bytes,
            complete=count >= facts.dataset_chunks,
        )


def _busy(uri: str) -> bool:
    try:
        lock = lock_file(uri)
    except DeviceError:
        return False
    if lock is None:
        return True
    lock.release()
    return False


def drop_stage(where: str) -> None:
    """Take away the stage at this address (`StageStatus.where`). Loaders that read it go on: a file that they have open
    stays until they close it. UsageError where a process is filling it, or it is no stage."""
    address = address_of(where, "", "")
    held = hold(address)
    if held is None:
        raise UsageError("the stage is being filled", where=where, next_step="end that first")
    with held:
        held.drop()
