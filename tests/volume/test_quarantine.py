"""Space that a late write may still hit is not used again, and all other space is."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from headrace.device import BlockDevice
from headrace.errors import (
    HeadraceError,
    UsageError,
    VolumeFull,
)
from headrace.units import MIB
from headrace.volume import Grant, Volume, layout
from headrace.volume.catalog.catalog import merge
from headrace.volume.writing import session as session_module
from headrace.volume.writing import stream
from tests.volume.support import KIB, content, new_volume, second, writing

pytestmark_fast = pytest.mark.usefixtures("nobody_else")


def fill(volume: Volume, session: object) -> None:
    """Small and large objects until nothing more fits."""
    for size in (100 * KIB, 4 * KIB):
        with pytest.raises(VolumeFull):
            for _ in range(10_000):
                name = f"{size} {volume.sequence}"
                with session.transaction() as tx:  # type: ignore[attr-defined]
                    tx.put(name, content(volume.sequence, size))


def ghost_hits(volume: Volume, devices: list[BlockDevice], grant: Grant) -> bool:
    """A late write of the dead: does any object suffer?"""
    Volume.open(devices, write=True).write_grant(grant, b"\xee" * grant.length_bytes)
    for info in Volume.open(devices).list():
        try:
            volume.read(info.name)
        except HeadraceError:
            return True
    return False


def aborted_grant() -> bool:
    volume = new_volume(size=3 * MIB)
    with writing(volume) as session:
        tx = session.transaction()
        grant = tx.allocate("x", 300 * KIB)
        tx.abort()
        fill(volume, session)
        return ghost_hits(volume, volume.devices, grant)


@pytestmark_fast
def test_space_of_an_unanswered_grant_is_not_used_again() -> None:
    assert not aborted_grant()


@pytestmark_fast
def test_without_the_quarantine_a_late_write_hits_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(session_module, "may_still_be_written", lambda allocation: False)
    assert aborted_grant()


def dead_session(clean: bool) -> bool:
    volume = new_volume(size=3 * MIB)
    session = volume.session("run", heartbeat_s=60)
    tx = session.transaction()
    grant = tx.allocate("x", 300 * KIB)
    if clean:
        session.close()
    else:
        session._beat.stop(None)
    after = second(volume)
    # Whoever only looks sees the free space that the successor will find.
    seen = after.info()
    with writing(after) as successor:
        assert successor.quarantined_bytes >= 300 * KIB
        assert (seen.quarantined_bytes, seen.free_bytes) == (successor.quarantined_bytes, successor.free_bytes)
        fill(after, successor)
        hit = ghost_hits(after, after.devices, grant)
    # One successor waits; the next may use the space again.
    last = second(volume)
    with writing(last) as session:
        assert session.quarantined_bytes == 0
        info = last.info()
        assert session.free_bytes + info.used_bytes == info.capacity_bytes
    return hit


@pytestmark_fast
@pytest.mark.parametrize("clean", [True, False])
def test_windows_of_a_dead_session_are_not_used_by_its_successor(clean: bool) -> None:
    assert not dead_session(clean)


@pytestmark_fast
def test_without_logged_windows_a_late_write_hits_an_object(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(layout, "UNCLEAN_PREDECESSOR", 0)
    with pytest.raises(AssertionError):
        assert not dead_session(False)


@pytestmark_fast
def test_answered_grants_of_an_aborted_transaction_are_free_again() -> None:
    volume = new_volume(size=3 * MIB)
    with writing(volume) as session:
        before = session.free_bytes
        for _ in range(50):
            with pytest.raises(RuntimeError), session.transaction() as tx:
                tx.put("x", content(1, 500 * KIB))
                raise RuntimeError
        assert session.free_bytes == before


@pytestmark_fast
def test_a_stream_that_ends_early_leaves_nothing_behind() -> None:
    volume = new_volume(size=3 * MIB)

    def broken() -> Iterator[bytes]:
        yield content(1, 300 * KIB)
        raise RuntimeError("the corpus ends here")

    with writing(volume) as session:
        before = session.free_bytes
        for _ in range(30):
            with pytest.raises(RuntimeError, match="corpus"), session.transaction() as tx:
                tx.write_stream("x", broken())
        for length in (1, 400 * KIB):
            with pytest.raises(UsageError, match="another length"), session.transaction() as tx:
                tx.write_stream("x", [content(1, 300 * KIB)], length_bytes=length)
        with pytest.raises(VolumeFull), session.transaction() as tx:
            tx.write_stream("x", (content(i, 300 * KIB) for i in range(10_000)))
        assert (session.free_bytes, session.quarantined_bytes) == (before, 0)
    assert volume.info().writer is not None
    generation = volume.log.start().header.generation
    with writing(second(volume)):
        assert volume.log.start().header.generation == generation  # It ended cleanly.


@pytestmark_fast
def test_a_stream_that_was_interrupted_while_it_wrote_is_quarantined(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = new_volume()

    def interrupted(*args: object, **options: object) -> None:
        raise KeyboardInterrupt

    with writing(volume) as session:
        monkeypatch.setattr(stream, "write_extents", interrupted)
        with pytest.raises(KeyboardInterrupt), session.transaction() as tx:
            tx.write_stream("x", [content(1, 300 * KIB)])
        assert session.quarantined_bytes >= 300 * KIB


def test_windows_are_joined() -> None:
    assert merge([(0, 10, 5), (1, 0, 4), (0, 15, 5), (0, 12, 1), (1, 8, 2)]) == [(0, 10, 10), (1, 0, 4), (1, 8, 2)]
