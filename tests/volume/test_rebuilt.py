"""A copy of the log that is rebuilt: the power fails, or its source is lost, at every write."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

import pytest

from headrace.errors import HeadraceError, MemberMissing, VolumeDiverged
from headrace.testing import CrashDevice, MemoryDevice, Timeline
from headrace.units import MIB
from headrace.volume import Volume
from headrace.volume.layout import ALIGN, Superblock
from headrace.volume.repair.scrub import scrub
from headrace.volume.writing import copies
from tests.volume.epochs import commit, copied, go_on, made, names, recorded
from tests.volume.support import KIB, STRIPE, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


#: Which members are there next: members 0 and 1 have the log.
SETS = ([0, 1, 2], [0, 2], [1, 2])


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
