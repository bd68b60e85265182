"""The step clock: a small context for any training loop, with or without torch."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import IO, Any

from headrace.errors import UsageError
from headrace.measure.records import StepRecord


class StepClock:
    """Splits every step into data wait, checkpoint stall and the rest, which is compute.

    `path`: a JSON line is appended there after every step and flushed, so that a killed rank leaves its finished steps.
    `synchronise`: called at the end of each step, before the time is taken. Where work is queued on an accelerator,
    hand in `torch.cuda.synchronize`: else the step ends before its work does and waits show up in the wrong place.
    `monotonic`, `wall`: the two clocks, in seconds; tests put their own.

    Not thread-safe: it belongs to the thread that trains. Contexts of categories do not nest in each other.
    """

    def __init__(
        self,
        *,
        rank: int = 0,
        path: str | Path | None = None,
        synchronise: Callable[[], None] | None = None,
        monotonic: Callable[[], float] = time.perf_counter,
        wall: Callable[[], float] = time.time,
    ) -> None:
        self.rank = rank
        self.records: list[StepRecord] = []
        self._synchronise = synchronise
        self._now = monotonic
        self._wall = wall
        self._file: IO[str] | None = None
        if path is not None:
            self._file = Path(path).open("a", encoding="utf-8")  # noqa: SIM115 (close() is its end)
        self._spent = {"data_wait": 0.0, "checkpoint": 0.0, "restart": 0.0}
        self._notes: dict[str, Any] = {}
        self._tokens = 0
        self._in_step = False
        self._in_category: str | None = None
        #: Time of categories spent between steps, added to the step that follows (or to the last one, by `close`).
        self._between = dict(self._spent)

    @contextmanager
    def step(self, number: int, *, tokens: int = 0) -> Iterator[None]:
        """One step. A step that raises is not recorded. `tokens`: what this rank consumes in it."""
        if self._in_step:
            raise UsageError("StepClock.step", expected="one step at a time", found="a step inside a step")
        self._in_step = True
        self._spent = dict.fromkeys(self._spent, 0.0)
        self._notes = {}
        self._tokens = tokens
        started_wall, started = self._wall(), self._now()
        try:
            yield
            if self._synchronise is not None:
                self._synchronise()
            total = self._now() - started
        finally:
            self._in_step = False
        inside = sum(self._spent.values())
        spent = {name: self._spent[name] + self._between[name] for name in self._spent}
        self._between = dict.fromkeys(self._between, 0.0)
        record = StepRecord(
            rank=self.rank,
            step=number,
            started_s=started_wall,
            data_wait_s=spent["data_wait"],
            compute_s=max(0.0, total - inside),
            checkpoint_s=spent["checkpoint"],
            restart_s=spent["restart"],
            tokens=self._tokens,
            notes=self._notes,
        )
        self.records.append(record)
        if self._file is not None:
            self._file.write(record.to_line() + "\n")
            self._file.flush()

    def data_wait(self) -> Any:
        """`with clock.data_wait(): batch = next(loader)`."""
        return self._category("data_wait")

    def checkpoint(self) -> Any:
        """The part of a save in which training stands still.

        For an asynchronous save that is staging, and waiting for the save before.
        """
        return self._category("checkpoint")

    def restart(self) -> Any:
        """Before the first step: restoring model, optimizer and loader from storage."""
        return self._category("restart")

    def note(self, **values: Any) -> None:
        """Keep JSON values with the step: `clock.note(loss=float(loss))`."""
        if not self._in_step:
            raise UsageError("StepClock.note", expected="a call inside `with clock.step(...)`", found="no step")
        self._notes.update(values)

    @contextmanager
    def _category(self, name: str) -> Iterator[None]:
        if self._in_category is not None:
            raise UsageError(
                f"StepClock.{name}", expected="one category after the other", found=f"{name} in {self._in_category}"
            )
        self._in_category = name
        started = self._now()
        try:
            yield
        finally:
            self._in_category = None
            (self._spent if self._in_step else self._between)[name] += self._now() - started

    def close(self) -> None:
        """Writes what was spent after the last step as a record with the number of that step, and closes the file."""
        left = self._between
        if self.records and any(left.values()):
            record = StepRecord(
                rank=self.rank,
                step=self.records[-1].step,
                started_s=self._wall() - sum(left.values()),
                data_wait_s=left["data_wait"],
                compute_s=0.0,
                checkpoint_s=left["checkpoint"],
                restart_s=left["restart"],
                notes={"after_last_step": True},
            )
            self.records.append(record)
            if self._file is not None:
                self._file.write(record.to_line() + "\n")
        self._between = dict.fromkeys(left, 0.0)
        if self._file is not None:
            self._file.close()
            self._file = None

    def __enter__(self) -> StepClock:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()
