"""The watch: where each second of a step goes, by clocks that are moved by hand."""

from __future__ import annotations

import json
import os
import random
import signal
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import nullcontext
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from headrace.errors import UsageError
from headrace.measure import Watch
from headrace.measure.watch import activity, notes
from headrace.measure.watch import watch as watch_module
from headrace.measure.watch.activity import SmActivity
from headrace.measure.watch.causes import WAIT
from headrace.measure.watch.host import node_traffic, throttled
from headrace.measure.watch.join import attribute
from headrace.measure.watch.replay import BEGIN, DELAY, END, Note, Replay
from headrace.measure.watch.wait import HelperShares, split
from tests.measure.watches import Gpu, Hands, batches
from tests.waiting import until


def test_every_second_of_a_step_is_in_one_part(tmp_path: Path) -> None:
    clock = Hands()
    with Watch(tmp_path, rank=3, world=8, **clock.options) as watch:
        with watch.restart():
            clock.pass_s(5)
        for number in watch.loader(batches(clock, 1, 2, 3), batch_bytes=lambda batch: 100 + batch):
            with watch.copy():
                clock.pass_s(0.25)
            with watch.compute():
                clock.pass_s(1)
                with watch.collective():
                    clock.pass_s(0.5)
                clock.pass_s(1)
            clock.pass_s(0.125)
            if number == 1:
                with watch.checkpoint():
                    clock.pass_s(4)
        # In no step.
        clock.pass_s(50)
        with watch.checkpoint():
            clock.pass_s(7)
    common = {"copy": 0.25, "compute": 2.0, "collective": 0.5, "other": 0.125}
    assert [step.spent for step in watch.steps] == [
        {"restart": 5.0, "blocked": 1.0, **common},
        {"blocked": 2.0, **common, "checkpoint": 4.0},
        {"blocked": 3.0, **common},
        {"checkpoint": 7.0},
    ]
    assert [step.wall_s for step in watch.steps] == [8.875, 8.875, 5.875, 7.0]
    assert [step.bytes for step in watch.steps] == [100, 101, 102, 0]
    assert watch.steps[1].started_s - watch.steps[0].started_s == 8.875
    lines = [json.loads(line) for line in (tmp_path / "rank-00003.jsonl").read_text().splitlines()]
    assert lines[0]["rank"] == 3 and lines[0]["world"] == 8 and lines[0]["clock"] == "host"
    assert [line["step"] for line in lines[1:]] == [0, 1, 2, 3] and lines[2]["checkpoint_s"] == 4.0
    metrics = watch.metrics()
    assert (
        metrics.steps == 4
        and metrics.bytes == 303
        and sum(metrics.spent.values()) == sum(s.wall_s for s in watch.steps)
    )


def test_metrics_take_for_computing_what_show_does() -> None:
    """Until something is marked all that is in no part; and what was told once is not taken back."""
    clock = Hands()
    with Watch(**clock.options) as watch:
        for number in watch.loader(batches(clock, 1, 1, 1, 1)):
            clock.pass_s(2)
            assert watch.metrics().under_way_s == 1 + 2
            if number == 2:
                before = watch.metrics()
                assert not before.compute_marked
                assert (before.spent["compute"], before.spent["other"], before.spent["blocked"]) == (4, 0, 2)
                with watch.compute():
                    clock.pass_s(3)
            if number == 3:
                told = watch.metrics()
                assert told.compute_marked and (told.spent["compute"], told.spent["other"]) == (4 + 3, 2)
    # Steps say what was measured.
    assert [step["other"] for step in watch.steps] == [2, 2, 2, 2] and sum(watch.metrics().spent.values()) == 15
    assert watch.metrics().under_way_s == 0


def test_accumulated_batches_are_one_step_and_a_loop_that_is_left_ends_one() -> None:
    clock = Hands()
    with Watch(**clock.options) as watch:
        loader = watch.loader(batches(clock, *[1] * 7), batches_per_step=3)
        for _ in loader:
            with watch.compute():
                clock.pass_s(2)
        # The seventh is alone.
        assert [step.wall_s for step in watch.steps] == [9, 9, 3]
        for _ in watch.loader(batches(clock, 1, 1, 1)):
            break
        clock.pass_s(100)
        assert [step.wall_s for step in watch.steps][3:] == [1]
        for _ in watch.loader([]):
            pass
        again = watch.loader(batches(clock, 1, 1))
        assert [next(again), next(again), next(again, None)] == [0, 1, None]
    assert [step.step for step in watch.steps] == list(range(6))


def test_a_job_that_starts_again_says_where_it_goes_on(tmp_path: Path) -> None:
    clock = Hands()

    def start(first: int, resumes: bool) -> None:
        with Watch(tmp_path, **clock.options) as watch:
            with watch.restart():
                clock.pass_s(1)
            if resumes:
                watch.resume(first)
            for _ in watch.loader(batches(clock, *[1] * 6)):
                with pytest.raises(UsageError, match="resume"):
                    watch.resume(100)
            assert [step.step for step in watch.steps] == list(range(first, first + 6))
            assert [step.counted for step in watch.steps] == [not resumes, *[False] * 5]

    path = [tmp_path / "rank-00000.jsonl"]
    start(0, resumes=False)
    start(4, resumes=True)
    found = attribute(path)
    assert (found.repeated_steps, found.repeats_unknown) == (2, False)
    start(0, resumes=False)
    found = attribute(path)
    assert (found.repeated_steps, found.repeats_unknown) == (2, True)


def test_others_see_the_step_that_is_under_way_and_those_that_were() -> None:
    """A thread that asks while the one that trains stands still."""
    clock, other = Hands(), ThreadPoolExecutor(1)
    # Who is there before a loader begins is none of its helpers.
    other.submit(threading.get_ident).result()
    seen: list[Any] = []

    def ask() -> None:
        assert watch.under_way() == watch._notes.peek()[0].under_way(clock.now), "the short way is the long one"
        seen.append(other.submit(lambda: (watch.under_way(), watch.recent(2))).result())

    def slowly() -> Iterator[int]:
        for number in range(3):
            clock.pass_s(1)
            ask()
            yield number

    with Watch(**clock.options) as watch:
        ask()
        with watch.restart():
            ask()
        for _ in watch.loader(slowly()):
            clock.pass_s(0.25)
            with watch.compute():
                clock.pass_s(2)
                with watch.collective():
                    clock.pass_s(4)
                clock.pass_s(8)
                ask()
    ask()
    other.shutdown()
    nothing, nothing_yet, *steps, end = seen
    assert nothing == nothing_yet == (None, []) and end[0] is None
    waiting, computing = steps[2], steps[3]
    assert (waiting[0].step, waiting[0].begun, waiting[0].cause, waiting[0].since) == (1, 115.25, "wait", 115.25)
    assert waiting[0].spent == {"wait": 1} and [step.step for step in waiting[1]] == [0]
    found = computing[0]
    assert (found.step, found.begun, found.cause, found.since, found.now) == (1, 115.25, "compute", 122.5, 130.5)
    assert found.spent == {"blocked": 1, "other": 0.25, "compute": 10, "collective": 4}
    assert [(step.step, step.begun, step.ended, step.wall_s) for step in end[1]] == [
        (1, 115.25, 130.5, 15.25),
        (2, 130.5, 145.75, 15.25),
    ]
    assert end[1][0].spent == found.spent


def test_a_glance_at_the_open_step_is_what_a_look_at_all_notes_says() -> None:
    """In loops of all shapes, worked out now and then."""
    made, clock = random.Random(7), Hands()
    seen: set[str] = set()
    with Watch(**clock.options) as watch:
        for _ in range(600):
            choice = made.choice(("step", "end", "drop", "compute", "nested", "fold", "full"))
            if choice == "step":
                watch.begin_step()
            elif choice in ("end", "drop"):
                watch.end_step(drop=choice == "drop")
            elif choice == "fold":
                clock.pass_s(2)
            elif choice == "full":
                watch._settle()
            with watch.checkpoint() if choice == "nested" else nullcontext(), watch.compute():
                clock.pass_s(made.choice((0.125, 0.25)))
                found = watch.under_way()
                assert found == watch._notes.peek()[0].under_way(clock.now)
                if found is not None:
                    assert sum(found.spent.values()) == found.now - found.begun
                seen.add(choice if found is not None else "none")
    assert len(seen) > 4
    assert all(sum(step.spent.values()) == step.wall_s == step.ended - step.begun for step in watch.steps)


def test_a_loop_that_was_left_long_ago_ends_no_step_of_another_one() -> None:
    clock = Hands()
    with Watch(**clock.options) as watch:
        left: Any = iter(watch.loader(batches(clock, 1, 1)))
        next(left)
        for _ in watch.loader(batches(clock, 1, 1)):
            with watch.compute():
                clock.pass_s(2)
            # The collector comes by.
            left = None
            with watch.compute():
                clock.pass_s(3)
    assert [step.wall_s for step in watch.steps] == [1, 6, 6]


def test_the_first_step_is_counted_where_nobody_has_said_which_one_it_is() -> None:
    clock = Hands()

    def starts(*numbers: int | None) -> list[bool]:
        with Watch(**clock.options) as watch:
            for number in numbers:
                watch.begin_step(number)
        return [step.counted for step in watch.steps]

    assert starts(None, 7) == starts(None, None) == [True, False]
    assert starts(7, None) == [False, False]
    with Watch(**clock.options) as watch:
        # None was left of the first.
        assert list(watch.loader([])) == [] and list(watch.loader([1])) == [1]
    assert [step.counted for step in watch.steps] == [True]


def test_a_loader_stays_what_it_was() -> None:
    class Mine(list[int]):
        epoch = 0

        def set_epoch(self, epoch: int) -> None:
            self.epoch = epoch

    mine, clock = Mine([1, 2]), Hands()
    with Watch(**clock.options) as watch:
        loader = watch.loader(mine)
        loader.set_epoch(4)
        assert mine.epoch == loader.epoch == 4 and len(loader) == 2
        assert list(loader) == [1, 2] == list(loader)
        with pytest.raises(AttributeError):
            _ = loader.nothing
    assert len(watch.steps) == 4


def test_a_loader_that_tells_is_believed() -> None:
    clock = Hands()

    class Telling:
        waited = (0.0, 0.0, 0)
        devices: tuple[()] = ()

        def __iter__(self) -> Iterator[int]:
            for number, (read, decoded) in enumerate([(1, 0), (0, 2), (1, 3)]):
                clock.pass_s(read + decoded)
                fetch, wait, size = self.waited
                self.waited = (fetch + read, wait + read + decoded, size + 1000)
                yield number

    class Epochs:
        loader = Telling()

        def __iter__(self) -> Iterator[int]:
            return iter(self.loader)

    with Watch(**clock.options) as watch:
        for _ in watch.loader(Epochs()):
            pass
    assert [step.spent for step in watch.steps] == [
        {"fetch": 1.0},
        {"preparation": 2.0},
        {"fetch": 1.0, "preparation": 3.0},
    ]
    assert [step.bytes for step in watch.steps] == [1000] * 3


def test_who_has_a_thread_reads_ahead_also_when_that_has_ended(tmp_path: Path) -> None:
    clock = Hands()

    def made(helped: bool) -> Iterator[int]:
        if helped:
            seen, done = threading.Event(), threading.Event()
            thread = threading.Thread(target=lambda: (seen.set(), done.wait()))
            thread.start()
            seen.wait()
        yield 0
        if helped:
            done.set()
            thread.join()
        yield 1

    def ahead(batches: Any) -> Any:
        with Watch(**clock.options) as watch:
            for _ in watch.loader(batches):
                clock.pass_s(0.1)
        window = watch.steps[-1].window
        assert window is not None
        return window["reads_ahead"], window["reads_apart"]

    assert ahead(made(helped=True)) == (True, False) and ahead(made(helped=False)) == (False, False)

    class Telling(list[int]):
        waited = (0.0, 0.0, 0)

    assert ahead(Telling([1, 2])) == (True, True)


def test_a_killed_rank_has_written_all_but_the_last_second(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(watch_module, "FLUSH_S", 0.01)
    path = tmp_path / "rank-00000.jsonl"
    if not (child := os.fork()):
        try:
            with Watch(tmp_path, device=None) as watch:
                while True:
                    watch.begin_step()
                    time.sleep(0.001)
        finally:
            os._exit(1)
    try:
        until(lambda: path.exists() and len(path.read_bytes().splitlines()) > 20)
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    before = attribute([path]).steps
    with Watch(tmp_path, device=None) as watch:
        watch.resume(before - 5)
        for _ in range(10):
            watch.begin_step()
    found = attribute([path])
    assert before >= 20 and (found.starts, found.repeated_steps, found.steps) == (2, 5, before + 10)


def test_ones_own_loader_says_what_it_does() -> None:
    clock = Hands()
    with Watch(**clock.options) as watch:

        def mine() -> Iterator[int]:
            for number in range(2):
                with watch.fetch():
                    clock.pass_s(3)
                clock.pass_s(0.5)
                with watch.preparation():
                    clock.pass_s(2)
                yield number

        for _ in watch.loader(mine()):
            with watch.compute():
                clock.pass_s(1)
    assert [step.spent for step in watch.steps] == [{"fetch": 3, "preparation": 2, "blocked": 0.5, "compute": 1}] * 2


@pytest.mark.parametrize(
    ("waits", "work", "spent"),
    [
        # Behind six seconds of work a wait of two is hidden; of eight, two are seen.
        ([2, 2, 2], 6, {"compute": 6}),
        ([8, 8, 8], 6, {"compute": 6, "blocked": 2}),
        ([8, 8, 8], 0.5, {"compute": 0.5, "blocked": 7.5}),
    ],
)
def test_by_the_clock_of_a_device_only_idleness_is_lost(
    waits: list[float], work: float, spent: dict[str, float]
) -> None:
    clock = Hands()
    gpu = Gpu(clock)
    with Watch(monotonic=clock, wall=clock.wall, device=gpu) as watch:
        for _ in watch.loader(batches(clock, *waits)):
            with watch.compute():
                gpu.work(work)
    # The first has nothing to hide behind; the last ends with its work.
    assert watch.steps[1].spent == pytest.approx(spent)
    assert watch.steps[1].wall_s == pytest.approx(sum(spent.values()))
    assert watch.steps[0]["blocked"] == waits[0]
    assert watch.header.clock == "fake"


def test_what_a_device_does_is_timed_there() -> None:
    clock = Hands()
    gpu = Gpu(clock)
    with Watch(monotonic=clock, wall=clock.wall, device=gpu) as watch:
        for _ in watch.loader(batches(clock, 0, 0, 0)):
            with watch.copy():
                gpu.work(1)
            with watch.compute():
                gpu.work(3)
                with watch.collective():
                    gpu.work(2)
                gpu.work(4)
            with watch.checkpoint():
                gpu.synchronise()
                clock.pass_s(5)
    # That the save waited for the work is no loss.
    assert watch.steps[1].spent == pytest.approx({"copy": 1, "compute": 7, "collective": 2, "checkpoint": 5})


def test_a_wait_is_taken_apart_by_what_was_at_work() -> None:
    plain: dict[str, Any] = {"own_cpu_s": 0.0, "own_queue_s": 0.0, "told": None, "shares": None}
    assert split(1.0, **plain) == {"blocked": 1.0}
    assert split(1.0, **plain, slept=False) == {"starved": 1.0}
    assert split(1.0, **{**plain, "own_cpu_s": 0.75}) == {"preparation": 0.75, "blocked": 0.25}
    assert split(1.0, **{**plain, "own_cpu_s": 5.0, "own_queue_s": 0.25}) == {"preparation": 0.75, "starved": 0.25}
    told = split(1.0, **{**plain, "told": (0.5, 0.75, 9), "own_cpu_s": 0.25})
    assert told == {"fetch": 0.5, "preparation": 0.5}
    # One is done, one was at work for half of the wait and without a CPU for a quarter, one came meanwhile.
    shares = HelperShares.of(
        {"a": (7.0, 3.0), "b": (2.0, 1.0)}, {"a": (7.0, 3.0), "b": (4.0, 2.0), "c": (9.0, 9.0)}, wall_s=4.0
    )  # fmt: skip
    assert split(1.0, **{**plain, "shares": shares}) == {"preparation": 0.5, "starved": 0.25, "blocked": 0.25}
    told = split(1.0, **{**plain, "shares": shares, "told": (0.25, 1.0, 9)})
    assert told == {"fetch": 0.25, "preparation": 0.5, "starved": 0.25}
    # The kernel has counted more than the clock.
    shares = HelperShares.of({"a": (0.0, 0.0)}, {"a": (1.5, 0.5)}, wall_s=1.0)
    assert split(1.0, **{**plain, "shares": shares}) == {"preparation": 0.75, "starved": 0.25}


def test_delay_between_two_askings_is_divided_by_time_off_the_cpu() -> None:
    at = cpu_s = delay_s = 0.0
    found: list[Note] = []

    def note(what: str | None, more: Any, wall_s: float = 0.0, used_s: float | None = None) -> None:
        """Behind so much time; `used_s` None: CPU time is not read."""
        nonlocal at, cpu_s
        at, cpu_s = at + wall_s, cpu_s + (used_s or 0.0)
        found.append((what, at, None if used_s is None else cpu_s, more))

    def asked(queued_s: float) -> None:
        nonlocal delay_s
        delay_s += queued_s
        note(DELAY, delay_s, 0, 0)

    # In no part: 4 s off the CPU, all of them delay.
    note(BEGIN, (0, 1000.0, True, 0, None), 5)
    note("compute", None, 0, 1)
    note(None, None)
    asked(4)
    # Off its CPU for 2 s in computing and copying and for 6 in a wait; 4 of these 8 it could have run.
    note("compute", None)
    note(None, None, 2)
    note("copy", None)
    note(None, None, 1)
    note(WAIT, (None, 0), 0, 1)
    note(None, (None, 1, None, 0), 7, 1)
    asked(4)
    note(BEGIN, (1, 1010.0, False, 0, None))
    note("compute", None)
    note(None, None, 3, 1)
    note(END, (7, None), 1, 1)
    seen = Replay(0.0, 0.0, 0.0, marked=False)
    early = seen.copy().run(found)
    asked(1.5)
    first, second = seen.run(found)
    assert first.spent == pytest.approx(
        {"compute": 4 / 3, "copy": 2 / 3, "starved": 4, "preparation": 1, "blocked": 3, "other": 0}
    )
    assert (first.begun, first.ended, first.counted, first.started_s) == (5, 15, True, 1000.0)
    assert second.spent == {"compute": 1.5, "starved": 1.5, "other": 1} and second.bytes == 7
    # What has not been asked yet is no delay.
    assert early[0].spent == first.spent and early[1].spent == {"compute": 3, "other": 1}


def test_what_short_waits_of_short_steps_did_is_known(tmp_path: Path) -> None:
    """A thread that prepares in waits, and sleeps while the device computes."""
    clock, cpu = Hands(), [0.0]
    with Watch(**clock.options) as watch:
        watch._notes.cpu_s = lambda: cpu[0]

        def works() -> Iterator[int]:
            for number in range(50):
                clock.pass_s(0.00005)
                cpu[0] += 0.00005
                yield number

        for _ in watch.loader(works()):
            with watch.compute():
                clock.pass_s(0.0001)
    assert sum(step["preparation"] for step in list(watch.steps)[1:]) == pytest.approx(49 * 0.00005)
    assert sum(step["blocked"] for step in list(watch.steps)[1:]) == pytest.approx(0, abs=1e-9)


def test_a_step_of_very_many_parts_is_worked_out_meanwhile(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(notes, "MOST_NOTES", 5)
    clock = Hands()
    with Watch(**clock.options) as watch:
        watch.begin_step()
        for number in range(20):
            with watch.compute():
                clock.pass_s(1)
                with watch.collective():
                    clock.pass_s(2)
                assert len(watch._notes.notes) < 9
            found = watch.under_way()
            assert found is not None and found.spent == {"compute": number + 1, "collective": 2 * number + 2}
    assert [step.spent for step in watch.steps] == [{"compute": 20, "collective": 40}]


def test_counters_are_read_as_the_kernel_writes_them() -> None:
    assert throttled("usage_usec 5\nnr_periods 3\nnr_throttled 2\nthrottled_usec 1500000\n") == (1.5, 2)
    assert throttled("nr_periods 3\nnr_throttled 2\nthrottled_time 1500000000\n") == (1.5, 2)
    assert throttled("usage_usec 5\n") == throttled("") == throttled("nr_throttled x\n") == (None, None)
    rows = "    lo: 9 1 0 0 0 0 0 0 9 1 0 0 0 0 0 0\n  eth0: 70 1 0 0 0 0 0 0 30 1 0 0 0 0 0 0\n"
    text = f"Inter-| Receive\n face |bytes\n{rows}"
    assert node_traffic(text) == (70, 30)


class _Nvml:
    """As much of nvidia-ml-py as is asked for: a GPU that is busy for a part of the time."""

    NVMLError = type("NVMLError", (Exception,), {})
    NVML_GPM_METRICS_GET_VERSION = 1

    def __init__(self, supported: bool, percent: float) -> None:
        self.supported, self.percent = supported, percent
        self.freed = 0

    def nvmlInit(self) -> None: ...

    def nvmlDeviceGetHandleByUUID(self, uuid: str) -> str:
        if uuid != "GPU-1":
            raise self.NVMLError("Not Found")
        return uuid

    def nvmlGpmQueryDeviceSupport(self, device: str) -> Any:
        return SimpleNamespace(isSupportedDevice=self.supported)

    def nvmlGpmSampleAlloc(self) -> dict[str, int]:
        return {"taken": 0}

    def nvmlGpmSampleGet(self, device: str, sample: dict[str, int]) -> None:
        sample["taken"] += 1

    def c_nvmlGpmMetricsGet_t(self) -> Any:
        return SimpleNamespace(metrics=[SimpleNamespace(metricId=0, nvmlReturn=0, value=0.0)])

    def nvmlGpmMetricsGet(self, asked: Any) -> None:
        assert asked.version == 1 and asked.numMetrics == 1 and asked.sample1 is not asked.sample2
        assert asked.sample1["taken"] and asked.sample2["taken"] and asked.metrics[0].metricId == 2
        asked.metrics[0].value = self.percent

    def nvmlGpmSampleFree(self, sample: Any) -> None:
        self.freed += 1


def test_the_activity_of_a_gpu_or_why_it_is_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    def module(found: Any) -> None:
        monkeypatch.setattr(activity.importlib, "import_module", lambda name: found)

    nvml = _Nvml(True, 37.5)
    module(nvml)
    busy = SmActivity("GPU-1")
    assert busy.why_not == "" and busy.since() == busy.since() == 0.375
    busy.close()
    assert nvml.freed == 2 and busy.since() is None
    assert "Not Found" in SmActivity("GPU-2").why_not
    module(_Nvml(False, 0))
    assert "no GPM counters" in SmActivity("GPU-1").why_not
    assert SmActivity(None).why_not == "there is no GPU"
    monkeypatch.undo()
    if not __import__("importlib.util").util.find_spec("pynvml"):
        assert "nvidia-ml-py is not installed" in SmActivity("GPU-1").why_not
