"""Space that is kept: for a job's checkpoints, and, after a deletion, until nobody can need its bytes any more."""

from __future__ import annotations

import threading
from contextlib import suppress
from typing import Any

import pytest

from headrace.errors import DeviceError, ObjectNotFound, UsageError, VolumeError, VolumeFull
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Session, Volume
from headrace.volume.repair.scrub import scrub
from headrace.volume.space import deallocate
from headrace.volume.space.allocator import FreeSpace
from headrace.volume.writing import reserve
from headrace.volume.writing.allocation import Allocation
from headrace.volume.writing.holdings import window_ranges
from tests.volume.support import KIB, STRIPE, content, writing
from tests.waiting import until

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")


def small(**options: Any) -> Volume:
    devices = [Forgetful(4 * MIB + 512 * KIB) for _ in range(2)]
    return Volume.create(devices=devices, stripe_bytes=STRIPE, log_bytes=128 * KIB, **options)


class Forgetful(MemoryDevice):
    """Remembers what it was told to forget."""

    fail: BaseException | None = None

    def deallocate(self, offset: int, length: int) -> None:
        if self.fail is not None:
            raise self.fail
        self.forgotten = [*getattr(self, "forgotten", []), (offset, length)]
        super().deallocate(offset, length)


def put(session: Session, name: str, length: int) -> None:
    with session.transaction() as tx:
        if name in session.volume:
            tx.delete(name)
        tx.put(name, content(length, length))


def test_what_is_reserved_is_there_for_those_it_is_for_and_for_nobody_else() -> None:
    volume = small()
    with writing(volume) as session:
        put(session, "run/step-0", 300 * KIB)
        free = session.free_bytes
        reservation = session.reserve(2 * MIB, "run/")
        assert reservation.held_bytes == session.reserved_bytes == 2 * MIB - 300 * KIB
        assert volume.info().reserved_bytes == session.reserved_bytes and volume.info().free_bytes == free
        with pytest.raises(VolumeFull, match="reserved for others"), session.transaction() as tx:
            tx.put("other", bytes(free - 1 * MIB))
        with pytest.raises(VolumeFull, match="too little space to reserve"):
            session.reserve(free, "more/")
        put(session, "other", free - 2 * MIB)
        # A rolling set of checkpoints always fits, whoever else fills the rest.
        for step in range(1, 12):
            with session.transaction() as tx:
                tx.put(f"run/step-{step}", content(step, 700 * KIB))
                if step > 1:
                    tx.delete(f"run/step-{step - 1}")
            with pytest.raises(VolumeFull), session.transaction() as tx:
                tx.put("else", bytes(400 * KIB))
        assert session.reserved_bytes == 2 * MIB - 1000 * KIB
        # What is written and aborted counts while it is under way, and no longer.
        held = session.reserved_bytes
        tx = session.transaction()
        tx.put("run/aborted", bytes(100 * KIB))
        assert session.reserved_bytes == held - 100 * KIB
        tx.abort()
        assert session.reserved_bytes == held
        with session.transaction() as tx:
            tx.rename("run/step-11", "kept")
        assert session.reserved_bytes == held + 700 * KIB
        reservation.release()
        reservation.release()
        assert session.reserved_bytes == 0
        put(session, "else", 200 * KIB)
    assert volume.info().reserved_bytes == 0
    assert scrub(volume.devices).clean


def test_without_the_count_a_job_meets_a_full_volume_in_the_middle(monkeypatch: pytest.MonkeyPatch) -> None:
    def run() -> None:
        with writing(small()) as session, session.reserve(1 * MIB, "run/"):
            with pytest.raises(VolumeFull), session.transaction() as tx:
                tx.put("greedy", bytes(session.free_bytes - 64 * KIB))
            put(session, "run/a", 900 * KIB)

    run()
    monkeypatch.setattr(reserve.Reservations, "kept", lambda self, share, wanted: 0)
    with pytest.raises(pytest.fail.Exception):
        run()


def test_a_reservation_is_made_while_a_transaction_takes_more(monkeypatch: pytest.MonkeyPatch) -> None:
    with writing(small()) as session:
        tx = session.transaction()
        tx.put("x/a", bytes(100 * KIB))
        share = Allocation.share

        def meanwhile(self: Allocation, prefix: str, taken: int) -> int:
            if self.name == "x/a":
                tx.begin("x/b")
            return share(self, prefix, taken)

        with monkeypatch.context() as patch:
            patch.setattr(Allocation, "share", meanwhile)
            reservation = session.reserve(1 * MIB, "x/")
        assert len(tx.allocations) == 2 and reservation.held_bytes == 1 * MIB - 100 * KIB
        tx.abort()


def test_objects_of_one_pack_count_each_for_its_own_reservation() -> None:
    volume = small()
    with writing(volume) as session:
        one, two = session.reserve(1 * MIB, "one/"), session.reserve(1 * MIB, "two/")
        names, lengths = ["one/a", "two/a", "else", "two/b"], [100 * KIB, 60 * KIB, 200 * KIB, 40 * KIB]

        def held() -> tuple[int, int]:
            return (1 * MIB - one.held_bytes) // KIB, (1 * MIB - two.held_bytes) // KIB

        tx = session.transaction()
        tx.put_many(names, bytes(400 * KIB), lengths, checksum_block_bytes=STRIPE)
        assert held() == (100, 100)
        # Who reserves now, sees what is under way.
        other = session.reserve(1 * MIB, "el")
        assert other.held_bytes == 1 * MIB - 200 * KIB
        other.release()
        tx.abort()
        assert held() == (0, 0)
        with session.transaction() as tx:
            tx.put_many(names, bytes(400 * KIB), lengths, checksum_block_bytes=STRIPE)
        assert held() == (100, 100)
        # The rest is full: a pack has what is kept for its objects, and nothing for others.
        put(session, "rest", session.free_bytes - session.reserved_bytes - 64 * KIB)
        with pytest.raises(VolumeFull, match="reserved for others"), session.transaction() as tx:
            tx.put_many(["one/c", "else/c"], bytes(600 * KIB), [300 * KIB] * 2, checksum_block_bytes=STRIPE)
        with session.transaction() as tx:
            tx.put_many(["one/c", "two/c"], bytes(600 * KIB), [300 * KIB] * 2, checksum_block_bytes=STRIPE)
        assert held() == (400, 400)


def test_space_of_a_transaction_that_nobody_will_end_is_there_to_reserve() -> None:
    volume = Volume.create(devices=[MemoryDevice(16 * MIB)], stripe_bytes=STRIPE)
    with writing(volume) as session:
        tx = session.transaction()
        tx.put("dropped", content(1, 12 * MIB))
        tx._flush()
        with pytest.raises(VolumeFull):
            session.reserve(8 * MIB, "kept/")
        tx.abandon()
        session.reserve(8 * MIB, "kept/")
        assert session.open_transactions == [] and session.reserved_bytes >= 8 * MIB


def test_reservations_that_cannot_be() -> None:
    with writing(small()) as session:
        session.reserve(1000, "run/a/")
        for arguments in ((5, ""), (5, "run/"), (5, "run/a/b"), (-1, "x"), (0.5, "x")):
            with pytest.raises(UsageError):
                session.reserve(*arguments)  # type: ignore[arg-type]
        assert session.reserve(2000, "run/a/").held_bytes == 2000 == session.reserved_bytes


# ---- deallocation ----------------------------------------------------------------------------------------------------


def test_deleted_space_is_deallocated_once_readers_had_time(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = small()
    with writing(volume) as session:
        put(session, "a", 300 * KIB)
        put(session, "b", 300 * KIB)
        used = volume.stored("a").blobs[0].data.used()
        free = session.free_bytes
        with session.transaction() as tx:
            tx.delete("a")
        # Long before the time has come, and a session that ends then, leave it as it is.
        assert session.deallocation.deallocated_bytes == 0
    assert not any(hasattr(device, "forgotten") for device in volume.devices)
    monkeypatch.setattr(deallocate, "AFTER_S", 0.05)
    with writing(volume) as session:
        windows = len(volume._catalog.windows.get(session.number, []))
        place = volume.stored("b").blobs[0].data.used()
        with session.transaction() as tx:
            tx.delete("b")
        until(lambda: session.deallocation.deallocated_bytes == 300 * KIB)
        until(lambda: session.free_bytes == free + 600 * KIB)
        # The log said, before, that commands go there.
        assert len(volume._catalog.windows[session.number]) > windows
        forgotten = [(m, *one) for m, device in enumerate(volume.devices) for one in device.forgotten]  # type: ignore[attr-defined]
        assert sorted(forgotten) == sorted(place) and used
        # It can be written again.
        for i in range(30):
            put(session, "c", 2 * MIB + i)
        assert volume.read("c") == content(2 * MIB + 29, 2 * MIB + 29)
    assert scrub(volume.devices).clean


def test_who_needs_space_that_is_being_deallocated_waits_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """A full volume whose old checkpoint is just being given back to the target has room for the next one."""
    monkeypatch.setattr(deallocate, "AFTER_S", 0.0)
    told, go_on = threading.Event(), threading.Event()

    def slow(self: MemoryDevice, offset: int, length: int) -> None:
        told.set()
        assert go_on.wait(30)

    monkeypatch.setattr(Forgetful, "deallocate", slow)
    volume = small()
    with writing(volume) as session:
        half = session.free_bytes * 3 // 5
        put(session, "old", half)
        with session.transaction() as tx:
            tx.delete("old")
        assert told.wait(30)
        assert session.deallocating_bytes >= half and session.free_bytes < half
        threading.Timer(0.1, go_on.set).start()
        put(session, "new", half)
        assert not session.deallocating_bytes


@pytest.mark.parametrize(
    ("failure", "said"), [(DeviceError("no answer came in time"), "no answer"), (MemoryError(), "out of memory")]
)
def test_a_deallocation_that_failed_is_quarantined(
    failure: BaseException, said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(deallocate, "AFTER_S", 0.0)
    volume = small()
    reader = Volume.open(volume.devices)
    with writing(volume) as session:
        put(session, "a", 300 * KIB)
        put(session, "b", 300 * KIB)
        reader.refresh()
        for device in volume.devices:
            device.fail = failure  # type: ignore[attr-defined]
        with session.transaction() as tx:
            tx.delete("a")
        until(lambda: session.deallocation.failed)
        until(lambda: session.quarantined_bytes == 300 * KIB)
        assert session.deallocation.failed is not None and said in session.deallocation.failed
        # Nothing is deallocated any more, and all else goes on.
        put(session, "c", 300 * KIB)
        with session.transaction() as tx:
            tx.delete("c")
        assert reader.read("a") == content(300 * KIB, 300 * KIB)
    assert volume.info().quarantined_bytes >= 300 * KIB


def test_space_that_is_being_given_back_is_waited_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deallocate, "AFTER_S", 0.0)
    go = threading.Event()
    forget = Forgetful.deallocate

    def slow(device: Forgetful, offset: int, length: int) -> None:
        assert go.wait(20)
        forget(device, offset, length)

    monkeypatch.setattr(Forgetful, "deallocate", slow)
    volume = small()
    with writing(volume) as session:
        put(session, "a", 4 * MIB)
        with session.transaction() as tx:
            tx.delete("a")
        until(lambda: session.free_bytes < 4 * MIB)
        with monkeypatch.context() as patch:
            patch.setattr("headrace.volume.writing.holdings.SPACE_S", 0.05)
            with pytest.raises(VolumeFull, match=r"4.0 MiB being given back to the target, free in a moment"):
                put(session, "b", 5 * MIB)
        threading.Timer(0.1, go.set).start()
        put(session, "b", 5 * MIB)
    assert volume.read("b") == content(5 * MIB, 5 * MIB)


def test_space_in_thousands_of_pieces_fits_into_the_log_and_so_does_a_successor() -> None:
    """What is logged covers them: rows for all would be longer than an area."""
    volume = small()
    session = volume.session("test", heartbeat_s=60.0)
    for member, space in enumerate(session._allocator._free):
        start, end = space.ranges()[-1]
        holes = [(at, at + 4 * KIB) for at in range(start, end - 8 * KIB, 8 * KIB)]
        session._allocator._free[member] = FreeSpace(holes)
    pieces = sum(len(space.ranges()) for space in session._allocator._free)
    assert pieces > 900
    for step in range(3):
        with suppress(VolumeError), session.transaction() as tx:
            tx.allocate("never answered", 700 * KIB, checksum_block_bytes=4096)
        with session.transaction() as tx:
            tx.put(f"{step}", content(step, 100 * KIB), checksum_block_bytes=4096)
    with pytest.raises(VolumeFull, match=r"in pieces too small for checksum blocks of 64.0 KiB; choose smaller"):
        put(session, "wide", 100 * KIB)
    rows = [len(ranges) for ranges in volume._catalog.windows.values()]
    assert max(rows) <= window_ranges(volume.superblock) < pieces
    session._beat.stop(None)
    with writing(Volume.open(volume.devices, write=True)) as following:
        assert following.quarantined_bytes >= 2100 * KIB
        put(following, "after", 1000)
    assert {info.name for info in Volume.open(volume.devices).list()} == {"0", "1", "2", "after"}


def test_a_reader_of_deallocated_bytes_hears_that_the_object_is_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deallocate, "AFTER_S", 0.0)
    volume = small()
    with writing(volume) as session:
        put(session, "a", 300 * KIB)
        reader = Volume.open(volume.devices)
        with session.transaction() as tx:
            tx.delete("a")
        until(lambda: session.deallocation.deallocated_bytes == 300 * KIB)
        with pytest.raises(ObjectNotFound, match="deleted while"):
            reader.read("a")
