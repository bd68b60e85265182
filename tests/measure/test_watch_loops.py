"""Real loops with one thing slow at a time: the watch names that one, and never storage where it was not.

The machine may be busy with something else: what is slow is slow by sleeping or by CPU time of its own, much more than
all else, and a lack of CPUs besides is no surprise.
"""

from __future__ import annotations

import os
import queue
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.accidents.relay import Relay
from headrace.dataset import RecordFeed, RecordFeedOptions, Records
from headrace.dataset.ingestion.records import ingest_records, open_records
from headrace.measure import Watch, differential, synthetic
from headrace.measure.watch.causes import STORAGE
from headrace.measure.watch.join import Attribution, attribute
from headrace.measure.watch.record import files_of
from headrace.measure.watch.verdict import path_text, sentence
from headrace.testing.serve import ServeProcess, serving
from headrace.volume import Volume
from tests.waiting import until

NQN = "nqn.2026-01.io.headrace:test-watch"
RECORD_BYTES = 64 << 10


def burn(cpu_s: float) -> None:
    """Of this thread, whatever else the machine does."""
    end = time.thread_time() + cpu_s
    while time.thread_time() < end:
        pass


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    folder = tmp_path_factory.mktemp("records") / "a"
    folder.mkdir()
    for number in range(64):
        (folder / f"{number:03}.bin").write_bytes(number.to_bytes(4, "little") * (RECORD_BYTES // 4))
    with serving(NQN, "mem:24MiB") as target:
        with Volume.create([target.uri()]) as volume, volume.session(run_id="test") as session:
            ingest_records(open_records(folder), session, "a")
        yield target


class Batches:
    """What `RecordLoader` is, without PyTorch."""

    def __init__(self, volume: Volume, decode: Callable[[Any], Any] | None = None, **options: Any) -> None:
        self.feed = RecordFeed(
            {"a": Records.open(volume, "a")},
            RecordFeedOptions(global_batch=4, prefetch=2, seed=1, epochs=1, **options), decode=decode,
        )  # fmt: skip
        self.devices = self.feed.devices

    @property
    def waited(self) -> tuple[float, float, int]:
        return self.feed.waited

    def __iter__(self) -> Iterator[Any]:
        while (batch := self.feed.acquire()) is not None:
            yield batch.items
        self.feed.close()


def watched(folder: Path, loop: Callable[[Watch], None]) -> tuple[Attribution, str]:
    with Watch(folder, device=None) as watch:
        loop(watch)
    found = attribute(files_of([folder]))
    assert found.total_gpu_s == pytest.approx(sum(step.wall_s for step in watch.steps), rel=1e-3)
    return found, sentence(found)


def storage_s(found: Attribution) -> float:
    return sum(found.spent_gpu_s[cause] for cause in STORAGE) + found.spent_gpu_s["blocked"]


def besides(found: Attribution, cause: str) -> float:
    """Lost to anything else. A machine that is busy with something else keeps any loop from its CPUs."""
    return found.lost_gpu_s - found.spent_gpu_s[cause] - found.spent_gpu_s["starved"]


def most(found: Attribution, cause: str) -> bool:
    """The sentence is about it, and not about a busy machine."""
    return found.spent_gpu_s[cause] > found.spent_gpu_s["starved"]


def test_slow_storage_is_told_with_path_and_target(target: ServeProcess, tmp_path: Path) -> None:
    with (
        Relay(target.port, bytes_per_s=2e6) as relay,
        Volume.open(target.uri().replace(f":{target.port}/", f":{relay.port}/")) as volume,
    ):
        batches = Batches(volume, decode=len)

        def loop(watch: Watch) -> None:
            for _ in watch.loader(batches):
                with watch.compute():
                    time.sleep(0.002)

        found, text = watched(tmp_path, loop)
    assert found.spent_gpu_s["fetch"] > 3 * besides(found, "fetch") and most(found, "fetch")
    assert text.startswith("Storage is your problem: waiting for reads cost")
    assert found.bytes == 64 * RECORD_BYTES
    slowest = found.paths[0]
    assert slowest["path"] == f"127.0.0.1:{relay.port}" and NQN in slowest["device"] and slowest["p99_s"] > 0.02
    assert path_text(slowest) in text
    # The thread that takes answers is seen, too.
    assert "io_run_queue_s" in found.ranks[0].windows


@pytest.mark.parametrize("threads", [0, 2])
def test_slow_decoding_is_no_storage(target: ServeProcess, tmp_path: Path, threads: int) -> None:
    def decode(record: Any) -> int:
        burn(0.008)
        return len(record)

    def loop(watch: Watch) -> None:
        for _ in watch.loader(Batches(volume, decode, threads=threads)):
            with watch.compute():
                time.sleep(0.001)

    with Volume.open(target.uri()) as volume:
        found, text = watched(tmp_path, loop)
    cpu = found.spent_gpu_s["preparation"] + found.spent_gpu_s["starved"]
    assert found.spent_gpu_s["preparation"] > 0.1 and cpu > 3 * storage_s(found)
    assert text.startswith("Storage is not your") and ("preparing data" in text or "CPU starvation" in text)


def in_this_thread(work: Callable[[float], None]) -> Iterator[int]:
    for number in range(20):
        work(0.02)
        yield number


def by_a_thread(work: Callable[[float], None]) -> Iterator[int]:
    """As loaders with workers are."""
    made: queue.Queue[int] = queue.Queue(2)

    def run() -> None:
        for number in range(20):
            work(0.02)
            made.put(number)

    thread = threading.Thread(target=run)
    thread.start()
    for _ in range(20):
        yield made.get()
    thread.join()


@pytest.mark.parametrize("loader", [in_this_thread, by_a_thread])
def test_of_any_loader_it_is_known_whether_it_worked(tmp_path: Path, loader: Callable[[Any], Iterator[int]]) -> None:
    def loop(watch: Watch, work: Callable[[float], None]) -> None:
        for _ in watch.loader(loader(work)):
            with watch.compute():
                time.sleep(0.001)

    worked, text = watched(tmp_path / "worked", lambda watch: loop(watch, burn))
    cpu = worked.spent_gpu_s["preparation"] + worked.spent_gpu_s["starved"]
    assert cpu > 2 * storage_s(worked) and text.startswith("Storage is not your")
    slept, text = watched(tmp_path / "slept", lambda watch: loop(watch, lambda seconds: time.sleep(3 * seconds)))
    assert slept.spent_gpu_s["blocked"] > 3 * besides(slept, "blocked")
    assert not most(slept, "blocked") or text.startswith("Your loader is your problem: it was blocked")


class Persistent:
    """Its thread lives on from epoch to epoch, as workers of loaders may. It works in the first."""

    def __init__(self) -> None:
        self.epochs: queue.Queue[int | None] = queue.Queue()
        self.made: queue.Queue[int] = queue.Queue()
        self.thread: threading.Thread | None = None

    def run(self) -> None:
        while (epoch := self.epochs.get()) is not None:
            (time.sleep if epoch else burn)(0.3)
            self.made.put(epoch)

    def __iter__(self) -> Iterator[int]:
        epoch = int(self.thread is not None)
        if self.thread is None:
            self.thread = threading.Thread(target=self.run)
            self.thread.start()
        self.epochs.put(epoch)
        yield self.made.get()


def test_what_a_worker_did_in_an_epoch_before_is_not_of_this_one(tmp_path: Path) -> None:
    loader = Persistent()
    with Watch(tmp_path, device=None) as watch:
        batches = watch.loader(loader)
        assert [*batches, *batches] == [0, 1]
    loader.epochs.put(None)
    assert loader.thread is not None
    loader.thread.join()
    assert watch.steps[0]["preparation"] + watch.steps[0]["starved"] > 3 * watch.steps[0]["blocked"]
    assert watch.steps[1]["blocked"] > 3 * watch.steps[1]["preparation"]


@pytest.mark.parametrize("cause", ["checkpoint", "copy", "collective", "other"])
def test_what_is_slow_besides_data_is_named(tmp_path: Path, cause: str) -> None:
    def loop(watch: Watch) -> None:
        for _ in watch.loader(range(12)):
            with watch.compute():
                time.sleep(0.002)
            if cause == "other":
                time.sleep(0.02)
                continue
            with getattr(watch, cause)():
                time.sleep(0.02)

    found, text = watched(tmp_path, loop)
    assert found.spent_gpu_s[cause] > 2 * besides(found, cause)
    if most(found, cause):
        begins = {"checkpoint": "Checkpoints that", "other": "What nobody marked is"}
        assert text.startswith(begins.get(cause, "Storage is not your")), text


def test_a_lack_of_cpus_is_no_storage(tmp_path: Path) -> None:
    """Twice as many busy processes as there are CPUs beside the loop."""
    code = f"import os\nwhile os.getppid() == {os.getpid()}:\n  for _ in range(100000): pass"
    cores = len(os.sched_getaffinity(0))
    busy = [subprocess.Popen([sys.executable, "-c", code]) for _ in range(2 * cores)]
    try:

        def loop(watch: Watch) -> None:
            started = time.monotonic()
            for _ in watch.loader(in_this_thread(burn)):
                with watch.compute():
                    burn(0.005)
                if watch.metrics().spent["starved"] > 0.3 or time.monotonic() - started > 20:
                    break

        found, text = watched(tmp_path, loop)
    finally:
        for process in busy:
            process.kill()
            process.wait()
    assert found.spent_gpu_s["starved"] > 3 * storage_s(found)
    assert text.startswith("Storage is not your") and "CPU starvation is, which" in text


def test_stalls_by_subtraction_and_what_other_storage_would_give(tmp_path: Path) -> None:
    class Reads:
        """Two batches ahead, from storage of a rate."""

        def __init__(self, rate: float, prepare_s: float) -> None:
            self.rate, self.prepare_s = rate, prepare_s

        def __iter__(self) -> Iterator[int]:
            made: queue.Queue[int] = queue.Queue(2)

            def run() -> None:
                for number in range(20):
                    time.sleep(1000 / self.rate)
                    made.put(number)

            thread = threading.Thread(target=run)
            thread.start()
            for _ in range(20):
                batch = made.get()
                time.sleep(self.prepare_s)
                yield batch
            thread.join()

    def loop(watch: Watch, batches: Any) -> None:
        for _ in watch.loader(batches, batch_bytes=1000):
            with watch.compute():
                time.sleep(0.01)

    loaders = {
        "synthetic": lambda: synthetic(None, 20),
        "cached": lambda: Reads(1e9, 0.01),
        "storage": lambda: Reads(1e4, 0.01),
    }
    stalls = differential(loop, loaders, folder=tmp_path, device=None)
    assert stalls.step_bytes == 1000
    # 10 ms of computing, 10 ms of preparation, 100 ms of reading behind both.
    assert stalls.preparation_s == pytest.approx(0.01, rel=0.8) and 0.05 < stalls.fetch_s < 0.5
    assert stalls.sentence.startswith("Storage is your problem: fetch stall")
    assert {path.name for path in tmp_path.iterdir()} == {"synthetic", "cached", "storage"}
    until(lambda: threading.active_count() < 50)
