"""Our host against a Linux kernel target (nvmet): bytes, digests, flush, sizes around the transfer limits, a volume."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from uuid import UUID, uuid4

import numpy as np
import pytest

from headrace.device import Batch, open_device, read_batch, write_batch
from headrace.errors import ConnectRefused, DeviceError, HeadraceError, NotFenced
from headrace.units import MIB
from headrace.volume import Volume
from tests.interop.kernel import KernelTarget, kernel_target

pytestmark = [pytest.mark.rig, pytest.mark.slow, pytest.mark.timeout(600)]

NQN = "nqn.2024-01.lab:kernel-target"
DIGESTS = [(0, 0), (1, 0), (0, 1), (1, 1)]


@pytest.fixture(scope="module")
def target(lab: Path) -> Iterator[KernelTarget]:
    with kernel_target(lab, NQN, "--size", "96", "--namespaces", "2") as running:
        yield running


def pattern(length: int, seed: int) -> np.ndarray:
    return np.random.default_rng(seed).integers(0, 256, length, dtype=np.uint8)


@pytest.mark.parametrize(("hdgst", "ddgst"), DIGESTS)
def test_what_is_written_is_read_back(target: KernelTarget, hdgst: int, ddgst: int) -> None:
    seed = 10 * hdgst + ddgst
    with_digests = {"hdgst": hdgst, "ddgst": ddgst}
    device = open_device(target.uri(**with_digests))
    try:
        assert device.block_bytes == 4096
        assert device.size_bytes == 96 * MIB
        # In-capsule data ends at 16 KiB on nvmet; beyond it data is pulled by R2T; 4 MiB is its MAXH2CDATA.
        sizes = [4096, 8192, 16384, 20480, 1 * MIB, 4 * MIB + 4096]
        offset = 0
        places = []
        for number, size in enumerate(sizes):
            data = pattern(size, seed * 100 + number)
            device.write(offset, data)
            places.append((offset, data))
            offset += size
        device.flush()
        for place, data in places:
            found = np.zeros(len(data), np.uint8)
            device.read_into(place, found)
            assert np.array_equal(found, data)
    finally:
        device.close()
    # A second host sees the same bytes: they are in the kernel, not in a buffer of ours.
    other = open_device(target.uri())
    try:
        for place, data in places:
            found = np.zeros(len(data), np.uint8)
            other.read_into(place, found)
            assert np.array_equal(found, data)
    finally:
        other.close()


def test_a_batch_with_checksums_over_two_namespaces(target: KernelTarget) -> None:
    devices = [open_device(target.uri(nsid, ddgst=1)) for nsid in (1, 2)]
    try:
        count, length = 64, 128 * 1024
        data = pattern(count * length, 7)
        batch = Batch(
            member=np.arange(count, dtype=np.uint32) % np.uint32(2),
            offset=np.uint64(32 * MIB) + np.arange(count, dtype=np.uint64) // np.uint64(2) * np.uint64(length),
            length=np.full(count, length, np.uint64),
            buffer_offset=np.arange(count, dtype=np.uint64) * np.uint64(length),
            checksum_block_bytes=65536,
        )
        checksums = np.zeros(batch.checksum_count, np.uint32)
        write_batch(devices, batch, [data], checksums=checksums)
        for device in devices:
            device.flush()
        found = np.zeros_like(data)
        read_batch(devices, batch, [found], checksums=checksums)
        assert np.array_equal(found, data)
        # The check can fail: another byte on the kernel's side is noticed.
        block = np.zeros(4096, np.uint8)
        devices[1].read_into(32 * MIB, block)
        block[100] ^= 1
        devices[1].write(32 * MIB, block)
        with pytest.raises(HeadraceError, match=r"(?i)checksum"):
            read_batch(devices, batch, [found], checksums=checksums)
    finally:
        for device in devices:
            device.close()


def test_describe_names_the_kernel(target: KernelTarget) -> None:
    device = open_device(target.uri(hdgst=1, ddgst=1))
    try:
        text = str(device.describe())
        assert NQN in text
        assert "nvme" in text.lower()
    finally:
        device.close()


def test_wrong_name_is_refused(target: KernelTarget) -> None:
    with pytest.raises(ConnectRefused):
        open_device(f"nvme+tcp://127.0.0.1:{target.port}/nqn.2024-01.lab:nobody?nsid=1")


def test_what_the_kernel_offers_is_used(target: KernelTarget) -> None:
    """Events of namespaces and of ANA; the namespace by its names; more R2Ts allowed than it sends."""
    with open_device(target.uri(2, maxr2t=3, host_traddr="127.0.0.1")) as device:
        told = device.describe()
        assert told["events"]["asked_for"] & 0x900 == 0x900
        assert told["ana"]["state"] == "optimized"
        uuid, nguid = told["uuid"], told["nguid"]
    base = target.uri(2).partition("?")[0]
    for key, value in (("uuid", str(UUID(uuid))), ("nguid", nguid)):
        if value.strip("0-"):
            with open_device(f"{base}?{key}={value}") as device:
                assert device.describe()["nsid"] == 2
    with pytest.raises(ConnectRefused, match="2 namespaces"):
        open_device(f"{base}?uuid={uuid4()}")


def test_an_alignment_that_the_kernel_refuses(target: KernelTarget) -> None:
    with pytest.raises(DeviceError, match="hpda"):
        open_device(target.uri(hpda=7, connect_timeout=10))


def test_a_volume_on_kernel_namespaces(target: KernelTarget) -> None:
    uris = [target.uri(1, hdgst=1, ddgst=1), target.uri(2)]
    payload = pattern(5 * MIB + 123, 99).tobytes()
    Volume.create(uris, name="kernel", force=True).close()
    with Volume.open(uris, write=True) as volume:
        with pytest.raises(NotFenced):
            # Its namespaces have no reservations; test_kernel_volume is about those that have.
            volume.session(run_id="rig")
        session = volume.session(run_id="rig", unfenced=True)
        try:
            with session.transaction() as tx:
                tx.put("a/large", payload)
                tx.put("a/small", b"from user space to the kernel and back")
        finally:
            session.close()
    with Volume.open(uris) as volume:
        assert [info.name for info in volume.list("a/")] == ["a/large", "a/small"]
        assert volume.read("a/large") == payload
        assert volume.read("a/large", 3 * MIB - 5, 1000) == payload[3 * MIB - 5 : 3 * MIB + 995]
        assert volume.read("a/small") == b"from user space to the kernel and back"
