"""Devices that cross processes: pickles, forks, and handles that are closed or dropped with work under way."""

from __future__ import annotations

import gc
import multiprocessing
import os
import pickle
from pathlib import Path

import numpy as np
import pytest

from headrace.device import Batch, NativeDevice, lock_file, open_device, read_batch, submit_read
from headrace.errors import DeviceClosed, UsageError


@pytest.fixture
def disk(tmp_path: Path) -> NativeDevice:
    device = open_device(f"file:{tmp_path}/disk?create=4MiB")
    device.write(4096, b"p" * 4096)
    return device


def _first_byte(device: NativeDevice) -> int:
    buffer = bytearray(4096)
    device.read_into(4096, buffer)
    return buffer[0]


def test_a_pickle_is_an_address_and_opens_when_used(disk: NativeDevice) -> None:
    again = pickle.loads(pickle.dumps(disk))
    assert again.uri == disk.uri
    assert _first_byte(again) == ord("p")
    again.close()
    assert _first_byte(disk) == ord("p")
    with pytest.raises(DeviceClosed):
        _first_byte(again)


def test_a_pickle_keeps_read_only(disk: NativeDevice) -> None:
    reader = open_device(disk.uri, read_only=True)
    again = pickle.loads(pickle.dumps(reader))
    with pytest.raises(UsageError, match="reading only"):
        again.write(0, bytes(4096))


def test_a_spawned_process_reads(disk: NativeDevice) -> None:
    with multiprocessing.get_context("spawn").Pool(1) as pool:
        assert pool.map(_first_byte, [disk]) == [ord("p")]


def test_a_lock_is_the_holders_and_not_that_of_who_was_forked_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(bytes(4096))
    uri = f"file:{tmp_path}/disk"
    lock = lock_file(uri)
    assert lock is not None
    (go, tell), (hear, say) = os.pipe(), os.pipe()
    children = []
    for releases in (True, False):
        pid = os.fork()
        if pid == 0:
            os.close(tell)
            if releases:
                lock.release()
                os.write(say, b"x")
            os.read(go, 1)
            os._exit(0)
        children.append(pid)
    try:
        os.read(hear, 1)
        assert lock_file(uri) is None
        lock.release()
        again = lock_file(uri)
        assert again is not None
        again.release()
    finally:
        os.close(tell)
        for pid in children:
            os.waitpid(pid, 0)
        for descriptor in (go, hear, say):
            os.close(descriptor)


def test_a_forked_child_opens_its_own_and_ends_cleanly(disk: NativeDevice) -> None:
    batch = Batch(
        member=np.zeros(1, np.uint32), offset=np.array([4096], np.uint64), length=np.array([4096], np.uint64),
        buffer_offset=np.zeros(1, np.uint64),
    )  # fmt: skip
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            buffer = bytearray(4096)
            read_batch([disk], batch, [buffer])
            status = 0 if buffer == b"p" * 4096 and _first_byte(disk) == ord("p") else 2
            disk.close()
            gc.collect()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert _first_byte(disk) == ord("p")


def test_a_transfer_belongs_to_its_process(disk: NativeDevice) -> None:
    batch = Batch(
        member=np.zeros(1, np.uint32), offset=np.zeros(1, np.uint64), length=np.array([4096], np.uint64),
        buffer_offset=np.zeros(1, np.uint64),
    )  # fmt: skip
    transfer = submit_read([disk], batch, [bytearray(4096)])
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            transfer.wait(5)
        except DeviceClosed:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    transfer.wait(5)


def test_memory_belongs_to_its_process() -> None:
    device = open_device("mem:1MiB")
    with pytest.raises(UsageError, match="cannot leave its process"):
        pickle.dumps(device)
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            device.read_into(0, bytearray(4096))
        except DeviceClosed:
            status = 0
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0


def test_memory_is_not_opened_for_reading_only() -> None:
    with pytest.raises(UsageError, match="nothing to read"):
        open_device("mem:1MiB", read_only=True)


def test_everything_dropped_with_work_under_way() -> None:
    for _ in range(20):
        device = open_device("mem:64MiB")
        count = 4096
        batch = Batch(
            member=np.zeros(count, np.uint32), offset=np.arange(count, dtype=np.uint64) * np.uint64(16384),
            length=np.full(count, 10000, np.uint64), buffer_offset=np.arange(count, dtype=np.uint64) * np.uint64(10000),
        )  # fmt: skip
        transfer = submit_read([device], batch, [np.empty(count * 10000, np.uint8)])
        del device, transfer, batch
    gc.collect()


def test_close_lets_a_transfer_end(disk: NativeDevice) -> None:
    count = 256
    batch = Batch(
        member=np.zeros(count, np.uint32), offset=np.arange(count, dtype=np.uint64) * np.uint64(8192),
        length=np.full(count, 100, np.uint64), buffer_offset=np.arange(count, dtype=np.uint64) * np.uint64(100),
    )  # fmt: skip
    buffer = bytearray(count * 100)
    transfer = submit_read([disk], batch, [buffer])
    disk.close()
    transfer.wait(20)
    with pytest.raises(DeviceClosed):
        submit_read([disk], batch, [buffer])


def test_read_only_file(tmp_path: Path) -> None:
    path = tmp_path / "disk"
    path.write_bytes(b"r" * 8192)
    path.chmod(0o444)
    with open_device(f"file:{path}", read_only=True) as device:
        assert device.read_only
        assert _first_byte(device) == ord("r")
        for call in (lambda: device.write(0, bytes(4096)), lambda: device.deallocate(0, 4096)):
            with pytest.raises(UsageError, match="reading only"):
                call()
        device.flush()
