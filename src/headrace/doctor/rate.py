"""How much storage delivers to this node: large reads and small ones, many under way, for a few seconds each.

    python -m headrace.doctor.rate disk /dev/nvme0n1
    python -m headrace.doctor.rate files /mnt/data

prints one line of JSON, as `headrace.doctor.touch` does, and for the same reason: the kernel may keep who reads for
ever. Nothing is written, and the page cache is gone past (O_DIRECT). It is put on storage only where somebody asks what
that delivers (`headrace doctor --expect`): it is load that others feel.
"""

from __future__ import annotations

import json
import mmap
import os
import random
import stat
import sys
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
from numpy.typing import NDArray

from headrace.accidents.apart import ask_apart
from headrace.device import (
    Batch,
    BlockAddress,
    NativeDevice,
    NvmeTcpAddress,
    Transfer,
    open_device,
    submit_read,
)
from headrace.doctor.probe import with_patience
from headrace.errors import HeadraceError
from headrace.measure.watch.host import IO_THREAD, thread_queue
from headrace.units import KIB, MIB, format_bytes

LARGE_BYTES, SMALL_BYTES = MIB, 4 * KIB
#: Reads of each kind go on for so long, after the first that come back.
SECONDS = 2.0
#: Under way at once, of devices.
_LARGE_AT_ONCE, _SMALL_AT_ONCE = 32, 256
#: Threads that read files.
_THREADS = 32
#: Connections of an address that asks for fewer: one is one core of the target.
_QUEUES = 8
#: Files smaller than this say more of opening than of reading; so many of them are read, of so many looked at.
FILE_MIN_BYTES = 16 * MIB
_FILES_MAX, _LOOKED_AT_MAX = 64, 10_000
#: The thread of headrace's host takes all answers: where it was on a processor, or waited for one, for so much of the
#: time, it was the end of it. Of readers in Python one runs at a time: of these, processors that they keep busy.
HOST_BUSY, PYTHON_BUSY = 0.9, 0.5
#: For the process that does it: a Python that starts, a walk, both measurements, and storage that is slow.
TIMEOUT_S = 60.0


@dataclass(frozen=True, kw_only=True)
class Rate:
    """What came of it."""

    #: As `Storage.name` has it.
    name: str
    #: Bytes a second of reads of 1 MiB; reads a second of 4 KiB at random places. `None`: not measured, `error` says
    #: why.
    read_bytes_per_s: float | None = None
    reads_per_s: float | None = None
    #: Which of both ("read", "iops") this node ended, and not storage: what read was busy all the time.
    held_back: Sequence[str] = ()
    #: What was read, and how: for people.
    how: str = ""
    size_bytes: int | None = None
    error: str | None = None


def rate_of_target(address: NvmeTcpAddress) -> Rate:
    """Of a target, by headrace's own host. Never raises for what a target does."""
    wider = with_patience(address, queues=max(_QUEUES, address.options.queues))
    try:
        device = open_device(wider.uri, read_only=True)
    except HeadraceError as error:
        return Rate(name=address.uri, error=str(error))
    assert isinstance(device, NativeDevice)
    with device:
        return rate_of_device(address.uri, device)


def rate_apart(name: str, kind: str, path: str) -> Rate:
    """Of a disk, or of files below a path, in a process of its own. `kind`: "disk" or "files"."""
    outcome, said, error = ask_apart("headrace.doctor.rate", kind, path, timeout_s=TIMEOUT_S)
    if said is None:
        why = {"silent": f"nothing came back within {TIMEOUT_S:g} s"}.get(outcome, f"not measured: {error}")
        return Rate(name=name, error=why)
    try:
        return Rate(**{**said, "name": name})
    except TypeError:
        return Rate(name=name, error="not measured: the process that was to do it said something else")


def rate_of_device(name: str, device: NativeDevice) -> Rate:
    """Random places, all of them on it. DeviceError ends it, and is told."""
    places = device.size_bytes // LARGE_BYTES
    if places < _LARGE_AT_ONCE:
        return Rate(name=name, error=f"{format_bytes(device.size_bytes)} are too little to measure")
    try:
        read, large_busy = _batches(device, LARGE_BYTES, _LARGE_AT_ONCE)
        small, small_busy = _batches(device, max(SMALL_BYTES, device.block_bytes), _SMALL_AT_ONCE)
    except HeadraceError as error:
        return Rate(name=name, error=f"a read failed: {error}")
    queues = device.describe().get("queues")
    return Rate(
        name=name, read_bytes_per_s=read * LARGE_BYTES, reads_per_s=small, size_bytes=device.size_bytes,
        held_back=[what for what, busy in (("read", large_busy), ("iops", small_busy)) if busy > HOST_BUSY],
        how=f"this node alone, random places, {_LARGE_AT_ONCE} reads of 1 MiB, then {_SMALL_AT_ONCE} of 4 KiB under "
        f"way, {SECONDS:g} s each" + (f", {queues} queues" if isinstance(queues, int) else ""),
    )  # fmt: skip


def _batches(device: NativeDevice, size: int, at_once: int) -> tuple[float, float]:
    """Reads a second, and the share of the time that the host's thread was busy. Two batches are under way, so that the
    device never waits for Python."""
    chance = np.random.default_rng(0)
    half = at_once // 2
    buffers = [np.empty(half * size, np.uint8) for _ in range(2)]
    places = device.size_bytes // size
    at = np.arange(half, dtype=np.uint64) * np.uint64(size)

    def begin(buffer: NDArray[np.uint8]) -> Transfer:
        batch = Batch(
            member=np.zeros(half, np.uint32), length=np.full(half, size, np.uint64), buffer_offset=at,
            offset=chance.integers(0, places, half).astype(np.uint64) * np.uint64(size),
        )  # fmt: skip
        return submit_read([device], batch, [buffer])

    under_way = [begin(buffer) for buffer in buffers]
    # Those that come back first found queues that were being filled.
    under_way[0].wait()
    under_way[0] = begin(buffers[0])
    # None for files and drives of this machine.
    host = thread_queue(IO_THREAD)
    begun, done, turn = time.perf_counter(), 0, 1
    busy_s = sum(host.read()) if host is not None else 0.0
    while time.perf_counter() - begun < SECONDS or not done:
        under_way[turn].wait()
        done += half
        under_way[turn] = begin(buffers[turn])
        turn = 1 - turn
    took, busy_s = time.perf_counter() - begun, (sum(host.read()) if host is not None else 0.0) - busy_s
    for transfer in under_way:
        transfer.wait()
    return done / took, busy_s / took


# ---- files ----------------------------------------------------------------------------------------------------------


def rate_of_files(path: str) -> Rate:
    """Of plain files at or below a path; in this process, which waits for as long as the kernel does."""
    files, looked_at = _find(path)
    if not files:
        more = f" among the first {looked_at} names" if looked_at >= _LOOKED_AT_MAX else ""
        return Rate(
            name=path, error=f"no file of {format_bytes(FILE_MIN_BYTES)} or more that may be read is below {path}{more}"
        )
    opened: list[tuple[int, int]] = []
    try:
        for file in files:
            try:
                descriptor = os.open(file, os.O_RDONLY | os.O_DIRECT | os.O_NONBLOCK | os.O_CLOEXEC)
            except OSError:
                continue
            size = os.fstat(descriptor).st_size
            if size < FILE_MIN_BYTES:
                # It was larger when it was looked at.
                os.close(descriptor)
                continue
            opened.append((descriptor, size))
        if not opened:
            return Rate(name=path, error="this file system has no reads past the page cache (O_DIRECT)")
        read = _threads(opened, LARGE_BYTES)
        used, begun = time.process_time(), time.perf_counter()
        small = _threads(opened, SMALL_BYTES)
        cpus = (time.process_time() - used) / (time.perf_counter() - begun)
    except OSError as error:
        return Rate(name=path, error=f"a read failed: {error.strerror}")
    finally:
        for descriptor, _ in opened:
            os.close(descriptor)
    whole = format_bytes(sum(size for _, size in opened))
    several = f"{len(opened)} files of {whole} in all" if len(opened) > 1 else f"a file of {whole}"
    return Rate(
        name=path, read_bytes_per_s=read * LARGE_BYTES, reads_per_s=small, size_bytes=_size_of(path),
        held_back=["iops"] if cpus > PYTHON_BUSY else [],
        how=f"this node alone, {several} past the page cache, {_THREADS} "
        f"readers, 1 MiB each in order, then 4 KiB at random places, {SECONDS:g} s each; what the server had in memory "
        "counts, too",
    )  # fmt: skip


def _find(path: str) -> tuple[list[str], int]:
    """The largest files below, and how many names were looked at. Links are not followed, other mounts not entered."""
    try:
        found = os.lstat(path)
    except OSError:
        return [], 0
    if stat.S_ISREG(found.st_mode):
        return ([path] if found.st_size >= FILE_MIN_BYTES else []), 1
    sizes: list[tuple[int, str]] = []
    looked_at = 0
    for folder, folders, names in os.walk(path):
        if Path(folder) != Path(path) and os.path.ismount(folder):
            folders.clear()
            continue
        for name in names:
            looked_at += 1
            try:
                one = os.lstat(f"{folder}/{name}")
            except OSError:
                continue
            # Of a file that is one hole, nothing is read.
            large = stat.S_ISREG(one.st_mode) and one.st_size >= FILE_MIN_BYTES and one.st_blocks
            if large and os.access(f"{folder}/{name}", os.R_OK):
                sizes.append((one.st_size, f"{folder}/{name}"))
        looked_at += len(folders)
        if looked_at >= _LOOKED_AT_MAX:
            break
    return [name for _, name in sorted(sizes, reverse=True)[:_FILES_MAX]], looked_at


def _size_of(path: str) -> int:
    found = os.statvfs(path)
    return found.f_blocks * found.f_frsize


def _threads(opened: Sequence[tuple[int, int]], size: int) -> float:
    """Reads a second."""
    begun = time.perf_counter()
    end = begun + SECONDS

    def reader(number: int) -> int:
        # Memory at the beginning of a page, as O_DIRECT wants it.
        buffer = mmap.mmap(-1, size)
        place = _places(number, opened, size)
        done = 0
        while True:
            descriptor, offset = place()
            done += os.preadv(descriptor, [buffer], offset) == size
            if time.perf_counter() >= end:
                return done

    with ThreadPoolExecutor(_THREADS) as pool:
        counts = list(pool.map(reader, range(_THREADS)))
    return sum(counts) / (time.perf_counter() - begun)


def _places(number: int, opened: Sequence[tuple[int, int]], size: int) -> Callable[[], tuple[int, int]]:
    """Where a reader reads next: large reads in order from a place of its own, small ones anywhere."""
    chance = random.Random(number)
    at = [chance.randrange(whole // size) for _, whole in opened]
    file = number % len(opened)

    def random_place() -> tuple[int, int]:
        descriptor, whole = opened[chance.randrange(len(opened))]
        return descriptor, chance.randrange(whole // size) * size

    def next_place() -> tuple[int, int]:
        descriptor, whole = opened[file]
        at[file] = (at[file] + 1) % (whole // size)
        return descriptor, at[file] * size

    return random_place if size == SMALL_BYTES else next_place


def _rate_of_disk(path: str) -> Rate:
    try:
        device = open_device(BlockAddress(path=path).uri, read_only=True)
    except HeadraceError as error:
        return Rate(name=path, error=str(error))
    assert isinstance(device, NativeDevice)
    with device:
        return rate_of_device(path, device)


if __name__ == "__main__":
    print(json.dumps(asdict({"disk": _rate_of_disk, "files": rate_of_files}[sys.argv[1]](sys.argv[2]))))
