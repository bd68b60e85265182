"""Our host's reservations against a Linux kernel target: one host name, two host identifiers at once.

nvmet keeps reservations in memory only: a restart forgets them, which is what the guard of writes is for.
"""

from __future__ import annotations

import uuid
from collections.abc import Iterator

import numpy as np
import pytest

from headrace.device import NativeDevice, ReservationType, new_key, open_device
from headrace.errors import ReservationConflict
from tests.interop.kernel import KernelTarget

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(600)]

SHARED = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS
OLD, NEW = np.full(4096, 1, np.uint8), np.full(4096, 2, np.uint8)


@pytest.fixture
def target(reserving_kernel: KernelTarget) -> KernelTarget:
    return reserving_kernel


@pytest.fixture
def pair(target: KernelTarget) -> Iterator[tuple[NativeDevice, uuid.UUID, NativeDevice, uuid.UUID]]:
    ids = uuid.uuid4(), uuid.uuid4()
    devices = [open_device(target.uri(), hostid=hostid) for hostid in ids]
    yield devices[0], ids[0], devices[1], ids[1]
    # Nothing is left for the next test, whoever holds.
    cleaner = open_device(target.uri(), hostid=uuid.uuid4())
    key = new_key()
    cleaner.reservations.register(key)
    cleaner.reservations.clear(key)
    for device in (*devices, cleaner):
        device.close()


def _block(device: NativeDevice) -> np.ndarray:
    found = np.zeros(4096, np.uint8)
    device.read_into(0, found)
    return found


def test_what_the_kernel_offers(pair: tuple[NativeDevice, uuid.UUID, NativeDevice, uuid.UUID]) -> None:
    capabilities = pair[0].reservations.capabilities
    assert capabilities.types == frozenset(ReservationType)
    assert not capabilities.persist


@pytest.mark.parametrize("abort", [False, True])
def test_a_takeover(pair: tuple[NativeDevice, uuid.UUID, NativeDevice, uuid.UUID], abort: bool) -> None:
    first, first_id, second, second_id = pair
    one, two = new_key(), new_key()
    first.reservations.register(one)
    first.reservations.acquire(one, SHARED)
    first.guard_writes(one, SHARED)
    first.write(0, OLD)
    report = second.reservations.report()
    mine = report.of(first_id)
    assert mine is not None and (mine.key, mine.holds) == (one, True)
    assert report.type == SHARED and report.of(second_id) is None
    with pytest.raises(ReservationConflict):
        second.write(0, NEW)
    assert np.array_equal(_block(second), OLD)

    second.reservations.register(two)
    second.reservations.preempt(two, one, SHARED, abort=abort)
    report = second.reservations.report()
    assert [(found.hostid, found.key, found.holds) for found in report.registrants] == [(second_id, two, True)]
    with pytest.raises(ReservationConflict):
        first.write(0, NEW)
    with pytest.raises(ReservationConflict, match=r"fenced.*not registered"):
        first.guard_writes(one, SHARED)
    assert np.array_equal(_block(first), OLD)
    second.guard_writes(two, SHARED)
    second.write(0, NEW)
    assert np.array_equal(_block(first), NEW)


def test_replace_release_and_unregister(pair: tuple[NativeDevice, uuid.UUID, NativeDevice, uuid.UUID]) -> None:
    first, first_id, second, _ = pair
    one, two = new_key(), new_key()
    first.reservations.register(one)
    with pytest.raises(ReservationConflict):
        first.reservations.register(two)
    first.reservations.register(two, replace=one)
    first.reservations.register(one, ignore_existing=True)
    mine = second.reservations.report().of(first_id)
    assert mine is not None and mine.key == one
    first.reservations.acquire(one, ReservationType.WRITE_EXCLUSIVE)
    first.reservations.release(one, ReservationType.WRITE_EXCLUSIVE)
    second.write(0, NEW)
    first.reservations.unregister(one)
    assert first.reservations.report().registrants == ()


def test_the_kernel_forgets_and_the_guard_does_not(target: KernelTarget) -> None:
    """The subsystem leaves its port, its namespace is made anew over the same bytes: as after a restart."""
    holder, zombie = (open_device(target.uri(loss_timeout=300), hostid=uuid.uuid4()) for _ in range(2))
    link, namespace = f"ports/1/subsystems/{target.nqn}", f"subsystems/{target.nqn}/namespaces/1"
    try:
        key = new_key()
        holder.reservations.register(key)
        holder.reservations.acquire(key, SHARED)
        zombie.reservations.register(key)
        holder.guard_writes(key, SHARED)
        holder.write(0, OLD)
        target.do(f"rm {link}; echo 0 > {namespace}/enable; echo 1 > {namespace}/enable")
        target.do(f"ln -s $PWD/subsystems/{target.nqn} {link}")
        # Queued while nobody was there, or sent since: it meets a target that lets everybody write.
        with pytest.raises(ReservationConflict, match=r"fenced.*not registered; no reservation"):
            holder.write(0, NEW)
        assert np.array_equal(_block(holder), OLD), "the write landed"
        # The other one has no guard.
        zombie.write(0, NEW)
        assert np.array_equal(_block(holder), NEW)
    finally:
        holder.close()
        zombie.close()
