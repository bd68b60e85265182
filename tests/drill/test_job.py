"""A job of the drill, without storage: what it writes, and how it is stopped."""

from __future__ import annotations

from dataclasses import replace
from types import SimpleNamespace
from typing import Any, cast

import numpy as np
import pytest

from headrace.drill import job, scenarios
from headrace.drill.node import Flood
from headrace.drill.report import DrillFailed, Finding
from headrace.errors import DeviceError, HeadraceError
from tests.waiting import until

#: More than bytes have values.
WRITES = 600


class Keeping:
    """A volume that keeps what each write begins with."""

    def __init__(self) -> None:
        self.seen: list[bytes] = []

    def write_grant(self, grant: object, buffer: np.ndarray[Any, np.dtype[np.uint8]]) -> None:
        if len(self.seen) == WRITES:
            raise DeviceError("enough")
        self.seen.append(buffer[4096:4104].tobytes())


def test_no_write_of_a_flood_is_taken_for_another_one() -> None:
    volume = Keeping()
    flood = Flood(cast(Any, volume), cast(Any, SimpleNamespace(length_bytes=8195)))
    until(lambda: flood.error is not None, "it ends")
    flood.end()
    assert flood.writes == WRITES == len(set(volume.seen))


def test_who_cannot_be_stopped_says_nothing_of_the_storage(monkeypatch: pytest.MonkeyPatch) -> None:
    def stop(pid: int) -> None:
        raise HeadraceError("process 1 does not stop")

    monkeypatch.setattr(job, "stop", stop)
    one = job.Job.__new__(job.Job)
    one.nodes = [cast(Any, SimpleNamespace(child=SimpleNamespace(pid=1)))]
    with pytest.raises(DrillFailed, match="does not stop"):
        one.freeze()


def state(error: str | None, said: str = "") -> job.State:
    return job.State(
        writes=0, error=error, said=said, receipt=None, busy=False, written_bytes=0, conflicts=0, fenced=0
    )  # fmt: skip


@pytest.mark.parametrize("then", ["SessionLost", "CommandFailed", None])
def test_a_write_that_fails_otherwise_says_nothing_yet(then: str | None) -> None:
    """As Linux answers one that comes while it shuts its host out: the next one is what counts."""
    first = [state("SessionLost", "Reservation Conflict"), state("CommandFailed", "Internal Error")]
    again: list[int] = []

    def writes_again(rank: int) -> job.State:
        again.append(rank)
        return state(then)

    one = SimpleNamespace(states=lambda: first, goes_on=lambda before: [*first], writes_again=writes_again)
    finding = Finding(scenario="takeover")
    states = scenarios._refused(cast(Any, one), finding)
    assert again == [1] and [each.error for each in states] == ["SessionLost", then]
    (note,) = finding.notes
    assert "rank 1 failed with Internal Error" in note and ("refused as it must be" in note) == (then == "SessionLost")


@pytest.mark.parametrize(
    ("fence", "alone", "known"), [("until-restart", 4096, True), ("until-restart", 0, False), ("none", 4096, False)]
)
def test_late_writes_that_who_followed_knew_of_are_told_as_such(fence: str, alone: int, known: bool) -> None:
    finding = Finding(scenario="cut", moved_bytes=4096, left_alone_bytes=alone)
    scenarios._moved(cast(Any, SimpleNamespace(fence=fence)), finding)
    assert finding.verdict == "not trusted" and ("Who followed knew that" in finding.problems[0]) == known


class Slow:
    """A rank that writes for much longer than anybody waits for an answer: what it says, a look at a time."""

    def __init__(self, clock: list[float], written: list[int]) -> None:
        self._clock = clock
        self._written = written

    def state(self) -> job.State:
        self._clock[0] += job.ANSWER_S / 2
        written = self._written.pop(0) if len(self._written) > 1 else self._written[0]
        busy = len(self._written) > 1
        return replace(state(None), busy=busy, written_bytes=written)


def test_large_shards_take_as_long_as_slow_storage_does(monkeypatch: pytest.MonkeyPatch) -> None:
    clock = [0.0]
    monkeypatch.setattr(job, "time", SimpleNamespace(monotonic=lambda: clock[0], sleep=lambda seconds: None))
    one = job.Job.__new__(job.Job)
    one.nodes = [cast(Any, Slow(clock, [*range(0, 100 * job.SOME_BYTES, job.SOME_BYTES)]))]
    one._idle()
    assert clock[0] > 10 * job.ANSWER_S
    # Its session beats, and nothing else gets there.
    one.nodes.append(cast(Any, Slow(clock, [*range(0, 100 * 4096, 4096)])))
    with pytest.raises(DrillFailed, match="rank 1 of the job does not go on"):
        one._idle()
