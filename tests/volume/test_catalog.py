"""The catalogue in tables: crashes at any write of flushes, merges and bulk commits; damage; readers that lag."""

from __future__ import annotations

import random
from collections.abc import Iterable
from contextlib import suppress

import numpy as np
import pytest

from headrace.errors import CommandFailed, SessionLost, VolumeDamaged
from headrace.testing import CrashDevice, Timeline
from headrace.units import MIB
from headrace.volume import Volume, layout
from headrace.volume.catalog import commit, compact
from headrace.volume.catalog.changes import count_slices
from headrace.volume.catalog.compact import FAN_IN, MANY_TABLES, choose
from headrace.volume.catalog.tables import Merge
from headrace.volume.catalog.tables import build as building
from headrace.volume.catalog.usage import usage_of
from headrace.volume.data.objects import Range, blobs_of, objects_of, space_of
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, STRIPE, Model, content, state_of, writing
from tests.volume.test_crash import check, every_crash, missed

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Tables after some commits, merges after some tables."""
    monkeypatch.setattr(commit, "LOG_BYTES", 32 * KIB)
    monkeypatch.setattr(commit, "RECENT_BYTES", 600)
    monkeypatch.setattr(commit, "BULK_BYTES", 3 * KIB)
    monkeypatch.setattr(building, "TARGET_BYTES", 600)
    monkeypatch.setattr(building, "FIRST_EXTENT", 8 * KIB)
    monkeypatch.setattr(compact, "LEAST_BYTES", 4 * KIB)


def small_volume(members: int = 2) -> tuple[Timeline, Volume]:
    timeline = Timeline()
    devices = [CrashDevice(timeline, 4 * MIB) for _ in range(members)]
    return timeline, Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)


def work(
    timeline: Timeline, volume: Volume, commits: int, model: Model | None = None, begin: int | None = None
) -> Model:
    """Small commits that overwrite and delete, and now and then one that is a table of its own."""
    model = model or Model()
    with writing(volume) as writer:
        begin = len(model.states) - 1 if begin is None else begin
        for i in range(begin, begin + commits):
            with model.transaction(writer, timeline) as tx:
                for name in (f"a/{i}", f"b/{i % 7}"):
                    if name in model.next:
                        model.delete(tx, name)
                    model.put(tx, name, content(i, 100 + i), checksum_block_bytes=4096)
                if f"a/{i - 6}" in model.next:
                    model.delete(tx, f"a/{i - 6}")
                if i % 10 == 9 and f"bulk/{i}/0" not in model.next:
                    for k in range(40):
                        model.put(tx, f"bulk/{i}/{k}", b"x" * (k % 3))
                if i % 20 == 19 and f"bulk/{i - 10}/0" in model.next:
                    for k in range(40):
                        model.delete(tx, f"bulk/{i - 10}/{k}")
    return model


def kinds(timeline: Timeline) -> set[int]:
    return {int.from_bytes(event.data[4:6], "little") for event in timeline.events if event.data[:4] == b"HRLR"}


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("members", [1, 2])
def test_a_crash_at_any_write_leaves_a_whole_commit_and_no_lost_space(members: int) -> None:
    timeline, volume = small_volume(members)
    timeline.begin()
    model = work(timeline, volume, 45)
    assert {layout.TABLES, layout.TABLES_CHANGED} <= kinds(timeline)
    assert any(event.data[:4] == b"HRTN" for event in timeline.events)
    assert state_of(Volume.open(volume.devices)) == model.states[-1] and scrub(volume.devices).clean
    every_crash(timeline, model, range(0, len(timeline.events) + 1, 17))


@pytest.mark.usefixtures("small")
def test_a_crash_in_a_session_that_follows_a_crash() -> None:
    """What an unfinished merge or an unadopted table left is free again, time after time."""
    chance = random.Random(3)
    timeline, volume = small_volume()
    model = Model()
    for i in range(5):
        timeline.begin()
        model = work(timeline, volume, 12, model, 100 * i + 1)
        crash = timeline.crash(chance.randrange(len(timeline.events) // 2, len(timeline.events)))
        last = max(crash.notes, default=0)
        media = crash.some(chance)
        check(crash, media, model, again=True)
        found = state_of(Volume.open(crash.nothing()))
        assert found in model.states[last : last + 2]
        timeline = Timeline()
        devices = [CrashDevice(timeline, device.size_bytes) for device in media]
        for device, medium in zip(devices, media, strict=True):
            device.data[:] = medium.data
        volume = Volume.open(devices, write=True)
        state = state_of(volume)
        del state["after"]
        with writing(volume, "test") as session, session.transaction() as tx:
            tx.delete("after")
        model = Model()
        model.states = [state]


@pytest.mark.usefixtures("small")
def test_without_fua_a_table_is_missed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(building, "write_through", lambda device, offset, data: device.write(offset, data))
    timeline, volume = small_volume()
    timeline.begin()
    model = work(timeline, volume, 12)
    missed(lambda: every_crash(timeline, model, range(len(timeline.events) // 2, len(timeline.events), 3)))


@pytest.mark.usefixtures("small")
def test_space_of_replaced_tables_is_free_only_behind_the_marker() -> None:
    """A reader that does not believe the record yet reads the old tables."""
    _, volume = small_volume()
    replaced: list[int] = []
    with writing(volume) as session:
        writer = session._writer
        append, free, count = writer.append, session._allocator.free, 0

        def note(kind: int, payload: bytes, number: int) -> layout.Record:
            record = append(kind, payload, number)
            if kind == layout.TABLES_CHANGED:
                replaced.append(record.sequence)
            return record

        def freed(ranges: Iterable[Range]) -> None:
            nonlocal count
            count += 1
            assert writer.cursor.durable >= replaced[-1]
            free(ranges)

        writer.append = note  # type: ignore[method-assign]
        assert writer._space is not None
        writer._space.free = freed  # type: ignore[method-assign]
        for i in range(200):
            with session.transaction() as tx:
                tx.put(f"{i}", b"", checksum_block_bytes=4096)
        assert count and len(replaced) >= count


@pytest.mark.usefixtures("small")
@pytest.mark.parametrize("copy", [0, 1])
def test_one_bad_copy_of_every_node_is_read_around_reported_and_mended(copy: int) -> None:
    timeline, volume = small_volume()
    model = work(timeline, volume, 45)
    devices = volume.devices
    reader = Volume.open(devices)
    roots = [table.root for table in reader._catalog.tables]
    assert len(roots) >= 2
    for root in roots:
        for member, _, offset, length in root.copies[copy].tolist():
            devices[member].data[offset : offset + length] = bytes(length)  # type: ignore[attr-defined]
    damaged = Volume.open(devices, write=True)
    assert state_of(damaged) == model.states[-1]
    report = scrub(devices)
    assert report.findings and not any(finding.fatal for finding in report.findings)
    assert all(f"copy {copy}" in str(finding) for finding in report.findings)
    if copy == 0:
        assert any("copy 0" in warning for warning in damaged.info().warnings)
    # A session writes it again, and goes on.
    model = work(timeline, damaged, 3, model)
    assert scrub(devices).clean and damaged.info().warnings == []
    assert state_of(Volume.open(devices)) == model.states[-1]
    for table in Volume.open(devices)._catalog.tables[:1]:
        for member, offset, length in table.root.space():
            devices[member].data[offset : offset + length] = bytes(length)  # type: ignore[attr-defined]
    with pytest.raises(VolumeDamaged, match=r"of table 0x\w+ is good at member .* offset \d+ and member .* offset \d+"):
        state_of(Volume.open(devices))
    assert any(finding.fatal for finding in scrub(devices).findings)


@pytest.mark.usefixtures("small")
def test_every_byte_of_a_root_matters() -> None:
    """The chain of trust begins in the log: a record with another root is another record."""
    timeline, volume = small_volume()
    model = work(timeline, volume, 45)
    assert state_of(volume) == model.states[-1]
    table = Volume.open(volume.devices)._catalog.tables[0]
    for field in ("birth", "top"):
        other = table.root._replace(
            **{field: (table.root.birth + 1) if field == "birth" else table.root.top._replace(crc=1)}
        )
        with pytest.raises(VolumeDamaged):
            type(table)(other, Volume.open(volume.devices).log.nodes).get(b"n")


@pytest.mark.usefixtures("small")
def test_a_reader_whose_tables_were_replaced_and_overwritten_looks_again() -> None:
    timeline, volume = small_volume()
    model = work(timeline, volume, 30)
    reader = Volume.open(volume.devices)
    old = reader._catalog.births
    model = work(timeline, volume, 45, model)
    now = Volume.open(volume.devices)._catalog
    live = {(member, offset) for member, offset, _ in now.table_space()}
    overwritten = 0
    for table in reader._catalog.tables:
        if table.birth not in now.births:
            for member, offset, length in table.root.space():
                assert (member, offset) not in live
                # Freed space may be anybody's by now.
                volume.devices[member].write(offset, b"\xff" * length)
                overwritten += 1
    assert overwritten
    names = sorted(model.states[-1])
    assert reader._catalog.births == old
    assert [info.name for info in reader.list()] == names
    assert reader._catalog.births == now.births
    reader = Volume.open(volume.devices)
    assert reader.read(names[0]) == model.states[-1][names[0]]


@pytest.mark.usefixtures("small")
def test_sessions_of_one_commit_do_not_leave_ever_more_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(compact, "LEAST_BYTES", 0)
    monkeypatch.setattr(compact, "PACE", 0)
    monkeypatch.setattr(compact, "MANY_TABLES", 6)
    monkeypatch.setattr(commit, "MANY_TABLES", 6)
    timeline, volume = small_volume()
    model = Model()
    for _ in range(40):
        model = work(timeline, volume, 3, model)
        volume = Volume.open(volume.devices, write=True)
        assert len(volume._catalog.tables) <= 10
    assert state_of(volume) == model.states[-1] and scrub(volume.devices).clean


def test_which_tables_are_merged() -> None:
    idle = [False] * 40
    assert choose([1, 1, 1], idle) is None
    assert choose([1, 1, 1, 1], idle) == (0, 4)
    assert choose([1, 1, 1, 1, 4, 4, 4, 4], idle) == (0, 4)
    # A large one is not written again for the sake of some small ones, nor one that is being merged.
    assert choose([1, 1, 1, 100], idle) is None
    assert choose([1, 1, 1, 1], [False, True, False, False]) is None
    assert choose([2**i for i in range(MANY_TABLES + 1)], idle) is not None


def test_tables_stay_few_and_bytes_are_written_again_a_few_times() -> None:
    """The policy alone: flushes of one size, merges that take their time."""
    sizes: list[int] = []
    written = most = 0
    merges: list[tuple[list[int], int]] = []
    ids: list[int] = []
    next_id = 0
    for _ in range(20_000):
        sizes.insert(0, 1)
        ids.insert(0, next_id)
        next_id += 1
        while True:
            busy = [any(one in merging for merging, _ in merges) for one in ids]
            chosen = choose(sizes, busy)
            if chosen is None:
                break
            merges.append((ids[chosen[0] : chosen[1]], sum(sizes[chosen[0] : chosen[1]])))
        merges = [(merging, left - compact.PACE) for merging, left in merges]
        for merging, left in merges:
            if left <= 0:
                first = ids.index(merging[0])
                total = sum(sizes[first : first + len(merging)])
                written += total
                sizes[first : first + len(merging)] = [total]
                ids[first : first + len(merging)] = [next_id]
                next_id += 1
        merges = [(merging, left) for merging, left in merges if left > 0]
        most = max(most, len(sizes))
    assert most <= MANY_TABLES and sum(sizes) == 20_000
    assert written / 20_000 <= 9, FAN_IN


@pytest.mark.usefixtures("small")
def test_a_listing_says_what_the_list_says_and_columns_count_what_objects_use(monkeypatch: pytest.MonkeyPatch) -> None:
    _, volume = small_volume()
    work(Timeline(), volume, 45)
    with writing(volume) as session, session.transaction() as tx:
        tx.put("ä/ö", content(1, 200 * KIB))
        tx.put_many([f"packed/{i}" for i in range(300)], b"x" * 900, 3)
    reader = Volume.open(volume.devices)
    assert len(reader._catalog.tables) >= 2
    for prefix in ("", "a/", "bulk/", "none", "ä", "packed/1"):
        expected = reader.list(prefix)
        found = reader.listing(prefix)
        assert [*found.names()] == [info.name for info in expected] and len(found) == len(expected)
        assert found.length_bytes.tolist() == [info.length_bytes for info in expected]
        assert found.sequence.tolist() == [info.sequence for info in expected]
        for most in (1, 7):
            # A piece at a time, over the borders of leaves and tables.
            monkeypatch.setattr("headrace.volume.contents._LISTED", most)
            pieces = list(reader.listings(prefix))
            assert [name for piece in pieces for name in piece.names()] == [info.name for info in expected]
            assert [size for piece in pieces for size in piece.length_bytes.tolist()] == found.length_bytes.tolist()
        assert len(found) < 100 or len(pieces) > 10
    for loaded in (False, True):
        if loaded:
            reader._catalog.load_tables()
        usage = usage_of(reader._catalog, reader.stripe_bytes)
        blobs = list(blobs_of(reader._catalog))
        used = sorted(one for blob in blobs for one in space_of(blob, reader.stripe_bytes) if one[2])
        assert sorted(one for one in zip(*map(np.ndarray.tolist, usage.ranges()), strict=True) if one[2]) == used
        assert dict(usage.slices) == count_slices(objects_of(reader._catalog)) != {}
        assert usage.newest == max(blob.birth for blob in blobs)


@pytest.mark.usefixtures("small")
def test_a_merge_that_cannot_be_logged_takes_no_commit_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """The commit before it is a fact. The log is broken, and the next commit says so."""
    _, volume = small_volume()

    def fail(*_: object) -> None:
        raise CommandFailed("write fault", where="here")

    acknowledged = 0
    with suppress(SessionLost), writing(volume) as session:
        replace = session._writer._replace

        def broken(merge: Merge) -> None:
            monkeypatch.setattr(commit, "write_through", fail)
            replace(merge)

        assert session._writer._compaction is not None
        session._writer._compaction._replace = broken
        for i in range(1000):
            with session.transaction() as tx:
                tx.put(f"{i}", b"", checksum_block_bytes=4096)
            acknowledged += 1
    assert 0 < acknowledged < 1000
    assert len(Volume.open(volume.devices).list()) == acknowledged
