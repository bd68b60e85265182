"""Slices, workers, and what becomes of an ingest that is interrupted or killed: the bytes are always the same."""

from __future__ import annotations

import contextlib
import json
import os
import signal
import struct
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import psutil
import pytest

from headrace.dataset import (
    CorpusOptions,
    IngestOptions,
    IngestProgress,
    WorkOptions,
    ingest,
    ingest_records,
    open_corpus,
)
from headrace.dataset.ingestion import pool as pools
from headrace.dataset.ingestion import progress, slices
from headrace.dataset.ingestion import run as ingest_run
from headrace.dataset.ingestion.hire import Local, LocalHire
from headrace.dataset.ingestion.output import Output
from headrace.dataset.ingestion.pool import MOST_DEATHS, Pool
from headrace.dataset.ingestion.slices import Done, Order, Slice, Task, slice_bytes
from headrace.dataset.ingestion.work import Work
from headrace.errors import DatasetError, DeviceTimeout, UsageError
from headrace.testing.serve import serving
from headrace.units import MIB
from headrace.volume import Session, Volume
from tests.dataset.corpora import memory_volume, texts, write_folder, write_jsonl, write_parquet
from tests.dataset.test_ingest import objects

#: Some twenty of them in the corpus.
SLICE_BYTES = 8_000


def write_corpus(folder: Path) -> Path:
    """Files of every kind: small ones, and some that are cut into many slices."""
    folder.mkdir()
    for index, text in enumerate(texts(30)):
        (folder / f"a{index:02}.txt").write_text(text)
    write_jsonl(folder / "b.jsonl", [*texts(80, 2), "", *texts(10, 3)])
    write_parquet(folder / "c.parquet", texts(60, 4))
    (folder / "d.txt").write_text("\n".join(texts(20, 5)))
    write_jsonl(folder / "e.jsonl", ["one line that is longer than slices are " * 500, *texts(3, 6)])
    return folder


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_corpus(tmp_path_factory.mktemp("corpus") / "texts")


@pytest.fixture(scope="module")
def tokenizer(corpus: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
    with memory_volume() as volume, volume.session(run_id="test") as session:
        ingest(corpus, session, "a", IngestOptions(vocab_size=300))
        path.write_bytes(volume.read("a.tokenizer.json"))
    return path


@pytest.fixture(scope="module")
def plainly(corpus: Path, tokenizer: Path) -> dict[str, bytes]:
    """The dataset in one slice, read by this process."""
    with memory_volume() as volume, volume.session(run_id="test") as session:
        report = ingest(corpus, session, "a", IngestOptions(tokenizer=tokenizer))
        assert (report.slices, report.workers) == (1, 1)
        return objects(volume, "a")


def options(tokenizer: Path, workers: int, **more: object) -> IngestOptions:
    return IngestOptions(tokenizer=tokenizer, workers=workers, slice_bytes=SLICE_BYTES, **more)  # type: ignore[arg-type]


@pytest.fixture
def image(tmp_path: Path) -> str:
    uri = f"file:{tmp_path}/a.img"
    Volume.create([f"{uri}?create=64MiB"]).close()
    return uri


def only_the_dataset(volume: Volume) -> bool:
    return [info.name for info in volume.list()] == ["a.bin", "a.idx", "a.json", "a.tokenizer.json"]


def _check_the_same(where: list[str], corpus: Path, tokenizer: Path, plainly: dict[str, bytes], workers: int) -> None:
    with Volume.open(where, write=True) as volume, volume.session(run_id="test") as session:
        report = ingest(corpus, session, "a", options(tokenizer, workers))
        assert report.slices >= 15 and report.resumed == 0
        assert (report.workers, report.direct) == (workers, True)
        assert objects(volume, "a") == plainly
        assert only_the_dataset(volume)
        # And nothing waits to be freed, as it would behind a writer of unknown fate.
        assert volume.info().quarantined_bytes == 0


def test_the_same_bytes_out_of_many_slices(
    corpus: Path, tokenizer: Path, plainly: dict[str, bytes], image: str
) -> None:
    _check_the_same([image], corpus, tokenizer, plainly, 1)


def test_the_same_bytes_from_workers_over_the_fabric(corpus: Path, tokenizer: Path, plainly: dict[str, bytes]) -> None:
    """Each of them writes as the host that the session is, which the target lets in and nobody else."""
    with serving("nqn.2026-01.io.headrace:test-ingest", "mem:16MiB", "mem:16MiB") as target:
        where = [target.uri(nsid=1), target.uri(nsid=2)]
        Volume.create(where).close()
        _check_the_same(where, corpus, tokenizer, plainly, 2)


def test_workers_without_a_way_to_the_volume(corpus: Path, tokenizer: Path, plainly: dict[str, bytes]) -> None:
    with memory_volume() as volume, volume.session(run_id="test") as session:
        report = ingest(corpus, session, "a", options(tokenizer, 2, part_bytes=4096))
        assert not report.direct
        assert objects(volume, "a") == plainly


def test_a_tokenizer_is_trained_once(corpus: Path) -> None:
    settings = IngestOptions(vocab_size=300, workers=1, slice_bytes=SLICE_BYTES)
    phases: list[str] = []
    with memory_volume() as volume, volume.session(run_id="test") as session:
        ingest(corpus, session, "b", settings)
        with pytest.raises(KeyboardInterrupt):
            ingest(corpus, session, "a", settings, progress=when_kept(session, interrupt))
        ingest(corpus, session, "a", settings, progress=lambda now: phases.append(now.phase))
        assert set(phases) == {"tokens", "commit"}
        assert objects(volume, "a") == objects(volume, "b")


# ---- limits ------------------------------------------------------------------------------------------------------


def test_a_limit_ends_at_the_same_byte(corpus: Path, tokenizer: Path) -> None:
    whole = open_corpus(corpus).size_bytes
    for limit in (1, whole // 3, whole * 2):
        limited = open_corpus(corpus, CorpusOptions(limit_bytes=limit))
        found = []
        for size in (None, SLICE_BYTES):
            with memory_volume() as volume, volume.session(run_id="test") as session:
                ingest(limited, session, "a", IngestOptions(tokenizer=tokenizer, workers=1, slice_bytes=size))
                found.append(objects(volume, "a"))
                assert only_the_dataset(volume)
        assert found[0] == found[1], limit


def test_slices_finished_in_any_order_give_the_limited_text() -> None:
    """As many tasks under way at a time as there may be: the last one first."""
    sizes = [10, 0, 7, 10, 3]
    for limit in range(1, 32):
        order = Order([Slice(index, ()) for index in range(len(sizes))], limit, most_parts=9)
        given: dict[int, int] = {}
        while not order.complete:
            tasks = []
            while (task := order.take()) is not None:
                tasks.append(task)
            assert tasks
            for task in reversed(tasks):
                room = sizes[task.index] if task.limit_bytes is None else min(sizes[task.index], task.limit_bytes)
                limited = sizes[task.index] > 0 and sizes[task.index] >= (task.limit_bytes or 1 << 60)
                given[task.index] = room
                order.finish(task.index, _done(room, task.limit_bytes, limited))
        assert sum(given[index] for index in range(order.settled)) == min(limit, 30)


def test_a_slice_of_an_earlier_run_that_went_too_far_is_read_again_once() -> None:
    order = Order([Slice(0, ()), Slice(1, ()), Slice(2, ())], 12, most_parts=9)
    # Another run has read both whole. Of the second only 7 bytes belong to the dataset.
    order.finish(0, _done(5, None, False))
    order.finish(1, _done(10, None, False))
    tasks = [order.take(), order.take(), order.take()]
    assert [task and (task.index, task.limit_bytes) for task in tasks] == [(1, 7), (2, 7), None]


def _done(text_bytes: int, limit: int | None, limited: bool) -> Done:
    return Done(parts=(), side_bytes=0, limit_bytes=limit, limited=limited, text_bytes=text_bytes)


def test_slices_are_bounded_in_number() -> None:
    for total in (0, 1, MIB, 1 << 40, 1 << 50):
        size = slice_bytes(total)
        assert total / size <= 12_000
    assert slice_bytes(1 << 30) == 16 * MIB


@pytest.mark.parametrize("kind", ["text", "records"])
def test_many_small_files_are_bounded_in_number(
    tmp_path: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch, kind: str
) -> None:
    monkeypatch.setattr(slices, "LEAST_BYTES", 1)
    monkeypatch.setattr(slices, "MOST_COUNT", 3)
    folder = write_folder(tmp_path / "texts", "abcdefghij")
    with memory_volume() as volume, volume.session(run_id="test") as session:
        if kind == "text":
            count = ingest(folder, session, "a", IngestOptions(tokenizer=tokenizer, workers=1)).slices
        else:
            count = ingest_records(folder, session, "a", WorkOptions(workers=1)).slices
        assert 1 < count <= 3


def test_a_dataset_of_too_many_parts_is_refused(corpus: Path) -> None:
    order = Order([Slice(0, ())], None, most_parts=2)
    with pytest.raises(DatasetError, match="too many parts"):
        order.finish(0, Done(parts=(1, 1, 1), side_bytes=0, limit_bytes=None, limited=False, text_bytes=3))


def test_parts_grow_where_there_would_be_too_many(
    corpus: Path, tokenizer: Path, plainly: dict[str, bytes], monkeypatch: pytest.MonkeyPatch
) -> None:
    with memory_volume() as volume, volume.session(run_id="test") as session:
        count = len(slices.slices_of(open_corpus(corpus).sources, SLICE_BYTES))
        monkeypatch.setattr(ingest_run, "MAX_SLICES", count + 3)
        assert ingest(corpus, session, "a", options(tokenizer, 1, part_bytes=4096)).slices == count
        assert objects(volume, "a") == plainly


def test_too_many_parts_are_seen_early() -> None:
    order = Order([Slice(index, ()) for index in range(1000)], None, most_parts=2000)
    with pytest.raises(DatasetError, match=r"too many parts.*320 in the first 64 of 1000 slices"):
        for index in range(1000):
            order.finish(index, replace(_done(3, None, False), parts=(1,) * 5))


# ---- interrupted and killed -----------------------------------------------------------------------------------------


def interrupt() -> None:
    raise KeyboardInterrupt


def when_kept(session: Session, act: Callable[[], None], count: int = 1) -> Callable[[IngestProgress], None]:
    """Calls `act` once, as soon as `count` slices are in the volume."""
    acted: list[bool] = []

    def told(now: IngestProgress) -> None:
        kept = [info for info in session.volume.list("a.ingest/") if info.name.endswith(".side")]
        if len(kept) >= count and not acted:
            acted.append(True)
            act()

    return told


@pytest.mark.parametrize("workers", [1, 2])
def test_ctrl_c_and_again(corpus: Path, tokenizer: Path, plainly: dict[str, bytes], image: str, workers: int) -> None:
    with Volume.open([image], write=True) as volume, volume.session(run_id="test") as session:
        with pytest.raises(KeyboardInterrupt):
            ingest(corpus, session, "a", options(tokenizer, workers), progress=when_kept(session, interrupt, 4))
        names = [info.name for info in volume.list()]
        assert all(name.startswith("a.ingest/") for name in names)
        assert volume.info().quarantined_bytes == 0
        assert not _workers_of(os.getpid())
        told: list[IngestProgress] = []
        # Other workers, other parts, and records that are bad treated otherwise: it is the same ingest.
        again = open_corpus(corpus, CorpusOptions(bad="skip"))
        report = ingest(again, session, "a", options(tokenizer, 1, part_bytes=4096), progress=told.append)
        assert 4 <= report.resumed < report.slices
        assert objects(volume, "a") == plainly
        assert only_the_dataset(volume)
        assert told[0].tokens == told[0].tokens_before > 0 and told[0].tokens_per_s == 0


def test_a_worker_that_is_killed(corpus: Path, tokenizer: Path, plainly: dict[str, bytes], image: str) -> None:
    def kill() -> None:
        for process in _workers_of(os.getpid()):
            process.kill()

    with Volume.open([image], write=True) as volume, volume.session(run_id="test") as session:
        report = ingest(corpus, session, "a", options(tokenizer, 2), progress=when_kept(session, kill))
        assert report.resumed == 0
        assert objects(volume, "a") == plainly
        assert only_the_dataset(volume)


_KILLED = """
import os, signal, sys
from headrace.dataset import IngestOptions, ingest
from headrace.volume import Volume
from tests.dataset.test_ingest_workers import _workers_of, when_kept

image, corpus, tokenizer, size = sys.argv[1:]

def kill():
    print(*[process.pid for process in _workers_of(os.getpid())], flush=True)
    os.kill(os.getpid(), signal.SIGKILL)

with Volume.open([image], write=True) as volume:
    with volume.session(run_id="test", heartbeat_s=0.05, missed_beats=2) as session:
        options = IngestOptions(tokenizer=tokenizer, workers=2, slice_bytes=int(size))
        ingest(corpus, session, "a", options, progress=when_kept(session, kill, 2))
"""


def test_the_whole_that_is_killed(corpus: Path, tokenizer: Path, plainly: dict[str, bytes], image: str) -> None:
    child = subprocess.run(
        [sys.executable, "-c", _KILLED, image, str(corpus), str(tokenizer), str(SLICE_BYTES)],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
        capture_output=True,
        text=True,
        timeout=240,
    )
    assert child.returncode == -signal.SIGKILL, child.stderr
    pids = [int(word) for word in child.stdout.split()]
    assert len(pids) == 2
    # Nobody ends the workers; they see that nobody is there any more.
    until = time.monotonic() + 60
    while any(_is_worker(pid) for pid in pids):
        assert time.monotonic() < until
        time.sleep(0.02)
    with (
        Volume.open([image], write=True) as volume,
        volume.session(run_id="test", heartbeat_s=0.05, missed_beats=2) as session,
    ):
        report = ingest(corpus, session, "a", options(tokenizer, 1))
        assert 2 <= report.resumed < report.slices
        assert objects(volume, "a") == plainly
        assert only_the_dataset(volume)


def _is_worker(pid: int) -> bool:
    try:
        process = psutil.Process(pid)
        return process.status() != psutil.STATUS_ZOMBIE and "headrace.dataset.ingestion.worker" in process.cmdline()
    except psutil.Error:
        return False


def _workers_of(pid: int) -> list[psutil.Process]:
    found = []
    for process in psutil.Process(pid).children():
        with contextlib.suppress(psutil.Error):
            if "headrace.dataset.ingestion.worker" in process.cmdline():
                found.append(process)
    return found


@pytest.mark.parametrize("workers", [1, 2])
def test_what_was_left_out_is_read_again_where_nothing_is_to_be(
    tokenizer: Path, image: str, tmp_path: Path, workers: int
) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(40))
    path.write_text("no JSON\n" + path.read_text())
    lenient, strict = (open_corpus(path, CorpusOptions(bad=bad)) for bad in ("skip", "fail"))
    with Volume.open([image], write=True) as volume, volume.session(run_id="test") as session:
        with pytest.raises(KeyboardInterrupt):
            ingest(lenient, session, "a", options(tokenizer, 1), progress=when_kept(session, interrupt, 2))
        with pytest.raises(DatasetError, match=r"not JSON.*a\.jsonl:1"):
            ingest(strict, session, "a", options(tokenizer, workers))
        report = ingest(lenient, session, "a", options(tokenizer, workers))
        assert report.resumed >= 1 and report.manifest.corpus["bad_records"] == 1
        assert only_the_dataset(volume)


class Dies:
    """A job that takes its process along."""

    def run(self, task: Task, output: Output) -> Done:
        os.kill(os.getpid(), signal.SIGKILL)
        raise AssertionError


class Fails:
    """A job with a defect."""

    def run(self, task: Task, output: Output) -> Done:
        raise KeyError("a defect")


class FailsToWrite:
    """A job whose writes fail in the worker, behind the space that it was given."""

    def run(self, task: Task, output: Output) -> Done:
        def fails(self: Volume, *_: object) -> None:
            raise DeviceTimeout("no way to the volume")

        Volume.write_grant = fails  # type: ignore[method-assign, assignment]
        output.write(np.zeros(8192, np.uint8))
        raise AssertionError


def _pool(session: Session, job: object) -> Pool:
    work = Work(session, "a")
    work.plan({}, {})
    order = Order([Slice(0, ())], None, most_parts=10)
    return Pool(session, work, job, order, 4096, lambda *_: None, order.finish, LocalHire())  # type: ignore[arg-type]


def test_a_slice_that_kills_its_workers_is_named() -> None:
    with memory_volume() as volume, volume.session(run_id="test") as session:
        with pytest.raises(DatasetError, match=rf"died {MOST_DEATHS} times.*slice 0.*SIGKILL.*--workers"):
            _pool(session, Dies()).run(1)
        with pytest.raises(RuntimeError, match="KeyError: 'a defect'"):
            _pool(session, Fails()).run(1)
        assert volume.list() == []
        assert not _workers_of(os.getpid())


def test_no_receipt_is_waited_for_where_a_write_failed(image: str, monkeypatch: pytest.MonkeyPatch) -> None:
    waited: list[int] = []

    def ending(self: Pool, workers: list[Any], until: float) -> None:
        waited.append(len(workers))

    monkeypatch.setattr(Pool, "_see_written", ending)
    with Volume.open([image], write=True) as volume, volume.session(run_id="test") as session:
        with pytest.raises(DeviceTimeout, match="no way to the volume"):
            _pool(session, FailsToWrite()).run(1)
        assert waited == [0]
        assert volume.list() == []


class StopsOnce:
    """A job whose process is stopped in the middle of a message, the first time."""

    def __init__(self, mark: Path) -> None:
        self.mark = mark

    def run(self, task: Task, output: Output) -> Done:
        if not self.mark.exists():
            self.mark.touch()
            os.write(int(sys.argv[1]), struct.pack(">Q", 1000) + b"the rest never comes")
            os.kill(os.getpid(), signal.SIGSTOP)
        output.write(np.full(8192, 7, np.uint8))
        side = np.zeros(0, np.uint8)
        return replace(_done(8192, None, False), parts=output.finish(side))


def test_a_worker_that_is_stopped_in_the_middle_of_a_message(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    mark, stopped = tmp_path / "mark", []
    real = Local.stop

    def stop(self: Local) -> None:
        # The next one has all the time that it wants.
        monkeypatch.undo()
        stopped.append(mark.exists())
        real(self)

    class Silence(float):
        def __lt__(self, other: float) -> bool:
            return mark.exists() and float(self) < other

    monkeypatch.setattr(Local, "stop", stop)
    monkeypatch.setattr(pools, "MOST_SILENCE_S", Silence(0.5))
    with memory_volume() as volume, volume.session(run_id="test") as session:
        _pool(session, StopsOnce(mark)).run(1)
        assert stopped == [True]
        assert volume.read("a.ingest/000000.001") == bytes([7]) * 4096
        assert not _workers_of(os.getpid())


# ---- what is no continuation ----------------------------------------------------------------------------------------


def test_another_ingest_is_not_gone_on_with(tmp_path: Path, tokenizer: Path, corpus: Path) -> None:
    copied = write_corpus(tmp_path / "texts")
    settings = options(tokenizer, 1)
    with memory_volume() as volume, volume.session(run_id="test") as session:
        with pytest.raises(KeyboardInterrupt):
            ingest(copied, session, "a", settings, progress=when_kept(session, interrupt))
        (copied / "a00.txt").write_text("changed")
        with pytest.raises(DatasetError, match=r"not finished.*a\.ingest/.*another corpus.*--restart"):
            ingest(copied, session, "a", settings)
        with pytest.raises(DatasetError, match=r"another.*limit_bytes"):
            ingest(open_corpus(copied, CorpusOptions(limit_bytes=100)), session, "a", settings)
        report = ingest(copied, session, "a", options(tokenizer, 1, restart=True))
        assert report.resumed == 0
        assert only_the_dataset(volume)
        # Something else of that name is nobody's to delete.
        with session.transaction() as transaction:
            transaction.put("b.ingest/x", b"mine")
        with pytest.raises(DatasetError, match="no plan"):
            ingest(copied, session, "b", settings)


def test_what_does_not_fit_together_is_refused(corpus: Path, tokenizer: Path) -> None:
    with memory_volume() as volume, volume.session(run_id="test") as session:
        with pytest.raises(KeyboardInterrupt):
            ingest(corpus, session, "a", options(tokenizer, 1), progress=when_kept(session, interrupt))
        with session.transaction() as transaction:
            transaction.delete("a.ingest/000000.000")
        with pytest.raises(DatasetError, match=r"does not fit together.*000000\.json.*--restart"):
            ingest(corpus, session, "a", options(tokenizer, 1))


@pytest.mark.parametrize(
    "change",
    [
        {"counts": {}},
        {"counts": None},
        {"counts": {**dict.fromkeys(slices.COUNTED, 0), "tokens": "7", "bad_shown": []}},
        {"counts": {**dict.fromkeys(slices.COUNTED, 0), "tokens": -1, "bad_shown": []}},
        {"counts": {**dict.fromkeys(slices.COUNTED, 0), "bad_shown": 1}},
        {"text_bytes": None},
        {"limit_bytes": "1"},
        {"parts": 1},
        {"more": 1},
        [],
    ],
)
def test_what_a_slice_says_of_itself_is_not_believed(tokenizer: Path, corpus: Path, change: Any) -> None:
    with memory_volume() as volume, volume.session(run_id="test") as session:
        with pytest.raises(KeyboardInterrupt):
            ingest(corpus, session, "a", options(tokenizer, 1), progress=when_kept(session, interrupt))
        said = json.loads(volume.read("a.ingest/000000.json"))
        with session.transaction() as transaction:
            transaction.delete("a.ingest/000000.json")
            changed = {**said, **change} if change else change
            transaction.put("a.ingest/000000.json", json.dumps(changed).encode())
        with pytest.raises(DatasetError, match=r"does not fit together.*000000\.json.*--restart"):
            ingest(corpus, session, "a", options(tokenizer, 1))


def test_what_is_kept_outlives_a_restart_without_its_tokenizer(corpus: Path, tokenizer: Path, tmp_path: Path) -> None:
    with memory_volume() as volume, volume.session(run_id="test") as session:
        with pytest.raises(KeyboardInterrupt):
            ingest(corpus, session, "a", options(tokenizer, 1), progress=when_kept(session, interrupt))
        kept = volume.list()
        with pytest.raises(DatasetError, match=r"none\.json"):
            ingest(corpus, session, "a", options(tmp_path / "none.json", 1, restart=True))
        assert volume.list() == kept != []


@pytest.mark.parametrize("wrong", [{"workers": 0}, {"slice_bytes": 0}, {"part_bytes": 1}, {"part_bytes": 4097}])
def test_wrong_options_are_refused(wrong: dict[str, int]) -> None:
    with pytest.raises(UsageError, match=next(iter(wrong))):
        IngestOptions(**wrong)  # type: ignore[arg-type]


# ---- memory and progress --------------------------------------------------------------------------------------------


def test_no_part_is_larger_than_was_allowed(corpus: Path, tokenizer: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.Teller, "EVERY_S", 0.0)
    seen: list[int] = []
    with memory_volume() as volume, volume.session(run_id="test") as session:

        def told(now: IngestProgress) -> None:
            for info in volume.list("a.ingest/"):
                if info.name[-4] == "." and info.name[-3:].isdigit():
                    seen.append(info.length_bytes)

        ingest(corpus, session, "a", options(tokenizer, 1, part_bytes=4096), progress=told)
    assert len(set(seen)) > 5 and max(seen) == 4096
