"""Members that are missing, and come back: which copies of the log count (docs/volume-format.md, "Epochs")."""

from __future__ import annotations

import pickle
from pathlib import Path
from typing import Any

import pytest

from headrace.device import BlockDevice, open_device, reference
from headrace.device.protocol import Buffer
from headrace.errors import (
    CommandFailed,
    DeviceError,
    HeadraceError,
    MemberMissing,
    NotAVolume,
    SessionLost,
    VolumeDiverged,
)
from headrace.testing import MemoryDevice, SharedNamespace
from headrace.units import MIB
from headrace.volume import Volume
from headrace.volume import info as volume_info
from headrace.volume.layout import ALIGN
from headrace.volume.repair.scrub import scrub
from headrace.volume.writing import fence
from tests.volume.epochs import Hole, Unread, commit, go_on, made, names
from tests.volume.support import KIB, STRIPE, State, content, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


def held(devices: list[MemoryDevice], *, degraded: bool = False) -> State:
    volume = Volume.open(devices, degraded=degraded)
    found = {}
    for info in volume.list():
        try:
            found[info.name] = volume.read(info.name)
        except MemberMissing as error:
            assert info.name in str(error) and "member" in str(error)
    return found


def test_a_missing_member_is_refused_unless_asked_for_and_nothing_changes() -> None:
    devices = made()
    before = [bytes(device.data) for device in devices]
    for away in range(3):
        left = [device for device in devices if device is not devices[away]]
        with pytest.raises(NotAVolume, match=f"number {away} not among them; .*--degraded"):
            Volume.open(left, write=True)
        volume = Volume.open(left, write=True, degraded=True)
        info = volume.info()
        assert [member.missing for member in info.members] == [index == away for index in range(3)]
        assert info.epoch == 1 and any(f"member {away} is missing" in warning for warning in info.warnings)
        with pytest.raises(MemberMissing, match=rf"object 'wide'.*member {away} \(id"):
            volume.read("wide")
        assert info.used_bytes + info.unreachable_bytes + info.free_bytes == info.capacity_bytes
    assert [bytes(device.data) for device in devices] == before


@pytest.mark.parametrize("away", [0, 1])
def test_a_copy_that_was_away_is_rebuilt_and_never_merged(away: int) -> None:
    devices = made()
    left = [device for device in devices if device is not devices[away]]
    for i in range(10):
        go_on(left, f"alone {i}")
    volume = Volume.open(left, degraded=True)
    assert volume.info().epoch == 2 and volume.log.copies == (1 - away,)
    alone = held(left, degraded=True)
    assert len(alone) == 10
    # All are there again: readers leave the old copy alone, the next session rebuilds it.
    volume = Volume.open(devices)
    assert volume.log.copies == (1 - away,) and state_of(volume) == {**alone, "wide": content(4, 300 * KIB)}
    assert any(f"log copy {away}" in warning for warning in volume.info().warnings)
    go_on(devices, "together", degraded=False)
    volume = Volume.open(devices)
    assert volume.log.copies == (0, 1) and volume.info().epoch == 3 and volume.info().warnings == []
    assert volume.info().members[away].log_counts
    # Now the other may go.
    other = [device for device in devices if device is not devices[1 - away]]
    assert "together" in [info.name for info in Volume.open(other, degraded=True).list()]


def test_a_member_without_the_log_may_be_away() -> None:
    devices = made()
    go_on(devices[:2], "alone")
    volume = Volume.open(devices)
    assert volume.info().epoch == 1 and volume.info().warnings == []
    assert sorted(state_of(volume)) == ["alone", "wide"]


def test_no_space_is_taken_on_a_member_that_is_missing() -> None:
    devices = made()
    volume = Volume.open(devices[:2], write=True, degraded=True)
    with writing(volume) as session:
        free = session.free_bytes
        with session.transaction() as tx:
            tx.delete("wide")
        info = volume.info()
        assert free < session.free_bytes < free + 300 * KIB
        assert info.free_bytes == session.free_bytes
        with pytest.raises(HeadraceError, match="full"):
            for i in range(100):
                commit(volume, session, f"more {i:03}", 200 * KIB)
        assert all(volume.read(info.name) for info in volume.list())
    info = Volume.open(devices).info()
    assert info.free_bytes > MIB


def test_checksum_tables_are_written_natively_without_a_member(monkeypatch: pytest.MonkeyPatch) -> None:
    def slow(*_: object) -> None:
        raise AssertionError("the reference engine")

    devices = [open_device("mem:8MiB") for _ in range(3)]
    Volume.create(devices=devices, stripe_bytes=STRIPE).close()
    monkeypatch.setattr(reference, "write", slow)
    volume = Volume.open(devices[:2], write=True, degraded=True)
    with writing(volume) as session:
        commit(volume, session, "long", 2 * MIB)
    assert volume.read("long") == content(4, 2 * MIB)


def test_where_no_copy_is_there_that_counts_nothing_opens() -> None:
    devices = made()
    go_on([devices[0], devices[2]], "alone")
    with pytest.raises(MemberMissing, match=r"member 2 knows epoch 2 .* member 0, found member 1 knows epoch 1"):
        Volume.open(devices[1:], degraded=True)


def test_a_member_without_the_log_that_was_left_behind_is_told_and_brought_up_to_date() -> None:
    devices = made()
    go_on(devices[:1], "alone")
    said = [str(finding) for finding in scrub(devices).findings if not finding.fatal]
    assert len(said) == 2 and "log copy 1 does not count in epoch 2: member 1" in said[0] + said[1]
    assert any("was left behind: it knows epoch 1, not 2: member 2" in line for line in said)
    go_on(devices, "together", degraded=False)
    assert scrub(devices).clean


def test_info_reads_no_large_catalogue_for_what_is_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = made()
    many = [f"{i:04}/" + "x" * 100 for i in range(600)]
    with writing(Volume.open(devices, write=True)) as session, session.transaction() as tx:
        tx.put_many(many, bytes(len(many)), 1)
    volume = Volume.open(devices[:2], write=True, degraded=True)
    assert volume._catalog.tables
    exact = volume.info()
    assert exact.exact and 0 < exact.unreachable_bytes < 2 * MIB
    monkeypatch.setattr(volume_info, "_READ_BYTES", 0)
    before = sum(device.reads for device in devices)
    bound = volume.info()
    assert sum(device.reads for device in devices) - before == 2, "the heartbeat block, on both copies"
    assert not bound.exact and bound.free_bytes < exact.free_bytes and bound.unreachable_bytes > exact.unreachable_bytes
    for one in (exact, bound):
        assert one.used_bytes + one.quarantined_bytes + one.unreachable_bytes + one.free_bytes == one.capacity_bytes
    with writing(volume) as session:
        # Its allocator knows; and goes on knowing when something there is deleted.
        held = volume.info()
        assert held.exact and held.unreachable_bytes == exact.unreachable_bytes
        with session.transaction() as tx:
            tx.delete("wide")
        after = volume.info()
        assert after.free_bytes == session.free_bytes and after.unreachable_bytes > held.unreachable_bytes
    assert Volume.open(devices[:2], degraded=True).info().unreachable_bytes == bound.unreachable_bytes
    monkeypatch.undo()
    assert Volume.open(devices[:2], degraded=True).info().unreachable_bytes == after.unreachable_bytes


def test_a_reader_learns_that_a_copy_was_left_behind_and_came_back() -> None:
    devices = made()
    readers = {away: Volume.open(devices) for away in (0, 1)}
    for away in (1, 0):
        go_on([device for index, device in enumerate(devices) if index != away], f"without {away}")
        assert all(reader.refresh() and f"without {away}" in reader for reader in readers.values())
        assert readers[0].log.copies == (1 - away,)
        go_on(devices, f"with {away}", degraded=False)
        assert all(reader.refresh() and f"with {away}" in reader for reader in readers.values())
        assert readers[1].log.copies == (0, 1) and readers[1].info().epoch in (3, 5)


class Bad(MemoryDevice):
    """Its copy of the log cannot be written, or not even read."""

    fails: str = ""

    def read_into(self, offset: int, buffer: Buffer) -> None:
        if self.fails == "reads" and 64 * KIB <= offset < 384 * KIB:
            raise CommandFailed("unrecovered read error", where=self.uri)
        super().read_into(offset, buffer)

    def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
        if self.fails and 64 * KIB <= offset < 384 * KIB:
            raise CommandFailed("write fault", where=self.uri)
        super().write(offset, data, fua=fua)


@pytest.mark.parametrize("fails", ["reads", "writes"])
@pytest.mark.parametrize("copy", [0, 1])
def test_a_copy_that_fails_though_its_member_is_there(copy: int, fails: str) -> None:
    devices = made(2)
    bad = Bad(2 * MIB)
    bad.data[:] = devices[copy].data
    devices[copy] = bad
    bad.fails = fails
    with pytest.raises(CommandFailed):
        go_on(devices, "both", degraded=False)
    go_on(devices, "one")
    volume = Volume.open(devices)
    assert volume.log.copies == (1 - copy,) and volume.info().epoch == 2 and len(state_of(volume)) == 2
    # It stays so: it is tried each time.
    go_on(devices, "again")
    assert Volume.open(devices).info().epoch == 2
    with pytest.raises(DeviceError, match=rf"copy {copy} of the volume's log cannot be rebuilt.*--degraded"):
        go_on(devices, "both", degraded=False)
    bad.fails = ""
    go_on(devices, "mended", degraded=False)
    assert Volume.open(devices).log.copies == (0, 1) and names([bad]) == {"wide", "one", "again", "mended"}


def test_a_member_whose_superblock_cannot_be_read_any_more_is_left_behind() -> None:
    devices = made(2)
    bad = Unread(2 * MIB)
    bad.data[:] = devices[1].data
    devices[1] = bad
    volume = Volume.open(devices, write=True, degraded=True)
    before = bytes(bad.data[: 640 * KIB])
    bad.fails = True
    with writing(volume) as session:
        commit(volume, session, "one")
    bad.fails = False
    assert bytes(bad.data[: 640 * KIB]) == before, "nobody knew what it holds"
    volume = Volume.open(devices)
    assert volume.log.copies == (0,) and volume.info().epoch == 2 and "one" in volume
    # So a session on that side alone is another history.
    go_on([bad], "other")
    with pytest.raises(VolumeDiverged):
        Volume.open(devices)


def test_a_reader_never_goes_back_to_a_copy_that_was_left_behind() -> None:
    devices = made(2)
    bad = Unread(2 * MIB)
    bad.data[:] = devices[1].data
    reader = Volume.open([devices[0], bad])
    go_on([bad], "without 0")
    before = bytes(devices[0].data)
    # It meets a log that went on, and whose superblock, which would say so, has just gone.
    bad.fails = True
    for _ in range(2):
        with pytest.raises(MemberMissing, match="went on"):
            reader.refresh()
    bad.fails = False
    assert reader.refresh() and "without 0" in reader and reader.log.copies == (1,)
    assert bytes(devices[0].data) == before


def test_a_session_that_came_and_died_where_takers_do_not_meet(monkeypatch: pytest.MonkeyPatch) -> None:
    """One goes on without member 0 while another, that has it, is between its look and the fence."""
    namespaces = [SharedNamespace(4 * MIB) for _ in range(3)]

    def connect(*which: int) -> list[BlockDevice]:
        return [namespaces[index].connect() for index in which]

    Volume.create(devices=connect(0, 1, 2), stripe_bytes=STRIPE)
    take, others = fence.take, []

    def late(*args: Any, **how: Any) -> fence.Fence:
        monkeypatch.setattr(fence, "take", take)
        other = Volume.open(connect(1, 2), write=True, degraded=True).session("other", heartbeat_s=60.0)
        commit(other.volume, other, "by the other")
        other.transaction().allocate("late", 300 * KIB)
        others.append(other)
        return take(*args, **how)

    monkeypatch.setattr(fence, "take", late)
    volume = Volume.open(connect(0, 1, 2), write=True)
    with volume.session("all", heartbeat_s=60.0) as session:
        assert session.quarantined_bytes >= 300 * KIB, "nobody knows that it ended"
        assert "by the other" in volume
    with pytest.raises(SessionLost):
        commit(others[0].volume, others[0], "lost")
    others[0].close()


def test_by_address_and_in_another_process(tmp_path: Path) -> None:
    uris = [f"file:{tmp_path / name}?create=4MiB" for name in "abc"]
    with Volume.create(uris, stripe_bytes=STRIPE) as volume:
        addresses = volume.uris
    (tmp_path / "b").rename(tmp_path / "away")
    with pytest.raises(DeviceError):
        Volume.open(addresses)
    with Volume.open(addresses, write=True, degraded=True) as volume:
        with writing(volume) as session:
            commit(volume, session, "alone")
        again = pickle.loads(pickle.dumps(volume))
        assert state_of(again) == state_of(volume) and len(again.uris) == 2
        again.close()
        assert any("left out" in text or "b" in text for text in volume.info().warnings)
    (tmp_path / "away").rename(tmp_path / "b")
    with Volume.open(addresses) as volume:
        assert state_of(volume) == {"alone": content(5, 5 * KIB)}


def test_a_zombie_on_a_member_that_was_away_is_fenced_when_it_is_back() -> None:
    namespaces = [SharedNamespace(4 * MIB) for _ in range(3)]

    def connect(*which: int) -> list[BlockDevice]:
        return [namespaces[index].connect() for index in which]

    Volume.create(devices=connect(0, 1, 2), stripe_bytes=STRIPE)
    volume = Volume.open(connect(0, 1, 2), write=True)
    zombie = volume.session("zombie", heartbeat_s=60.0)
    tx = zombie.transaction()
    grant = tx.allocate("late", 300 * KIB)
    for away in (0, 2):
        left = [index for index in range(3) if index != away]
        volume = Volume.open(connect(*left), write=True, degraded=True)
        with volume.session("alone", takeover="if-dead", heartbeat_s=60.0) as session:
            assert session.fence == "persistent"
            commit(volume, session, f"without {away}")
            if away == 0:
                # It may still write there: its windows on that member stay in the log, and its heir is not at ease.
                assert any(member == 0 for ranges in volume._catalog.windows.values() for member, _, _ in ranges)
        assert volume.info().writer is not None
    volume = Volume.open(connect(0, 1, 2), write=True)
    with volume.session("all", takeover="if-dead", heartbeat_s=60.0) as session:
        with pytest.raises(SessionLost):
            zombie.volume.write_grant(grant, content(0, 300 * KIB))
        reports = [namespace.connect().reservations.report() for namespace in namespaces]
        assert len({found.key for report in reports for found in report.registrants}) == 1
        commit(volume, session, "all")
    assert sorted(state_of(Volume.open(connect(2, 1, 0)))) == ["all", "without 0", "without 2"]


# ---- one copy that counts, and a block of it that cannot be read -----------------------------------------------------


@pytest.mark.parametrize("area", range(4))
def test_an_unreadable_header_matters_only_where_it_may_be_the_newest(area: int) -> None:
    devices = made(2)
    for i in range(3):
        go_on(devices[:1], f"alone {i}")
    hole = Hole(2 * MIB)
    hole.data[:] = devices[0].data
    volume = Volume.open([hole], degraded=True)
    reader, newest = Volume.open([hole], degraded=True), volume.log.start().area
    hole.at = volume.superblock.area_offset(0, area)
    if area == newest:
        with pytest.raises(CommandFailed):
            Volume.open([hole], degraded=True)
        return
    assert names([hole]) == {"wide", *(f"alone {i}" for i in range(3))} and not reader.refresh()
    assert any(f"header of area {area}" in warning for warning in reader.info().warnings)
    go_on([hole], "more")
    assert reader.refresh() and "more" in reader
    # Somebody moved there since, and it may be the newest.
    with writing(Volume.open([hole], write=True, degraded=True)) as session:
        while session._writer.cursor.area != area:
            session._writer.move(say_so=session._writer.cursor.area // 2 == area // 2)
        commit(session.volume, session, "newer")
    with pytest.raises(CommandFailed):
        Volume.open([hole], degraded=True)


def test_a_snapshot_on_the_copy_that_does_not_answer_just_now_is_not_damaged() -> None:
    """The other copy was left behind, and the reader does not know it yet: the superblocks say that still."""
    devices = made(2)
    hole = Hole(2 * MIB)
    hole.data[:] = devices[1].data
    reader = Volume.open([devices[0], hole])
    go_on([hole], "alone")
    log = reader.log
    newest = log.start().area
    hole.at = log.superblock.area_offset(1, newest) + ALIGN
    with pytest.raises(CommandFailed):
        log.load()
    hole.at = -1
    assert reader.refresh() and "alone" in reader
