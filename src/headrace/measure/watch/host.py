"""What the process, its node and its container did: so that a lack of CPUs can be told from slow storage.

Taken at the end of a step, once a second. All of it is read from /proc and the cgroup; what is not there is None, which
is "not known".
"""

from __future__ import annotations

import contextlib
import os
import resource
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

#: Share of the time that looking at a loader's helpers may cost.
COST = 0.0003
#: What the native host calls its thread; there is one a process.
IO_THREAD = "headrace-host"
#: Helpers of a loader that are looked at.
MOST_HELPERS = 64


class RunQueue:
    """Of one task: seconds on a CPU, and seconds in which it could run and waited for one. Costs a microsecond."""

    def __init__(self, path: str = "/proc/thread-self/schedstat") -> None:
        """`OSError`: there is no such task, or the kernel does not tell."""
        self._file = -1
        self._file = os.open(path, os.O_RDONLY | os.O_CLOEXEC)
        try:
            self.read()
        except BaseException:
            self.close()
            raise

    def read(self) -> tuple[float, float]:
        on_cpu, waited = os.pread(self._file, 64, 0).split()[:2]
        return int(on_cpu) * 1e-9, int(waited) * 1e-9

    def close(self) -> None:
        """Again: does nothing."""
        file, self._file = self._file, -1
        if file >= 0:
            os.close(file)

    __del__ = close


def own_queue() -> RunQueue | None:
    """Of the thread that calls; None where the kernel does not tell."""
    try:
        return RunQueue()
    except (OSError, ValueError):
        return None


def tasks() -> set[str]:
    """Threads of this process, and processes that it or its children started: names of folders in /proc."""
    found = {f"self/task/{tid}" for tid in _listed("/proc/self/task")}
    level = _children("self")
    for _ in range(3):
        found |= level
        level = {child for pid in level for child in _children(pid)}
    return found


def _children(process: str) -> set[str]:
    return {
        pid for tid in _listed(f"/proc/{process}/task") for pid in _read(f"/proc/{process}/task/{tid}/children").split()
    }


def _listed(folder: str) -> list[str]:
    try:
        return [path.name for path in Path(folder).iterdir()][: 16 * MOST_HELPERS]
    except OSError:
        return []


def _read(path: str) -> str:
    try:
        return Path(path).read_text(encoding="ascii", errors="replace")
    except OSError:
        return ""


class Helpers:
    """The threads and processes of a loader: those that came while it began."""

    def __init__(self) -> None:
        self._queues: dict[str, RunQueue] = {}

    def __len__(self) -> int:
        return len(self._queues)

    def add(self, names: set[str]) -> None:
        for name in sorted(names - set(self._queues))[: MOST_HELPERS - len(self._queues)]:
            with contextlib.suppress(OSError, ValueError):
                self._queues[name] = RunQueue(f"/proc/{name}/schedstat")

    def read(self) -> dict[str, tuple[float, float]]:
        """Of each its seconds on CPUs and waiting for one, since it is there."""
        found = {}
        for name, queue in list(self._queues.items()):
            try:
                found[name] = queue.read()
            except (OSError, ValueError):
                # It has ended.
                queue.close()
                del self._queues[name]
        return found

    def close(self) -> None:
        for queue in self._queues.values():
            queue.close()
        self._queues.clear()


class IoThread:
    """The thread of this process that sends commands over the fabric and takes their answers. Where it lacks a CPU,
    every path is slow."""

    def __init__(self) -> None:
        self._queue: RunQueue | None = None
        self._waited_s = 0.0
        #: Devices that there were when it was looked for.
        self._devices = 0

    def since(self, devices: int) -> float | None:
        """Seconds that it could run and waited for a CPU, since it was asked before; None: not known. `devices`: that
        are open; where their number is another, a thread that was not there is looked for again."""
        if self._queue is None and devices != self._devices:
            self._devices = devices
            self._queue, self._waited_s = thread_queue(IO_THREAD), 0.0
            if self._queue is not None:
                self._waited_s = self._queue.read()[1]
            return None
        try:
            last, self._waited_s = self._waited_s, self._queue.read()[1] if self._queue is not None else 0.0
        except (OSError, ValueError):
            self.close()
        return self._waited_s - last if self._queue is not None else None

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close()
        self._queue, self._devices = None, 0


def thread_queue(name: str) -> RunQueue | None:
    """Of a thread of this process; None where there is none of that name, or the kernel does not tell."""
    for tid in _listed("/proc/self/task"):
        if _read(f"/proc/self/task/{tid}/comm").strip() == name:
            with contextlib.suppress(OSError, ValueError):
                return RunQueue(f"/proc/self/task/{tid}/schedstat")
    return None


@dataclass(frozen=True, kw_only=True)
class _Counted:
    at: float
    user_s: float
    system_s: float
    major_faults: int
    throttled_s: float | None
    throttled_times: int | None
    received: int
    sent: int
    #: Of the process, from block devices, by the kernel's own reckoning.
    read_bytes: int | None


class HostCounters:
    """Differences since they were taken before."""

    def __init__(self, monotonic: Any = time.perf_counter) -> None:
        self._now = monotonic
        self._cgroup = _cpu_stat()
        self._last = self._count()

    def since(self) -> dict[str, Any]:
        last, now = self._last, self._count()
        self._last = now
        found: dict[str, Any] = {
            "window_s": round(now.at - last.at, 6),
            "cpu_user_s": round(now.user_s - last.user_s, 4),
            "cpu_system_s": round(now.system_s - last.system_s, 4),
            "major_faults": now.major_faults - last.major_faults,
            "node_received_bytes": now.received - last.received,
            "node_sent_bytes": now.sent - last.sent,
        }
        if now.throttled_s is not None and last.throttled_s is not None:
            found["throttled_s"] = round(now.throttled_s - last.throttled_s, 6)
        if now.throttled_times is not None and last.throttled_times is not None:
            found["throttled_times"] = now.throttled_times - last.throttled_times
        if now.read_bytes is not None and last.read_bytes is not None:
            found["read_bytes"] = now.read_bytes - last.read_bytes
        return found

    def _count(self) -> _Counted:
        used = resource.getrusage(resource.RUSAGE_SELF)
        throttled_s, times = self._throttled()
        received, sent = node_traffic()
        return _Counted(
            at=self._now(), user_s=used.ru_utime, system_s=used.ru_stime, major_faults=used.ru_majflt,
            throttled_s=throttled_s, throttled_times=times, received=received, sent=sent, read_bytes=_read_bytes(),
        )  # fmt: skip

    def _throttled(self) -> tuple[float | None, int | None]:
        if self._cgroup is None:
            return None, None
        return throttled(_read(str(self._cgroup)))


def throttled(text: str) -> tuple[float | None, int | None]:
    """Of a `cpu.stat`, of either version: seconds, and how often. None: it says nothing of that."""
    said = dict(pair for line in text.splitlines() if len(pair := line.split()) == 2)
    try:
        seconds = None
        if "throttled_usec" in said:
            seconds = int(said["throttled_usec"]) * 1e-6
        elif "throttled_time" in said:
            seconds = int(said["throttled_time"]) * 1e-9
        return seconds, int(said["nr_throttled"]) if "nr_throttled" in said else None
    except ValueError:
        return None, None


def _cpu_stat() -> Path | None:
    """Where the cgroup of this process says how it was throttled."""
    for line in _read("/proc/self/cgroup").splitlines():
        _, controllers, path = [*line.split(":", 2), "", ""][:3]
        if controllers == "":
            roots = ["/sys/fs/cgroup", "/sys/fs/cgroup/unified"]
        elif "cpu" in controllers.split(","):
            roots = [f"/sys/fs/cgroup/{controllers}", "/sys/fs/cgroup/cpu"]
        else:
            continue
        # In a container the path is often that of the host, and what is mounted is this very group.
        for candidate in [Path(f"{root}{part}/cpu.stat") for root in roots for part in (path.rstrip("/"), "")]:
            if "nr_throttled" in _read(str(candidate)):
                return candidate
    return None


def node_traffic(text: str | None = None) -> tuple[int, int]:
    """Bytes received and sent by all interfaces of the node but the loopback."""
    received = sent = 0
    for line in (_read("/proc/net/dev") if text is None else text).splitlines()[2:]:
        name, _, rest = line.partition(":")
        fields = rest.split()
        if name.strip() != "lo" and len(fields) >= 9:
            received, sent = received + int(fields[0]), sent + int(fields[8])
    return received, sent


def _read_bytes() -> int | None:
    for line in _read("/proc/self/io").splitlines():
        if line.startswith("read_bytes:"):
            return int(line.split()[1])
    return None
