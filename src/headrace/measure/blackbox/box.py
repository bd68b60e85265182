"""`BlackBox`: dumps of a rank, made when something goes wrong, while nobody looks.

    with Watch("runs/a/watch") as watch, BlackBox("runs/a/watch", watch=watch):
        ...

A dump is made on SIGTERM; when a step takes far too long; when a collective fails or times out; when an exception
leaves the `with`; and on request: SIGUSR2, `box.dump()`, or `touch FOLDER/dump-now`, which all ranks see. Files are
those of `headrace.measure.blackbox.dump`; earlier ones stay beside the last as `rank-00003.before-1.blackbox` and so
on, as many as `kept`.

Two threads. One keeps time and hears signals, and never touches a file. The other one writes; if the file system hangs,
so does it, and nothing else.
"""

from __future__ import annotations

import importlib
import itertools
import logging
import os
import signal
import statistics
import sys
import threading
import time
import weakref
from collections import deque
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING

from headrace.device import BlockDevice, open_devices
from headrace.errors import HeadraceError, UsageError
from headrace.measure.blackbox.dump import dump_name, write_dump
from headrace.measure.blackbox.pauses import Pauses
from headrace.measure.blackbox.signals import GRACE_S, Signals
from headrace.measure.blackbox.take import clocks, take

if TYPE_CHECKING:
    from typing_extensions import Self

    from headrace.measure.watch.watch import Watch

_log = logging.getLogger("headrace")

#: Between two looks at the step that is under way, and at the folder.
_TICK_S, _LOOK_S = 0.25, 1.0
#: Steps that are long beside others are no matter where they are shorter than this.
_SHORT_S = 1.0
#: So many steps make a median.
_STEPS = 8
#: After a dump by the watchdog, or of an exception in a loop, the next one of its kind is not before; each time twice
#: as long.
_QUIET_S, _MOST_QUIET_S = 30.0, 3600.0
#: What one rank asks of the others is not done twice.
_RECENT_S = 30.0
_DUMP_TIMEOUT_S = 60.0
#: Dumps that wait for one that hangs.
_MOST_WAITING = 8
DUMP_NOW, RECORDER = "dump-now", "flight-recorder-"
#: Long by nature.
_LONG = ("checkpoint", "restart")


class DumpFailed(HeadraceError):
    """A dump was not written."""

    fault = "host"


@dataclass
class _Asked:
    why: str
    detail: str
    over: threading.Event = field(default_factory=threading.Event)
    path: Path | None = None
    error: str = ""


class BlackBox:
    """Of one rank. Made by the main thread, where signals are to be heard.

    Args:
        folder: where dumps go; it is made. The same for all ranks, and best none on the storage that is watched.
        watch: what training is at; None: dumps have events only, and there is no watchdog.
        devices: whose events; None: of all that the process has open then.
        rank, world: those of `watch`, else as torchrun says (`RANK`, `WORLD_SIZE`), else 0 of 1.
        watchdog_s: a step that takes longer; None: none is too long.
        watchdog_times: and one that takes so many times the median of the last ones, and more than a second; but for
            steps in a checkpoint or restart. None: it is not compared.
        kept: files of a rank.
        flight_recorder: PyTorch's, where it records, is written beside each dump, as `flight-recorder-3`; and a dump is
            made when PyTorch writes it on a time-out of NCCL, to the same place where it was told no other.
    """

    def __init__(
        self,
        folder: str | os.PathLike[str],
        *,
        watch: Watch | None = None,
        devices: Sequence[BlockDevice] | None = None,
        rank: int | None = None,
        world: int | None = None,
        watchdog_s: float | None = 120.0,
        watchdog_times: float | None = 20.0,
        kept: int = 4,
        flight_recorder: bool = True,
    ) -> None:
        if not 1 <= kept <= 100:
            raise UsageError("kept", expected="1 to 100", found=str(kept))
        for name, value, least in (("watchdog_s", watchdog_s, 0.0), ("watchdog_times", watchdog_times, 1.0)):
            if value is not None and not value > least:
                raise UsageError(name, expected=f"more than {least:g}, or None", found=str(value))
        self.rank = rank if rank is not None else watch.rank if watch is not None else _number("RANK", 0)
        self.world = world if world is not None else watch.world if watch is not None else _number("WORLD_SIZE", 1)
        self._core = _Core(
            Path(folder), self.rank, self.world, watch, devices, watchdog_s, watchdog_times, kept, flight_recorder
        )
        self._closed = weakref.finalize(self, self._core.close)

    @property
    def path(self) -> Path:
        """Of the last dump."""
        return self._core.path

    @property
    def signals(self) -> str:
        """Why signals are not heard; empty where they are."""
        return self._core.signals.why_not

    def dump(self, detail: str = "") -> Path:
        """Now; by any thread. `DumpFailed`: it could not be written. `UsageError`: the box is closed, or another
        process's."""
        return self._core.dump("request", detail)

    def close(self) -> None:
        """Ends its threads, and gives signals back. Again: does nothing."""
        self._closed()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if error is not None and not (isinstance(error, SystemExit) and not error.code):
            self._core.failed("", error)
        self.close()


class _Core:
    """What the threads know; not the box, so that it can be forgotten."""

    def __init__(
        self,
        folder: Path,
        rank: int,
        world: int,
        watch: Watch | None,
        devices: Sequence[BlockDevice] | None,
        watchdog_s: float | None,
        watchdog_times: float | None,
        kept: int,
        flight_recorder: bool,
    ) -> None:
        self._rank, self._world, self._watch, self._devices = rank, world, watch, devices
        self._watchdog_s, self._watchdog_times, self._kept = watchdog_s, watchdog_times, kept
        self.path = folder / dump_name(rank)
        self._started = clocks()
        self._process = os.getpid()
        try:
            folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError("a black box cannot write here", where=str(folder), found=error.strerror) from None
        self._request_file = folder / DUMP_NOW
        self._seen = {self._request_file: _sign(self._request_file)}
        self._flight_recorder = flight_recorder
        # As PyTorch is told it: where both are not one name, what the box writes there looks as if PyTorch had.
        self._recorders_file = folder.absolute() / f"{RECORDER}{rank}"
        #: Variables that are the box's: another one has its own folder.
        self._told_pytorch: dict[str, str] = {}
        if flight_recorder:
            pytorchs, self._told_pytorch = _pytorchs_file(self._recorders_file, rank)
            self._seen[pytorchs] = _sign(pytorchs)
            self._make_ready()
        self._watchdog_failed = False
        self._told: tuple[int, float] | None = None
        self._pauses = Pauses(_QUIET_S, _MOST_QUIET_S)
        self._dumped_at = -_RECENT_S
        self._queue: deque[_Asked] = deque()
        self._changed = threading.Condition()
        self._over = False
        #: At the step under way, so far.
        self.looks = 0
        self.signals = Signals((signal.SIGTERM, signal.SIGUSR2))
        if watch is not None:
            watch.tell_failures(self.failed)
        self._threads = [
            threading.Thread(target=target, name=f"headrace-blackbox-{target.__name__.strip('_')}", daemon=True)
            for target in (self._keep, self._write_all)
        ]
        for thread in self._threads:
            thread.start()

    # ---- for any thread --------------------------------------------------------------------------------------------

    def dump(self, why: str, detail: str) -> Path:
        if self._process != os.getpid() or self._over:
            raise UsageError(
                "no dump is made any more" if self._over else "a black box belongs to the process that made it",
                where=str(self.path),
            )  # fmt: skip
        asked = self._ask(why, detail)
        if not asked.over.wait(_DUMP_TIMEOUT_S):
            raise DumpFailed("a dump does not end", where=str(self.path), expected=f"an end in {_DUMP_TIMEOUT_S:g} s")
        if asked.path is None:
            raise DumpFailed("a dump was not written", where=str(self.path), found=asked.error)
        return asked.path

    def failed(self, cause: str, error: BaseException) -> None:
        """An exception left a part of a step, or (cause "") the `with` of the box. Waits for the dump, not for long.
        A loop may catch one after the other: of one kind the next one is dumped after a while only."""
        if self._process != os.getpid() or self._over or getattr(error, "_headrace_dumped", False):
            return
        name, detail = type(error).__name__, f"{type(error).__name__}: {error}"[:500]
        if cause:
            kind = f"{name} in {cause}"
            if (left_s := self._pauses.left_s(kind)) > 0:
                if self._pauses.leave_out(kind):
                    _log.warning(
                        "headrace: another %s (%s), not dumped by the black box at %s; the next one in %.0f s at the "
                        "earliest", kind, detail, self.path, left_s,
                    )  # fmt: skip
                return
            if left_out := self._pauses.begin(kind):
                detail += f" ({left_out} more of its kind since the last dump of one were not dumped)"
        with suppress(AttributeError):
            # The same one goes on through what is around it.
            error._headrace_dumped = True  # type: ignore[attr-defined]
        self._ask(cause or "exception", detail).over.wait(GRACE_S)

    def close(self) -> None:
        if self._process == os.getpid():
            with self._changed:
                self._over = True
                self._changed.notify_all()
            self.signals.wake()
            for thread in self._threads:
                if thread is not threading.current_thread():
                    # One that hangs in a file system ends with the process.
                    thread.join(GRACE_S)
        for name, value in self._told_pytorch.items():
            if os.environ.get(name) == value:
                del os.environ[name]
        self.signals.close()

    def _ask(self, why: str, detail: str) -> _Asked:
        asked = _Asked(why, detail)
        with self._changed:
            if len(self._queue) < _MOST_WAITING:
                self._queue.append(asked)
                self._changed.notify_all()
            else:
                asked.error = "too many dumps are waiting already"
                asked.over.set()
        return asked

    # ---- the one that keeps time -----------------------------------------------------------------------------------

    def _keep(self) -> None:
        while not self._over:
            for number in self.signals.wait(_TICK_S):
                if number == signal.SIGTERM:
                    self._ask("sigterm", "the process was told to end").over.wait(GRACE_S)
                else:
                    self._ask("request", signal.Signals(number).name)
                self.signals.done(number)
            try:
                self._look_at_step()
            except Exception as error:
                # Signals are to be heard all the same, and the next look may do.
                if not self._watchdog_failed:
                    _log.warning("headrace: the watchdog of the black box at %s fails: %r", self.path, error)
                self._watchdog_failed = True
            self.looks += 1

    def _look_at_step(self) -> None:
        if self._watch is None or (self._watchdog_s is None and self._watchdog_times is None):
            return
        step = self._watch.under_way()
        if step is None or (step.step, step.begun) == self._told or self._pauses.left_s("watchdog") > 0:
            return
        took = step.now - step.begun
        bound = self._bound(step.cause) if took > min(_SHORT_S, self._watchdog_s or _SHORT_S) else None
        if bound is None or took <= bound[0]:
            return
        self._told = (step.step, step.begun)
        self._pauses.begin("watchdog")
        self._ask(
            "watchdog",
            f"step {step.step} has been under way for {took:.1f} s, {bound[1]}; for {step.now - step.since:.1f} s in "
            f"{step.cause}",
        )

    def _bound(self, cause: str) -> tuple[float, str] | None:
        """Seconds beyond which a step is too long, and what they are."""
        found = []
        if self._watchdog_s is not None:
            found.append((self._watchdog_s, f"more than {self._watchdog_s:g} s"))
        recent = self._watch.recent(64) if self._watch is not None and self._watchdog_times is not None else []
        if self._watchdog_times is not None and len(recent) >= _STEPS and cause not in _LONG:
            median = statistics.median(step.wall_s for step in recent)
            found.append(
                (max(_SHORT_S, self._watchdog_times * median), f"where the last ones took {median:.3g} s by median")
            )
        return min(found, default=None)

    # ---- the one that writes ---------------------------------------------------------------------------------------

    def _write_all(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._queue or self._over, _LOOK_S)
                asked = self._queue.popleft() if self._queue else None
            if asked is not None:
                self._carry_out(asked)
            elif self._over:
                return
            else:
                self._look_at_folder()

    def _carry_out(self, asked: _Asked) -> None:
        try:
            self._write(asked)
            asked.path = self.path
            if asked.why in ("watchdog", "collective", "exception") and self._world > 1:
                self._call_others(asked)
        except Exception as error:
            # Whatever it is, it is not training's.
            asked.error = f"{type(error).__name__}: {error}"
            _log.warning("headrace: no dump of the black box at %s: %s", self.path, asked.error)
        finally:
            asked.over.set()

    def _write(self, asked: _Asked) -> None:
        dump = take(
            rank=self._rank, world=self._world, why=asked.why, detail=asked.detail, started=self._started,
            watch=self._watch, devices=self._devices if self._devices is not None else open_devices(),
        )  # fmt: skip
        write_dump(self.path, dump, when_written=self._make_room)
        self._dumped_at = time.monotonic()
        try:
            self._write_flight_recorder()
        except Exception as error:
            # There is a dump all the same.
            _log.warning("headrace: no Flight Recorder beside the dump at %s: %r", self.path, error)

    def _make_ready(self) -> None:
        """Modules are imported now, not by the thread that dumps: that may take seconds, and the recorder goes on."""
        if "torch.distributed" in sys.modules:
            try:
                importlib.import_module("headrace.torch.flight_recorder")
            except Exception as error:
                self._flight_recorder = False
                _log.warning("headrace: no Flight Recorder beside dumps at %s: %r", self.path, error)

    def _write_flight_recorder(self) -> None:
        ours = self._recorders_file
        if not self._flight_recorder or "torch.distributed" not in sys.modules:
            return
        if ours in self._seen and _sign(ours) not in (None, self._seen[ours]):
            # PyTorch has just written it: that one is of the moment of the time-out.
            return
        from headrace.torch.flight_recorder import flight_recorder_trace

        trace = flight_recorder_trace()
        if trace:
            self._put(ours, trace)

    def _make_room(self) -> None:
        """The last dump is the one before, from now on; the oldest of too many is gone."""
        stem = self.path.stem
        before = (self.path.with_name(f"{stem}.before-{number}.blackbox") for number in range(1, self._kept))
        older = [self.path, *before]
        for newer, place in reversed(list(itertools.pairwise(older))):
            with suppress(FileNotFoundError):
                _keep_too(newer, place) if newer is self.path else newer.replace(place)

    def _call_others(self, asked: _Asked) -> None:
        self._put(self._request_file, f"rank {self._rank}: {asked.why}: {asked.detail}"[:600].encode())

    def _put(self, place: Path, data: bytes) -> None:
        """A whole file, of which this box is not told."""
        temporary = place.with_name(f".{place.name}.{self._rank}.tmp")
        temporary.write_bytes(data)
        temporary.replace(place)
        if place in self._seen:
            self._seen[place] = _sign(place)

    def _look_at_folder(self) -> None:
        for file, before in self._seen.items():
            now = _sign(file)
            self._seen[file] = now
            if now is None or now == before:
                continue
            if file is not self._request_file:
                # It is not written over: what was under way at the time-out is given up by now.
                self._flight_recorder &= file != self._recorders_file
                self._ask("collective", f"PyTorch wrote its Flight Recorder to {file}")
                continue
            text = ""
            with suppress(OSError), file.open("rb") as opened:
                text = opened.read(600).decode("utf-8", "replace")
            if text.startswith("rank ") and time.monotonic() - self._dumped_at < _RECENT_S:
                continue
            self._ask("request", text or f"a file {DUMP_NOW}")


def _keep_too(file: Path, place: Path) -> None:
    """There is a last dump at any time; but where the file system knows no links."""
    place.unlink(missing_ok=True)
    try:
        os.link(file, place)
    except FileNotFoundError:
        raise
    except OSError:
        file.replace(place)


def _sign(file: Path) -> tuple[int, int, int] | None:
    try:
        found = file.stat()
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino


def _pytorchs_file(ours: Path, rank: int) -> tuple[Path, dict[str, str]]:
    """Which PyTorch writes on a time-out: beside ours, where nobody has said otherwise; and variables that say so."""
    # In the order in which it looks.
    names = ("TORCH_FR_DUMP_TEMP_FILE", "TORCH_NCCL_DEBUG_INFO_TEMP_FILE")
    prefix = next((os.environ[name] for name in names if os.environ.get(name)), None)
    told: dict[str, str] = {}
    if prefix is None:
        prefix = str(ours.absolute().with_name(RECORDER))
        told = dict.fromkeys(names, prefix)
        os.environ.update(told)
    return Path(f"{prefix}{rank}"), told


def _number(variable: str, default: int) -> int:
    text = os.environ.get(variable, str(default))
    if not text.isdecimal():
        raise UsageError("this is no whole number", where=variable, found=repr(text))
    return int(text)
