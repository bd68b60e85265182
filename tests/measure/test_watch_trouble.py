"""What others do to a watch: words that cannot be meant, files that fail, forks, listeners, loaders that misbehave."""

from __future__ import annotations

import gc
import json
import os
import sys
import threading
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from types import FrameType, SimpleNamespace
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.measure import Watch
from headrace.measure.watch import source as source_module
from headrace.measure.watch.join import attribute
from headrace.measure.watch.record import WatchStep, files_of
from tests.measure.watches import Hands, batches


def test_what_cannot_be_meant(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    clock = Hands()
    watch = Watch(**clock.options)
    watch.begin_step(7)
    with pytest.raises(UsageError, match="steps count up: expected 8 or more, found 7"):
        watch.begin_step(7)
    with watch.compute(), pytest.raises(UsageError, match="inside one of its parts"):
        watch.begin_step()
    caught: list[BaseException] = []

    def elsewhere() -> None:
        try:
            with watch.preparation():
                pass
        except UsageError as error:
            caught.append(error)

    thread = threading.Thread(target=elsewhere)
    thread.start()
    thread.join()
    assert "belongs to the thread that trains" in str(caught[0])
    with pytest.raises(UsageError, match="batches_per_step"):
        watch.loader([], batches_per_step=0)
    watch.close()
    watch.close()
    with pytest.raises(UsageError, match="closed"):
        watch.begin_step()
    with watch.compute():
        assert watch.under_way() is None
    with pytest.raises(UsageError, match="device"):
        Watch(device="cuda")
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot write here"):
        Watch(tmp_path / "file", **clock.options)
    monkeypatch.setenv("RANK", "x")
    with pytest.raises(UsageError, match="rank is no whole number at RANK"):
        Watch(**clock.options)


def test_no_trouble_of_the_file_is_trainings(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    clock = Hands()
    torn = tmp_path / "rank-00000.jsonl"
    torn.write_text('{"torn": ')
    with Watch(tmp_path, **clock.options) as watch:
        for number in watch.loader(batches(clock, *[1] * 6)):
            if number == 2:
                watch._lines._file, real = os.open("/dev/full", os.O_WRONLY), watch._lines._file  # type: ignore[union-attr]
                os.close(real)
    assert len(watch.steps) == 6
    assert [record.getMessage() for record in caplog.records] == [
        f"headrace: the watch writes no more to {torn}: No space left on device"
    ]
    assert torn.read_text().splitlines()[0] == '{"torn": ' and torn.read_text().splitlines()[1].startswith('{"headrace')


def test_a_fork_writes_nothing_twice(tmp_path: Path) -> None:
    clock = Hands()
    with Watch(tmp_path, **clock.options) as watch:
        watch.begin_step()
        clock.pass_s(0.5)
        watch.begin_step()
        if not (child := os.fork()):
            watch._lines.close()  # type: ignore[union-attr]
            os._exit(0)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    lines = (tmp_path / "rank-00000.jsonl").read_text().splitlines()
    assert [json.loads(line).get("step") for line in lines] == [None, 0, 1]


# ---- what others do to it --------------------------------------------------------------------------------------------


def _written(folder: Path) -> list[int]:
    lines = [json.loads(line) for line in (folder / "rank-00000.jsonl").read_text().splitlines()]
    return [line["step"] for line in lines if "step" in line]


def test_a_listener_that_fails_or_closes_has_no_step_told_twice(tmp_path: Path) -> None:
    clock = Hands()
    told: list[int] = []

    def fails_once(step: WatchStep) -> None:
        told.append(step.step)
        if told == [0, 1]:
            raise ValueError("of the listener")

    watch = Watch(tmp_path / "fails", listeners=[fails_once], **clock.options)
    for _ in range(4):
        watch.begin_step()
        clock.pass_s(0.1)
    with pytest.raises(ValueError, match="of the listener"):
        watch.close()
    watch.close()
    assert told == _written(tmp_path / "fails") == [step.step for step in watch.steps] == [0, 1, 2, 3]

    closes = Watch(tmp_path / "closes", listeners=[lambda step: closes.close()], **clock.options)
    for _ in range(4):
        closes.begin_step()
        clock.pass_s(0.4)
    with pytest.raises(UsageError, match="closed"):
        closes.begin_step()
    assert _written(tmp_path / "closes") == [0, 1, 2, 3]


def test_a_loader_that_hands_out_inside_its_own_part_is_told_so() -> None:
    clock = Hands()
    watch = Watch(**clock.options)

    def loader() -> Iterator[int]:
        for number in range(4):
            with watch.fetch():
                clock.pass_s(1)
                yield number

    running = iter(watch.loader(loader(), batches_per_step=2))
    with pytest.raises(UsageError, match="before `yield`, found fetch"):
        next(running)
    watch.close()
    del running
    assert watch.steps[0].spent == {"fetch": pytest.approx(1)}


def test_what_goes_on_behind_a_watch_or_in_every_epoch_is_not_kept() -> None:
    clock = Hands()
    with Watch(**clock.options) as watch:
        for _ in range(5):
            for _ in watch.loader([1, 2]):
                clock.pass_s(1)
        assert len(watch._sources) <= 1
    for _ in range(3):
        watch.gradients_ready()
        watch.gradients_exchanged()
        watch.recast("checkpoint", 1)
    assert not watch._notes.notes


def test_an_interrupt_in_the_middle_of_a_part_keeps_no_step_from_coming() -> None:
    clock = Hands()
    interrupts = [False]

    def now() -> float:
        if interrupts.pop():
            raise KeyboardInterrupt
        interrupts.append(False)
        return clock()

    with Watch(monotonic=now, wall=clock.wall, device=None) as watch:
        part = watch.compute()
        for number in range(3):
            watch.begin_step(number)
            with part:
                clock.pass_s(1)
            interrupts.append(True)
            # Ctrl-C in a notebook, which goes on.
            with pytest.raises(KeyboardInterrupt):
                part.__enter__()
            interrupts.append(False)
    assert [step.spent for step in watch.steps] == [{"compute": 1}] * 3


def test_an_interrupt_anywhere_in_it_keeps_no_step_from_coming_and_brings_none_twice(tmp_path: Path) -> None:
    """At each line of what ends a wait, and of what works out notes: the loop goes on, and its file can be read."""
    names = {"end", "_end", "looked", "fold", "_finish", "add", "flush"}

    def interrupted(at: int) -> bool:
        clock, left, folder = Hands(), [at], tmp_path / str(at)

        def trace(frame: FrameType, event: str, _: object) -> Any:
            code = frame.f_code
            if "measure/watch" not in code.co_filename or code.co_name not in names:
                return None
            if event == "line":
                left[0] -= 1
                if left[0] == 0:
                    raise KeyboardInterrupt
            return trace

        with Watch(folder, **clock.options) as watch:
            for number in range(3):
                before = sys.gettrace()
                sys.settrace(trace if number == 0 else before)
                try:
                    with suppress(KeyboardInterrupt):
                        for _ in watch.loader(range(3)):
                            with watch.compute():
                                clock.pass_s(1)
                finally:
                    sys.settrace(before)
        found = [step.step for step in watch.steps]
        assert found == sorted(set(found)) and len(found) >= 6, at
        assert attribute(files_of([folder])).steps >= 6, at
        return left[0] <= 0

    count = 1
    while interrupted(count):
        count += 1
    assert count > 50


def test_gradients_of_a_backward_that_is_in_no_part_are_not_waited_for_in_a_later_one() -> None:
    clock = Hands()
    with Watch(**clock.options) as watch:
        watch.begin_step()
        watch.gradients_ready()
        clock.pass_s(3)
        watch.gradients_exchanged()
        with watch.compute():
            # The optimizer's.
            clock.pass_s(4)
            assert watch.under_way() == watch._notes.peek()[0].under_way(clock.now)
        assert watch.under_way() == watch._notes.peek()[0].under_way(clock.now)
    assert watch.steps[0].spent == {"other": pytest.approx(3), "compute": pytest.approx(4)}


def test_steps_of_a_watch_that_nobody_closes_are_written(tmp_path: Path) -> None:
    clock = Hands()
    watch = Watch(tmp_path, **clock.options)
    for _ in watch.loader([1, 2, 3]):
        clock.pass_s(0.1)
    assert not _written(tmp_path)
    del watch
    gc.collect()
    assert _written(tmp_path) == [0, 1, 2]


def test_counters_of_the_time_between_two_steps_are_told() -> None:
    clock = Hands()
    with Watch(**clock.options) as watch:
        for seconds in (2, 7, 3):
            watch.begin_step()
            clock.pass_s(seconds)
            watch.end_step()
            clock.pass_s(5)
    assert [step.window and step.window["window_s"] for step in watch.steps] == [2, 12, 8]


def test_a_stall_is_not_taken_for_what_helpers_did_before_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """They decode all the time, and are looked at every second; then storage stands for five."""
    now, used = [100.0], [0.0]
    monkeypatch.setattr(source_module, "time", SimpleNamespace(perf_counter=lambda: now[0], thread_time=lambda: 0.001))
    source = source_module.Source([])
    source.helpers = SimpleNamespace(read=lambda: {"one": (used[0], 0.0)})  # type: ignore[assignment]
    monkeypatch.setattr(source_module, "_LONG", 1)

    def works(seconds: float, share: float) -> None:
        now[0], used[0] = now[0] + seconds, used[0] + share * seconds

    source.look()
    works(0.1, 1)
    seen = source.looked()
    assert seen is not None and seen.on_cpu == pytest.approx(1)
    works(0.5, 1)
    works(0.1, 1)
    assert source.shares_in(0.1) is seen
    works(5, 0)
    stalled = source.shares_in(5)
    assert stalled is not None and stalled.on_cpu == pytest.approx(0.6 / 5.6)
    works(1, 1)
    assert source.shares_in(0.01) is seen
