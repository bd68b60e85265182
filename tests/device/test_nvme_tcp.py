"""What only a device behind a network can do: be refused, be lost, fail while it is away, come back."""

from __future__ import annotations

import contextlib
import ctypes
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
import pytest

from headrace.device import Batch, NativeDevice, open_device, read_batch, submit_read, submit_write
from headrace.errors import ConnectRefused, DeviceError, DeviceGone, DeviceTimeout, UsageError
from headrace.fabric import (
    FileMedia,
    ListenOptions,
    MemoryMedia,
    NamespaceOptions,
    SubsystemOptions,
    Target,
    TargetOptions,
)
from headrace.testing.serve import free_port
from tests.stopping import stop

NQN = "nqn.2026-01.io.example:disk"
BLOCK = 4096


def options(*namespaces: NamespaceOptions, port: int = 0, **more: object) -> TargetOptions:
    spaces = namespaces or (NamespaceOptions(media=MemoryMedia(size_bytes=8 << 20)),)
    return TargetOptions(
        listen=[ListenOptions(port=port)],
        subsystems=[SubsystemOptions(nqn=NQN, namespaces=spaces, **more)],  # type: ignore[arg-type]
    )


@pytest.fixture
def target() -> Iterator[Target]:
    with Target(options()) as running:
        yield running


def batch(count: int, length: int = BLOCK) -> Batch:
    rows = np.arange(count, dtype=np.uint64)
    return Batch(
        member=np.zeros(count, np.uint32),
        offset=rows * np.uint64(-(-length // BLOCK) * BLOCK),
        length=np.full(count, length, np.uint64),
        buffer_offset=rows * np.uint64(length),
        checksum_block_bytes=BLOCK,
    )


@pytest.mark.parametrize("more", ["", "&hdgst=1&ddgst=1", "&queues=3&depth=4"])
def test_batches_with_checksums(target: Target, more: str) -> None:
    with open_device(target.uri() + more) as device:
        rows = batch(100, 70_001)
        data = np.random.default_rng(4).integers(0, 256, 100 * 70_001, np.uint8)
        sums = np.zeros(rows.checksum_count, np.uint32)
        submit_write([device], rows, [data], sums).wait(30)
        device.flush()
        back = np.zeros_like(data)
        read_batch([device], rows, [back], sums)
        assert np.array_equal(back, data)
        seen = device.describe()
        assert seen["transport"] == "nvme+tcp"
        assert seen["associations_lost"] == 0


def test_a_pickle_connects_again(target: Target) -> None:
    with open_device(target.uri()) as device:
        device.write(0, b"q" * BLOCK)
        with pickle.loads(pickle.dumps(device)) as again:
            buffer = bytearray(BLOCK)
            again.read_into(0, buffer)
            assert buffer == b"q" * BLOCK


def test_a_forked_child_connects_by_itself(target: Target) -> None:
    with open_device(target.uri()) as device:
        device.write(0, b"f" * BLOCK)
        pid = os.fork()
        if pid == 0:
            status = 1
            try:
                buffer = bytearray(BLOCK)
                device.read_into(0, buffer)
                device.close()
                status = 0 if buffer == b"f" * BLOCK else 2
            finally:
                os._exit(status)
        assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
        device.read_into(0, bytearray(BLOCK))
        assert device.loss_count() == 0


def test_nobody_listens() -> None:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        with pytest.raises(ConnectRefused) as caught:
            open_device(f"nvme+tcp://127.0.0.1:{port}/{NQN}?nsid=1&connect_timeout=20")
    assert str(port) in str(caught.value)


def test_wrong_name_wrong_namespace_wrong_host() -> None:
    with Target(options(allow_hosts=["nqn.2026-01.io.example:only"])) as strict, pytest.raises(ConnectRefused):
        open_device(strict.uri())
    with Target(options()) as target:
        with pytest.raises(ConnectRefused):
            open_device(target.uri("nqn.2026-01.io.example:other"))
        with pytest.raises(DeviceError):
            open_device(target.uri(nsid=7))


def test_a_listener_that_says_nothing() -> None:
    with socket.socket() as mute:
        mute.bind(("127.0.0.1", 0))
        mute.listen()
        begun = time.monotonic()
        with pytest.raises(DeviceTimeout):
            open_device(f"nvme+tcp://127.0.0.1:{mute.getsockname()[1]}/{NQN}?nsid=1&connect_timeout=0.5")
        assert time.monotonic() - begun < 5


def test_opening_hears_ctrl_c() -> None:
    with socket.socket() as mute, ThreadPoolExecutor(1) as beside:
        mute.bind(("127.0.0.1", 0))
        mute.listen()

        def interrupt() -> None:
            peer, _ = mute.accept()
            with peer:
                # Before it connected it was not in there.
                peer.recv(1)
                os.kill(os.getpid(), signal.SIGINT)
                peer.recv(1 << 20)

        interrupted = beside.submit(interrupt)
        begun = time.monotonic()
        with pytest.raises(KeyboardInterrupt):
            open_device(f"nvme+tcp://127.0.0.1:{mute.getsockname()[1]}/{NQN}?nsid=1&connect_timeout=60")
        assert time.monotonic() - begun < 30
        interrupted.result()


def test_read_only(target: Target) -> None:
    with open_device(target.uri(), read_only=True) as device:
        device.read_into(0, bytearray(BLOCK))
        with pytest.raises(UsageError, match="reading only"):
            device.write(0, bytes(BLOCK))
        with pytest.raises(UsageError, match="member 0"):
            submit_write([device], batch(1), [bytes(BLOCK)])


def test_a_write_protected_namespace_says_so(tmp_path: Path) -> None:
    (tmp_path / "disk").write_bytes(bytes(1 << 20))
    media = FileMedia(path=str(tmp_path / "disk"))
    with (
        Target(options(NamespaceOptions(media=media, read_only=True))) as target,
        open_device(target.uri()) as device,
    ):
        assert device.read_only
        with pytest.raises(UsageError, match=r"only read.*allow-host"):
            device.write(0, bytes(BLOCK))


# ---- a target in a process of its own, to be killed ----------------------------------------------------------------

SERVE = """
import sys, time
from headrace.fabric import *
path, port = sys.argv[1], int(sys.argv[2])
with Target(TargetOptions(
    listen=[ListenOptions(port=port)],
    subsystems=[SubsystemOptions(nqn=sys.argv[3], namespaces=[
        NamespaceOptions(media=FileMedia(path=path, size_bytes=8 << 20, create=True), volatile_cache_bytes=64 << 20)])],
)) as target:
    print(target.addresses[0][1], flush=True)
    time.sleep(600)
"""


class Served:
    """A target process over one file, with a volatile cache."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.port = free_port()
        self.process: subprocess.Popen[str] | None = None
        self.start()

    def start(self) -> None:
        command = [sys.executable, "-c", SERVE, str(self.path), str(self.port), NQN]
        self.process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
        assert self.process.stdout is not None
        self.port = int(self.process.stdout.readline())

    def kill(self) -> None:
        if self.process is not None:
            self.process.kill()
            self.process.wait()
            assert self.process.stdout is not None
            self.process.stdout.close()
            self.process = None

    def signal(self, number: signal.Signals) -> None:
        assert self.process is not None
        if number == signal.SIGSTOP:
            stop(self.process.pid)
        else:
            self.process.send_signal(number)

    def uri(self, more: str = "") -> str:
        return f"nvme+tcp://127.0.0.1:{self.port}/{NQN}?nsid=1{more}"


@pytest.fixture
def served(tmp_path: Path) -> Iterator[Served]:
    served = Served(tmp_path / "disk")
    try:
        yield served
    finally:
        served.kill()


def _read(device: NativeDevice, offset: int) -> bytes:
    buffer = bytearray(BLOCK)
    device.read_into(offset, buffer)
    return bytes(buffer)


def test_io_waits_for_a_killed_target_and_goes_on(served: Served) -> None:
    with open_device(served.uri("&loss_timeout=60")) as device:
        assert device.volatile_cache
        device.write(0, b"1" * BLOCK)
        device.flush()
        device.write(BLOCK, b"2" * BLOCK)
        before = device.loss_count()
        served.kill()
        transfer = submit_read([device], batch(2), [bytearray(2 * BLOCK)])
        with pytest.raises(DeviceTimeout):
            transfer.wait(0.5)
        served.start()
        transfer.wait(60)
        # The association is another one, and what was not flushed is gone: that is what the count is for.
        assert device.loss_count() == before + 1
        assert _read(device, 0) == b"1" * BLOCK
        assert _read(device, BLOCK) == bytes(BLOCK)
        device.write(BLOCK, b"2" * BLOCK)
        device.flush()
        assert _read(device, BLOCK) == b"2" * BLOCK
        assert device.describe()["associations_lost"] == before + 1


def test_io_fails_while_a_target_stays_away_and_works_when_it_is_back(served: Served) -> None:
    with open_device(served.uri("&loss_timeout=1.5&connect_timeout=1")) as device:
        served.kill()
        begun = time.monotonic()
        with pytest.raises(DeviceGone):
            _read(device, 0)
        assert time.monotonic() - begun < 10
        # While it fails, it fails at once: the quickest of some, for the machine may be busy.
        seconds = []
        for _ in range(5):
            begun = time.monotonic()
            with pytest.raises(DeviceGone):
                device.write(0, bytes(BLOCK))
            seconds.append(time.monotonic() - begun)
        assert min(seconds) < 1
        said = device.describe()
        assert said["state"] == "failing" and said["stalled"] and said["stalled_s"] > 1
        served.start()
        deadline = time.monotonic() + 30
        while device.describe()["state"] != "connected":
            assert time.monotonic() < deadline
            time.sleep(0.05)
        device.write(0, b"9" * BLOCK)
        assert _read(device, 0) == b"9" * BLOCK


def test_a_write_that_was_given_up_leaves_a_range_of_unknown_fate(served: Served) -> None:
    with open_device(served.uri("&io_timeout=1")) as device:
        device.write(0, bytes(BLOCK))
        assert device.unsettled() == []
        served.signal(signal.SIGSTOP)
        transfer = submit_write([device], batch(1), [b"w" * BLOCK])
        deadline = time.monotonic() + 30
        while device.loss_count() == 0:
            assert time.monotonic() < deadline
            time.sleep(0.02)
        (ghost,) = device.unsettled()
        assert (ghost.offset, ghost.length, ghost.generation) == (0, BLOCK, 1)
        assert ghost.age_s >= 0 and ghost.path == device.paths()[0].portal
        served.signal(signal.SIGCONT)
        transfer.wait(30)
        # It succeeded, and its first copy may be on its way all the same.
        assert _read(device, 0) == b"w" * BLOCK
        assert len(device.unsettled()) == 1 and device.describe()["unsettled"] == 1
        assert device.settle(ghost.generation - 1) == 1
        assert device.settle(device.loss_count()) == 0 and device.unsettled() == []


def test_waiting_hears_ctrl_c(served: Served) -> None:
    with open_device(served.uri("&io_timeout=60&keepalive=120")) as device:
        served.signal(signal.SIGSTOP)
        waits = threading.Event()

        def interrupt() -> None:
            assert waits.wait(60)
            time.sleep(0.3)
            os.kill(os.getpid(), signal.SIGINT)

        begun = time.monotonic()
        transfer = submit_read([device], batch(4), [bytearray(4 * BLOCK)])
        with ThreadPoolExecutor(1) as beside, pytest.raises(KeyboardInterrupt):
            beside.submit(interrupt)
            waits.set()
            transfer.wait()
        assert time.monotonic() - begun < 30
        served.signal(signal.SIGCONT)
        transfer.wait(30)


def test_a_stopped_target_does_not_hold_close_for_ever(served: Served) -> None:
    device = open_device(served.uri("&io_timeout=60"))
    served.signal(signal.SIGSTOP)
    transfer = submit_read([device], batch(4), [bytearray(4 * BLOCK)])
    begun = time.monotonic()
    device.close()
    assert time.monotonic() - begun < 30
    with pytest.raises(DeviceError), contextlib.closing(device):
        transfer.wait(1)


def test_large_batches_survive_kills_by_the_durability_rule(served: Served) -> None:
    """Write, flush, and again where an association was lost in between: then everything outlives one more kill."""
    rows = batch(64, 65_000)
    sums = np.zeros(rows.checksum_count, np.uint32)

    def kill_twice() -> None:
        for _ in range(2):
            time.sleep(0.4)
            served.kill()
            served.start()

    with open_device(served.uri("&loss_timeout=60")) as device:
        thread = threading.Thread(target=kill_twice)
        thread.start()
        turn = 0
        try:
            while thread.is_alive() or turn == 0:
                turn += 1
                data = np.random.default_rng(turn).integers(0, 256, 64 * 65_000, np.uint8)
                for _ in range(10):
                    losses = device.loss_count()
                    submit_write([device], rows, [data], sums).wait(60)
                    device.flush()
                    if device.loss_count() == losses:
                        break
                else:
                    pytest.fail("no write outlived the kills")
                back = np.zeros_like(data)
                read_batch([device], rows, [back], sums)
                assert np.array_equal(back, data)
        finally:
            thread.join()
        assert device.loss_count() >= 1
        served.kill()
        served.start()
        back[:] = 0
        read_batch([device], rows, [back], sums)
        assert np.array_equal(back, data)


def test_a_held_gil_costs_nothing(served: Served) -> None:
    """A training process can hold the GIL for long: the keep-alive goes on, and a batch under way ends meanwhile."""
    with open_device(served.uri("&keepalive=1")) as device:
        buffer = bytearray(64 * BLOCK)
        transfer = submit_read([device], batch(64), [buffer])
        # PyDLL keeps the GIL during the call.
        ctypes.PyDLL(None).usleep(3_000_000)
        assert transfer.done()
        transfer.wait(0)
        assert _read(device, 0) == bytes(BLOCK)
        assert device.loss_count() == 0
