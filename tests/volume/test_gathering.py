"""Groups of objects that are written one by one, by anybody, and become visible in one commit."""

from __future__ import annotations

import pytest

from headrace.errors import UsageError, VolumeFull
from headrace.units import KIB
from headrace.volume import Session, Volume
from headrace.volume.repair.scrub import scrub
from headrace.volume.writing.gathering import Gathering
from tests.volume.support import content, new_volume, second, state_of, writing


def write(gathering: Gathering, rank: Volume, group: str, name: str, data: bytes) -> None:
    receipt = rank.write_grant(gathering.allocate(group, name, len(data)), data)
    gathering.accept(group, type(receipt).from_json(receipt.to_json()))


def test_a_group_is_one_commit_and_nothing_of_it_is_seen_before() -> None:
    volume = new_volume()
    ranks = [volume, second(volume)]
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("run/step-1/a", b"what was there")
            tx.put("run/latest", b"1")
        gathering = Gathering(lambda: session)
        parts = {f"run/step-1/{name}": content(seed, 100 * KIB) for seed, name in enumerate("ab")}
        before = state_of(volume)
        for rank, (name, data) in zip(ranks, parts.items(), strict=True):
            write(gathering, rank, "run/step-1", name, data)
            assert state_of(volume) == before
        assert gathering.pending("run/step-1") == dict.fromkeys(parts, 100 * KIB)
        sequence = gathering.publish("run/step-1", delete=["run/latest"])
        assert state_of(volume) == parts
        assert {volume.sequence_of(name) for name in parts} == {sequence}
        assert gathering.pending("run/step-1") == {}
        with pytest.raises(UsageError, match="given up, or is published"):
            gathering.publish("run/step-1")
    assert scrub(volume.devices).clean


def test_what_is_written_again_takes_the_place_of_what_was_written_before() -> None:
    """Of a save that was given up without a word; also where a rank of it had not finished."""
    volume = new_volume()
    rank = second(volume)
    with writing(volume) as session:
        gathering = Gathering(lambda: session)
        for value in (b"first", b"second"):
            write(gathering, volume, "run/step-1", "run/step-1/a", value * 1000)
        late = gathering.allocate("run/step-1", "run/step-1/b", 7)
        with pytest.raises(UsageError, match="still being written"):
            gathering.publish("run/step-1")
        write(gathering, rank, "run/step-1", "run/step-1/b", b"another")
        with pytest.raises(UsageError, match="written again"):
            gathering.accept("run/step-1", rank.write_grant(late, b"too lat"))
        gathering.publish("run/step-1")
        assert state_of(volume) == {"run/step-1/a": b"second" * 1000, "run/step-1/b": b"another"}
    assert scrub(volume.devices).clean


def test_what_is_given_up_leaves_its_space() -> None:
    """A group before one beside it that is published, too; one in another folder stays."""
    volume = new_volume()
    size = int(volume.info().free_bytes * 0.4)
    with writing(volume) as session:
        gathering = Gathering(lambda: session)
        write(gathering, volume, "other/step-1", "other/step-1/a", b"kept")
        for step in range(1, 9):
            folder = f"run/step-{step % 4}"
            write(gathering, volume, folder, f"{folder}/a", bytes(size))
            gathering.give_up(folder)
        for step in range(4, 8):
            write(gathering, volume, f"run/step-{step}", f"run/step-{step}/large", bytes(size))
            write(gathering, volume, f"run/step-{step}9", f"run/step-{step}9/small", b"published")
            gathering.publish(f"run/step-{step}9")
            assert gathering.pending(f"run/step-{step}") == {}
        gathering.publish("other/step-1")
        assert state_of(volume)["other/step-1/a"] == b"kept"
    assert scrub(volume.devices).clean


def test_too_little_space_is_told_and_leaves_the_group_as_it_was() -> None:
    volume = new_volume()
    with writing(volume) as session:
        gathering = Gathering(lambda: session)
        write(gathering, volume, "run/step-1", "run/step-1/a", b"fits")
        with pytest.raises(VolumeFull):
            gathering.allocate("run/step-1", "run/step-1/b", 1 << 40)
        gathering.publish("run/step-1")
    assert state_of(volume) == {"run/step-1/a": b"fits"}


def test_it_begins_when_it_is_used() -> None:
    def refuse() -> Session:
        raise AssertionError

    gathering = Gathering(refuse)
    gathering.give_up("run/step-1")
    assert gathering.pending("run/step-1") == {}
    gathering.close()
