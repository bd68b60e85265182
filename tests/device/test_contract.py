"""What `BlockDevice` promises, on every kind of device."""

from __future__ import annotations

import threading

import numpy as np
import pytest

from headrace.device import BlockDevice, NativeDevice
from headrace.errors import DeviceClosed, UsageError

BLOCK = 4096


def bytes_of(device: BlockDevice, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    device.read_into(offset, buffer)
    return bytes(buffer)


def test_is_a_block_device(device: NativeDevice) -> None:
    assert isinstance(device, BlockDevice)
    assert (device.size_bytes, device.block_bytes, device.read_only) == (4 << 20, BLOCK, False)
    assert device.loss_count() == 0


def test_new_device_reads_zeros(device: NativeDevice) -> None:
    assert bytes_of(device, 0, 1 << 20) == bytes(1 << 20)


def test_reads_what_was_written(device: NativeDevice) -> None:
    data = np.random.default_rng(1).integers(0, 256, 3 * BLOCK, np.uint8)
    device.write(2 * BLOCK, data)
    device.flush()
    assert bytes_of(device, 2 * BLOCK, 3 * BLOCK) == data.tobytes()
    assert bytes_of(device, 0, 2 * BLOCK) == bytes(2 * BLOCK)
    assert bytes_of(device, 5 * BLOCK, BLOCK) == bytes(BLOCK)


def test_last_block_and_forced_unit_access(device: NativeDevice) -> None:
    device.write(device.size_bytes - BLOCK, b"\xa5" * BLOCK, fua=True)
    assert bytes_of(device, device.size_bytes - BLOCK, BLOCK) == b"\xa5" * BLOCK


@pytest.mark.parametrize("kind", [bytearray, np.frombuffer, memoryview])
def test_takes_any_buffer(device: NativeDevice, kind: type) -> None:
    data = bytes(range(256)) * 16
    source = bytearray(data)
    device.write(0, kind(source, np.uint16) if kind is np.frombuffer else kind(source))
    assert bytes_of(device, 0, BLOCK) == data
    target = np.zeros((4, 512), np.uint16)
    device.read_into(0, target)
    assert target.tobytes() == data


def test_a_buffer_is_free_again_after_the_call(device: NativeDevice) -> None:
    buffer = bytearray(BLOCK)
    device.write(0, buffer)
    device.read_into(0, buffer)
    buffer.extend(b"more")  # BufferError while anybody holds a view


@pytest.mark.parametrize(
    ("offset", "length"),
    [
        (1, BLOCK),
        (0, BLOCK + 1),
        (0, 100),
        (4 << 20, BLOCK),
        ((4 << 20) - BLOCK, 2 * BLOCK),
        (-BLOCK, BLOCK),
        (1 << 64, BLOCK),
        ((1 << 64) - BLOCK, BLOCK),
    ],
)
def test_ranges_that_cannot_be(device: NativeDevice, offset: int, length: int) -> None:
    with pytest.raises(UsageError):
        device.read_into(offset, bytearray(length))
    with pytest.raises(UsageError):
        device.write(offset, bytes(length))
    if length % BLOCK == 0 or offset % BLOCK:
        with pytest.raises(UsageError):
            device.deallocate(offset, length)


def test_buffers_that_cannot_be(device: NativeDevice) -> None:
    with pytest.raises(UsageError, match="buffer"):
        device.read_into(0, bytes(BLOCK))
    with pytest.raises(UsageError, match="buffer"):
        device.read_into(0, np.zeros((BLOCK, 2), np.uint8)[:, 0])
    with pytest.raises(UsageError, match="buffer"):
        device.write(0, "text")  # type: ignore[arg-type]
    read_only = np.zeros(BLOCK, np.uint8)
    read_only.flags.writeable = False
    with pytest.raises(UsageError, match="buffer"):
        device.read_into(0, read_only)


def test_deallocated_blocks_are_usable(device: NativeDevice) -> None:
    device.write(0, b"x" * 2 * BLOCK)
    device.deallocate(0, BLOCK)
    assert bytes_of(device, BLOCK, BLOCK) == b"x" * BLOCK
    device.write(0, b"y" * BLOCK)
    assert bytes_of(device, 0, BLOCK) == b"y" * BLOCK


def test_many_threads(device: NativeDevice) -> None:
    wrong: list[int] = []

    def work(number: int) -> None:
        for turn in range(20):
            data = bytes([number, turn]) * (BLOCK // 2)
            device.write(number * BLOCK, data)
            if bytes_of(device, number * BLOCK, BLOCK) != data:
                wrong.append(number)

    threads = [threading.Thread(target=work, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert wrong == []


def test_closed_device_says_so(device: NativeDevice) -> None:
    device.close()
    device.close()
    for call in (
        lambda: device.read_into(0, bytearray(BLOCK)),
        lambda: device.write(0, bytes(BLOCK)),
        device.flush,
        lambda: device.deallocate(0, BLOCK),
        lambda: device.size_bytes,
        device.describe,
    ):
        with pytest.raises(DeviceClosed, match="closed"):
            call()


def test_describe_says_what_is_in_use(device: NativeDevice) -> None:
    device.read_into(0, bytearray(BLOCK))
    device.flush()
    seen = device.describe()
    assert seen["uri"] == device.uri
    assert seen["state"] == ("connected" if seen["transport"] == "nvme+tcp" else "open")
    assert seen["associations_lost"] == 0
    assert seen["counters"]["reads"] == 1
    assert {"transport", "engine", "address"} <= set(seen)


def test_512_byte_blocks(opener) -> None:  # type: ignore[no-untyped-def]
    device = opener(512)
    assert device.block_bytes == 512
    device.write(512, b"z" * 512)
    assert bytes_of(device, 0, 1536) == bytes(512) + b"z" * 512 + bytes(512)
