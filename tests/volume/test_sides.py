"""Members that went on without each other: two histories, one of which is given up."""

from __future__ import annotations

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any

import pytest

from headrace.errors import DeviceGone, MemberMissing, VolumeDiverged, WriterActive
from headrace.testing import MemoryDevice
from headrace.volume import Volume
from headrace.volume.catalog.commit import LogWriter
from headrace.volume.catalog.log import LogReader
from headrace.volume.layout import Epoch
from headrace.volume.media import epochs
from headrace.volume.repair import salvage
from headrace.volume.repair.scrub import scrub
from headrace.volume.writing import copies, fence, heartbeat
from tests.volume.epochs import commit, copied, epochs_of, go_on, made, names
from tests.volume.support import KIB, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


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


@pytest.mark.parametrize("moment", ["judge", "take"])
def test_a_side_that_is_given_up_while_it_begins_a_session_forgets_its_blobs(
    moment: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """When its volume has followed the log, and does not hold the members yet."""
    devices = made(2)
    for index in (0, 1):
        with writing(Volume.open([devices[index]], write=True, degraded=True)) as session, session.transaction() as tx:
            tx.put_many(["packed", "with it"], b"by %d" % index, [4, 4], [0, 0])
    volume = Volume.open([devices[1]], write=True, degraded=True)
    assert volume.read("packed") == b"by 1"
    owner: Any = {"judge": heartbeat, "take": fence}[moment]
    step, others = getattr(owner, moment), []

    def late(*arguments: Any, **options: Any) -> Any:
        if not others:
            others.append(Volume.open(devices, keep=0, write=True))
            with writing(others[0]) as session:
                commit(session.volume, session, "together")
        return step(*arguments, **options)

    monkeypatch.setattr(owner, moment, late)
    if moment == "take":
        with pytest.raises(WriterActive, match="at the same moment"), writing(volume):
            pass
        volume.refresh()
    with writing(volume) if moment == "judge" else nullcontext():
        assert others and "together" in volume
        with pytest.raises(MemberMissing, match="packed"):
            volume.read("packed")


def test_without_identities_two_histories_are_merged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(epochs, "known", lambda best, block: True)
    with pytest.raises(pytest.fail.Exception, match="VolumeDiverged"):
        test_members_that_went_on_without_each_other_are_refused_until_one_is_given_up(0)


def test_who_is_given_up_is_named_once_however_many_they_are() -> None:
    [block, *_] = epochs_of(made(3))
    other = Epoch(7, 2, 0, 1, b"o" * 16)
    known = copies.next_epoch(block, [0], [other] * 30).epochs
    assert known[1].same(other) and known[2:] == block.epochs and known[0].number == 8


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
    # The checker and salvage say it, and go on with the other side.
    report, found = scrub(devices), salvage.look(devices)
    assert not any(finding.fatal for finding in report.findings) and report.object_count == 3
    for said in (map(str, report.findings), found.lost):
        assert any(f"member {empty}" in line and "nothing was committed there" in line for line in said)
    assert {one.name for one in found.objects if not one.doubtful} == {"wide", "by the other", "and again"}
    assert [bytes(device.data) for device in devices] == before
    go_on(devices, "together", degraded=False)
    assert names(devices) == names([devices[0]]) == names([devices[1]]) == {
        "wide", "by the other", "and again", "together"
    }  # fmt: skip
    assert Volume.open(devices).log.copies == (0, 1) and scrub(devices).clean


def test_of_two_sides_that_have_committed_nothing_all_go_on_with_the_same_one() -> None:
    devices = made(2)
    for device in devices:
        idle([device])
    volume = Volume.open(devices)
    (left,) = {0, 1} - {volume.superblock.log_member[copy] for copy in volume.log.copies}
    for said in (map(str, scrub(devices).findings), salvage.look(devices).lost):
        assert any(f"member {left}" in line and "nothing was committed there" in line for line in said)
    go_on(devices, "together", degraded=False)
    assert names(devices) == {"wide", "together"} and scrub(devices).clean


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
    for call in (Volume.open, scrub, salvage.look):
        with pytest.raises(VolumeDiverged):
            call(devices)  # type: ignore[operator]


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
