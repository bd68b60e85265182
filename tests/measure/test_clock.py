"""The step clock on a clock of our own: who spent what, exactly."""

from __future__ import annotations

from pathlib import Path

import pytest

from headrace.errors import UsageError
from headrace.measure import StepClock, StepRecord, read_records, write_records


class Hands:
    """A clock that stands still until it is moved."""

    def __init__(self) -> None:
        self.now = 0.0

    def __call__(self) -> float:
        return self.now

    def move(self, seconds: float) -> None:
        self.now += seconds


@pytest.fixture
def hands() -> Hands:
    return Hands()


def test_a_step_is_split_without_remainder(hands: Hands, tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    clock = StepClock(rank=3, path=path, monotonic=hands, wall=lambda: 1000.0 + hands.now)
    with clock, clock.step(7, tokens=64):
        with clock.data_wait():
            hands.move(0.25)
        hands.move(2.0)
        with clock.checkpoint():
            hands.move(0.5)
        with clock.data_wait():
            hands.move(0.25)
        clock.note(loss=1.5)
    (written,) = read_records(path)
    assert written == clock.records[0]
    assert written == StepRecord(
        rank=3,
        step=7,
        started_s=1000.0,
        data_wait_s=0.5,
        compute_s=2.0,
        checkpoint_s=0.5,
        tokens=64,
        notes={"loss": 1.5},
    )
    assert written.total_s == 3.0
    assert written.storage_s == 1.0


def test_time_between_steps_goes_to_the_next_and_at_the_end_to_the_last(hands: Hands, tmp_path: Path) -> None:
    with StepClock(path=tmp_path / "s", monotonic=hands, wall=hands) as clock:
        with clock.restart():
            hands.move(3.0)
        with clock.step(0):
            hands.move(1.0)
        with clock.step(1):
            hands.move(1.0)
        with clock.checkpoint():
            hands.move(4.0)
    first, second, after = read_records(tmp_path / "s")
    assert (first.restart_s, first.compute_s) == (3.0, 1.0)
    assert (second.restart_s, second.checkpoint_s) == (0.0, 0.0)
    assert (after.step, after.checkpoint_s, after.compute_s) == (1, 4.0, 0.0)
    assert after.notes == {"after_last_step": True}


def test_the_accelerator_is_waited_for_inside_the_step(hands: Hands) -> None:
    clock = StepClock(monotonic=hands, wall=hands, synchronise=lambda: hands.move(5.0))
    with clock.step(0):
        hands.move(1.0)
    assert clock.records[0].compute_s == 6.0


def test_a_step_that_fails_is_not_a_step(hands: Hands) -> None:
    clock = StepClock(monotonic=hands, wall=hands)
    with pytest.raises(RuntimeError), clock.step(0):
        raise RuntimeError
    assert clock.records == []
    with clock.step(1):
        hands.move(1.0)
    assert [r.step for r in clock.records] == [1]


def test_misuse_is_told(hands: Hands) -> None:
    clock = StepClock(monotonic=hands, wall=hands)
    with pytest.raises(UsageError, match="one step at a time"), clock.step(0), clock.step(1):
        pass
    with pytest.raises(UsageError, match="one category after the other"), clock.data_wait(), clock.checkpoint():
        pass
    with pytest.raises(UsageError, match="inside"):
        clock.note(a=1)


def test_a_torn_last_line_is_left_out_and_damage_is_told(tmp_path: Path) -> None:
    row = StepRecord(rank=0, step=0, started_s=0, data_wait_s=0, compute_s=1)
    path = tmp_path / "steps.jsonl"
    write_records(path, [row, row])
    whole = path.read_text()
    path.write_text(whole[:-20])
    assert list(read_records(path)) == [row]
    path.write_text("{nonsense}\n" + whole)
    with pytest.raises(UsageError, match="not a step record"):
        list(read_records(path))


def test_negative_times_are_refused() -> None:
    with pytest.raises(UsageError, match="data_wait_s"):
        StepRecord(rank=0, step=0, started_s=0, data_wait_s=-1, compute_s=0)
