"""Part `ring` of suite `watch`: what it costs to keep what a device did lately.

Two devices on one target and one I/O thread, one with a ring and one without (`HEADRACE_EVENTS=0`), take turns with the
same small reads. What is compared is the CPU time of the I/O thread for a command: the least of each, since whatever
else the machine does only adds to it. `cargo run --release -p headrace-transfer --example ring` times a write alone.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure
from benchmarks.pairs import interleaved
from headrace.device import Batch, BlockDevice, open_device, read_batch
from headrace.fabric import MemoryMedia, NamespaceOptions, SubsystemOptions, Target, TargetOptions

_BLOCK = 4096
_SIZE_BYTES = 64 << 20


def ring(quick: bool) -> Iterator[Figure]:
    rounds, times = (9, 2) if quick else (25, 8)
    namespaces = [NamespaceOptions(media=MemoryMedia(size_bytes=_SIZE_BYTES))]
    nqn = "nqn.2024-01.headrace:ring"
    with (
        Target(TargetOptions(subsystems=[SubsystemOptions(nqn=nqn, namespaces=namespaces)])) as target,
        _opened(target.uri(), "65536") as recording,
        _opened(target.uri(), "0") as silent,
    ):
        thread = _thread("headrace-host")
        pairs = interleaved(
            lambda: 1 / _cpu_ns(recording, thread, times), lambda: 1 / _cpu_ns(silent, thread, times), rounds
        )  # fmt: skip
        events = recording.events()
    if len(events) < 65535 or events["status"].any():
        raise RuntimeError("the ring is not full of good reads")
    ours, peer = ([1 / rate for rate in rates] for rates in (pairs.ours, pairs.peer))
    more = [mine - theirs for mine, theirs in zip(ours, peer, strict=True)]
    yield Figure(
        suite="watch", figure="ring", value=min(ours) - min(peer), at_most=50.0, samples=more,
        noise=pairs.noise * statistics.median(peer), ours=statistics.median(ours), peer=statistics.median(peer),
        unit="ns of CPU time of the I/O thread for an event", measured_in="ns/command",
    )  # fmt: skip


@contextmanager
def _opened(uri: str, events: str) -> Iterator[BlockDevice]:
    before = os.environ.get("HEADRACE_EVENTS")
    os.environ["HEADRACE_EVENTS"] = events
    try:
        device = open_device(uri)
    finally:
        if before is None:
            del os.environ["HEADRACE_EVENTS"]
        else:
            os.environ["HEADRACE_EVENTS"] = before
    with device:
        yield device


def _thread(name: str) -> Path:
    for task in Path("/proc/self/task").iterdir():
        if (task / "comm").read_text().strip() == name:
            return task / "schedstat"
    raise RuntimeError(f"no thread {name} in this process")


def _cpu_ns(device: BlockDevice, thread: Path, times: int) -> float:
    """Nanoseconds of the I/O thread for a read of 4 KiB. Every second block, so that each is a command."""
    commands = _SIZE_BYTES // _BLOCK // 2
    rows = np.arange(commands, dtype=np.uint64) * np.uint64(_BLOCK)
    batch = Batch(
        member=np.zeros(commands, np.uint32),
        offset=rows * np.uint64(2),
        length=np.full(commands, _BLOCK, np.uint64),
        buffer_offset=rows,
    )
    buffer = np.zeros(commands * _BLOCK, np.uint8)
    begun = int(thread.read_text().split()[0])
    for _ in range(times):
        read_batch([device], batch, [buffer])
    return (int(thread.read_text().split()[0]) - begun) / (commands * times)
