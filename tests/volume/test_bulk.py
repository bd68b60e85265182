"""Commits so large that they are tables of their own: what they delete must be gone, whatever was there before."""

from __future__ import annotations

import pytest

from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume, commit
from headrace.volume.scrub import scrub
from headrace.volume.session import Session
from tests.volume.support import KIB, STRIPE, state_of, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


@pytest.fixture
def volume(monkeypatch: pytest.MonkeyPatch) -> Volume:
    """Commits of 3 KiB are tables; what is recent stays in the log for long."""
    monkeypatch.setattr(commit, "BULK_BYTES", 3 * KIB)
    devices = [MemoryDevice(8 * MIB) for _ in range(2)]
    return Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=256 * KIB)


def names(count: int) -> list[str]:
    return [f"{i:03d}/" + "x" * 200 for i in range(count)]


def put_few_at_a_time(session: Session, count: int) -> None:
    for name in names(count):
        with session.transaction() as tx:
            tx.put(name, name.encode())


def check(volume: Volume, expected: dict[str, bytes]) -> None:
    assert state_of(volume) == expected
    assert state_of(Volume.open(volume.devices)) == expected
    assert scrub(volume.devices).clean


def test_deleting_all_there_is_before_any_table(volume: Volume) -> None:
    """The table of the commit has nothing to say; the objects must be gone nevertheless, since their space is."""
    with writing(volume) as session:
        put_few_at_a_time(session, 16)
        assert not session.catalog.tables
        with session.transaction() as tx:
            assert tx.delete_prefix("0") == 16
        check(volume, {})
    check(volume, {})


def test_a_deletion_of_what_a_move_writes_as_a_table_meanwhile(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    """The window for the table of a commit may need the log to move, and the move writes what is recent as a table."""
    with writing(volume) as session:
        put_few_at_a_time(session, 16)
        writer = session._writer
        assert not session.catalog.tables and session._allocator._free[0].total
        take, moved = writer._space.take, []  # type: ignore[union-attr]

        def window(size: int, least: int) -> object:
            if not moved and not writer._moving:
                # As `Allocator._extend` has it where the log has grown just so long.
                moved.append(True)
                writer._recent_bytes = 0
                writer.move(say_so=True)
            return take(size, least)

        monkeypatch.setattr(writer._space, "take", window)
        with session.transaction() as tx:
            for name in names(15):
                tx.delete(name)
        assert moved
        check(volume, {names(16)[15]: names(16)[15].encode()})
