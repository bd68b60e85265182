"""A power cut at any write leaves the last acknowledged commit or the one in flight, whole.

Each rule that this rests on is switched off once, and must be missed.
"""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest

from headrace.errors import HeadraceError
from headrace.testing import Crash, CrashDevice, MemoryDevice, Timeline
from headrace.volume import Volume, layout
from headrace.volume.catalog import commit
from headrace.volume.catalog.changes import Outcome
from headrace.volume.data import durable
from headrace.volume.writing import session
from tests.volume.support import KIB, Model, State, content, crash_volume, open_read, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


def work(timeline: Timeline, volume: Volume, commits: int) -> Model:
    """Transactions over several objects, members, streams and deletions; log areas fill up on the way."""
    model = Model()
    timeline.begin()
    with writing(volume) as writer:
        for i in range(commits):
            with model.transaction(writer, timeline) as tx:
                model.put(tx, f"a/{i}", content(i, 3 * KIB + i), checksum_block_bytes=4096)
                if i % 3 == 0:
                    model.put(tx, f"b/{i}", content(100 + i, 150 * KIB + i))
                if i % 5 == 4:
                    data = content(200 + i, 70 * KIB)
                    tx.write_stream(f"c/{i}", [data[:1000], data[1000:]], checksum_block_bytes=4096)
                    model.next[f"c/{i}"] = data
                if i >= 2:
                    model.delete(tx, f"a/{i - 2}")
                if i >= 3 and i % 3 == 0:
                    model.delete(tx, f"b/{i - 3}")
    return model


def recover(devices: list[MemoryDevice]) -> State:
    """What the next session finds, after it has committed something of its own."""
    volume = Volume.open(devices, write=True)
    with writing(volume, "next") as writer:
        found = state_of(volume)
        with writer.transaction() as tx:
            tx.put("after", b"the crash")
        assert volume.read("after") == b"the crash"
        # Nothing leaks: what is neither used nor waiting can be handed out.
        info = volume.info()
        assert writer.free_bytes + info.used_bytes + writer.quarantined_bytes == info.capacity_bytes
    assert state_of(volume) == {**found, "after": b"the crash"}
    return found


def check(crash: Crash, devices: list[MemoryDevice], model: Model, *, again: bool) -> None:
    last = max(crash.notes, default=0)
    allowed = model.states[last : last + 2]
    seen = state_of(Volume.open(devices))
    assert seen in allowed
    if again:
        found = recover(devices)
        assert found in allowed
        # What a reader was shown never vanishes.
        assert not (seen == allowed[-1] and found != seen)


def every_crash(timeline: Timeline, model: Model, positions: range | None = None) -> None:
    chance = random.Random(1)
    for position in positions or range(len(timeline.events) + 1):
        crash = timeline.crash(position)
        check(crash, crash.nothing(), model, again=crash.position % 3 == 0)
        if crash.blocks_in_the_air:
            check(crash, crash.everything(), model, again=False)
            check(crash, crash.some(chance), model, again=True)


def shared_work(timeline: Timeline, volume: Volume) -> Model:
    """Objects that share blobs: packed, composed, renamed, and deleted before those that have bytes of them."""
    model = Model()
    timeline.begin()
    a, many = content(1, 70 * KIB), content(2, 3000)
    with writing(volume) as writer:
        with model.transaction(writer, timeline) as tx:
            model.put(tx, "a", a, checksum_block_bytes=4096)
            tx.put_many([f"m/{i}" for i in range(10)], many, 300)
            model.next.update({f"m/{i}": many[300 * i : 300 * i + 300] for i in range(10)})
        with model.transaction(writer, timeline) as tx:
            tx.compose("c", [("a", 100, 5000), b"new", ("m/3", 7, None)], checksum_block_bytes=4096)
            model.next["c"] = a[100:5100] + b"new" + many[907:1200]
            model.delete(tx, "a")
        with model.transaction(writer, timeline) as tx:
            tx.rename("m/0", "n")
            model.next["n"] = model.next.pop("m/0")
            tx.compose("d", [("c", 4990, 20)])
            model.next["d"] = model.next["c"][4990:5010]
            model.delete(tx, "c")
        with model.transaction(writer, timeline) as tx:
            assert tx.delete_prefix("m/") == 9
            model.next = {name: data for name, data in model.next.items() if not name.startswith("m/")}
            model.put(tx, "e", content(3, 9000))
        with model.transaction(writer, timeline) as tx:
            model.delete(tx, "n")
            model.delete(tx, "d")
        assert volume.info().used_bytes == 12 * KIB
    return model


@pytest.mark.parametrize("members", [1, 2])
def test_a_crash_at_any_write_leaves_shared_bytes_whole_and_none_lost(members: int) -> None:
    timeline, volume = crash_volume(members)
    model = shared_work(timeline, volume)
    assert open_read(timeline.crash(len(timeline.events)).nothing()) == model.states[-1]
    every_crash(timeline, model)


@pytest.mark.parametrize(("members", "block_bytes"), [(1, 4096), (2, 4096), (2, 512), (3, 4096)])
def test_a_crash_at_every_write_leaves_a_whole_commit(members: int, block_bytes: int) -> None:
    timeline, volume = crash_volume(members, block_bytes=block_bytes)
    model = work(timeline, volume, 14)
    assert volume.log.start().header.generation > 1  # The log moved on the way.
    every_crash(timeline, model, range(0, len(timeline.events) + 1, 1 if (members, block_bytes) == (2, 4096) else 5))


def test_a_crash_during_recovery_leaves_a_whole_commit() -> None:
    timeline, volume = crash_volume(2)
    model = work(timeline, volume, 3)
    # A commit that stands on one log copy only, without its marker.
    commits = [i for i, event in enumerate(timeline.events) if event.fua and _kind(event.data) == layout.COMMIT]
    crash = timeline.crash(commits[-1])
    again = Timeline()
    devices = [CrashDevice(again, device.size_bytes) for device in crash.everything()]
    for device, medium in zip(devices, crash.everything(), strict=True):
        device.data[:] = medium.data
    again.begin()
    with writing(Volume.open(devices, write=True), "next"):
        pass
    last = max(crash.notes, default=0)
    shown = False
    for second in again.crashes():
        for media in (second.nothing(), second.everything()):
            assert state_of(Volume.open(media)) in model.states[last : last + 2]
        # Once the commit in flight is shown from durable bytes alone, it stays.
        whole = state_of(Volume.open(second.nothing())) == model.states[last + 1]
        assert whole or not shown
        shown = shown or whole
        assert recover(second.nothing()) == model.states[last + 1]
    assert shown


def _kind(data: bytes) -> int:
    return int.from_bytes(data[4:6], "little") if data[:4] == b"HRLR" else 0


def missed(run: Callable[[], None]) -> None:
    """The rule that was switched off is missed: wrong state, or an error where there must be none."""
    with pytest.raises((AssertionError, HeadraceError)):
        run()


def test_without_the_flush_data_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "flush_all", lambda devices: None)
    timeline, volume = crash_volume(2)
    model = work(timeline, volume, 4)
    missed(lambda: every_crash(timeline, model))


def test_without_one_record_for_all_a_transaction_is_torn(monkeypatch: pytest.MonkeyPatch) -> None:
    def one_by_one(writer: commit.LogWriter, outcome: Outcome, sequence: int, number: int) -> layout.Record:
        for change in outcome.changes.items():
            record = writer.commit_changes(dict([change]), 0, writer.cursor.sequence + 1, outcome.totals, number)
            writer.catalog.apply(record)
        return record

    monkeypatch.setattr(session, "commit_records", one_by_one)
    timeline, volume = crash_volume(2)
    model = work(timeline, volume, 4)
    missed(lambda: every_crash(timeline, model))


def test_without_fua_acknowledged_commits_vanish(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(commit, "write_through", lambda device, offset, data: device.write(offset, data))
    timeline, volume = crash_volume(2)
    model = work(timeline, volume, 4)
    missed(lambda: every_crash(timeline, model))


def test_without_the_header_last_a_half_written_area_is_believed(monkeypatch: pytest.MonkeyPatch) -> None:
    original = commit.LogWriter.move

    def header_first(self: commit.LogWriter, *, say_so: bool) -> None:
        count = len(list(self.catalog.snapshot()))
        cursor = self.cursor
        header = layout.AreaHeader(cursor.header.generation + 1, 1, cursor.sequence, count, self.catalog.session, 0)
        self._write_header(1 - cursor.area, header)
        original(self, say_so=say_so)

    monkeypatch.setattr(commit.LogWriter, "move", header_first)
    timeline, volume = crash_volume(2)
    model = work(timeline, volume, 14)
    headers = [i for i, event in enumerate(timeline.events) if event.data[:8] == b"HRLOGHDR"]
    missed(lambda: every_crash(timeline, model, range(headers[0], headers[0] + 6)))
