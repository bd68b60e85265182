"""Who may write: refusal, takeover, grants, quarantine."""

from __future__ import annotations

import multiprocessing
import os
import pickle
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import ClassVar

import pytest

from headrace.device import BlockDevice
from headrace.errors import (
    DeviceGone,
    DeviceTimeout,
    HeadraceError,
    ObjectExists,
    ObjectNotFound,
    SessionLost,
    UsageError,
    VolumeError,
    VolumeFull,
    WriterActive,
)
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Grant, Receipt, Volume, layout
from headrace.volume.catalog import commit
from headrace.volume.catalog.catalog import merge
from headrace.volume.writing import heartbeat, stream
from headrace.volume.writing import session as session_module
from tests.volume.support import KIB, STRIPE, content, open_read, state_of, writing

BEAT = 0.05


def new_volume(members: int = 2, size: int = 4 * MIB) -> Volume:
    return Volume.create(devices=[MemoryDevice(size) for _ in range(members)], stripe_bytes=STRIPE)


def second(volume: Volume) -> Volume:
    return Volume.open(volume.devices, write=True)


# ---- one writer ----


def test_a_second_writer_is_refused_with_who_where_since_when() -> None:
    volume = new_volume()
    with volume.session("training", heartbeat_s=BEAT):
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
    assert time.monotonic() - started < 2


def silent(volume: Volume, run_id: str) -> None:
    """A session whose process died: it never beats again, and never closed."""
    session = volume.session(run_id, heartbeat_s=BEAT)
    session._beat.stop(None)


def test_a_dead_session_is_taken_over_when_asked_or_by_its_own_run() -> None:
    volume = new_volume()
    silent(volume, "run")
    with pytest.raises(WriterActive, match=r"no beat in \d+\.\d s, the last one due at 20\d\d-.*seems to be dead"):
        second(volume).session("other")
    started = time.monotonic()
    session = second(volume).session("run", heartbeat_s=BEAT)
    assert time.monotonic() - started >= 5 * BEAT
    session._beat.stop(None)
    with second(volume).session("other", takeover="if-dead"):
        pass


def test_slow_answers_prove_nothing() -> None:
    """The owner may wait for the same device: only looks that were answered promptly count, and not for ever."""
    beat = heartbeat.new_heartbeat(1, "run", 0.02)

    class Slow:
        delays: ClassVar[list[float]] = []
        looks = 0

        def read(self) -> layout.Heartbeat:
            self.looks += 1
            time.sleep(self.delays.pop(0) if self.delays else 0)
            return beat

    block = Slow()
    block.delays = [0, 0, 0.05, 0, 0, 0]
    assert heartbeat.wait_for_silence(block, beat, 3)  # type: ignore[arg-type]
    assert block.looks >= 6
    block.delays = [0.03] * 1000
    with pytest.raises(DeviceTimeout, match="too slowly"):
        heartbeat.wait_for_silence(block, beat, 3)  # type: ignore[arg-type]


def test_two_takers_at_once_leave_one_holder() -> None:
    volume = new_volume()
    silent(volume, "run")
    results: list[object] = []

    def take(name: str) -> None:
        try:
            results.append(second(volume).session(name, takeover="if-dead", heartbeat_s=BEAT))
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


@pytest.mark.usefixtures("nobody_else")
def test_the_heartbeat_may_be_lost_on_one_copy_or_both() -> None:
    volume = new_volume()
    with writing(volume) as session, session.transaction() as tx:
        tx.put("x", b"1")
    for copies in ((0,), (1,), (0, 1)):
        for copy in copies:
            device = volume.devices[volume.superblock.log_member[copy]]
            device.write(volume.superblock.log_offset[copy], bytes(4096))
        with writing(second(volume)) as session:
            assert session.number > 1
    assert open_read(volume.devices) == {"x": b"1"}


def holder(uris: list[str], ready: object) -> None:
    volume = Volume.open(uris, write=True)
    session = volume.session("job", heartbeat_s=0.1)
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


# ---- transactions ----

pytestmark_fast = pytest.mark.usefixtures("nobody_else")


@pytestmark_fast
def test_what_went_wrong_inside_is_not_hidden_by_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = new_volume()
    session = volume.session()

    def gone() -> None:
        raise DeviceGone("the target is gone")

    close = session.close
    monkeypatch.setattr(session, "close", gone)
    with pytest.raises(ZeroDivisionError), session:
        _ = 1 // 0
    with pytest.raises(DeviceGone), session:
        pass
    close()


def test_all_or_nothing_on_an_exception() -> None:
    volume = new_volume()
    with writing(volume) as session:
        with pytest.raises(RuntimeError), session.transaction() as tx:
            tx.put("x", b"1")
            raise RuntimeError
        assert state_of(volume) == {}
        with pytest.raises(UsageError, match="not committed"):
            _ = tx.sequence
        with pytest.raises(UsageError, match="ended"):
            tx.put("y", b"")


@pytestmark_fast
def test_objects_never_change_but_can_be_replaced() -> None:
    volume = new_volume()
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("x", b"1")
        info = volume.stat("x")
        with pytest.raises(ObjectExists), session.transaction() as tx:
            tx.put("x", b"2")
        with session.transaction() as tx:
            tx.delete("x")
            tx.put("x", b"2")
        assert volume.read("x") == b"2"
        with pytest.raises(ObjectNotFound, match="replaced"):
            volume.submit_read(info, [0], [1], [bytearray(1)], [0])
        with pytest.raises(ObjectNotFound), session.transaction() as tx:
            tx.delete("y")
        with pytest.raises(UsageError, match="already"), session.transaction() as tx:
            tx.put("z", b"")
            tx.put("z", b"")


@pytestmark_fast
def test_two_open_transactions_are_told_apart() -> None:
    volume = new_volume()
    with writing(volume) as session:
        one, two = session.transaction(), session.transaction()
        one.put("x", b"1")
        two.put("x", b"2")
        two.commit()
        with pytest.raises(ObjectExists):
            one.commit()
        assert volume.read("x") == b"2"


@pytestmark_fast
def test_numbers_and_names_that_cannot_be_meant() -> None:
    volume = new_volume()
    with pytest.raises(UsageError, match="not UTF-8"):
        volume.session("\udcff")
    with writing(volume) as session:
        free = session.free_bytes
        for length in (1.5, -1, "1", None):
            with pytest.raises(UsageError, match="length of an object"), session.transaction() as tx:
                tx.allocate("x", length)  # type: ignore[arg-type]
            if length is not None:
                with pytest.raises(UsageError, match="length of an object"), session.transaction() as tx:
                    tx.write_stream("x", [b""], length_bytes=length)  # type: ignore[arg-type]
        assert session.free_bytes == free
        assert isinstance(session.free_bytes, int)
        with session.transaction() as tx:
            tx.put("x", b"1234")
    for offset, length in ((-1, None), (5, None), (5, 0), (0, 5), (0, -1), (0, 1 << 70), (1 << 70, None), (1 << 70, 1)):
        with pytest.raises(UsageError, match="leaves the object"):
            volume.read("x", offset, length)
    assert volume.read("x", 4) == b""


@pytestmark_fast
@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "a\0", "é" * 513, "\ud800"])
def test_bad_names_are_refused(name: str) -> None:
    volume = new_volume()
    with writing(volume) as session, pytest.raises(UsageError, match="not a name"), session.transaction() as tx:
        tx.put(name, b"")


@pytestmark_fast
def test_grants_and_receipts() -> None:
    volume = new_volume()
    with writing(volume) as session:
        with pytest.raises(VolumeError, match="not answered"), session.transaction() as tx:
            grant = tx.allocate("x", 100)
        with session.transaction() as tx:
            grant = pickle.loads(pickle.dumps(tx.allocate("x", 200 * KIB, checksum_block_bytes=4096)))
            assert Grant.from_json(grant.to_json()) == grant
            with pytest.raises(UsageError, match="does not fit"):
                volume.write_grant(grant, b"short")
            receipt = volume.write_grant(grant, content(1, 200 * KIB))
            assert Receipt.from_json(receipt.to_json()) == receipt
            for wrong in ({"transaction": 99}, {"birth": 1}, {"roots": b""}, {"length_bytes": 1}, {"session": 9}):
                with pytest.raises(UsageError, match="no grant"):
                    tx.accept(Receipt(**{**receipt.__dict__, **wrong}))
            tx.accept(receipt)
        assert volume.read("x") == content(1, 200 * KIB)
        with pytest.raises(UsageError, match="another volume"):
            new_volume().write_grant(grant, content(1, 200 * KIB))
        for text in ("", "[]", "{}", '{"name": 1}', "null"):
            with pytest.raises(UsageError, match="not a grant"):
                Grant.from_json(text)


def test_reading_needs_no_write_access() -> None:
    volume = new_volume()
    reader = Volume.open(volume.devices)
    with pytest.raises(UsageError, match="open for reading"):
        reader.session()


@pytestmark_fast
@pytest.mark.parametrize("failure", [KeyboardInterrupt, DeviceTimeout("no answer")])
@pytest.mark.parametrize("write", range(4))
def test_after_a_failed_write_to_the_log_nothing_more_is_written_there(
    monkeypatch: pytest.MonkeyPatch, failure: BaseException, write: int
) -> None:
    volume = new_volume()
    session = volume.session("run", heartbeat_s=60)
    with session.transaction() as tx:
        tx.put("before", b"1")
    tx = session.transaction()
    tx.put("in flight", content(1, 300 * KIB))
    original, count = commit.write_through, 0

    def failing(device: BlockDevice, offset: int, data: bytes) -> None:
        nonlocal count
        if count == write:
            raise failure
        count += 1
        original(device, offset, data)

    monkeypatch.setattr(commit, "write_through", failing)
    with pytest.raises(type(failure) if isinstance(failure, HeadraceError) else KeyboardInterrupt):
        tx.commit()
    monkeypatch.setattr(commit, "write_through", original)
    left = [bytes(device.data) for device in volume.devices]  # type: ignore[attr-defined]
    with pytest.raises(SessionLost, match="can no longer write"):
        later = session.transaction()
        later.put("later", b"2")
        later.commit()
    area = volume.superblock.area_offset(0, 0)
    end = volume.superblock.area_offset(0, volume.superblock.area_count)
    assert all(bytes(d.data)[area:end] == b[area:end] for d, b in zip(volume.devices, left, strict=True))  # type: ignore[attr-defined]
    session.close()
    # The next session knows that commands may be late, and finds the commit whole or not at all.
    after = second(volume)
    with writing(after) as successor:
        assert ("in flight" in after) == (write > 0)
        assert successor.quarantined_bytes > 0
        if write > 0:
            assert after.read("in flight") == content(1, 300 * KIB)
        with successor.transaction() as tx:
            tx.put("after", b"3")
    assert "later" not in Volume.open(volume.devices)


# ---- ghosts ----


def fill(volume: Volume, session: object) -> None:
    """Small and large objects until nothing more fits."""
    for size in (100 * KIB, 4 * KIB):
        with pytest.raises(VolumeFull):
            for _ in range(10_000):
                name = f"{size} {volume.sequence}"
                with session.transaction() as tx:  # type: ignore[attr-defined]
                    tx.put(name, content(volume.sequence, size))


def ghost_hits(volume: Volume, devices: list[BlockDevice], grant: Grant) -> bool:
    """A late write of the dead: does any object suffer?"""
    Volume.open(devices, write=True).write_grant(grant, b"\xee" * grant.length_bytes)
    for info in Volume.open(devices).list():
        try:
            volume.read(info.name)
        except HeadraceError:
            return True
    return False


def aborted_grant() -> bool:
    volume = new_volume(size=3 * MIB)
    with writing(volume) as session:
        tx = session.transaction()
        grant = tx.allocate("x", 300 * KIB)
        tx.abort()
        fill(volume, session)
        return ghost_hits(volume, volume.devices, grant)


@pytestmark_fast
def test_space_of_an_unanswered_grant_is_not_used_again() -> None:
    assert not aborted_grant()


@pytestmark_fast
def test_without_the_quarantine_a_late_write_hits_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "may_still_be_written", lambda allocation: False)
    assert aborted_grant()


def dead_session(clean: bool) -> bool:
    volume = new_volume(size=3 * MIB)
    session = volume.session("run", heartbeat_s=60)
    tx = session.transaction()
    grant = tx.allocate("x", 300 * KIB)
    if clean:
        session.close()
    else:
        session._beat.stop(None)
    after = second(volume)
    # Whoever only looks sees the free space that the successor will find.
    seen = after.info()
    with writing(after) as successor:
        assert successor.quarantined_bytes >= 300 * KIB
        assert (seen.quarantined_bytes, seen.free_bytes) == (successor.quarantined_bytes, successor.free_bytes)
        fill(after, successor)
        hit = ghost_hits(after, after.devices, grant)
    # One successor waits; the next may use the space again.
    last = second(volume)
    with writing(last) as session:
        assert session.quarantined_bytes == 0
        info = last.info()
        assert session.free_bytes + info.used_bytes == info.capacity_bytes
    return hit


@pytestmark_fast
@pytest.mark.parametrize("clean", [True, False])
def test_windows_of_a_dead_session_are_not_used_by_its_successor(clean: bool) -> None:
    assert not dead_session(clean)


@pytestmark_fast
def test_without_logged_windows_a_late_write_hits_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "UNCLEAN_PREDECESSOR", 0)
    with pytest.raises(AssertionError):
        assert not dead_session(False)


@pytestmark_fast
def test_answered_grants_of_an_aborted_transaction_are_free_again() -> None:
    volume = new_volume(size=3 * MIB)
    with writing(volume) as session:
        before = session.free_bytes
        for _ in range(50):
            with pytest.raises(RuntimeError), session.transaction() as tx:
                tx.put("x", content(1, 500 * KIB))
                raise RuntimeError
        assert session.free_bytes == before


@pytestmark_fast
def test_a_stream_that_ends_early_leaves_nothing_behind() -> None:
    volume = new_volume(size=3 * MIB)

    def broken() -> Iterator[bytes]:
        yield content(1, 300 * KIB)
        raise RuntimeError("the corpus ends here")

    with writing(volume) as session:
        before = session.free_bytes
        for _ in range(30):
            with pytest.raises(RuntimeError, match="corpus"), session.transaction() as tx:
                tx.write_stream("x", broken())
        for length in (1, 400 * KIB):
            with pytest.raises(UsageError, match="another length"), session.transaction() as tx:
                tx.write_stream("x", [content(1, 300 * KIB)], length_bytes=length)
        with pytest.raises(VolumeFull), session.transaction() as tx:
            tx.write_stream("x", (content(i, 300 * KIB) for i in range(10_000)))
        assert (session.free_bytes, session.quarantined_bytes) == (before, 0)
    assert volume.info().writer is not None
    generation = volume.log.start().header.generation
    with writing(second(volume)):
        assert volume.log.start().header.generation == generation  # It ended cleanly.


@pytestmark_fast
def test_a_stream_that_was_interrupted_while_it_wrote_is_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = new_volume()

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with writing(volume) as session:
        monkeypatch.setattr(stream, "write_extents", interrupted)
        with pytest.raises(KeyboardInterrupt), session.transaction() as tx:
            tx.write_stream("x", [content(1, 300 * KIB)])
        assert session.quarantined_bytes >= 300 * KIB


def test_windows_are_joined() -> None:
    assert merge([(0, 10, 5), (1, 0, 4), (0, 15, 5), (0, 12, 1), (1, 8, 2)]) == [(0, 10, 10), (1, 0, 4), (1, 8, 2)]


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
