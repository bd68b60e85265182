"""Block devices of the kernel, on loop devices: what they say of themselves, who else has them, and failures that stay.

What every device promises runs on them too (`test_contract`, `test_batches`).
"""

from __future__ import annotations

import dataclasses
import multiprocessing
import subprocess
import tempfile
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.device import (
    Batch,
    KernelReservations,
    NativeDevice,
    Registrant,
    ReservationReport,
    ReservationType,
    lanes,
    new_key,
    open_device,
    submit_write,
)
from headrace.errors import CommandFailed, DeviceError, DeviceGone, ReservationConflict, UsageError
from headrace.fabric import FileMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions
from headrace.testing.loop import LoopDevice

pytestmark = pytest.mark.skipif(bool(LoopDevice.problem()), reason=LoopDevice.problem() or "there are loop devices")

SIZE = 8 << 20
BLOCK = 4096
SHARED = ReservationType.WRITE_EXCLUSIVE_REGISTRANTS

Loops = Callable[..., LoopDevice]


@pytest.fixture
def loops(tmp_path: Path) -> Iterator[Loops]:
    made: list[LoopDevice] = []

    def make(size_bytes: int = SIZE, **options: Any) -> LoopDevice:
        made.append(LoopDevice(tmp_path / f"loop-{len(made)}", size_bytes, **options))
        return made[-1]

    yield make
    for loop in made:
        loop.close()


def _run(*command: str) -> None:
    subprocess.run(command, check=True, stdin=subprocess.DEVNULL, capture_output=True, timeout=60)


def _bytes(device: NativeDevice, offset: int, length: int) -> bytes:
    buffer = bytearray(length)
    device.read_into(offset, buffer)
    return bytes(buffer)


def test_what_it_says_of_itself(loops: Loops) -> None:
    with open_device(loops().path) as device:
        said = device.describe()
        assert (device.size_bytes, device.block_bytes, device.read_only) == (SIZE, 512, False)
        # The loop device has a volatile cache ("write back"); what is written here does not stay in it.
        assert not device.volatile_cache
        assert (said["transport"], said["direct"], said["writes_through"]) == ("block", True, True)
        assert said["engine"] in ("io_uring", "pread") and said["oldest_call_s"] is None
        assert lanes([device], "checkpoint") == [device]
        assert device.unsettled() == []


@pytest.mark.parametrize("engine", ["pread", "io_uring"])
def test_the_engine_that_was_asked_for(loops: Loops, engine: str, io_uring: str) -> None:
    if engine == "io_uring" and io_uring:
        pytest.skip(io_uring)
    with open_device(f"{loops().path}?engine={engine}") as device:
        assert device.describe()["engine"] == engine


def test_its_own_block_or_a_larger_one(loops: Loops) -> None:
    large = loops(sector_bytes=4096).path
    with open_device(large) as device:
        assert device.block_bytes == 4096
        with pytest.raises(UsageError, match="not aligned"):
            device.write(512, bytes(512))
    with pytest.raises(UsageError, match=r"no blocks of this size.*block=4096 or more.*found block=512"):
        open_device(f"{large}?block=512")
    with open_device(f"{loops().path}?block=4096") as device:
        assert device.block_bytes == 4096


def test_buffers_of_any_alignment(loops: Loops) -> None:
    with open_device(loops().path) as device:
        data = np.random.default_rng(7).integers(0, 256, (3 << 20) + 512, np.uint8)
        for shift in (0, 1, 8, 511, 512):
            memory = np.zeros(len(data) + 1024, np.uint8)
            start = -memory.ctypes.data % 512 + shift
            memory[start : start + len(data)] = data
            device.write(512 * shift, memory[start : start + len(data)])
            memory[:] = 0
            device.read_into(512 * shift, memory[start : start + len(data)])
            assert np.array_equal(memory[start : start + len(data)], data), shift


def test_a_write_is_on_the_medium_when_it_is_answered(loops: Loops) -> None:
    """Seen at the file below, past its page cache, which the loop device flushes for a durable write."""
    loop = loops()
    with open_device(loop.path) as device:
        before = _flushes(loop.path)
        device.write(0, b"d" * BLOCK)
        assert _flushes(loop.path) > before
        assert loop.image.read_bytes()[:BLOCK] == b"d" * BLOCK


def _flushes(path: str) -> int:
    """Flush requests that the block layer has carried out: field 16 of the statistics."""
    return int(Path(f"/sys/block/{Path(path).name}/stat").read_text().split()[15])


def test_deallocated_blocks_are_given_back(loops: Loops) -> None:
    loop = loops()
    with open_device(loop.path) as device:
        device.write(0, b"x" * SIZE)
        used = loop.image.stat().st_blocks
        device.deallocate(1 << 20, 4 << 20)
        assert loop.image.stat().st_blocks < used
        assert _bytes(device, 0, 1 << 20) == b"x" * (1 << 20)
        assert _bytes(device, 5 << 20, 3 << 20) == b"x" * (3 << 20)


def test_a_mounted_device_is_refused_by_name(loops: Loops, tmp_path: Path) -> None:
    loop = loops()
    _run("mkfs.ext4", "-q", loop.path)
    image = loop.image.read_bytes()
    with tempfile.TemporaryDirectory(prefix="mounted at ") as folder:
        _run("mount", "-o", "ro,noload", loop.path, folder)
        try:
            with pytest.raises(UsageError, match=r"in use on this machine") as caught:
                open_device(loop.path)
            assert caught.value.found == f"{Path(loop.path).name} is mounted at {folder}"
            with open_device(loop.path, read_only=True) as device:
                assert _bytes(device, 1024, 1024)[56:58] == b"\x53\xef"
        finally:
            _run("umount", folder)
    assert loop.image.read_bytes() == image
    open_device(loop.path).close()


def test_a_claim_without_a_name_is_refused(loops: Loops) -> None:
    """As of another container's mount, which this one does not see."""
    path = loops().path
    claim = subprocess.Popen(
        ["python3", "-c", f"import os; os.open({path!r}, os.O_RDWR | os.O_EXCL); print('held', flush=True); input()"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
    )
    assert claim.stdin and claim.stdout
    try:
        assert claim.stdout.readline() == b"held\n"
        with pytest.raises(UsageError, match=r"in use on this machine.*EBUSY"):
            open_device(path)
    finally:
        claim.communicate(b"\n", timeout=30)
    open_device(path).close()


def _write_a_block(path: str, number: int) -> None:
    with open_device(path) as device:
        device.write(number * BLOCK, bytes([number + 1]) * BLOCK)


def test_many_processes_of_a_node_write_together(loops: Loops) -> None:
    path = loops().path
    with open_device(path) as device:
        context = multiprocessing.get_context("spawn")
        writers = [context.Process(target=_write_a_block, args=(path, number)) for number in range(6)]
        for writer in writers:
            writer.start()
        for writer in writers:
            writer.join(60)
        assert [writer.exitcode for writer in writers] == [0] * 6
        assert _bytes(device, 0, 6 * BLOCK) == b"".join(bytes([n + 1]) * BLOCK for n in range(6))


def test_a_fork_opens_it_again(loops: Loops) -> None:
    with open_device(loops().path) as device:
        device.write(0, b"p" * BLOCK)
        child = multiprocessing.get_context("fork").Process(target=device.write, args=(BLOCK, b"c" * BLOCK))
        child.start()
        child.join(60)
        assert child.exitcode == 0
        assert _bytes(device, 0, 2 * BLOCK) == b"p" * BLOCK + b"c" * BLOCK


def test_a_device_that_is_served_is_not_written_to(loops: Loops) -> None:
    path = loops().path
    subsystem = SubsystemOptions(
        nqn="nqn.2026-01.io.example:loop", namespaces=[NamespaceOptions(media=FileMedia(path=path))]
    )
    target = Target(TargetOptions(subsystems=[subsystem]))
    try:
        with pytest.raises(UsageError, match=r"for himself.*exclusive lock"):
            open_device(path)
    finally:
        target.stop()
    with open_device(path), pytest.raises(DeviceError, match="in use"):
        Target(TargetOptions(subsystems=[subsystem]))


def test_a_read_only_device(loops: Loops) -> None:
    with open_device(loops(read_only=True).path) as device:
        assert device.read_only
        assert _bytes(device, 0, BLOCK) == bytes(BLOCK)
        for act in (lambda: device.write(0, bytes(BLOCK)), lambda: device.deallocate(0, BLOCK)):
            with pytest.raises(UsageError, match="the kernel lets nobody write"):
                act()
        device.flush()


def test_partitions_and_the_disk_around_them(loops: Loops, tmp_path: Path) -> None:
    loop = loops()
    first = loop.add_partition(1, 2048, 4096, tmp_path / "p1")
    second = loop.add_partition(2, 8192, 4096, tmp_path / "p2")
    _run("mkfs.ext4", "-q", first)
    with tempfile.TemporaryDirectory() as folder:
        _run("mount", first, folder)
        try:
            with pytest.raises(UsageError, match="p1 is mounted at"):
                open_device(loop.path)
            with open_device(f"block:{second}") as device:
                assert device.size_bytes == 4096 * 512
                device.write(0, b"2" * BLOCK)
        finally:
            _run("umount", folder)


def test_a_device_that_has_shrunk(loops: Loops) -> None:
    loop = loops()
    with open_device(loop.path) as device:
        loop.resize(SIZE // 2)
        device.write(0, b"x" * BLOCK)
        with pytest.raises(DeviceGone, match=r"read failed: .*has shrunk.*expected 8388608 bytes, found 4194304 bytes"):
            _bytes(device, SIZE - BLOCK, BLOCK)
        with pytest.raises(DeviceGone, match=r"^write failed: .*has shrunk"):
            device.write(SIZE - BLOCK, b"x" * BLOCK)
        with pytest.raises(DeviceGone, match=r"^an earlier write failed: .*has shrunk"):
            device.write(0, b"y" * BLOCK)
        assert _bytes(device, 0, BLOCK) == b"x" * BLOCK


def test_a_failed_write_stays_failed(tmp_path: Path) -> None:
    """A loop device whose file has no room: until it is opened again, nothing is written and no flush succeeds."""
    _run("mount", "-t", "tmpfs", "-o", "size=2m", "none", str(tmp_path))
    try:
        with LoopDevice(tmp_path / "image", SIZE) as loop, open_device(f"{loop.path}?block=4096") as device:
            device.write(0, b"a" * BLOCK)
            device.flush()
            with pytest.raises(CommandFailed, match=r"^write failed: what is behind the device is full"):
                device.write(4 << 20, bytes([1]) * (3 << 20))
            errors = device.describe()["counters"]["errors"]
            for act in (device.flush, lambda: device.write(0, b"b" * BLOCK), lambda: device.deallocate(0, BLOCK)):
                with pytest.raises(CommandFailed, match=r"^an earlier write failed"):
                    act()
            assert device.describe()["counters"]["errors"] == errors + 3
            assert _bytes(device, 0, BLOCK) == b"a" * BLOCK
            with open_device(device.uri) as again:
                again.write(0, b"c" * BLOCK)
                again.flush()
    finally:
        _run("umount", "--lazy", str(tmp_path))


def test_what_is_no_block_device(tmp_path: Path, loops: Loops) -> None:
    file = tmp_path / "file"
    file.write_bytes(bytes(SIZE))
    with pytest.raises(UsageError, match=r"not a block device.*file:/PATH"):
        open_device(f"block:{file}")
    with pytest.raises(UsageError, match="not a block device"):
        open_device("/dev/null")
    with pytest.raises(DeviceError, match=r"no such block device.*nvme connect"):
        open_device("/dev/nothing-here")
    path = loops().path
    with pytest.raises(UsageError, match=rf"file: address of a block device.*block:{path}"):
        open_device(f"file:{path}")


def test_a_device_without_reservations_says_so(loops: Loops, tmp_path: Path) -> None:
    """The verbs where they work run against a kernel in the rig (`tests/interop/test_kernel_block.py`)."""
    loop = loops()
    with open_device(loop.path) as device:
        assert device.describe()["reservations"] == {
            "scope": "node",
            "problem": "the kernel has no reservations for devices of this kind",
        }
        kept = device.reservations
        assert isinstance(kept, KernelReservations) and not kept.capabilities and kept.hostid is None
        key = new_key()
        for act in (
            kept.report,
            lambda: kept.register(key),
            lambda: kept.join(key, SHARED),
            lambda: kept.preempt(key, key, SHARED),
            lambda: device.guard_writes(key, SHARED),
        ):
            with pytest.raises(UsageError, match="the block device keeps no reservations"):
                act()
    part = loop.add_partition(1, 2048, 4096, tmp_path / "part")
    says = rf"a partition cannot be reserved.*of {Path(loop.path).name}"
    with open_device(f"block:{part}") as device, pytest.raises(UsageError, match=says):
        device.reservations.report()


def test_a_guard_that_was_not_passed_stops_writes_of_every_kind(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    """As where a device is opened again, in another process, after its node was fenced."""
    with open_device(loops().path) as device:
        device.write(0, b"x" * BLOCK)
        refused = ReservationConflict("this node is fenced")

        def not_held(*_: object, **__: object) -> None:
            raise refused

        monkeypatch.setattr(KernelReservations, "check_held", not_held)
        with pytest.raises(ReservationConflict):
            device.guard_writes(new_key(), SHARED)
        assert device.describe()["guard"]["state"] == "fenced"
        batch = Batch(
            member=np.zeros(1, np.uint32), offset=np.zeros(1, np.uint64), length=np.full(1, BLOCK, np.uint64),
            buffer=np.zeros(1, np.uint32), buffer_offset=np.zeros(1, np.uint64),
        )  # fmt: skip
        acts = (
            lambda: device.write(0, b"y" * BLOCK),
            device.flush,
            lambda: device.deallocate(0, BLOCK),
            lambda: submit_write([device], batch, [b"y" * BLOCK]),
        )
        for act in acts:
            with pytest.raises(ReservationConflict, match="fenced"):
                act()
        assert _bytes(device, 0, BLOCK) == b"x" * BLOCK
        device.unguard_writes()
        device.write(0, b"z" * BLOCK)


def test_one_node_more_than_the_target_keeps(loops: Loops, monkeypatch: pytest.MonkeyPatch) -> None:
    """SPDK's target keeps 16; no target of the tests keeps so few, so its answers are made here."""
    kept = KernelReservations("/dev/nvme1n1", lambda: "block:/dev/nvme1n1")
    others = tuple(Registrant(cntlid=0xFFFF, hostid=uuid.uuid4(), key=1, holds=at == 0) for at in range(16))
    said = ReservationReport(generation=1, type=SHARED, persistent=False, registered=16, registrants=others)
    monkeypatch.setattr(KernelReservations, "_check_kept", lambda self: None)
    monkeypatch.setattr(KernelReservations, "_within", lambda self, *_, **__: 2)
    monkeypatch.setattr(KernelReservations, "report", lambda self, **_: said)
    with pytest.raises(ReservationConflict, match=r"too many nodes.*one more than 16.*nvme\+tcp://"):
        kept.register(1)
    said = dataclasses.replace(said, registered=3, registrants=others[:3])
    with pytest.raises(CommandFailed, match=r"does not register.*status 0x2"):
        kept.register(1)
