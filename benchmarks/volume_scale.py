"""Suite `volume-scale`: what a volume of a million objects costs those who open it, and those who commit to it.

Bounds, not ratios to a peer: bytes read and memory are counted, and a commit is compared with other commits. What is
opened lies in files, and every opening is a process of its own, so that its memory is its own. Commits go to memory, so
that no disk is measured.
"""

from __future__ import annotations

import gc
import json
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.figures import Figure
from headrace.device import BlockDevice, open_device
from headrace.device.protocol import Buffer
from headrace.testing import MemoryDevice
from headrace.units import KIB, MIB
from headrace.volume import Session, Volume
from headrace.volume.catalog.usage import usage_of

SUITE = "volume-scale"
MEMBERS = 2
#: Of one member; the files are sparse.
MEMBER_BYTES = 1 << 30
FULL, QUICK = 1_000_000, 10_000
COMMITS, QUICK_COMMITS = 10_000, 200
#: Before commits are counted: code is loaded, the first window is open.
WARM_COMMITS = 100


class Counting:
    """A device that counts what is read from it."""

    def __init__(self, device: BlockDevice) -> None:
        self._device = device
        self.read_bytes = 0

    def __getattr__(self, name: str) -> Any:
        return getattr(self._device, name)

    def read_into(self, offset: int, buffer: Buffer) -> None:
        self.read_bytes += np.frombuffer(buffer, np.uint8).nbytes
        self._device.read_into(offset, buffer)


def name_of(number: int) -> str:
    return f"run/step-{number // 1000:06d}/object-{number:07d}"


def fill(volume: Volume, count: int) -> None:
    """`count` objects, a tenth of them in ten commits behind the first."""
    first = count * 9 // 10
    with volume.session("fill") as session:
        for start, stop in [(0, first), *((at, at + count // 100) for at in range(first, count, count // 100))]:
            with session.transaction() as transaction:
                transaction.put_many(map(name_of, range(start, stop)), b"x" * (stop - start), 1)


def commit(session: Session, first: int, count: int) -> list[float]:
    """Seconds of each of so many commits of one small object."""
    took = []
    for number in range(first, first + count):
        started = time.perf_counter()
        with session.transaction() as transaction:
            transaction.put(f"new/{number * 7919 % 1_000_003:07d}", b"y")
        took.append(time.perf_counter() - started)
    return took


# ---- processes that open it ------------------------------------------------------------------------------------------


def _resident(field: str) -> int:
    """Bytes that are resident now ("VmRSS"), or were at most so far ("VmHWM")."""
    for line in Path("/proc/self/status").read_text().splitlines():
        if line.startswith(f"{field}:"):
            return int(line.split()[1]) * KIB
    raise RuntimeError(f"no {field}")


def look_up(uris: list[str], name: str) -> dict[str, float]:
    """Open and look one name up, as each of a thousand ranks does."""
    devices = [Counting(open_device(uri, read_only=True)) for uri in uris]
    before = _resident("VmRSS")
    started = time.perf_counter()
    found = name in Volume.open(devices)
    took = time.perf_counter() - started
    return {
        "found": found,
        "read": sum(device.read_bytes for device in devices),
        "memory": _resident("VmHWM") - before,
        "seconds": took,
    }


def load(uris: list[str]) -> dict[str, float]:
    """The whole catalogue, as a session has it: every table in memory, space and slices counted."""
    volume = Volume.open(uris)
    gc.collect()
    before = _resident("VmRSS")
    started = time.perf_counter()
    volume._catalog.load_tables()
    usage_of(volume._catalog, volume.stripe_bytes)
    return {"seconds": time.perf_counter() - started, "memory": _resident("VmHWM") - before}


def list_range(uris: list[str], prefix: str) -> dict[str, float]:
    """Names that begin with `prefix`."""
    devices = [Counting(open_device(uri, read_only=True)) for uri in uris]
    volume = Volume.open(devices)
    before = sum(device.read_bytes for device in devices)
    found = volume.list(prefix)
    return {"found": len(found), "read": sum(device.read_bytes for device in devices) - before}


def _apart(what: str, *arguments: object) -> dict[str, float]:
    """One of the functions above in a process of its own."""
    command = [sys.executable, "-m", "benchmarks.volume_scale", what, json.dumps(arguments)]
    answer = subprocess.run(command, check=True, stdout=subprocess.PIPE, timeout=300)
    result: dict[str, float] = json.loads(answer.stdout)
    return result


# ---- figures ---------------------------------------------------------------------------------------------------------


def _opening(count: int, rounds: int) -> Iterator[Figure]:
    with tempfile.TemporaryDirectory(prefix="headrace-benchmark-") as folder:
        paths = [Path(folder) / f"{member}.img" for member in range(MEMBERS)]
        for path in paths:
            with path.open("wb") as file:
                file.truncate(MEMBER_BYTES)
        uris = [f"file:{path}" for path in paths]
        with Volume.create(uris, stripe_bytes=MIB) as volume:
            fill(volume, count)
            # Tables of every size, and, where there is time for it, as long a log as there is.
            with volume.session("more") as session:
                commit(session, 0, min(2000, count // 20))
        names = [name_of(count * number // rounds) for number in range(rounds)] + ["new/none", "zzz"]
        looks = [_apart("look_up", uris, name) for name in names]
        assert [look["found"] for look in looks] == [True] * rounds + [False] * 2
        read = [look["read"] for look in looks]
        memory = [look["memory"] for look in looks]
        yield Figure(suite=SUITE, figure="cold_look_up_read", value=max(read), unit="bytes", at_most=MIB, samples=read)
        yield Figure(
            suite=SUITE, figure="cold_look_up_memory", value=max(memory), unit="bytes", at_most=32 * MIB,
            samples=memory,
        )  # fmt: skip
        seconds = [look["seconds"] for look in looks]
        yield Figure(suite=SUITE, figure="cold_look_up", value=median(seconds), unit="s", samples=seconds)
        loads = [_apart("load", uris) for _ in range(3)]
        seconds = [one["seconds"] for one in loads]
        yield Figure(
            suite=SUITE, figure="whole_catalogue", value=median(seconds), unit="s", at_most=2.0, samples=seconds
        )
        each = [one["memory"] / count for one in loads]
        yield Figure(
            suite=SUITE, figure="whole_catalogue_memory", value=median(each), unit="bytes an object", at_most=300,
            samples=each,
        )  # fmt: skip
        listed = _apart("list_range", uris, f"run/step-{count // 2000:06d}/")
        assert listed["found"] == 1000
        yield Figure(
            suite=SUITE, figure="list_1000_read", value=listed["read"], unit="bytes", at_most=MIB,
            samples=[listed["read"]],
        )  # fmt: skip


def _committing(count: int, commits: int) -> Iterator[Figure]:
    volume = Volume.create(devices=[MemoryDevice(MEMBER_BYTES) for _ in range(MEMBERS)], stripe_bytes=MIB)
    fill(volume, count)
    with volume.session("commit") as session:
        commit(session, 0, WARM_COMMITS)
        # A collection of everything that was ever imported is Python's, and its time is not the commit's.
        gc.collect()
        gc.freeze()
        took = commit(session, WARM_COMMITS, commits)
        gc.unfreeze()
    typical = median(took)
    percentiles = [float(value) for value in np.percentile(took, [50, 90, 99, 99.9, 100]) / typical]
    yield Figure(suite=SUITE, figure="commit", value=typical, unit="s", samples=[typical])
    yield Figure(
        suite=SUITE, figure="commit_worst", value=max(took) / typical, unit="x the median", at_most=10,
        samples=percentiles,
    )  # fmt: skip


def run(quick: bool) -> Iterator[Figure]:
    count = QUICK if quick else FULL
    yield from _opening(count, 3 if quick else 10)
    yield from _committing(count, QUICK_COMMITS if quick else COMMITS)


if __name__ == "__main__":
    print(json.dumps(globals()[sys.argv[1]](*json.loads(sys.argv[2]))))
