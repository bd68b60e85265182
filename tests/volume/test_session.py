"""One writer: refusal, takeover, its ranks and its readers, in one process and in several."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path

import pytest

from headrace.errors import (
    HeadraceError,
    ObjectNotFound,
    SessionLost,
    UsageError,
    WriterActive,
)
from headrace.volume import Receipt, Volume
from tests.volume.support import BEAT, KIB, STRIPE, content, new_volume, open_read, second, silent, state_of, writing


def test_a_second_writer_is_refused_with_who_where_since_when() -> None:
    volume = new_volume()
    # Two missed beats are death to whoever may not take over anyway: on a busy machine that must be long.
    with volume.session("training", heartbeat_s=6 * BEAT):
        for takeover in ("refuse", "if-dead"):
            with pytest.raises(WriterActive) as refused:
                second(volume).session("other", takeover=takeover)
            text = str(refused.value)
            assert "heart beats" in text and "'training'" in text and str(os.getpid()) in text and "since 20" in text
        with pytest.raises(WriterActive, match="heart beats"):
            second(volume).session("training")


def test_a_closed_session_is_followed_at_once() -> None:
    volume = new_volume()
    volume.session("one", heartbeat_s=30).close()
    started = time.monotonic()
    generation = volume.log.start().header.generation
    with second(volume).session("two") as session:
        assert (session.number, session.quarantined_bytes) == (2, 0)
        # Nothing was in flight, so the log goes on where it was.
        assert volume.log.start().header.generation == generation
    assert time.monotonic() - started < 25


def test_two_takers_at_once_leave_one_holder() -> None:
    volume = new_volume()
    silent(volume, "run")
    results: list[object] = []

    def take(name: str) -> None:
        try:
            results.append(second(volume).session(name, takeover="if-dead", heartbeat_s=6 * BEAT))
        except HeadraceError as error:
            results.append(error)

    threads = [threading.Thread(target=take, args=(f"taker {i}",)) for i in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(30)
    holders = [result for result in results if not isinstance(result, HeadraceError)]
    assert len(results) == 3 and len(holders) == 1


def test_a_session_that_was_taken_over_cannot_commit() -> None:
    volume = new_volume()
    old = volume.session("run", heartbeat_s=BEAT)
    old._beat._stop.set()  # Stopped, as by SIGSTOP: it does not know that time passes.
    tx = old.transaction()
    tx.put("late", b"x" * 5000)
    with second(volume).session("run", heartbeat_s=BEAT) as session:
        with session.transaction() as tx2:
            tx2.put("new", b"y")
        with pytest.raises(SessionLost, match="took the volume over"):
            tx.commit()
        with pytest.raises(SessionLost):
            old.transaction()
    assert open_read(volume.devices) == {"new": b"y"}
    old.close()
    assert volume.refresh() and state_of(volume) == {"new": b"y"}


def test_a_zombies_log_record_is_never_believed() -> None:
    """Without its last look at the heartbeat, a stopped writer appends to a log that is not in force any more."""
    volume = new_volume()
    reader = Volume.open(volume.devices)
    old = volume.session("run", heartbeat_s=BEAT)
    old._beat._stop.set()
    tx = old.transaction()
    tx.put("late", b"x")
    with second(volume).session("run", heartbeat_s=BEAT) as session:
        old.look = lambda: None  # type: ignore[method-assign]
        with pytest.raises(SessionLost, match="took the volume over"):
            tx.commit()
        with session.transaction() as tx2:
            tx2.put("new", b"y")
        reader.refresh()
        assert state_of(reader) == {"new": b"y"} == open_read(volume.devices)


def holder(uris: list[str], ready: object) -> None:
    volume = Volume.open(uris, write=True)
    session = volume.session("job", heartbeat_s=0.4)
    with session.transaction() as tx:
        tx.put(f"by {session.number}", content(session.number, 200 * KIB))
    ready.set()  # type: ignore[attr-defined]
    time.sleep(60)


def test_two_processes_over_files(tmp_path: Path) -> None:
    """The second is refused while the first lives, and takes over when it was killed."""
    uris = [f"file:{tmp_path / name}?create=8MiB" for name in ("a", "b")]
    with Volume.create(uris, stripe_bytes=STRIPE) as volume:
        uris = volume.uris
    spawn = multiprocessing.get_context("spawn")
    ready = spawn.Event()
    process = spawn.Process(target=holder, args=(uris, ready))
    process.start()
    try:
        assert ready.wait(30)
        with Volume.open(uris, write=True) as volume:
            with pytest.raises(WriterActive, match=f"process {process.pid}"):
                volume.session("other")
            with pytest.raises(WriterActive, match="heart beats"):
                volume.session("job")
            assert process.pid is not None
            os.kill(process.pid, signal.SIGKILL)
            process.join(10)
            with volume.session("job") as session, session.transaction() as tx:
                tx.put("after", b"x")
            assert volume.read("by 1") == content(1, 200 * KIB)
    finally:
        process.kill()
        process.join(10)
    with Volume.open(",".join(uris)) as volume:
        assert sorted(state_of(volume)) == ["after", "by 1"]
        clone = pickle.loads(pickle.dumps(volume))
        assert state_of(clone) == state_of(volume) and clone.uris == volume.uris
        clone.close()


def busy(uris: list[str], count: int) -> None:
    with Volume.open(uris, write=True) as volume, volume.session("busy") as session:
        for i in range(count):
            with session.transaction() as tx:
                tx.put(f"{i:04}", content(i, 3000))
                if i >= 4:
                    tx.delete(f"{i - 4:04}")


def test_readers_beside_a_busy_writer_in_another_process(tmp_path: Path) -> None:
    """Every state that a reader sees is one that was committed, and the sequence only grows."""
    with Volume.create([f"file:{tmp_path / name}?create=4MiB" for name in "ab"], stripe_bytes=STRIPE) as volume:
        uris = volume.uris
    process = multiprocessing.get_context("spawn").Process(target=busy, args=(uris, 150))
    process.start()
    states = 0
    try:
        with Volume.open(uris) as reader:
            deadline = time.monotonic() + 60
            last = reader.sequence
            while time.monotonic() < deadline and "0149" not in reader:
                if not reader.refresh():
                    time.sleep(0.001)
                    continue
                assert reader.sequence > last
                last = reader.sequence
                names = [info.name for info in reader.list()]
                newest = int(names[-1])
                assert names == [f"{i:04}" for i in range(max(0, newest - 3), newest + 1)]
                # An object that was deleted and overwritten meanwhile is said to be so, which is all that counts.
                with suppress(ObjectNotFound):
                    assert reader.read(names[-1]) == content(newest, 3000)
                states += 1
            assert "0149" in reader
    finally:
        process.join(30)
        process.kill()
        process.join(10)
    assert process.exitcode == 0 and states > 1


RANK = """
import sys
from headrace.volume import Grant, Volume
volume = Volume.open(sys.argv[1], write=True)
grant = Grant.from_json(sys.argv[2])
print(volume.write_grant(grant, bytes([len(grant.name)]) * grant.length_bytes).to_json())
volume.close()
"""


def test_ranks_in_other_processes_write_into_one_transaction(tmp_path: Path) -> None:
    uris = [f"file:{tmp_path / name}?create=8MiB" for name in ("a", "b")]
    with Volume.create(uris, stripe_bytes=STRIPE) as volume, volume.session("job") as session:
        with session.transaction() as tx:
            grants = [tx.allocate("r" * (rank + 1), 300 * KIB + rank) for rank in range(2)]
            ranks = [
                subprocess.Popen(
                    [sys.executable, "-c", RANK, ",".join(uris), grant.to_json()], stdout=subprocess.PIPE, text=True
                )
                for grant in grants
            ]
            for rank in ranks:
                out, _ = rank.communicate(timeout=60)
                assert rank.returncode == 0
                tx.accept(Receipt.from_json(out))
            assert "r" not in volume
        assert state_of(volume) == {
            "r": b"\x01" * (300 * KIB),
            "rr": b"\x02" * (300 * KIB + 1),
        }


@pytest.mark.usefixtures("nobody_else")
def test_a_session_stays_behind_at_a_fork() -> None:
    volume = new_volume()
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("x", b"1")
        child = os.fork()
        if child == 0:
            try:
                assert volume.read("x") == b"1"
                session.transaction()
            except UsageError:
                os._exit(7)
            os._exit(1)
        assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 7
        with session.transaction() as tx:
            tx.put("y", b"2")


def test_reading_needs_no_write_access() -> None:
    volume = new_volume()
    reader = Volume.open(volume.devices)
    with pytest.raises(UsageError, match="open for reading"):
        reader.session()


def test_info_holds_no_commit_up_while_it_waits_for_the_session() -> None:
    volume = new_volume()
    with volume.session("training", heartbeat_s=10.0) as session:
        with session.lock:  # As a commit does, before it takes the volume's.
            looking = threading.Thread(target=volume.info)
            looking.start()
            looking.join(0.3)
            assert volume.lock.acquire(timeout=5), "each waits for the other, for ever"
            volume.lock.release()
        looking.join(5)
        assert not looking.is_alive()
