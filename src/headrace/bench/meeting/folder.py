"""A meeting by files, in a folder that every node sees: for nodes that reach no port of each other.

    headrace-meet-JOB-run.json              rank 0: this run's name, new each time
    headrace-meet-JOB-RUN-ROUND-RANK.json   what a rank brings; round 0: who it is
    headrace-meet-JOB-RUN-ROUND-all.json    rank 0's answer, or why the meeting is over
    headrace-meet-JOB-RUN-beat-RANK.json    its last sign of life (`beats`)

Each file but the last is written beside its place and renamed. JOB is what all ranks of a job know (`Seat.token`):
others may meet in the same folder. What an earlier run of a job left behind misleads nobody: rank 0 takes it away, and
a rank believes no first word of rank 0 that does not name the word that it chose by chance for this run. Clocks are
those of the nodes.
"""

from __future__ import annotations

import contextlib
import json
import os
import secrets
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from headrace.bench.meeting import beats
from headrace.bench.meeting.beats import Beats, Heard
from headrace.bench.meeting.messages import ALL_BYTES, RESULT_BYTES, Garbage, decode
from headrace.bench.meeting.seat import Seat
from headrace.bench.meeting.together import GRACE_S, Meeting, Value, printable, reason
from headrace.errors import MeetingFailed, UsageError

_LOOK_S = 0.02
_LOOK_MOST_S = 0.25


class FolderMeeting(Meeting):
    #: A file is seen by others when their node looks again: NFS keeps what it knows for up to a minute.
    ahead_s = 2.0
    silent_s = 90.0

    def __init__(self, seat: Seat, folder: str | os.PathLike[str]) -> None:
        super().__init__(seat)
        self._folder = Path(folder)
        if not self._folder.is_dir():
            raise UsageError("--meet", expected="a folder that every rank sees", found=str(folder))
        self._prefix = f"headrace-meet-{seat.token}-"
        self._run = ""
        self._word = secrets.token_hex(8)
        self._round = 0
        self._over = False
        self.clock_error_s = None
        #: Of rank 0: who has come, with the word of each, and so reads the last words.
        self._here: dict[int, Any] = {}
        self._beats: Beats | None = None
        self._heard: dict[int, Heard] = {}
        self._looked_s = 0.0

    def join(self, within_s: float) -> None:
        self._join(within_s)
        self._beats = Beats(self._beat)

    def _join(self, within_s: float) -> None:
        deadline_s = time.monotonic() + within_s
        me = {"host": self.seat.host, "word": self._word}
        named = self._folder / f"{self._prefix}run.json"
        if self.seat.rank == 0:
            for left in self._folder.glob(f"{self._prefix}*"):
                with contextlib.suppress(OSError):
                    left.unlink()
            self._run = secrets.token_hex(8)
            self._write(named, {"run": self._run})
            came = self._collect(me, deadline_s, "did not come", within_s)
            self.hosts = [printable(one.get("host", ""), 80) for one in came]
            words: list[Any] = [one.get("word") for one in came]
            self._write(self._answer(0), {"answer": self.hosts, "words": words, "clock": _wall_s()})
            return
        while True:
            run = self._read(named).get("run")
            if isinstance(run, str) and run.isalnum() and run != self._run:
                self._run = run
                self._write(self._value(self.seat.rank), {"value": me})
            said = self._read(self._answer(0)) if self._run else {}
            roster = said.get("words")
            mine = isinstance(roster, list) and self._word in roster
            if mine and "failed" in said:
                raise MeetingFailed(printable(said["failed"], 1000))
            if mine:
                hosts, clock = said.get("answer"), said.get("clock")
                if isinstance(hosts, list) and isinstance(clock, int | float):
                    self.hosts = [printable(host, 80) for host in hosts]
                    self.clock_s = _wall_s() - clock
                    return
            if time.monotonic() > deadline_s + (GRACE_S if self._run else 0.0):
                raise MeetingFailed(
                    f"rank 0 was not there within {within_s:g} s", where=str(self._folder),
                    next_step="start every rank, with the same folder for --meet",
                )  # fmt: skip
            time.sleep(_LOOK_S)

    def gather(self, value: Value, answer: Callable[[list[Value]], Value], *, within_s: float) -> Value:
        self._round += 1
        deadline_s = time.monotonic() + within_s
        if self.seat.rank == 0:
            values = self._collect(value, deadline_s, "brought nothing", within_s)
            # Whoever brought something has read the answer before.
            self._answer(self._round - 1).unlink(missing_ok=True)
            found = answer(values)
            self._write(self._answer(self._round), {"answer": found})
            return found
        mine = self._value(self.seat.rank)
        self._write(mine, {"value": value})
        pause_s = _LOOK_S
        self._listen([0])
        while True:
            self._look([0])
            said = self._read(self._answer(self._round))
            # Why a meeting is over stands under the round in which it ended, which may be one that others are in.
            said = said or self._read(self._failure())
            if "answer" in said:
                mine.unlink(missing_ok=True)
                return said["answer"]
            if "failed" in said:
                raise MeetingFailed(printable(said["failed"], 1000))
            if time.monotonic() > deadline_s + GRACE_S:
                raise MeetingFailed(f"rank 0 said nothing within {within_s:g} s", where=str(self._folder))
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_MOST_S)

    def leave(self, error: BaseException | None = None) -> None:
        if self._over:
            return
        self._over = True
        if self._beats is not None:
            self._beats.stop()
        with contextlib.suppress(OSError, MeetingFailed):
            if self.seat.rank == 0:
                if error is not None:
                    text = str(error) if isinstance(error, MeetingFailed) else f"rank 0 failed: {reason(error)}"
                    self._write(self._failure(), {"failed": text})
                    if self._round == 0:
                        self._write(self._answer(0), {"failed": text, "words": [*self._here.values()]})
                self._clear()
            elif self._run:
                failed = error is not None and not isinstance(error, MeetingFailed)
                if failed and error is not None:
                    self._write(self._failure(self.seat.rank), {"failed": reason(error)})
                self._write(self._bye(self.seat.rank), {})

    # ---- files ----

    def _value(self, rank: int) -> Path:
        return self._file(f"{self._round}-{rank}")

    def _answer(self, number: int) -> Path:
        return self._file(f"{number}-all")

    def _failure(self, rank: int = 0) -> Path:
        return self._file(f"failed-{rank}")

    def _bye(self, rank: int) -> Path:
        return self._file(f"bye-{rank}")

    def _file(self, name: str) -> Path:
        return self._folder / f"{self._prefix}{self._run}-{name}.json"

    def _collect(self, own: Value, deadline_s: float, what: str, within_s: float) -> list[Any]:
        """Every rank's value of this round, by rank."""
        values: dict[int, Any] = {0: own}
        pause_s = _LOOK_S
        self._listen(range(1, self.seat.world))
        while True:
            for rank in range(1, self.seat.world):
                if rank in values:
                    continue
                said = self._read(self._value(rank))
                if "value" in said and (self._round or isinstance(said["value"], dict)):
                    values[rank] = said["value"]
                    if not self._round:
                        self._here[rank] = said["value"].get("word")
                elif self._round and "failed" in (failed := self._read(self._failure(rank))):
                    raise MeetingFailed(f"{self.names([rank])} failed: {printable(failed['failed'])}")
            away = [rank for rank in range(self.seat.world) if rank not in values]
            if not away:
                return [values[rank] for rank in range(self.seat.world)]
            self._look(away)
            if time.monotonic() > deadline_s:
                raise MeetingFailed(
                    f"{self.names(away)} of {self.seat.world} {what} within {within_s:g} s", where=str(self._folder),
                    next_step="start every rank, with the same folder for --meet" if not self._round else None,
                )  # fmt: skip
            time.sleep(pause_s)
            pause_s = min(2 * pause_s, _LOOK_MOST_S)

    # ---- signs of life ----

    def _beat(self, still_s: float) -> None:
        """On the thread of beats. Written over, not renamed: NFS looks again at a file that it knows when it is opened,
        at a name only now and then."""
        path = self._file(f"beat-{self.seat.rank}")
        path.write_bytes(json.dumps(beats.message(still_s, self.clock_s)).encode())

    def _listen(self, ranks: Sequence[int]) -> None:
        for rank in ranks:
            self._heard.setdefault(rank, Heard()).wait_from_now()
        self._looked_s = time.monotonic()

    def _look(self, ranks: Sequence[int]) -> None:
        """MeetingFailed where one of them hangs. Nobody beats before all are there."""
        if self._beats is None or time.monotonic() - self._looked_s < beats.BEAT_S:
            return
        self._looked_s = time.monotonic()
        for rank in ranks:
            said = self._read(self._file(f"beat-{rank}"))
            if said:
                self._heard[rank].beat(said, self.clock_s if self.seat.rank else 0.0)
            self._heard[rank].check(self.names([rank]), self.silent_s)

    def _write(self, path: Path, message: dict[str, Any]) -> None:
        data = json.dumps(message).encode()
        if len(data) > min(RESULT_BYTES, ALL_BYTES // self.seat.world):
            raise MeetingFailed(f"what {self.seat.named()} found is too much to send: {len(data)} bytes")
        beside = path.with_name(f"{path.name}.{self._word}")
        try:
            beside.write_bytes(data)
            beside.replace(path)
        except OSError as error:
            raise MeetingFailed("cannot write", where=str(path), found=error.strerror or str(error)) from None

    def _read(self, path: Path) -> dict[str, Any]:
        """{} where it is not there (yet), or is no message: it may be half seen."""
        try:
            with path.open("rb") as file:
                data = file.read(RESULT_BYTES + 1)
            return decode(data) if len(data) <= RESULT_BYTES else {}
        except (OSError, Garbage):
            return {}

    def _clear(self) -> None:
        """Rank 0 takes the files away when the others have read them, or had time to."""
        deadline_s = time.monotonic() + GRACE_S
        others = [self._bye(rank) for rank in self._here]
        while self._run and not all(one.exists() for one in others) and time.monotonic() < deadline_s:
            time.sleep(_LOOK_S)
        for path in self._folder.glob(f"{self._prefix}{self._run}-*"):
            path.unlink(missing_ok=True)
        mine = self._folder / f"{self._prefix}run.json"
        if self._read(mine).get("run") == self._run:
            mine.unlink(missing_ok=True)


def _wall_s() -> float:
    """What a clock on the wall is ahead of this node's monotonic one: nodes have the former in common, more or less."""
    return time.time() - time.monotonic()
