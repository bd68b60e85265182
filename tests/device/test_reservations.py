"""Reservations through a real target in a process of its own, which is killed and started again."""

from __future__ import annotations

import pickle
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import numpy as np
import pytest

from headrace.accidents.relay import Relay
from headrace.device import NativeDevice, ReservationType, new_key, open_device
from headrace.errors import CommandFailed, DeviceError, OutcomeUnknown, ReservationConflict, UsageError
from headrace.testing.serve import ServeProcess, free_port, serving
from headrace.units import MIB
from tests.stopping import stopped

NQN = "nqn.2026-01.io.headrace:reservations"
SHARED = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS
OLD, NEW = np.full(4096, 1, np.uint8), np.full(4096, 2, np.uint8)


class _Target:
    """Always on the same port with the same media."""

    def __init__(self, media: str) -> None:
        self._media = media
        self._port = free_port()
        self._stack = ExitStack()
        self.process: ServeProcess = self.start()

    def start(self) -> ServeProcess:
        self.process = self._stack.enter_context(serving(NQN, self._media, port=self._port))
        return self.process

    def kill(self) -> None:
        self.process.process.kill()
        self._stack.close()

    def close(self) -> None:
        self._stack.close()


Open = Callable[..., NativeDevice]


@pytest.fixture
def target(tmp_path: Path) -> Iterator[_Target]:
    running = _Target(f"{tmp_path / 'media'}:4MiB")
    yield running
    running.close()


@pytest.fixture
def connect(target: _Target) -> Iterator[Open]:
    """A host with a fresh identifier and a fresh key, registered with it: `device, key = connect()`."""
    opened: list[NativeDevice] = []

    def open_one(hostid: uuid.UUID | None = None) -> NativeDevice:
        uri = target.process.uri(loss_timeout=60, keepalive=5)
        opened.append(open_device(uri, hostid=hostid or uuid.uuid4()))
        return opened[-1]

    yield open_one
    for device in opened:
        device.close()


def _block(device: NativeDevice, offset: int = 0) -> np.ndarray:
    found = np.zeros(4096, np.uint8)
    device.read_into(offset, found)
    return found


def test_the_verbs(connect: Open) -> None:
    one, two = uuid.uuid4(), uuid.uuid4()
    first, second = connect(one), connect(two)
    capabilities = first.reservations.capabilities
    assert capabilities.types == frozenset(ReservationType) and capabilities.persist
    key, other = new_key(), new_key()
    with pytest.raises(ReservationConflict):
        first.reservations.acquire(key, SHARED)
    first.reservations.register(key)
    with pytest.raises(ReservationConflict):
        first.reservations.register(other)
    first.reservations.register(other, replace=key)
    first.reservations.register(key, ignore_existing=True)
    first.reservations.acquire(key, SHARED)
    report = second.reservations.report()
    assert (report.type, report.persistent, report.registered) == (SHARED, False, 1)
    mine = report.of(one)
    assert mine is not None and (mine.key, mine.holds, mine.cntlid) == (key, True, 0xFFFF)
    assert report.holders == (mine,) and report.of(two) is None

    first.write(0, OLD)
    for refused in (lambda: second.write(0, NEW), second.flush, lambda: second.deallocate(0, 4096)):
        with pytest.raises(ReservationConflict, match="Reservation Conflict"):
            refused()
    assert np.array_equal(_block(second), OLD)
    # Where nothing is registered there is nothing to replace; it is registered then.
    second.reservations.register(other, ignore_existing=True)
    second.write(0, NEW)
    with pytest.raises(ReservationConflict):
        second.reservations.acquire(other, ReservationType.WRITE_EXCLUSIVE)
    second.reservations.preempt(other, key, ReservationType.WRITE_EXCLUSIVE)
    with pytest.raises(ReservationConflict):
        first.write(0, OLD)
    second.reservations.release(other, ReservationType.WRITE_EXCLUSIVE)
    first.write(0, OLD)
    with pytest.raises(ReservationConflict):
        first.reservations.clear(key)
    second.reservations.acquire(other, ReservationType.EXCLUSIVE_ACCESS)
    with pytest.raises(ReservationConflict):
        _block(first)
    second.reservations.unregister(other)
    assert second.reservations.report().registrants == ()
    first.reservations.register(key)
    first.reservations.clear(key)
    assert first.reservations.report().registered == 0


def test_a_namespace_that_offers_none(target: _Target, tmp_path: Path) -> None:
    def add(**said: object) -> str:
        namespace = {"path": str(tmp_path / "open"), "size": MIB, "create": True, **said}
        return target.process.uri(target.process.ask("add-namespace", nqn=NQN, namespace=namespace)["nsid"])

    def remove() -> None:
        target.process.ask("remove-namespace", nqn=NQN, nsid=2)

    key = new_key()
    with open_device(add(no_reservations=True), hostid=uuid.uuid4()) as device:
        verbs = device.reservations
        assert not verbs.capabilities.types and not verbs.capabilities.persist
        for refused in (verbs.report, lambda: verbs.register(key), lambda: verbs.acquire(key, SHARED)):
            with pytest.raises(CommandFailed, match="Invalid Command Opcode"):
                refused()
        device.write(0, NEW)
        assert np.array_equal(_block(device), NEW)
    remove()
    with open_device(add(), hostid=uuid.uuid4()) as device:
        device.reservations.register(key, persist=True)
    remove()
    with pytest.raises(DeviceError, match=r"hosts are registered in .*open\.reservations"):
        add(no_reservations=True)


def test_keys_and_devices_that_cannot_be_meant(connect: Open) -> None:
    device = connect()
    for wrong in (0, -1, 1 << 64):
        with pytest.raises(UsageError, match="reservation key"):
            device.reservations.register(wrong)
    with pytest.raises(ValueError):
        device.reservations.acquire(5, 7)  # type: ignore[arg-type]
    memory = open_device("mem:1MiB")
    with pytest.raises(UsageError, match="nvme"):
        memory.reservations.report()
    memory.close()


def test_a_reservation_outlives_a_killed_target(target: _Target, connect: Open) -> None:
    holder, stranger = connect(), connect()
    key = new_key()
    holder.reservations.register(key, persist=True)
    holder.reservations.acquire(key, SHARED)
    holder.write(0, OLD)
    holder.flush()
    target.kill()
    target.start()
    with pytest.raises(ReservationConflict):
        stranger.write(0, NEW)
    report = stranger.reservations.report()
    assert report.persistent and report.type == SHARED and report.registered == 1
    holder.write(4096, OLD)
    assert np.array_equal(_block(stranger), OLD)


def _zombie(target: _Target, connect: Open, *, guard: bool) -> tuple[NativeDevice, BaseException | None]:
    """A holder is preempted; the target dies, the holder's next write is queued, and a target comes back that has
    forgotten all reservations, as Linux does."""
    zombie, taker = connect(), connect()
    key = new_key()
    zombie.reservations.register(key)
    zombie.reservations.acquire(key, SHARED)
    if guard:
        zombie.guard_writes(key, SHARED)
    zombie.write(0, OLD)
    zombie.flush()
    own = new_key()
    taker.reservations.register(own)
    taker.reservations.preempt(own, key, SHARED)
    taker.close()
    target.kill()
    outcome: list[BaseException | None] = []

    def write() -> None:
        try:
            zombie.write(0, NEW)
            outcome.append(None)
        except BaseException as error:
            outcome.append(error)

    writer = threading.Thread(target=write)
    writer.start()
    _until(lambda: zombie.describe()["state"] != "connected")
    target.start()
    writer.join(60)
    assert outcome, "the write neither ended nor failed"
    return zombie, outcome[0]


def test_a_zombies_queued_write_never_lands(target: _Target, connect: Open) -> None:
    zombie, error = _zombie(target, connect, guard=True)
    assert isinstance(error, ReservationConflict)
    assert "fenced" in str(error) and "this host is not registered; no reservation" in str(error)
    assert np.array_equal(_block(zombie), OLD), "the zombie's write landed"
    assert zombie.describe()["guard"]["state"] == "fenced"
    # For good, and for everything but reads.
    for refused in (lambda: zombie.write(0, NEW), zombie.flush, lambda: zombie.deallocate(0, 4096)):
        with pytest.raises(ReservationConflict, match="fenced"):
            refused()
    # Registering again does not help: a new guard would have to be set.
    zombie.reservations.register(new_key())
    with pytest.raises(ReservationConflict, match="fenced"):
        zombie.write(0, NEW)
    zombie.unguard_writes()
    zombie.write(0, NEW)
    assert zombie.describe()["guard"] == {"state": "off"}


def test_without_the_guard_it_would(target: _Target, connect: Open) -> None:
    """What the guard is for: the target that forgot lets it pass."""
    zombie, error = _zombie(target, connect, guard=False)
    assert error is None and np.array_equal(_block(zombie), NEW)


def test_who_still_holds_goes_on(target: _Target, connect: Open) -> None:
    holder = connect()
    key = new_key()
    holder.reservations.register(key, persist=True)
    holder.reservations.acquire(key, ReservationType.WRITE_EXCLUSIVE)
    holder.guard_writes(key, ReservationType.WRITE_EXCLUSIVE)
    holder.write(0, OLD)
    for round_ in range(2):
        target.kill()
        target.start()
        holder.write(4096 * (1 + round_), NEW)
        holder.flush()
    guard = holder.describe()["guard"]
    assert (guard["state"], guard["associations_passed"]) == ("passed", 3), guard


def test_every_path_is_asked(target: _Target, connect: Open) -> None:
    """A path that comes back finds out for all of them."""
    taker = connect()
    with Relay(target.process.port) as relay:
        port = target.process.port
        uri = target.process.uri(loss_timeout=60, keepalive=5).replace(f":{port}/", f":{port},127.0.0.1:{relay.port}/")
        holder = open_device(uri, hostid=uuid.uuid4())
        try:
            key = new_key()
            holder.reservations.register(key)
            holder.reservations.acquire(key, SHARED)
            holder.guard_writes(key, SHARED)
            _until(lambda: holder.describe()["guard"]["associations_passed"] == 2)
            for at in range(8):
                holder.write(4096 * at, OLD)
            own = new_key()
            taker.reservations.register(own)
            taker.reservations.preempt(own, key, SHARED)
            assert holder.describe()["guard"]["state"] == "passed", "nobody has asked yet"
            relay.cut()
            _until(lambda: not all(path["usable"] for path in holder.describe()["paths"]))
            relay.heal()
            _until(lambda: holder.describe()["guard"]["state"] == "fenced")
            with pytest.raises(ReservationConflict, match="fenced"):
                holder.write(0, NEW)
            _block(holder)
        finally:
            holder.close()


def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 20
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.02)


@pytest.mark.parametrize("wrong", ["key", "type", "nothing"])
def test_a_guard_that_does_not_pass_at_once(connect: Open, wrong: str) -> None:
    device = connect()
    key = new_key()
    if wrong != "nothing":
        device.reservations.register(key)
        device.reservations.acquire(key, SHARED)
    guarded = ReservationType.WRITE_EXCLUSIVE if wrong == "type" else SHARED
    with pytest.raises(ReservationConflict, match="fenced"):
        device.guard_writes(key ^ 1 if wrong == "key" else key, guarded)
    with pytest.raises(ReservationConflict, match="fenced"):
        device.write(0, NEW)
    _block(device)


def test_the_guard_goes_with_the_device(connect: Open) -> None:
    device = connect()
    key = new_key()
    device.reservations.register(key)
    device.reservations.acquire(key, SHARED)
    device.guard_writes(key, SHARED)
    copy: NativeDevice = pickle.loads(pickle.dumps(device))
    try:
        copy.write(0, NEW)
        assert copy.describe()["guard"]["state"] == "passed"
        device.reservations.unregister(key)
        late: NativeDevice = pickle.loads(pickle.dumps(device))
        with pytest.raises(ReservationConflict, match="fenced"):
            late.write(0, OLD)
        assert np.array_equal(_block(late), NEW)
        late.close()
    finally:
        copy.close()


def test_admin_commands_pass_through(target: _Target, connect: Open) -> None:
    device = connect()
    identify = device.admin(0x06, cdw10=1, read_bytes=4096)
    assert identify.ok and len(identify.data) == 4096
    assert identify.data[768:].startswith(NQN.encode() + b"\0")
    # Keep Alive Timer: an answer in DW0.
    assert device.admin(0x0A, cdw10=0x0F).dw0 == 5000
    # Host behaviour support: data that go out, and come back.
    behaviour = bytes([1]) + bytes(511)
    assert device.admin(0x09, cdw10=0x16, data_out=behaviour).ok
    assert device.admin(0x0A, cdw10=0x16, read_bytes=512).data == behaviour
    refused = device.admin(0xC1)
    assert not refused.ok and (refused.status_type, refused.status_code, refused.do_not_retry) == (0, 1, True)
    assert "Invalid Command Opcode" in refused.status
    for opcode in (0x00, 0x01, 0x0C, 0x7F):
        with pytest.raises(UsageError, match="host's own"):
            device.admin(opcode)
    with pytest.raises(UsageError, match="multiple of 4"):
        device.admin(0x06, cdw10=1, read_bytes=4097)
    with pytest.raises(UsageError, match="multiple of 4"):
        device.admin(0x06, cdw10=1, read_bytes=2 * MIB)
    with pytest.raises(UsageError, match="cdw12"):
        device.admin(0x06, cdw12=1 << 32)

    with stopped(target.process.process.pid), pytest.raises(OutcomeUnknown, match="unknown"):
        device.admin(0x06, cdw10=1, read_bytes=4096, timeout_s=0.5)
    device.write(0, NEW)
    assert np.array_equal(_block(device), NEW)


def test_errors_of_other_kinds_stay_what_they_are(connect: Open) -> None:
    device = connect()
    key = new_key()
    device.reservations.register(key)
    device.reservations.acquire(key, SHARED)
    with pytest.raises(CommandFailed, match="Invalid Field"):
        device.reservations.release(key, ReservationType.WRITE_EXCLUSIVE)
