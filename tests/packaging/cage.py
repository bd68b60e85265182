"""Run a program the way a locked-down container runs it. Started as root in a mount namespace of its own:

    unshare --mount --propagation private python cage.py VISIBLE_DIRECTORY... -- PROGRAM ARGUMENT...

Every file system is read-only, /dev/shm has 64 MB and is the only place to write; user nobody, no capabilities, no new
privileges, io_uring refused by seccomp as container engines do by default. VISIBLE_DIRECTORIES stay readable for nobody
even where a parent of theirs (a home) is closed to others.
"""

from __future__ import annotations

import ctypes
import os
import stat
import struct
import subprocess
import sys
import tempfile
from pathlib import Path

NOBODY = 65534
SHM_MIB = 64
VIRTUAL = {"proc", "sysfs", "cgroup", "cgroup2", "devpts", "devtmpfs", "debugfs", "securityfs", "mqueue", "bpf"}
IO_URING_CALLS = (425, 426, 427)  # setup, enter, register: the same numbers on every architecture
PR_CAPBSET_DROP, PR_SET_NO_NEW_PRIVS, PR_SET_SECCOMP = 24, 38, 22
SECCOMP_MODE_FILTER, SECCOMP_RET_ALLOW, SECCOMP_RET_ERRNO, EPERM = 2, 0x7FFF0000, 0x00050000, 1


def mount(*words: str) -> None:
    subprocess.run(["mount", *words], check=True)


def open_a_way(directory: Path) -> None:
    """Where a parent of `directory` is closed to others, cover it by an empty one that holds only `directory`."""
    for parent in reversed(directory.parents):
        if not parent.stat().st_mode & stat.S_IXOTH:
            holder = tempfile.mkdtemp(prefix="cage-")
            mount("--bind", str(directory), holder)
            mount("-t", "tmpfs", "-o", "mode=755", "tmpfs", str(parent))
            directory.mkdir(parents=True)
            mount("--move", holder, str(directory))
            Path(holder).rmdir()
            return


def close_file_systems() -> None:
    mount("-t", "tmpfs", "-o", f"size={SHM_MIB}m,mode=1777", "tmpfs", "/dev/shm")
    for line in reversed(Path("/proc/self/mounts").read_text().splitlines()):
        _, where, kind, options, *_ = line.split()
        where = where.encode().decode("unicode_escape")
        if kind not in VIRTUAL and where != "/dev/shm" and "ro" not in options.split(","):
            subprocess.run(["mount", "-o", "remount,bind,ro", where], check=False, stderr=subprocess.DEVNULL)


def become_nobody() -> None:
    libc = ctypes.CDLL(None, use_errno=True)

    def prctl(*arguments: int) -> None:
        words = [ctypes.c_ulong(word) for word in (*arguments, 0, 0, 0, 0)[:5]]
        if libc.prctl(*words):
            raise OSError(ctypes.get_errno(), f"prctl{arguments}")

    for capability in range(int(Path("/proc/sys/kernel/cap_last_cap").read_text()) + 1):
        prctl(PR_CAPBSET_DROP, capability)
    os.setgroups([])
    os.setresgid(NOBODY, NOBODY, NOBODY)
    os.setresuid(NOBODY, NOBODY, NOBODY)  # Leaves no capability behind.
    prctl(PR_SET_NO_NEW_PRIVS, 1)
    # Classic BPF: load the call's number; one of io_uring's: refuse with EPERM; else allow.
    count = len(IO_URING_CALLS)
    code = [(0x20, 0, 0, 0)]
    code += [(0x15, count - index, 0, number) for index, number in enumerate(IO_URING_CALLS)]
    code += [(0x06, 0, 0, SECCOMP_RET_ALLOW), (0x06, 0, 0, SECCOMP_RET_ERRNO | EPERM)]
    filters = ctypes.create_string_buffer(b"".join(struct.pack("<HBBI", *instruction) for instruction in code))
    program = ctypes.create_string_buffer(struct.pack("@HP", len(code), ctypes.addressof(filters)))
    prctl(PR_SET_SECCOMP, SECCOMP_MODE_FILTER, ctypes.addressof(program))


def main() -> None:
    split = sys.argv.index("--")
    for directory in sys.argv[1:split]:
        open_a_way(Path(directory).resolve())
    close_file_systems()
    become_nobody()
    command = sys.argv[split + 1 :]
    environment = {"PATH": "/nowhere", "HOME": "/nonexistent", "LANG": "C.UTF-8", "TERM": "dumb"}
    os.chdir("/")
    os.execve(command[0], command, environment)


if __name__ == "__main__":
    main()
