"""Log copies that are missing, and that come back: epochs (docs/volume-format.md, "Epochs")."""

from __future__ import annotations

import pytest

from headrace.errors import HeadraceError, MemberMissing, NotAVolume
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume
from tests.volume.support import KIB, STRIPE, State, content, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


def made(members: int = 3) -> list[MemoryDevice]:
    devices = [MemoryDevice(4 * MIB) for _ in range(members)]
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
    assert info.free_bytes > 3 * MIB


def test_where_no_copy_is_there_that_counts_nothing_opens() -> None:
    devices = made()
    go_on([devices[0], devices[2]], "alone")
    with pytest.raises(MemberMissing, match=r"member 2 knows epoch 2 .* member 0, found member 1 knows epoch 1"):
        Volume.open(devices[1:], degraded=True)
