from __future__ import annotations

import pickle

import pytest

from headrace.device import BlockDevice
from headrace.errors import DeviceClosed, DeviceError, UsageError
from headrace.testing import MemoryDevice


def test_it_is_a_block_device() -> None:
    device = MemoryDevice(8192, block_bytes=512)
    assert isinstance(device, BlockDevice)
    device.write(512, b"x" * 512)
    buffer = bytearray(1024)
    device.read_into(0, buffer)
    assert buffer == bytes(512) + b"x" * 512
    device.deallocate(512, 512)
    device.read_into(512, memoryview(buffer)[:512])
    assert buffer[:512] == bytes(512)


@pytest.mark.parametrize(("offset", "length"), [(1, 512), (0, 100), (8192, 512), (-512, 512), (7680, 1024)])
def test_ranges_that_it_cannot_take(offset: int, length: int) -> None:
    device = MemoryDevice(8192, block_bytes=512)
    with pytest.raises(UsageError):
        device.write(offset, bytes(length))
    with pytest.raises(UsageError):
        device.read_into(offset, bytearray(length))


def test_states() -> None:
    with pytest.raises(UsageError):
        MemoryDevice(8192, block_bytes=1024)
    with pytest.raises(UsageError):
        MemoryDevice(100)
    device = MemoryDevice(8192, read_only=True)
    with pytest.raises(DeviceError):
        device.write(0, bytes(4096))
    device.close()
    with pytest.raises(DeviceClosed):
        device.flush()
    device.reopen().flush()
    with pytest.raises(UsageError):
        pickle.dumps(device)


def test_a_volatile_cache_can_be_lost() -> None:
    device = MemoryDevice(8192, volatile_cache=True)
    device.write(0, b"a" * 4096)
    device.flush()
    device.write(0, b"b" * 4096)
    device.write(4096, b"c" * 4096, fua=True)
    device.lose_cache()
    assert (device.data[0], device.data[4096], device.loss_count()) == (ord("a"), ord("c"), 1)
