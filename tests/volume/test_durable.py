"""When is it durable: a cache that is lost between a write and its flush, and the rule that finds out."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from headrace.errors import DeviceError, HeadraceError
from headrace.testing import CrashDevice, MemoryDevice, Timeline
from headrace.units import MIB
from headrace.volume import Volume
from headrace.volume.data import durable
from headrace.volume.writing import transaction
from headrace.volume.writing.allocation import Allocation
from tests.volume.support import KIB, content, crash_volume, open_read, second, writing

pytestmark = pytest.mark.usefixtures("nobody_else", "quick")

BIG = content(1, 300 * KIB)
STREAM = content(2, 200 * KIB)
CHANGING = content(3, 5 * KIB)
ALL = {"big": BIG, "changing": CHANGING, "stream": STREAM}


def lose_at(index: int, member: int) -> tuple[Timeline, int]:
    """Write, with a member's cache lost right after the index-th command; returns how many commands there were."""
    timeline, volume = crash_volume(2)
    timeline.begin()
    done = False

    def after(event: int) -> None:
        nonlocal done
        if event == index and not done:
            done = True
            timeline.devices[member].lose_cache()

    timeline.after_event = after
    with writing(volume) as session, session.transaction() as tx:
        tx.put("big", BIG, checksum_block_bytes=4096)
        # The caller's memory is its own again when `put` returns, also where the bytes are written once more later.
        changing = bytearray(CHANGING)
        tx.put("changing", changing)
        changing[:] = bytes(len(changing))
        tx.write_stream("stream", [STREAM])
    return timeline, len(timeline.events)


def after_power_cut(timeline: Timeline) -> dict[str, bytes]:
    return open_read(timeline.crash(len(timeline.events)).nothing())


def test_bytes_that_a_lost_controller_took_along_are_written_again() -> None:
    index, count = 0, 1
    while index < count:
        for member in (0, 1):
            timeline, count = lose_at(index, member)
            assert after_power_cut(timeline) == ALL
        index += 1
    assert index > 10


def test_without_counting_losses_acknowledged_bytes_are_gone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(durable, "lost_since", lambda devices, before: False)
    lost = 0
    for index in range(12):
        timeline, _ = lose_at(index, 0)
        try:
            lost += after_power_cut(timeline) != ALL
        except HeadraceError:
            lost += 1
    assert lost


def test_a_rank_flushes_through_the_device_that_wrote() -> None:
    """The coordinator's flush reaches another cache: a rank's bytes must be durable before its receipt exists."""
    timeline, volume = crash_volume(2)
    timeline.begin()
    with writing(volume) as session, session.transaction() as tx:
        receipt = volume.write_grant(tx.allocate("x", len(BIG)), BIG)
        assert timeline.crash(len(timeline.events)).blocks_in_the_air == 0
        tx.accept(receipt)


def test_a_device_that_loses_every_write_is_given_up() -> None:
    class Hopeless(MemoryDevice):
        def flush(self) -> None:
            self.lose_cache()

    devices = [Hopeless(4 * MIB, volatile_cache=True)]
    volume = Volume.create(devices=devices)
    with (
        writing(volume) as session,
        pytest.raises(DeviceError, match="during every attempt"),
        session.transaction() as tx,
    ):
        tx.put("x", b"never durable")
    assert "x" not in Volume.open(devices)


def test_a_failed_flush_fails_the_transaction() -> None:
    class Failing(CrashDevice):
        fail = False

        def flush(self) -> None:
            if self.fail:
                raise DeviceError("the flush failed", where=self.uri)
            super().flush()

    timeline = Timeline()
    devices = [Failing(timeline, 4 * MIB), Failing(timeline, 4 * MIB)]
    volume = Volume.create(devices=devices, stripe_bytes=64 * KIB)
    with writing(volume) as session:
        devices[1].fail = True
        with pytest.raises(DeviceError, match="flush failed"), session.transaction() as tx:
            tx.put("x", BIG)
        devices[1].fail = False
        with session.transaction() as tx:
            tx.put("x", BIG)
    assert open_read(devices) == {"x": BIG}


def flushes(timeline: Timeline) -> list[int]:
    return [sum(e.kind == "flush" and e.device == i for e in timeline.events) for i in range(len(timeline.devices))]


def test_the_objects_of_a_transaction_share_a_flush(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline, volume = crash_volume(2)
    with writing(volume) as session:
        session.transaction().put("first", b"opens a window")
        timeline.begin()
        before = flushes(timeline)
        with session.transaction() as tx:
            for i in range(20):
                tx.put(f"n/{i}", content(i, 5000))
            tx.write_stream("s", [content(30, 70 * KIB)], checksum_block_bytes=4096)
            tx.compose("c", [b"new bytes"])
            assert timeline.crash(len(timeline.events)).blocks_in_the_air > 20
        assert [after - b for after, b in zip(flushes(timeline), before, strict=True)] == [1, 1]
        assert open_read(timeline.crash(len(timeline.events)).nothing())["n/7"] == content(7, 5000)
        # What would be too much to keep is durable when `put` returns.
        monkeypatch.setattr(transaction, "KEPT_BYTES", 10_000)
        with session.transaction() as tx:
            tx.put("small", content(1, 4000))
            assert timeline.crash(len(timeline.events)).blocks_in_the_air == 1
            tx.put("large", content(1, 9000))
            assert timeline.crash(len(timeline.events)).blocks_in_the_air == 0


def test_an_object_whose_flush_failed_is_not_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    timeline, volume = crash_volume(1)

    def failing(devices: object) -> None:
        raise DeviceError("the flush failed")

    with writing(volume) as session:
        tx = session.transaction()
        with monkeypatch.context() as patch, pytest.raises(DeviceError):
            patch.setattr(transaction, "KEPT_BYTES", 100)
            patch.setattr(durable, "flush_all", failing)
            tx.put("x", BIG)
        with pytest.raises(DeviceError, match="earlier flush"):
            tx.commit()
    assert timeline.events and open_read(timeline.devices) == {}


@pytest.mark.parametrize("then", ["another write", "nothing"])
def test_what_a_failed_flush_may_still_land_on_stays_quarantined(then: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where the rest of the same blob is written after it, by a thread that did not hear of it."""
    _, volume = crash_volume(2)

    def failing(devices: object) -> None:
        raise DeviceError("the flush failed")

    with writing(volume) as session:
        free = session.free_bytes
        tx = session.transaction()
        tx.put("whole", BIG)
        allocation = tx.begin("x", own=False)
        extents = session.take(allocation, len(BIG), 4096)

        def flush_fails() -> None:
            with monkeypatch.context() as patch, pytest.raises(DeviceError, match="the flush failed"):
                patch.setattr(durable, "flush_all", failing)
                tx._flush()

        tx.write_part(allocation, volume.devices, lambda: None, 1)
        if then == "another write":
            tx.write_part(allocation, volume.devices, flush_fails, 1)
            tx.write_part(allocation, volume.devices, lambda: None, 1)
        else:
            flush_fails()
        allocation.written(data=extents, tables=[], roots=np.zeros(len(BIG) // 4096, np.uint32))
        with pytest.raises(DeviceError, match="earlier flush"):
            tx.commit()
        assert session.quarantined_bytes >= 2 * len(BIG) and session.free_bytes <= free - 2 * len(BIG)
    with writing(second(volume)) as session:
        assert session.quarantined_bytes >= 2 * len(BIG)


def test_whoever_flushes_waits_for_a_flush_that_has_its_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a commit goes ahead of the flush of its objects, which another thread has begun."""
    began, go, ended = threading.Event(), threading.Event(), threading.Event()

    def slow(devices: object) -> None:
        began.set()
        assert go.wait(60)
        ended.set()

    monkeypatch.setattr(durable, "flush_all", slow)
    unflushed = durable.Unflushed()
    unflushed.write(Allocation("x", 1), [], lambda: None, kept_bytes=1)
    first = threading.Thread(target=unflushed.flush)
    first.start()
    assert began.wait(60)
    threading.Timer(0.05, go.set).start()
    unflushed.flush()
    assert ended.is_set()
    first.join()


def test_bytes_that_are_not_copied_are_the_callers_again_when_no_flush_has_them(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """A flush of another thread may write them once more, and would take what the caller has there by then."""
    _, volume = crash_volume(1)
    began, go = threading.Event(), threading.Event()

    def slow(devices: object) -> None:
        began.set()
        assert go.wait(60)

    with writing(volume) as session:
        tx = session.transaction()
        write = tx._unflushed.write

        def taken_along(*arguments: object, **more: int) -> None:
            write(*arguments, **more)  # type: ignore[arg-type]
            other.start()
            assert began.wait(60)

        monkeypatch.setattr(transaction, "KEPT_BYTES", 100)
        monkeypatch.setattr(durable, "flush_all", slow)
        monkeypatch.setattr(tx._unflushed, "write", taken_along)
        other = threading.Thread(target=tx._unflushed.flush)
        putting = threading.Thread(target=tx.put, args=("x", bytearray(CHANGING)))
        putting.start()
        assert began.wait(60)
        putting.join(0.2)
        assert putting.is_alive()
        go.set()
        putting.join(60)
        other.join(60)
        tx.commit()
    assert open_read(volume.devices) == {"x": CHANGING}
