"""Transactions: everything or nothing, and what is refused."""

from __future__ import annotations

import pickle
import threading
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from headrace.device import BlockDevice
from headrace.device.protocol import Buffer
from headrace.errors import (
    DeviceGone,
    DeviceTimeout,
    HeadraceError,
    ObjectExists,
    ObjectNotFound,
    SessionLost,
    UsageError,
    VolumeError,
    VolumeFull,
)
from headrace.testing import MemoryDevice
from headrace.units import MIB
from headrace.volume import Grant, Receipt, Volume
from headrace.volume.catalog import commit
from headrace.volume.repair.scrub import scrub
from tests.volume.support import KIB, STRIPE, content, new_volume, second, state_of, writing

pytestmark_fast = pytest.mark.usefixtures("nobody_else")


@pytestmark_fast
def test_what_went_wrong_inside_is_not_hidden_by_the_close(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = new_volume()
    session = volume.session()

    def gone() -> None:
        raise DeviceGone("the target is gone")

    close = session.close
    monkeypatch.setattr(session, "close", gone)
    with pytest.raises(ZeroDivisionError), session:
        _ = 1 // 0
    with pytest.raises(DeviceGone), session:
        pass
    close()


def test_all_or_nothing_on_an_exception() -> None:
    volume = new_volume()
    with writing(volume) as session:
        with pytest.raises(RuntimeError), session.transaction() as tx:
            tx.put("x", b"1")
            raise RuntimeError
        assert state_of(volume) == {}
        with pytest.raises(UsageError, match="not committed"):
            _ = tx.sequence
        with pytest.raises(UsageError, match="ended"):
            tx.put("y", b"")


@pytestmark_fast
def test_objects_never_change_but_can_be_replaced() -> None:
    volume = new_volume()
    with writing(volume) as session:
        with session.transaction() as tx:
            tx.put("x", b"1")
        info = volume.stat("x")
        with pytest.raises(ObjectExists), session.transaction() as tx:
            tx.put("x", b"2")
        with session.transaction() as tx:
            tx.delete("x")
            tx.put("x", b"2")
        assert volume.read("x") == b"2"
        with pytest.raises(ObjectNotFound, match="replaced"):
            volume.submit_read(info, [0], [1], [bytearray(1)], [0])
        with pytest.raises(ObjectNotFound), session.transaction() as tx:
            tx.delete("y")
        with pytest.raises(UsageError, match="already"), session.transaction() as tx:
            tx.put("z", b"")
            tx.put("z", b"")


@pytestmark_fast
def test_two_open_transactions_are_told_apart() -> None:
    volume = new_volume()
    with writing(volume) as session:
        one, two = session.transaction(), session.transaction()
        one.put("x", b"1")
        two.put("x", b"2")
        two.commit()
        with pytest.raises(ObjectExists):
            one.commit()
        assert volume.read("x") == b"2"


@pytestmark_fast
def test_numbers_and_names_that_cannot_be_meant() -> None:
    volume = new_volume()
    with pytest.raises(UsageError, match="not UTF-8"):
        volume.session("\udcff")
    with writing(volume) as session:
        free = session.free_bytes
        for length in (1.5, -1, "1", None):
            with pytest.raises(UsageError, match="length of an object"), session.transaction() as tx:
                tx.allocate("x", length)  # type: ignore[arg-type]
            if length is not None:
                with pytest.raises(UsageError, match="length of an object"), session.transaction() as tx:
                    tx.write_stream("x", [b""], length_bytes=length)  # type: ignore[arg-type]
        assert session.free_bytes == free
        assert isinstance(session.free_bytes, int)
        with session.transaction() as tx:
            tx.put("x", b"1234")
    for offset, length in ((-1, None), (5, None), (5, 0), (0, 5), (0, -1), (0, 1 << 70), (1 << 70, None), (1 << 70, 1)):
        with pytest.raises(UsageError, match="leaves the object"):
            volume.read("x", offset, length)
    assert volume.read("x", 4) == b""


@pytestmark_fast
@pytest.mark.parametrize("name", ["", "/a", "a/", "a//b", "a\0", "é" * 513, "\ud800"])
def test_bad_names_are_refused(name: str) -> None:
    volume = new_volume()
    with writing(volume) as session, pytest.raises(UsageError, match="not a name"), session.transaction() as tx:
        tx.put(name, b"")


@pytestmark_fast
def test_grants_and_receipts() -> None:
    volume = new_volume()
    with writing(volume) as session:
        with pytest.raises(VolumeError, match="not answered"), session.transaction() as tx:
            grant = tx.allocate("x", 100)
        with session.transaction() as tx:
            grant = pickle.loads(pickle.dumps(tx.allocate("x", 200 * KIB, checksum_block_bytes=4096)))
            assert Grant.from_json(grant.to_json()) == grant
            with pytest.raises(UsageError, match="does not fit"):
                volume.write_grant(grant, b"short")
            receipt = volume.write_grant(grant, content(1, 200 * KIB))
            assert Receipt.from_json(receipt.to_json()) == receipt
            for wrong in ({"transaction": 99}, {"birth": 1}, {"roots": b""}, {"length_bytes": 1}, {"session": 9}):
                with pytest.raises(UsageError, match="no grant"):
                    tx.accept(Receipt(**{**receipt.__dict__, **wrong}))
            tx.accept(receipt)
        assert volume.read("x") == content(1, 200 * KIB)
        with pytest.raises(UsageError, match="another volume"):
            new_volume().write_grant(grant, content(1, 200 * KIB))
        for text in ("", "[]", "{}", '{"name": 1}', "null"):
            with pytest.raises(UsageError, match="not a grant"):
                Grant.from_json(text)


@pytestmark_fast
@pytest.mark.parametrize("failure", [KeyboardInterrupt, DeviceTimeout("no answer")])
@pytest.mark.parametrize("write", range(4))
def test_after_a_failed_write_to_the_log_nothing_more_is_written_there(
    monkeypatch: pytest.MonkeyPatch, failure: BaseException, write: int
) -> None:
    volume = new_volume()
    session = volume.session("run", heartbeat_s=60)
    with session.transaction() as tx:
        tx.put("before", b"1")
    tx = session.transaction()
    tx.put("in flight", content(1, 300 * KIB))
    original, count = commit.write_through, 0

    def failing(device: BlockDevice, offset: int, data: bytes) -> None:
        nonlocal count
        if count == write:
            raise failure
        count += 1
        original(device, offset, data)

    monkeypatch.setattr(commit, "write_through", failing)
    with pytest.raises(type(failure) if isinstance(failure, HeadraceError) else KeyboardInterrupt):
        tx.commit()
    monkeypatch.setattr(commit, "write_through", original)
    left = [bytes(device.data) for device in volume.devices]  # type: ignore[attr-defined]
    with pytest.raises(SessionLost, match="can no longer write"):
        later = session.transaction()
        later.put("later", b"2")
        later.commit()
    area = volume.superblock.area_offset(0, 0)
    end = volume.superblock.area_offset(0, volume.superblock.area_count)
    assert all(bytes(d.data)[area:end] == b[area:end] for d, b in zip(volume.devices, left, strict=True))  # type: ignore[attr-defined]
    session.close()
    # The next session knows that commands may be late, and finds the commit whole or not at all.
    after = second(volume)
    with writing(after) as successor:
        assert ("in flight" in after) == (write > 0)
        assert successor.quarantined_bytes > 0
        if write > 0:
            assert after.read("in flight") == content(1, 300 * KIB)
        with successor.transaction() as tx:
            tx.put("after", b"3")
    assert "later" not in Volume.open(volume.devices)


# ---- several threads ----


class Held(MemoryDevice):
    """A write of data waits to be let go, once."""

    def __init__(self, size_bytes: int) -> None:
        super().__init__(size_bytes)
        self.hold = threading.Event()
        self.held, self.go = threading.Event(), threading.Event()

    def write(self, offset: int, data: Buffer, *, fua: bool = False) -> None:
        if self.hold.is_set() and not fua:
            self.hold.clear()
            self.held.set()
            assert self.go.wait(60)
        super().write(offset, data, fua=fua)


@pytestmark_fast
@pytest.mark.parametrize("end", ["commit", "abort", "close"])
def test_who_still_writes_when_it_ends_writes_to_nobody_elses_space(end: str) -> None:
    """Its space is neither handed out while it writes, nor lost when it has."""
    volume = Volume.create(devices=[Held(3 * MIB)], stripe_bytes=STRIPE)
    (device,) = volume.devices
    assert isinstance(device, Held)
    with writing(volume) as session, ThreadPoolExecutor(1) as pool:
        free = session.free_bytes
        tx = session.transaction()
        device.hold.set()
        late = pool.submit(tx.put, "late", content(1, 300 * KIB))
        assert device.held.wait(60)
        taken = free - session.free_bytes
        assert taken >= 300 * KIB
        if end == "close":
            session.close()
        elif end == "abort":
            tx.abort()
        else:
            with pytest.raises(UsageError, match="another thread still writes in this transaction: found 1 call"):
                tx.commit()
        with pytest.raises(UsageError, match="ended"):
            tx.put("more", b"")
        if end != "close":
            # All that is left, and not that.
            with session.transaction() as others:
                others.put("all", content(2, session.free_bytes - 256 * KIB))
            assert session.quarantined_bytes == 0
            left = session.free_bytes
        device.go.set()
        late.result(60)
        if end != "close":
            assert volume.read("all") == content(2, volume.stat("all").length_bytes)
            assert session.free_bytes == left + taken and session.quarantined_bytes == 0
    with writing(second(volume)) as session:
        assert "late" not in session.volume and (session.quarantined_bytes > 0) is (end == "close")
    assert scrub(volume.devices).clean


@pytestmark_fast
def test_nothing_comes_into_a_transaction_that_is_being_committed(monkeypatch: pytest.MonkeyPatch) -> None:
    volume = new_volume()
    with writing(volume) as session, ThreadPoolExecutor(1) as pool:
        tx = session.transaction()
        tx.put("x", b"1" * 5000)
        left = session.free_bytes
        flush, refused = tx._flush, []

        def meanwhile() -> None:
            for late in (lambda: tx.allocate("late", 5000), lambda: tx.put("late", b"2"), lambda: tx.delete("x")):
                error = pool.submit(late).exception(60)
                refused.append(isinstance(error, UsageError) and "ended" in str(error))
            flush()

        monkeypatch.setattr(tx, "_flush", meanwhile)
        tx.commit()
        assert refused == [True] * 3 and session.free_bytes == left
        with pytest.raises(UsageError, match="ended"):
            tx.allocate("later", 5000)
        # An abort that comes too early to be too late.
        tx = session.transaction()
        tx.put("y", b"1" * 5000)
        flush = tx._flush
        monkeypatch.setattr(tx, "_flush", lambda: (flush(), pool.submit(tx.abort).result(60)))
        with pytest.raises(UsageError, match="aborted while it was committed"):
            tx.commit()
        assert session.free_bytes == left
    assert state_of(volume) == {"x": b"1" * 5000}


@pytestmark_fast
@pytest.mark.parametrize("fails", [False, True])
def test_an_abort_that_comes_too_late_says_so(fails: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    volume = new_volume()
    with writing(volume) as session, ThreadPoolExecutor(2) as pool:
        tx = session.transaction()
        tx.put("x", b"1" * 5000)
        record, wait = session._record, tx._gate.wait
        begun, waiting, go = threading.Event(), threading.Event(), threading.Event()

        def slow(*arguments: Any) -> Any:
            with pytest.raises(UsageError, match="by this very thread"):
                tx.abort()
            begun.set()
            assert go.wait(60)
            if fails:
                raise DeviceTimeout("no answer")
            return record(*arguments)

        def told(timeout: float | None = None) -> bool:
            waiting.set()
            return wait(timeout)

        monkeypatch.setattr(session, "_record", slow)
        monkeypatch.setattr(tx._gate, "wait", told)
        committing = pool.submit(tx.commit)
        assert begun.wait(60)
        aborting = pool.submit(tx.abort)
        assert waiting.wait(60) and not aborting.done()
        go.set()
        if fails:
            with pytest.raises(DeviceTimeout):
                committing.result(60)
            aborting.result(60)
        else:
            late = f"committed before it could be aborted: found commit {committing.result(60)}"
            with pytest.raises(UsageError, match=late):
                aborting.result(60)
        # It has ended.
        tx.abort()
        assert session.open_transactions == []
    assert state_of(volume) == ({} if fails else {"x": b"1" * 5000})


@pytestmark_fast
def test_what_found_no_space_counts_for_nothing() -> None:
    volume = new_volume()
    with writing(volume) as session, session.transaction() as tx:
        tx.put("x", b"1")
        before = tx._record_bytes
        for late in (
            lambda: tx.put("y", bytes(9 * MIB)),
            lambda: tx.put_many(["a", "b"], bytes(9 * MIB), [1, 9 * MIB - 1]),
            lambda: tx.allocate("z", 9 * MIB),
        ):
            with pytest.raises(VolumeFull):
                late()
            assert tx._record_bytes == before
        tx.put("y", b"2")
    assert state_of(volume) == {"x": b"1", "y": b"2"}
