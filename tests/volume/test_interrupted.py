"""Ctrl-C in the middle of a commit: whatever the caller does then, no two objects get the same space."""

from __future__ import annotations

import pytest

from headrace.errors import HeadraceError, SessionLost
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, STRIPE, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


def interrupt(*args: object, **options: object) -> None:
    raise KeyboardInterrupt


@pytest.fixture
def volume() -> Volume:
    return Volume.create(devices=[MemoryDevice(4 * MIB) for _ in range(2)], stripe_bytes=STRIPE, log_bytes=128 * KIB)


@pytest.mark.parametrize("where", ["mark", "apply", "free"])
def test_between_the_record_and_the_catalogue_the_session_ends(
    volume: Volume, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("before", b"0" * 50_000)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), session.transaction() as tx:
            tx.put("x", b"1" * 50_000)
            tx.delete("before")
            owner = {"mark": session._writer, "apply": session.catalog, "free": session._allocator}[where]
            patch.setattr(owner, where, interrupt)
        with pytest.raises(SessionLost), session.transaction() as tx:
            tx.put("y", b"2" * 50_000)
    again = Volume.open(volume.devices, write=True)
    with writing(again) as session, session.transaction() as tx:
        tx.put("z", b"3" * 3 * MIB)
    assert state_of(again) == {"x": b"1" * 50_000, "z": b"3" * 3 * MIB}
    assert scrub(volume.devices).clean


def test_after_it_the_objects_keep_their_space(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also when all that waits for late writes is set free, as a renewal does."""
    with writing(volume) as session:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt), session.transaction() as tx:
            tx.put("x", b"1" * 50_000)
            patch.setattr(session._writer, "compact", interrupt)
        session._allocator.settle()
        expected = {"x": b"1" * 50_000}
        for i in range(100):
            # Large ones, and at last all that is left.
            name, data = f"y/{i}", bytes([i]) * (300_000 if session.free_bytes > 900_000 else 20_000)
            try:
                with session.transaction() as tx:
                    tx.put(name, data)
                expected[name] = data
            except HeadraceError:
                break
        assert session.free_bytes < 300_000 and state_of(volume) == expected
    assert scrub(volume.devices).clean


@pytest.mark.parametrize("where", ["_write_header", "_write"])
def test_a_session_does_not_go_on_where_the_log_is_not(
    volume: Volume, where: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Written, and then interrupted: in the header of a move, or in any record."""
    expected: dict[str, bytes] = {}
    with writing(volume) as session:
        writer = session._writer
        write = getattr(writer, where)

        def interrupted(*args: object) -> None:
            write(*args)
            raise KeyboardInterrupt

        # As the target of a move has it, where nothing but the log keeps others out.
        monkeypatch.setattr(session, "_look_at_log", lambda: None)
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(writer, where, interrupted)
            for i in range(40):
                with session.transaction() as tx:
                    tx.put(f"{i}", b"1")
                expected[f"{i}"] = b"1"
        with pytest.raises(SessionLost), session.transaction() as tx:
            tx.put("after", b"2")
    found = state_of(Volume.open(volume.devices))
    assert found.items() >= expected.items() and len(found) <= len(expected) + 1
    assert scrub(volume.devices).clean


def test_a_merge_is_in_the_log_and_in_memory_or_the_session_ends(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    with writing(volume) as session:
        with monkeypatch.context() as patch, pytest.raises(KeyboardInterrupt):
            patch.setattr(session.catalog, "_replace", interrupt)
            for i in range(40):
                with session.transaction() as tx:
                    tx.put_many([f"{i:02}/{j:03}" + "x" * 100 for j in range(300)], bytes(300), 1)
        with pytest.raises(SessionLost), session.transaction() as tx:
            tx.put("after", b"2")
    again = Volume.open(volume.devices, write=True)
    assert len(again.list()) == 300 * (i + 1)
    with writing(again) as session, session.transaction() as tx:
        tx.put("after", b"2")
    assert scrub(volume.devices).clean
