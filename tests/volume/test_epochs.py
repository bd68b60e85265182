"""Log copies that are missing, and that come back: epochs (docs/volume-format.md, "Epochs")."""

from __future__ import annotations

import pickle
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from headrace.device import BlockDevice, open_device, reference
from headrace.device.protocol import Buffer
from headrace.errors import (
    CommandFailed,
    DeviceError,
    DeviceGone,
    HeadraceError,
    MemberMissing,
    NotAVolume,
    SessionLost,
    VolumeDiverged,
    WriterActive,
)
from headrace.testing import CrashDevice, MemoryDevice, SharedNamespace, Timeline
from headrace.units import MIB
from headrace.volume import Volume
from headrace.volume import info as volume_info
from headrace.volume.catalog.commit import LogWriter
from headrace.volume.catalog.log import LogReader
from headrace.volume.layout import ALIGN, Epoch, Superblock
from headrace.volume.media import epochs
from headrace.volume.media.members import read_superblock
from headrace.volume.repair import salvage
from headrace.volume.repair.scrub import scrub
from headrace.volume.writing import copies, fence, heartbeat
from tests.volume.support import KIB, STRIPE, State, content, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


def made(members: int = 3) -> list[MemoryDevice]:
    devices = [MemoryDevice(2 * MIB) for _ in range(members)]
    with writing(Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB)) as session:
        commit(session.volume, session, "wide", 300 * KIB)
    return devices


def commit(volume: Volume, session, name: str, length: int = 5 * KIB) -> None:  # type: ignore[no-untyped-def]
    with session.transaction() as tx:
        tx.put(name, content(len(name), length))


def go_on(devices: list[MemoryDevice], name: str, *, degraded: bool = True) -> None:
    """A session that commits one object."""
    volume = Volume.open(devices, write=True, degraded=degraded)
    with writing(volume) as session:
        commit(volume, session, name)


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


@pytest.mark.parametrize("keep", [0, 1])
def test_members_that_went_on_without_each_other_are_refused_until_one_is_given_up(keep: int) -> None:
    devices = made(2)
    for index in (0, 1):
        go_on([devices[index]], f"by {index} alone")
        go_on([devices[index]], f"by {index} again")
    before = [bytes(device.data) for device in devices]
    refused = (
        r"member [01] and member [01]: found member [01] knows epoch 2 \(.*, since .*\); .* epoch 2 .*--keep MEMBER"
    )
    for call in (Volume.open, scrub, salvage.look):
        with pytest.raises(VolumeDiverged, match=refused if call == Volume.open else "without each other"):
            call(devices)  # type: ignore[operator]
    # Each side alone can be read.
    for index in (0, 1):
        assert names([devices[index]]) == {"wide", f"by {index} alone", f"by {index} again"}
        assert "by" in str([found.name for found in salvage.look([devices[index]]).objects])
    volume = Volume.open(devices, keep=keep)
    assert f"by {keep} alone" in volume and f"by {1 - keep} alone" not in volume
    assert [bytes(device.data) for device in devices] == before
    volume = Volume.open(devices, keep=keep, write=True)
    with writing(volume) as session:
        assert session.number == 4
        commit(volume, session, "together")
    # From now on they have one history.
    kept = {"wide", f"by {keep} alone", f"by {keep} again", "together"}
    assert names(devices) == names([devices[0]]) == names([devices[1]]) == kept
    assert Volume.open(devices).info().epoch == 3 and scrub(devices).clean


def test_another_history_on_a_member_without_the_log_is_told() -> None:
    """Members 0 and 2 went on without 1, and so did other copies of them: here is member 2 of those."""
    devices = made()
    others = copied(devices)
    for some in (devices, others):
        go_on([some[0], some[2]], "alone")
    mixed = [devices[0], devices[1], others[2]]
    for call in (Volume.open, scrub):
        with pytest.raises(VolumeDiverged, match=r"without each other.* at member 0 and member 2: .*--keep MEMBER"):
            call(mixed)  # type: ignore[operator]
    found = salvage.look(mixed)
    assert {one.name for one in found.objects} == {"wide", "alone"}
    assert any(line.startswith("member 2: it went on in another history, epoch 2 (") for line in found.lost)


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


@pytest.mark.parametrize("more", [False, True])
@pytest.mark.parametrize("fails", [False, True])
def test_a_reader_of_the_side_that_is_given_up_forgets_its_blobs(
    more: bool, fails: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Both sides had a session of the same number, and so blobs of the same numbers. `more`: the side that is given up
    has come as far as the other one will have. `fails`: the other log is known of, and cannot be read yet."""
    devices = made(2)
    births = set()
    for index in (0, 1):
        volume = Volume.open([devices[index]], write=True, degraded=True)
        with writing(volume) as session, session.transaction() as tx:
            tx.put_many(["packed", "with it"], b"by %d" % index, [4, 4], [0, 0])
        births.add(volume.stored("packed").blobs[0].entry.birth)
    with writing(Volume.open([devices[1]], write=True, degraded=True)) as session:
        if more:
            commit(session.volume, session, "more")
    reader = Volume.open([devices[1]], degraded=True)
    assert reader.read("packed") == b"by 1" and len(births) == 1
    with writing(Volume.open(devices, keep=0, write=True)) as session:
        commit(session.volume, session, "together")
        assert (session.volume.sequence == reader.sequence) is more
    if fails:
        load, calls = LogReader.load, [0]

        def second(self: LogReader, **how: bool) -> Any:
            calls[0] += 1
            if calls[0] == 2:
                raise DeviceGone("the target is away")
            return load(self, **how)

        monkeypatch.setattr(LogReader, "load", second)
        with pytest.raises(DeviceGone):
            reader.refresh()
        # Until then it has what it had.
        assert reader.stored("with it") and "together" not in reader
    assert reader.refresh() and "together" in reader
    with pytest.raises(MemberMissing, match="packed"):
        reader.read("packed")


def test_without_identities_two_histories_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "known", lambda best, block: True)
    with pytest.raises(pytest.fail.Exception, match="VolumeDiverged"):
        test_members_that_went_on_without_each_other_are_refused_until_one_is_given_up(0)


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


class Unread(MemoryDevice):
    """Its superblock cannot be read for a while."""

    fails = False

    def read_into(self, offset: int, buffer: Buffer) -> None:
        if self.fails and offset in (0, self.size_bytes - ALIGN):
            raise CommandFailed("unrecovered read error", where=self.uri)
        super().read_into(offset, buffer)


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


def test_who_is_given_up_is_named_once_however_many_they_are() -> None:
    [block, *_] = epochs_of(made(3))
    other = Epoch(7, 2, 0, 1, b"o" * 16)
    known = copies.next_epoch(block, [0], [other] * 30).epochs
    assert known[1].same(other) and known[2:] == block.epochs and known[0].number == 8


def epochs_of(devices: list[MemoryDevice]) -> list[Superblock]:
    return [read_superblock(device)[0] for device in devices]


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


# ---- a crash at every write ------------------------------------------------------------------------------------------


def recorded(scenario: Callable[[list[CrashDevice]], None], before: list[MemoryDevice]) -> Timeline:
    """What a scenario writes to these devices, and every point at which the power may fail."""
    timeline = Timeline()
    devices = [CrashDevice(timeline, device.size_bytes) for device in before]
    for device, medium in zip(devices, before, strict=True):
        device.data[:] = medium.data
    timeline.begin()
    scenario(devices)
    return timeline


def copied(devices: list[MemoryDevice]) -> list[MemoryDevice]:
    copies = []
    for device in devices:
        copy = MemoryDevice(device.size_bytes)
        copy.data[:] = device.data
        copies.append(copy)
    return copies


#: Which members are there next: members 0 and 1 have the log.
SETS = ([0, 1, 2], [0, 2], [1, 2])


def names(devices: list[MemoryDevice]) -> set[str]:
    return {info.name for info in Volume.open(devices, degraded=True).list()}


def survive(media: list[MemoryDevice], acknowledged: set[str]) -> None:
    """Whoever is there then has all that was acknowledged, or says that it has not; so, too, after another session."""
    for there in SETS:
        left = copied(media)
        try:
            found = names([left[index] for index in there])
        except MemberMissing:
            assert 0 not in there or 1 not in there
            continue
        assert acknowledged <= found
        go_on([left[index] for index in there], "first")
        for then in SETS:
            again = copied(left)
            try:
                go_on([again[index] for index in then], "second")
            except MemberMissing:
                assert 0 not in then or 1 not in then
                continue
            except VolumeDiverged:
                # An epoch had begun without the one, and now one without the other.
                assert 0 not in there or 1 not in there
                continue
            assert acknowledged | {"first", "second"} <= names([again[index] for index in then])


def crashes(away: int) -> None:
    """A member with the log goes away, and comes back: two sessions, cut off at every write."""
    base = made()

    def leaves(devices: list[CrashDevice]) -> None:
        go_on([device for index, device in enumerate(devices) if index != away], "alone")  # type: ignore[misc]

    def comes_back(devices: list[CrashDevice]) -> None:
        go_on([*devices], "together", degraded=False)

    for scenario, acknowledged in ((leaves, {"wide"}), (comes_back, {"wide", "alone"})):
        timeline = recorded(scenario, base)
        for position in moments(timeline):
            crash = timeline.crash(position)
            survive(crash.nothing() if position % 2 else crash.everything(), acknowledged)
        base = timeline.crash(len(timeline.events)).everything()


def moments(timeline: Timeline) -> Iterator[int]:
    """Around every write of a superblock, and now and then."""
    ends = {0, timeline.devices[0].size_bytes - ALIGN}
    blocks = [index for index, event in enumerate(timeline.events) if event.kind == "write" and event.offset in ends]
    assert blocks
    for position in range(len(timeline.events) + 1):
        if position % 6 == 0 or position - 1 in blocks or position == blocks[0]:
            yield position


@pytest.mark.parametrize("away", [0, 1])
def test_a_crash_at_any_write_loses_nothing_that_was_acknowledged(away: int) -> None:
    crashes(away)


def no_epoch(superblock: Superblock, *_: object) -> Superblock:
    return superblock


def last_first(members: Sequence[int], before: Sequence[int], now: Sequence[int]) -> list[int]:
    return [members[copy] for copy in sorted(now, key=lambda copy: copy in before)]


@pytest.mark.parametrize(
    ("rule", "instead"),
    [("next_epoch", no_epoch), ("members_in_order", last_first), ("_rebuild", lambda log, copy: None)],
)
def test_a_rule_that_is_off_is_missed(rule: str, instead: object, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copies, rule, instead)
    with pytest.raises((AssertionError, HeadraceError)):
        crashes(1)


@pytest.mark.parametrize("away", [0, 1])
def test_a_table_that_was_written_on_one_member_alone_stands_on_two_when_the_other_is_back(away: int) -> None:
    devices = [MemoryDevice(2 * MIB) for _ in range(2)]
    Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB).close()
    names = [f"{i:04d}/" + "x" * 100 for i in range(400)]
    alone = Volume.open([devices[1 - away]], write=True, degraded=True)
    with writing(alone) as session, session.transaction() as tx:
        tx.put_many(names, bytes(len(names)), 1)
    go_on(devices, "together", degraded=False)
    for left in devices:
        found = [info.name for info in Volume.open([left], degraded=True).list()]
        assert found == [*names, "together"]
    assert scrub(devices).clean


# ---- the copy that is left behind, until it counts again -------------------------------------------------------------


def left_behind(moves: int) -> list[MemoryDevice]:
    """Member 1 was away while the log moved so many times."""
    devices = made(2)
    with writing(Volume.open(devices[:1], write=True, degraded=True)) as session:
        for i in range(moves):
            if i:
                session._writer.move(say_so=True)
            commit(session.volume, session, f"alone {i}")
    return devices


def opened_alone(media: MemoryDevice) -> set[str]:
    """What the member says whose rebuilding was interrupted, when the other one never comes back."""
    copy = copied([media])
    found = names(copy)
    go_on(copy, "after")
    assert names(copy) == found | {"after"}
    return found


@pytest.mark.parametrize(("moves", "same_area"), [(1, False), (2, True), (3, False)])
def test_the_source_of_a_copy_is_lost_on_the_way(moves: int, same_area: bool) -> None:
    base = left_behind(moves)
    there, here = (Volume.open([device], degraded=True).log.start().area for device in base)
    assert (there == here) is same_area
    before, after = {"wide"}, {"wide", *(f"alone {i}" for i in range(moves))}
    timeline = recorded(lambda devices: go_on([*devices], "together", degraded=False), base)
    ends = {0, timeline.devices[1].size_bytes - ALIGN}
    writes = [i for i, event in enumerate(timeline.events) if event.kind == "write" and event.device == 1]
    last = next(i for i in writes if timeline.events[i].offset in ends)
    found = []
    for position in [i for i in writes if i <= last]:
        crash = timeline.crash(position)
        found += [opened_alone(crash.nothing()[1]), opened_alone(crash.everything()[1])]
    assert all(one in (before, after) for one in found) and found[0] == before and found[-1] == after


# ---- a side that has committed nothing -------------------------------------------------------------------------------


def idle(devices: list[MemoryDevice]) -> None:
    """A session that takes space, and commits nothing."""
    with writing(Volume.open(devices, write=True, degraded=True)) as session:
        session.transaction().allocate("never", 100 * KIB)


@pytest.mark.parametrize("empty", [0, 1])
def test_a_side_that_has_committed_nothing_is_left_behind(empty: int) -> None:
    devices = made(2)
    idle([devices[empty]])
    go_on([devices[1 - empty]], "by the other")
    go_on([devices[1 - empty]], "and again")
    before = [bytes(device.data) for device in devices]
    volume = Volume.open(devices)
    assert volume.log.copies == (1 - empty,) and "by the other" in volume
    assert any("nothing was committed there" in warning for warning in volume.info().warnings)
    assert [bytes(device.data) for device in devices] == before
    go_on(devices, "together", degraded=False)
    assert names(devices) == names([devices[0]]) == names([devices[1]]) == {
        "wide", "by the other", "and again", "together"
    }  # fmt: skip
    assert Volume.open(devices).log.copies == (0, 1) and scrub(devices).clean


def twice(devices: list[MemoryDevice]) -> None:
    idle(devices)
    idle(devices)


def adopted(devices: list[MemoryDevice]) -> None:
    """Something was in flight."""
    with pytest.MonkeyPatch.context() as patch:
        adopt = LogWriter.adopt
        patch.setattr(LogWriter, "adopt", lambda self: adopt(self) or True)
        idle(devices)


def moved_on(devices: list[MemoryDevice]) -> None:
    with writing(Volume.open(devices, write=True, degraded=True)) as session:
        session._writer.move(say_so=True)


@pytest.mark.parametrize("touch", [twice, adopted, moved_on])
@pytest.mark.parametrize("side", [0, 1])
def test_a_side_that_may_have_what_the_other_does_not_know_is_no_empty_one(
    touch: Callable[[list[MemoryDevice]], None], side: int
) -> None:
    devices = made(2)
    touch([devices[side]])
    go_on([devices[1 - side]], "by the other")
    with pytest.raises(VolumeDiverged):
        Volume.open(devices)


def test_a_side_that_is_about_to_commit_is_not_taken_for_dead(monkeypatch: pytest.MonkeyPatch) -> None:
    devices = made(2)
    go_on(devices[:1], "by the other")
    alive = Volume.open(devices[1:], write=True, degraded=True).session("alive", heartbeat_s=60.0)
    volume = Volume.open(devices, write=True)
    with monkeypatch.context() as patch:
        patch.setattr(heartbeat, "wait_for_silence", lambda block, seen, missed: False)
        with pytest.raises(WriterActive, match="alive"):
            volume.session("other", takeover="if-dead")
    commit(alive.volume, alive, "after all")
    alive.close()
    with pytest.raises(VolumeDiverged):
        Volume.open(devices)


# ---- one copy that counts, and a block of it that cannot be read ----


class Hole(MemoryDevice):
    """One block cannot be read."""

    at = -1

    def read_into(self, offset: int, buffer: Buffer) -> None:
        if offset <= self.at < offset + memoryview(buffer).nbytes:
            raise CommandFailed("unrecovered read error", where=self.uri)
        super().read_into(offset, buffer)


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
