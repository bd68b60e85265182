"""What a device says of what it did lately: every device, what hangs, paths that go or are slow, a full ring."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator

import numpy as np
import pytest

from headrace.accidents.relay import Relay
from headrace.device import (
    EVENT,
    Batch,
    EventKind,
    Events,
    NativeDevice,
    lanes,
    open_device,
    open_devices,
    read_batch,
    status_text,
)
from headrace.device.events import NO_PATH
from headrace.errors import UsageError
from headrace.fabric import MemoryMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions
from headrace.testing.devices import MemoryDevice
from tests.waiting import until

NQN = "nqn.2026-01.io.example:events"
BLOCK = 4096


@pytest.fixture
def target() -> Iterator[Target]:
    namespaces = [NamespaceOptions(media=MemoryMedia(size_bytes=8 << 20))]
    with Target(TargetOptions(subsystems=[SubsystemOptions(nqn=NQN, namespaces=namespaces)])) as target:
        yield target


def blocks(count: int) -> Batch:
    """Reads that do not touch, so that each is a command."""
    rows = np.arange(count, dtype=np.uint64) * np.uint64(BLOCK)
    return Batch(
        member=np.zeros(count, np.uint32),
        offset=rows * np.uint64(2),
        length=np.full(count, BLOCK, np.uint64),
        buffer_offset=rows,
    )


def of(events: Events, *kinds: EventKind) -> Events:
    return events[np.isin(events["kind"], kinds)]


def test_every_device_tells_what_it_did(device: NativeDevice) -> None:
    begun = time.monotonic_ns()
    device.write(8192, bytes(4096))
    device.read_into(4096, bytearray(8192))
    device.flush()
    device.deallocate(0, 4096)
    ended = time.monotonic_ns()
    record = device.event_record()
    events = of(record.events, EventKind.READ, EventKind.WRITE, EventKind.FLUSH, EventKind.OTHER)
    assert events.dtype == EVENT and record.recorded >= 4 and not record.trouble
    assert list(events["kind"]) == [EventKind.WRITE, EventKind.READ, EventKind.FLUSH, EventKind.OTHER]
    assert list(events["offset"]) == [8192, 4096, 0, 0] and list(events["bytes"]) == [4096, 8192, 0, 4096]
    assert (events["started_ns"] >= begun).all() and (events["ended_ns"] <= ended).all()
    assert (events["started_ns"] <= events["ended_ns"]).all()
    assert not events["status"].any() and not events["retries"].any() and not events["path"].any()
    (path,) = record.paths
    assert path.address and path.target == getattr(device._address, "subsysnqn", "")
    assert device in open_devices()
    device.close()
    assert device not in open_devices()


def test_what_hangs_is_seen_without_an_end_and_then_with_it(target: Target) -> None:
    with Relay(target.addresses[0][1]) as relay:
        uri = target.uri().replace(f":{target.addresses[0][1]}/", f":{relay.port}/")
        with open_device(uri + "&io_timeout=600&keepalive=3600") as device:
            relay.hold_now()
            reader = threading.Thread(target=device.read_into, args=(BLOCK, bytearray(BLOCK)))
            reader.start()
            try:
                until(lambda: not device.events()["ended_ns"].all(), "the read is under way")
                (hung,) = device.events()[-1:]
                assert (hung["kind"], hung["offset"], hung["bytes"]) == (EventKind.READ, BLOCK, BLOCK)
                assert device.event_record().paths[hung["path"]].name == f"127.0.0.1:{relay.port}"
                began = int(hung["started_ns"])
                until(lambda: time.monotonic_ns() > began + 20_000_000)
            finally:
                relay.release()
                reader.join()
            (read,) = of(device.events(), EventKind.READ)
            assert read["started_ns"] == began and read["ended_ns"] > began + 20_000_000


def test_a_lost_path_and_what_it_took_with_it(target: Target) -> None:
    with Relay(target.addresses[0][1]) as relay:
        uri = target.uri().replace(f":{target.addresses[0][1]}/", f":{relay.port}/")
        with open_device(uri + "&io_timeout=600&keepalive=3600&loss_timeout=600") as device:
            relay.hold_now()
            reader = threading.Thread(target=device.read_into, args=(0, bytearray(BLOCK)))
            reader.start()
            try:
                until(lambda: len(of(device.events(), EventKind.READ)), "the read is under way")
                relay.cut()
                relay.release()
                until(lambda: len(of(device.events(), EventKind.WAITING_READ)), "it waits for a path")
                waits = of(device.events(), EventKind.WAITING_READ)[0]
                assert (waits["path"], waits["offset"], waits["retries"]) == (NO_PATH, 0, 1)
                until(lambda: len(of(device.events(), EventKind.NOT_CONNECTED)), "an attempt failed")
            finally:
                relay.heal()
                reader.join()
            events = device.events()
            lost, again = of(events, EventKind.READ)
            assert "association was lost" in status_text(lost["status"]) and lost["retries"] == 0
            assert again["status"] == 0 and again["retries"] == 1 and again["started_ns"] >= lost["ended_ns"]
            kinds = [kind for kind in events["kind"] if kind >= EventKind.CONNECTED]
            assert kinds[:2] == [EventKind.CONNECTED, EventKind.PATH_LOST] and kinds[-1] == EventKind.CONNECTED
            (first,) = of(events, EventKind.PATH_LOST)
            assert lost["ended_ns"] == first["ended_ns"]


def test_reads_are_taken_back_from_a_path_that_is_frozen(target: Target) -> None:
    port = target.addresses[0][1]
    with Relay(port) as relay:
        uri = target.uri().replace(f":{port}/", f":{port},127.0.0.1:{relay.port}/")
        with open_device(uri + "&policy=round-robin&io_timeout=600&keepalive=3600") as device:
            until(lambda: all(path.usable for path in device.paths()))
            read_batch([device], blocks(64), [np.zeros(64 * BLOCK, np.uint8)])
            relay.hold_now()
            read_batch([device], blocks(64), [np.zeros(64 * BLOCK, np.uint8)])
            slow = f"127.0.0.1:{relay.port}"
            record = device.event_record()
            relay.release()
            back = of(record.events, EventKind.RECALLED)
            assert len(back) and {record.paths[path].name for path in back["path"]} == {slow}
            assert "taken back" in status_text(back["status"][0])
            (marked,) = of(record.events, EventKind.PATH_SLOW)
            assert record.paths[marked["path"]].name == slow
            tried = of(record.events, EventKind.READ)
            assert (tried["retries"] == 1).sum() == len(back) and len(tried) == 128


def test_a_full_ring_keeps_the_last_ones_and_is_read_while_it_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HEADRACE_EVENTS", "1000")
    over = threading.Event()
    with open_device("mem:8MiB") as device:

        def work() -> None:
            while not over.is_set():
                read_batch([device], blocks(256), [np.zeros(256 * BLOCK, np.uint8)])

        worker = threading.Thread(target=work)
        worker.start()
        try:
            until(lambda: device.event_record().recorded > 5000)
            for _ in range(20):
                record = device.event_record()
                ended = record.events[record.events["ended_ns"] > 0]
                assert record.lost == record.recorded - len(ended) and len(ended) <= 1024
                assert (ended["bytes"] == BLOCK).all() and (ended["offset"] % BLOCK == 0).all()
                assert (ended["started_ns"] <= ended["ended_ns"]).all()
        finally:
            over.set()
            worker.join()
        assert len(device.events()) == 1023


def test_a_device_that_records_nothing_says_so(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(UsageError, match="records no events"):
        MemoryDevice(1 << 20).events()
    monkeypatch.setenv("HEADRACE_EVENTS", "0")
    with open_device("mem:1MiB") as device, pytest.raises(UsageError, match="records no events"):
        device.events()
    for wrong in ("-1", "many", "16777217"):
        monkeypatch.setenv("HEADRACE_EVENTS", wrong)
        with pytest.raises(UsageError, match="HEADRACE_EVENTS"):
            open_device("mem:1MiB")


def test_a_view_of_a_device_has_the_events_of_all(target: Target) -> None:
    with open_device(target.uri()) as device:
        (view,) = lanes([device], "metadata")
        view.write(0, bytes(BLOCK))
        device.read_into(0, bytearray(BLOCK))
        kinds = (EventKind.READ, EventKind.WRITE)
        assert list(of(view.events(), *kinds)["kind"]) == [EventKind.WRITE, EventKind.READ]
        assert of(view.events(), *kinds).tobytes() == of(device.events(), *kinds).tobytes()
