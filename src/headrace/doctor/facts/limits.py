"""What this process may use: its cgroup, its ulimits, io_uring."""

from __future__ import annotations

import errno
import re
import subprocess
import sys
from dataclasses import dataclass

from headrace.doctor.machine import COMMAND_TIMEOUT_S, Machine, number_of

#: Above it a limit is none (cgroup v1 writes the largest page-aligned number).
_NO_LIMIT = 1 << 60
#: The system call has one number on every architecture; `struct io_uring_params` has 120 bytes.
_RING = """
import ctypes
libc = ctypes.CDLL(None, use_errno=True)
print(0 if libc.syscall(425, 1, ctypes.create_string_buffer(120)) >= 0 else ctypes.get_errno())
"""


@dataclass(frozen=True, kw_only=True)
class Throttle:
    """A bound of the cgroup on one disk."""

    #: Major and minor number.
    number: str
    #: "rbps", "wbps" (bytes a second), "riops", "wiops".
    what: str
    value: int


@dataclass(frozen=True, kw_only=True)
class Limits:
    """`None`: no limit, or nothing says so."""

    #: 1 or 2; `None`: no cgroup is to be seen.
    cgroup_version: int | None
    cgroup: str | None
    memory_max_bytes: int | None
    memory_used_bytes: int | None
    #: Of it, files that the kernel keeps in memory.
    memory_file_bytes: int | None
    #: Processes that were killed for want of memory.
    killed: int | None
    #: Processors, as 3.5.
    cpu_quota: float | None
    #: How often, of how many periods, it was used up.
    cpu_throttled: int | None
    cpu_periods: int | None
    cpuset: str | None
    throttles: tuple[Throttle, ...]
    #: Soft and hard, of this process.
    memlock_bytes: int | None
    files: int | None
    files_hard: int | None
    #: `kernel.io_uring_disabled`: 0, 1 (only its group), 2 (nobody).
    io_uring_disabled: int | None
    #: What the kernel said when one was asked for: "allowed", or the name of an error ("EPERM", "ENOSYS").
    io_uring: str | None
    #: The group may have so much before it is slowed down, and how often it was.
    memory_high_bytes: int | None
    memory_slowed: int | None
    #: A filter of system calls is in force (2), as containers have one.
    seccomp: int | None


def read_limits(machine: Machine) -> Limits:
    version, folders, own = _cgroup(machine)
    files, files_hard = _limit(machine, "Max open files")
    memlock, _ = _limit(machine, "Max locked memory")
    v2 = version == 2

    def first(controller: str, name: str) -> int | None:
        """The narrowest on the way up."""
        values = [machine.number(f"{folder}/{name}") for folder in folders.get(controller, [])]
        return min((value for value in values if value is not None and 0 <= value < _NO_LIMIT), default=None)

    def text(controller: str, name: str) -> str:
        return "\n".join(filter(None, (machine.text(f"{folder}/{name}") for folder in folders.get(controller, []))))

    memory = folders.get("memory", [])
    stat = (machine.text(f"{memory[0]}/memory.stat") if memory else None) or ""
    quota, throttled, periods = _cpu(machine, folders.get("cpu", []), v2)
    seccomp = re.search(r"^Seccomp:\s+(\d)$", machine.text("/proc/self/status") or "", re.M)
    events = (machine.text(f"{memory[0]}/memory.events") if memory and v2 else None) or ""
    return Limits(
        cgroup_version=version,
        cgroup=own,
        memory_max_bytes=first("memory", "memory.max" if v2 else "memory.limit_in_bytes"),
        memory_used_bytes=machine.number(f"{memory[0]}/{'memory.current' if v2 else 'memory.usage_in_bytes'}")
        if memory
        else None,
        memory_file_bytes=_entry(stat, "file" if v2 else "cache"),
        killed=_entry(events, "oom_kill"),
        cpu_quota=quota,
        cpu_throttled=throttled,
        cpu_periods=periods,
        cpuset=next(
            filter(None, (machine.word(f"{one}/cpuset.cpus.effective") for one in folders.get("cpuset", [])[:1])), None
        ),
        throttles=_throttles_v2(text("io", "io.max")) if v2 else _throttles_v1(machine, folders.get("blkio", [])),
        memlock_bytes=memlock,
        files=files,
        files_hard=files_hard,
        io_uring_disabled=machine.number("/proc/sys/kernel/io_uring_disabled"),
        io_uring=machine.asked("io-uring", ask_io_uring),
        memory_high_bytes=first("memory", "memory.high") if v2 else None,
        memory_slowed=_entry(events, "high"),
        seccomp=int(seccomp[1]) if seccomp else None,
    )


def ask_io_uring() -> str | None:
    """Sets up a ring of one entry: what the kernel and its filters really let this user do. In a process of its own:
    a filter may kill who asks. `None`: that process came to nothing."""
    try:
        answer = subprocess.run(
            [sys.executable, "-I", "-S", "-c", _RING], stdin=subprocess.DEVNULL, capture_output=True, text=True,
            timeout=COMMAND_TIMEOUT_S, check=False,
        )  # fmt: skip
    except (OSError, subprocess.SubprocessError):
        return None
    if answer.returncode < 0:
        return f"killed by signal {-answer.returncode}"
    number = number_of(answer.stdout.strip())
    return None if number is None else "allowed" if number == 0 else errno.errorcode.get(number, f"error {number}")


def _cgroup(machine: Machine) -> tuple[int | None, dict[str, list[str]], str | None]:
    """Of each controller the folders of this process's group and of those above it, the nearest first."""
    base = "/sys/fs/cgroup"
    lines = (machine.text("/proc/self/cgroup") or "").splitlines()[:64]
    entries = [line.split(":", 2) for line in lines if line.count(":") >= 2]
    folders: dict[str, list[str]] = {}
    if machine.exists(f"{base}/cgroup.controllers"):
        own = next((path for number, names, path in entries if number == "0" and not names), "/")
        way = _way(base, own)
        return 2, dict.fromkeys(("memory", "cpu", "cpuset", "io"), way), own
    for _, names, path in entries:
        for name in names.split(","):
            if name in ("memory", "cpu", "cpuset", "blkio"):
                place = next((f"{base}/{one}" for one in (names, name) if machine.exists(f"{base}/{one}")), None)
                if place is not None:
                    folders[name] = _way(place, path)
    return (1, folders, next(iter(path for _, _, path in entries), None)) if folders else (None, {}, None)


def _way(base: str, own: str) -> list[str]:
    parts = [part for part in own.split("/") if part not in ("", ".", "..")][:32]
    # In a container the group is the root of what is seen, whatever its name is outside.
    return [base + "".join(f"/{part}" for part in parts[:count]) for count in range(len(parts), -1, -1)]


def _cpu(machine: Machine, folders: list[str], v2: bool) -> tuple[float | None, int | None, int | None]:
    quotas: list[float] = []
    for folder in folders:
        if v2:
            words = (machine.text(f"{folder}/cpu.max") or "").split()
            quota, period = (number_of(words[0]), number_of(words[1])) if len(words) == 2 else (None, None)
        else:
            quota, period = (machine.number(f"{folder}/cpu.cfs_{name}_us") for name in ("quota", "period"))
        if quota is not None and period and quota > 0:
            quotas.append(quota / period)
    stat = (machine.text(f"{folders[0]}/cpu.stat") if folders else None) or ""
    return min(quotas, default=None), _entry(stat, "nr_throttled"), _entry(stat, "nr_periods")


def _entry(text: str, name: str) -> int | None:
    match = re.search(rf"^{name} (\d{{1,19}})$", text, re.M)
    return int(match[1]) if match else None


def _throttles_v2(text: str) -> tuple[Throttle, ...]:
    found = []
    for line in text.splitlines()[:256]:
        number, _, rest = line.partition(" ")
        for name, value in re.findall(r"\b([rw](?:bps|iops))=(\d{1,18})\b", rest):
            if re.fullmatch(r"\d+:\d+", number):
                found.append(Throttle(number=number, what=name, value=int(value)))
    return tuple(found)


def _throttles_v1(machine: Machine, folders: list[str]) -> tuple[Throttle, ...]:
    names = {
        "read_bps_device": "rbps",
        "write_bps_device": "wbps",
        "read_iops_device": "riops",
        "write_iops_device": "wiops",
    }
    found = []
    for folder in folders:
        for name, what in names.items():
            for line in (machine.text(f"{folder}/blkio.throttle.{name}") or "").splitlines()[:256]:
                match = re.fullmatch(r"(\d+:\d+) (\d{1,18})", line)
                if match:
                    found.append(Throttle(number=match[1], what=what, value=int(match[2])))
    return tuple(found)


def _limit(machine: Machine, name: str) -> tuple[int | None, int | None]:
    match = re.search(rf"^{name}\s+(\d{{1,19}}|unlimited)\s+(\d{{1,19}}|unlimited)", _own(machine), re.M)
    return (number_of(match[1]), number_of(match[2])) if match else (None, None)


def _own(machine: Machine) -> str:
    return machine.text("/proc/self/limits") or ""
