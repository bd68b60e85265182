"""Records decoded in processes: the right ones in the right order, and no process that stays, hangs or dies unseen."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.dataset import RecordFeed, RecordFeedBatch, RecordFeedOptions, Records
from headrace.dataset.decoding import memory, processes
from headrace.dataset.decoding.memory import Shared
from headrace.dataset.decoding.processes import Processes
from headrace.errors import DatasetError, DecoderLost, DeviceTimeout, HeadraceError, UsageError
from headrace.volume import Volume
from tests.dataset import decoders
from tests.dataset.corpora import native_volume
from tests.dataset.test_record_feed import content, fill
from tests.stopping import stop

COUNTS = {"a": 90, "b": 30}
#: For what must happen on a machine that is busy.
LONG_S = 60.0


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    with native_volume() as volume:
        fill(volume, tmp_path_factory.mktemp("records"), COUNTS)
        yield volume


def feed(volume: Volume, decode: Any = decoders.plain, names: str = "a", **options: Any) -> RecordFeed[Any]:
    return RecordFeed(
        {name: Records.open(volume, name) for name in names},
        RecordFeedOptions(**{"global_batch": 12, "seed": 5, "processes": 1, **options}),
        shares=[3, 1][: len(names)],
        decode=decode,
    )


def step(running: RecordFeed[Any], patience: type[HeadraceError] | tuple[()] = DeviceTimeout) -> RecordFeedBatch[Any]:
    """The next batch, whatever a busy machine has it wait."""
    end = time.monotonic() + LONG_S
    while True:
        try:
            batch = running.acquire()
            assert batch is not None
            return batch
        except patience:
            assert time.monotonic() < end


def pids(running: RecordFeed[Any]) -> list[int]:
    assert isinstance(running._decoder, Processes)
    return running._decoder.pids


def is_there(pid: int) -> bool:
    """Also one whose first thread has ended before another: nobody can wait for it yet."""
    try:
        found = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        return found[0] != "Z" or int(found[17]) > 1
    except OSError:
        return False


def until_gone(gone: list[int]) -> None:
    end = time.monotonic() + LONG_S
    while any(map(is_there, gone)):
        assert time.monotonic() < end, "a process stays"
        time.sleep(0.01)


def test_batches_come_in_order_and_are_the_callers_own(volume: Volume) -> None:
    running = feed(volume, decoders.mixed, "ab", processes=2, prefetch=3)
    batches = [step(running) for _ in range(20)]
    seen = set()
    for batch in batches:
        names = ["ab"[source] for source in batch.sources.tolist()]
        for item, name, number in zip(batch.items, names, batch.samples.tolist(), strict=True):
            data = np.frombuffer(content(name, number), np.uint8)
            assert item["n"] == number and np.array_equal(item["view"], data)
            assert np.array_equal(item["sorted"].reshape(-1), np.sort(data)[: len(data) // 2 * 2])
            assert item["empty"].shape == (0, 3)
            # To be written to, as what is read without processes is.
            item["view"][:] = 0
            item["sorted"][:] = 0
            seen.add(item["pid"])
    assert seen == set(pids(running)) and len(seen) == 2 and os.getpid() not in seen
    assert running.metrics().ring_bytes > 0
    running.close()
    assert pids(running) == [] and not any(map(is_there, seen))
    running.close()


GOES_WRONG: list[tuple[str, type[Exception], str]] = [
    ("value", ValueError, "no picture"),
    ("unpicklable", DatasetError, r"decode failed at while record .*Unpicklable: .*no picture"),
    ("wants", DatasetError, r"decode failed at while record .*Wants: 1 and 2"),
    ("exit", DatasetError, r"decode failed at while record .*SystemExit: 3"),
    ("stop", RuntimeError, r"StopIteration while record \d+ of a.records"),
    ("memoryview", TypeError, "memoryview"),
    ("killed", DecoderLost, r"died at record \d+ of a.records: found killed by SIGKILL; the next call starts"),
    ("exited", DecoderLost, r"died at record \d+ of a.records: found exit status 7; the next call starts"),
]


def test_what_goes_wrong_comes_in_its_step(volume: Volume, tmp_path: Path) -> None:
    """Each time in the second batch of a state. The next call decodes it again, in another process where one died."""
    expected = feed(volume, processes=0)
    batches = [step(expected) for _ in range(2)]
    number, file = int(batches[1].samples[4]), tmp_path / "bad"
    running = feed(volume, partial(decoders.bad, number, file))
    for what, kind, told in GOES_WRONG:
        file.write_text(what)
        # As after an interruption, but for the process, which is the same.
        running.back_to((0, 0, 0))
        assert step(running).items == batches[0].items
        (before,) = pids(running) or [0]
        with pytest.raises(kind, match=told) as caught:
            step(running, ())
        assert running.consumed == 12
        error = caught.value
        if kind is not DecoderLost:
            said = " ".join([str(error), *getattr(error, "__notes__", [])])
            assert what == "memoryview" or f"record {number} of a.records" in said
            # Where in the process it was.
            assert "decoders.py" in str(error.__cause__) or what == "memoryview"
        file.unlink()
        # Batches ahead may have gone through the process that died.
        assert step(running, DecoderLost if kind is DecoderLost else ()).items == batches[1].items
        assert (pids(running) == [before]) == (kind is not DecoderLost)
    running.close()


@pytest.mark.parametrize("what", ["hangs", "stopped"])
def test_one_that_hangs_is_ended_and_replaced(volume: Volume, tmp_path: Path, what: str) -> None:
    expected = feed(volume, processes=0)
    first, second = expected.acquire(), expected.acquire()
    assert first is not None and second is not None
    number, file = int(second.samples[4]), tmp_path / "bad"
    if what == "hangs":
        file.write_text("hangs")
    running = feed(volume, partial(decoders.bad, number, file), stall_timeout_s=0.3, prefetch=1)
    assert step(running).items == first.items
    before = pids(running)
    if what == "stopped":
        stop(before[0])
    end = time.monotonic() + LONG_S
    while True:
        assert time.monotonic() < end
        try:
            batch = running.acquire()
            # It was decoded before it was stopped.
            assert what == "stopped" and batch is not None
        except DeviceTimeout as error:
            if "a record was not decoded in time at record" in str(error):
                break
            assert "a batch of records was not decoded in time" in str(error)
    if what == "hangs":
        assert f"record {number} of a.records" in str(error_of(running))
    until_gone(before)
    file.unlink(missing_ok=True)
    position = running.consumed
    batch = step(running)
    assert batch.position == position and [n for n, _ in batch.items] == batch.samples.tolist()
    assert not set(before) & set(pids(running))
    running.close()


def error_of(running: RecordFeed[Any]) -> HeadraceError:
    """What the next call says, where that is what hangs."""
    end = time.monotonic() + LONG_S
    while True:
        assert time.monotonic() < end
        try:
            running.acquire()
        except DeviceTimeout as error:
            if "a record was" in str(error):
                return error


def test_those_that_die_idle_are_replaced(volume: Volume) -> None:
    running = feed(volume, processes=2, prefetch=1, global_batch=2)
    step(running)
    # What is ahead is decoded, and nobody waits for a process.
    end = time.monotonic() + LONG_S
    while not all(each.done() for flight in running._ahead._flights for each in flight.decoding):  # type: ignore[union-attr]
        assert time.monotonic() < end
        time.sleep(0.01)
    before = pids(running)
    for pid in before:
        os.kill(pid, signal.SIGKILL)
    until_gone(before)
    for _ in range(4):
        batch = step(running)
        assert [number for number, _ in batch.items] == batch.samples.tolist()
    assert not set(before) & set(pids(running))
    running.close()


def test_close_ends_what_hangs(volume: Volume, tmp_path: Path) -> None:
    file = tmp_path / "bad"
    file.write_text("hangs")
    running = feed(volume, partial(decoders.bad, 7, file), stall_timeout_s=0.3, global_batch=90)
    with pytest.raises(DeviceTimeout):
        running.acquire()
    before = pids(running)
    running.close()
    assert not any(map(is_there, before))
    with pytest.raises(UsageError, match="is closed"):
        running.acquire()


def test_a_fork_closes_nothing_of_its_parents_and_waits_for_nobody(volume: Volume) -> None:
    running = feed(volume)
    first = step(running)
    assert isinstance(running._decoder, Processes)
    (hand,) = running._decoder._hands
    held, over = threading.Event(), threading.Event()

    def hold() -> None:
        # As the thread that starts a process, or sees one end.
        with hand._lock:
            held.set()
            over.wait(LONG_S)

    thread = threading.Thread(target=hold)
    thread.start()
    held.wait()
    child = os.fork()
    if child == 0:
        # It waits for a thread that it has not, or it does not.
        signal.setitimer(signal.ITIMER_REAL, 10)
        running.close()
        os._exit(0)
    over.set()
    thread.join()
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 0
    # What is between the parent and its process is as it was.
    before, second = pids(running), step(running)
    assert second.position == first.position + 12 and pids(running) == before
    running.close()


def test_what_no_process_can_import_is_refused(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match=r"cannot be pickled at .*<lambda>.*the top of a module"):
        feed(volume, lambda record: 1)
    with pytest.raises(UsageError, match="one of the two"):
        feed(volume, threads=1)
    # In a process that runs the program to find the function there, and finds it beginning to train.
    monkeypatch.setattr(processes, "INSIDE", True)
    with pytest.raises(UsageError, match=r"would start others.*__main__"):
        feed(volume).acquire()


PROGRAM = """
import functools, pathlib, sys, time
from headrace.dataset import RecordFeed, RecordFeedOptions, Records
from headrace.volume import Volume

uri, hang, what = sys.argv[1:]

def decode(record):
    if pathlib.Path(hang).exists():
        time.sleep(3600)
    return int(bytes(record["n"]))

if __name__ == "__main__":
    feed = RecordFeed(
        {"a": Records.open(Volume.open(uri), "a")}, RecordFeedOptions(global_batch=8, processes=1), decode=decode
    )
    for number in range(1000000):
        batch = feed.acquire()
        assert batch.items == batch.samples.tolist()
        print("pids", *feed._decoder.pids, flush=True)
        if what == "ends" and number == 3:
            sys.exit()
        if what == "hangs":
            pathlib.Path(hang).touch()
"""


@pytest.fixture(scope="module")
def uri(tmp_path_factory: pytest.TempPathFactory) -> str:
    folder = tmp_path_factory.mktemp("volume")
    with Volume.create([f"file:{folder}/a.img?create=16MiB"]) as volume:
        fill(volume, folder, {"a": 20})
        return volume.uris[0]


@pytest.mark.parametrize("how", [None, signal.SIGINT, signal.SIGKILL])
def test_a_program_that_ends_or_is_ended_leaves_no_process(
    uri: str, tmp_path: Path, how: signal.Signals | None
) -> None:
    """Nor one that hangs. What it decodes by is a function of its own."""
    (tmp_path / "program.py").write_text(PROGRAM)
    with subprocess.Popen(
        [sys.executable, str(tmp_path / "program.py"), uri, str(tmp_path / "hang"), "hangs" if how else "ends"],
        stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, start_new_session=True,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
    ) as program:  # fmt: skip
        assert program.stdout is not None
        word, *found = program.stdout.readline().split()
        assert word == "pids", program.communicate()[1]
        if how is not None:
            end = time.monotonic() + LONG_S
            while not (tmp_path / "hang").exists():
                assert time.monotonic() < end
                time.sleep(0.01)
            os.kill(program.pid, how)
        try:
            _, err = program.communicate(timeout=LONG_S)
        finally:
            program.kill()
    assert program.returncode == (0 if how is None else -how), err
    until_gone([int(pid) for pid in found])


def test_memory_is_bounded_and_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    shared = Shared.make()
    try:
        monkeypatch.setattr(memory, "_KEPT_BYTES", 1 << 20)
        large = np.ones(4 << 20, np.uint8)
        place = shared.put([large, "text", {"a": np.arange(5)}], memory.BEGIN)
        found = shared.take(place, own=True)
        assert np.array_equal(found[0], large) and found[1] == "text" and found[2]["a"].tolist() == [0, 1, 2, 3, 4]
        assert shared.held_bytes > 4 << 20
        shared.shrink(shared.behind(place))
        assert shared.held_bytes <= 1 << 20
        for wrong in ((0, 100, 10), (64, 1 << 40, 10), (64, 10, 11)):
            with pytest.raises(DatasetError, match="says what cannot be"):
                shared.take(wrong, own=True)
        monkeypatch.setattr(memory, "MOST_BYTES", 1 << 20)
        with pytest.raises(DatasetError, match="too long: expected at most"):
            shared.put(large, memory.BEGIN)
    finally:
        shared.close()
