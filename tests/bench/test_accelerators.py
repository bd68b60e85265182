"""AU by formula, the search, and threads that come to what the formula says."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.bench.accelerators import (
    WORKLOADS,
    Found,
    Trial,
    Workload,
    emulate,
    search,
    utilisation,
    workload_of,
)
from headrace.bench.accelerators.arithmetic import EXCLUDED_STEPS
from headrace.bench.accelerators.emulator import FEWEST_STEPS
from headrace.bench.accelerators.samples import Samples, WholeFiles
from headrace.bench.places.protocol import Item
from headrace.errors import DeviceError, UsageError
from tests.waiting import PATIENCE_S

SMALL = Workload(name="small", batch=4, sample_bytes=1000, compute_s=0.02, ahead=2)


# ---- the arithmetic ----


def test_au_of_steps_that_wait_for_storage() -> None:
    # 0.3 s of computing in steps of 0.4 s; the first, of 5 s, does not count.
    assert utilisation([5.0, 5.4, 5.8, 6.2], 0.3) == pytest.approx(0.75)
    assert utilisation([5.0, 5.3, 5.6], 0.3) == pytest.approx(1.0)
    with pytest.raises(UsageError):
        utilisation([1.0], 0.3)


@given(
    loads=st.lists(st.floats(0, 2), min_size=3, max_size=30), compute=st.floats(0.01, 2), first=st.floats(0, 100)
)  # fmt: skip
def test_au_is_what_dlio_computes_where_sleeps_are_exact(loads: list[float], compute: float, first: float) -> None:
    """statscounter.py: sum(compute_i, counted) / (t_end - t_start - sum(proc_i, not counted)), one rank."""
    ends, now = [], 0.0
    for load in [first, *loads]:
        now += load + compute
        ends.append(now)
    dlio = len(loads) * compute / (now - (first + compute))
    assert utilisation(ends, compute) == pytest.approx(dlio, rel=1e-6)


def test_demands_of_mlperf_s_workloads() -> None:
    """GB/s an accelerator, as the rules' sizes and times give it (v2.0 and v3.0)."""
    demands = {name: one.demand_bytes_per_s / 1e9 for name, one in WORKLOADS.items()}
    assert demands == pytest.approx(
        {
            "unet3d-a100": 1.61, "unet3d-h100": 3.18, "unet3d-b200": 6.33, "resnet50-a100": 0.105,
            "resnet50-h100": 0.205, "cosmoflow-a100": 0.51, "cosmoflow-h100": 0.81, "retinanet-b200": 0.163,
            "dlrm-b200": 7.0, "flux-b200": 0.077,
        },
        rel=0.01,
    )  # fmt: skip


def test_a_workload_is_changed_and_says_so() -> None:
    mine = workload_of("UNET3D-h100", compute_s=1.0, batch=None)
    assert (mine.batch, mine.compute_s, mine.name) == (7, 1.0, "unet3d-h100, changed")
    for wrong in ("unet", ""):
        with pytest.raises(UsageError, match="cosmoflow-h100"):
            workload_of(wrong)
    for values in ({"batch": 0}, {"compute_s": float("nan")}, {"au": 1.5}, {"sample_bytes": 1 << 40}):
        with pytest.raises(UsageError):
            workload_of("unet3d-h100", **values)


# ---- the search ----


@dataclass
class Fixed:
    au: float
    feeds: float | None = None


@settings(max_examples=100)
@given(limit=st.integers(0, 300), most=st.integers(1, 256), start=st.integers(1, 256), guess=st.floats(0, 400))
def test_the_search_finds_the_limit(limit: int, most: int, start: int, guess: float) -> None:
    tried: list[int] = []

    def measure(count: int) -> Fixed:
        tried.append(count)
        return Fixed(0.95 if count <= limit else 0.5, guess)

    found = search(measure, threshold=0.9, most=most, start=min(start, most))
    assert found.largest == min(limit, most)
    assert found.complete
    assert found.fails_at == (limit + 1 if limit < most else None)
    assert len(tried) == len(set(tried)) <= 2 * most.bit_length() + 2


@settings(max_examples=40)
@given(aus=st.lists(st.floats(0, 1), min_size=64, max_size=64), most=st.integers(1, 64))
def test_of_any_storage_the_answer_passed_and_its_neighbour_failed(aus: list[float], most: int) -> None:
    found = search(lambda count: Fixed(aus[count - 1]), threshold=0.9, most=most)
    assert found.complete
    assert not found.largest or aus[found.largest - 1] >= 0.9
    assert found.largest == most or aus[found.largest] < 0.9


def test_near_the_threshold_three_trials_count() -> None:
    trials = iter([Fixed(0.91), Fixed(0.89), Fixed(0.893)])
    found = search(lambda _: next(trials), threshold=0.9, most=1)
    assert (found.largest, found.fails_at, found.tried) == (0, 1, ((1, 0.893),))
    assert found.sentence == "not one accelerator above 90% AU: 1 had 89.3%"
    # One that is far off does not decide it.
    trials = iter([Fixed(0.91), Fixed(0.5), Fixed(0.905)])
    assert search(lambda _: next(trials), threshold=0.9, most=1).tried == ((1, 0.905),)


def test_so_many_as_were_asked_for_and_no_search() -> None:
    found = Found(largest=0, fails_at=4, threshold=0.9, tried=((4, 0.5),), most=4, only=True)
    assert found.complete and found.sentence == "4 accelerators below 90% AU (50.0%); fewer were not asked for"


def test_when_the_time_is_up_the_bracket_is_told() -> None:
    asked: list[int] = []
    found = search(
        lambda count: asked.append(count) or Fixed(0.99 if count < 6 else 0.2),  # type: ignore[func-returns-value]
        threshold=0.9, most=64, time_is_up=lambda: len(asked) >= 4,
    )  # fmt: skip
    assert (found.largest, found.fails_at, found.complete) == (4, 8, False)
    assert "at least 4 accelerators" in found.sentence and "8 had 20.0%" in found.sentence


# ---- the samples ----


@settings(max_examples=25)
@given(
    lengths=st.lists(st.integers(0, 9_000), min_size=1, max_size=6), sample=st.integers(1, 300),
    batch=st.integers(1, 20), per_file=st.integers(1, 40), accelerators=st.integers(1, 5), seed=st.integers(0, 99),
)  # fmt: skip
def test_accelerators_read_everything_once_before_anything_twice(
    lengths: list[int], sample: int, batch: int, per_file: int, accelerators: int, seed: int
) -> None:
    begins = np.cumsum([0, *lengths])
    seen = np.zeros(int(begins[-1]), np.int64)
    for index in range(accelerators):
        try:
            samples = Samples(
                lengths, batch=batch, sample_bytes=sample, samples_per_file=per_file, accelerator=index,
                accelerators=accelerators, seed=seed,
            )  # fmt: skip
        except UsageError:
            assert sum(lengths) // sample < 2 * accelerators
            return
        for _ in range(samples.before_again):
            moved = 0
            for piece in samples.next(7, 100):
                assert 0 < len(piece.item) <= 7 and piece.length.max() <= 100
                for item, offset, length in zip(*(column.tolist() for column in piece), strict=True):
                    assert offset >= 0 and offset + length <= lengths[item]
                    seen[begins[item] + offset : begins[item] + offset + length] += 1
                    moved += length
            assert moved == batch * sample
    assert seen.max(initial=0) <= 1


def test_files_of_one_name_are_a_sample_and_each_is_read_once() -> None:
    items = [Item(f"{number:02}.{kind}", number + 1) for number in range(7) for kind in ("jpg", "json", "txt")]
    seen: list[int] = []
    for index in range(2):
        samples = WholeFiles(items, batch=1, accelerator=index, accelerators=2, seed=3)
        for _ in range(samples.before_again):
            pieces = list(samples.next(1, 1))
            assert [piece.offset.tolist() for piece in pieces] == [[0]] * 3
            assert len({items[int(piece.item[0])].name[:2] for piece in pieces}) == 1
            assert all(piece.length[0] == items[int(piece.item[0])].length_bytes for piece in pieces)
            seen += [int(piece.item[0]) for piece in pieces]
    assert sorted(seen) == [*range(len(items))] and seen != sorted(seen)
    with pytest.raises(UsageError, match="8 samples"):
        WholeFiles(items, batch=1, accelerator=0, accelerators=8, seed=0)
    with pytest.raises(UsageError, match="too long to be read whole"):
        WholeFiles([Item("a", 2 << 30)], batch=1, accelerator=0, accelerators=1, seed=0)


# ---- the threads ----


class FixedRate:
    """Loaders of one storage that gives so many bytes a second to all together, on a schedule that knows no delay."""

    def __init__(self, bytes_per_s: float, batch_bytes: int) -> None:
        self._seconds = batch_bytes / bytes_per_s
        self._batch_bytes = batch_bytes
        self._lock = threading.Lock()
        self._free_s = 0.0
        self.open = 0
        self.batches = 0

    def __call__(self, index: int) -> FixedRate:
        self.open += 1
        return self

    def batch(self) -> int:
        with self._lock:
            now_s = time.perf_counter()
            # What is late because the machine was busy is made good: up to a few batches.
            self._free_s = max(self._free_s, now_s - 3 * self._seconds) + self._seconds
            due_s = self._free_s
            self.batches += 1
        time.sleep(max(0.0, due_s - time.perf_counter()))
        return self._batch_bytes

    def stop(self) -> None:
        return

    def close(self) -> None:
        self.open -= 1


@pytest.mark.parametrize("accelerators, share", [(1, 0.5), (3, 0.25), (2, 4.0)])
def test_threads_come_to_the_au_of_the_formula(accelerators: int, share: float) -> None:
    rate = share * accelerators * SMALL.demand_bytes_per_s
    # A step lasts as long as the longer one of computing and reading.
    formula = min(1.0, share)
    for _ in range(4):
        storage = FixedRate(rate, SMALL.batch_bytes)
        trial = emulate(SMALL, storage, accelerators, seconds=0.8)
        assert storage.open == 0
        assert len(trial.each) == accelerators and not trial.cut
        # Never more than storage allows, but for batches that lay ready; less where the machine was busy.
        assert trial.au <= formula + 0.2
        if share < 1 and abs(trial.au - formula) < 0.08 and abs(trial.rate / rate - 1) < 0.3:
            return
        # What a busy machine makes of a sleep is not what storage is: it never lets them wait.
        if share > 1 and min(trial.each) > 0.95 and trial.au > 0.3:
            return
    pytest.fail(f"{trial.au:.2f} in the last of four trials, where {formula:.2f} is due")


def test_a_loader_reads_no_further_ahead_than_it_may() -> None:
    storage = FixedRate(1e12, SMALL.batch_bytes)
    trial = emulate(SMALL, storage, 2, seconds=0.01)
    assert trial.steps == FEWEST_STEPS - EXCLUDED_STEPS
    # Each: its steps, the batches ahead, and one that was on its way.
    assert storage.batches <= 2 * (FEWEST_STEPS + SMALL.ahead + 1)


class Broken:
    closed = 0

    def __init__(self, do: Callable[[], int]) -> None:
        self._do = do

    def batch(self) -> int:
        return self._do()

    def stop(self) -> None:
        return

    def close(self) -> None:
        Broken.closed += 1


def test_an_error_of_one_loader_ends_the_trial() -> None:
    def fail() -> int:
        raise DeviceError("gone", where="there")

    before = threading.active_count()
    Broken.closed = 0
    with pytest.raises(DeviceError, match="gone at there"):
        emulate(SMALL, lambda i: Broken(fail if i else lambda: 1), 3, seconds=30)
    assert Broken.closed == 3
    assert threading.active_count() == before


def test_storage_that_gives_nothing_is_given_up(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("headrace.bench.accelerators.emulator._LEAST_PATIENCE_S", 0.5)
    released = threading.Event()

    class Standing(Broken):
        def stop(self) -> None:
            released.set()

    batches = 0

    def stand() -> int:
        nonlocal batches
        batches += 1
        released.wait(0.4 if batches == 1 else PATIENCE_S if batches == 5 else 0.0)
        return 1000

    trial: Trial = emulate(SMALL, lambda _: Standing(stand), 1, seconds=0.1)
    # Four steps: quick ones after a first one that was slow are not enough.
    assert trial.cut and trial.au == pytest.approx(4 * 0.02 / trial.seconds) and trial.seconds >= 0.5
    assert trial.bytes == 4000
