"""The processes that figures are taken with: each answers jobs, one JSON line each way, and ends with its input.

headrace-bench serve|bare|host     native/bench: the bare socket, and a load on our native host
python -m benchmarks.python_load   the same I/O from Python, and a receive loop in plain Python
python -m benchmarks.target        our target
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from functools import cache
from pathlib import Path
from typing import Any

from benchmarks.cores import pinned

ROOT = Path(__file__).resolve().parent.parent
#: Where the native programs lie on a machine that cannot build them.
CARRIED = ROOT / "build" / "headrace-bench"


@cache
def native_programs() -> str:
    """`headrace-bench`, brought up to date where there is a cargo."""
    if cargo := shutil.which("cargo"):
        # With what the native module is compiled of, as it is (cargo chooses features by the packages it is asked for):
        # by itself it would have the host compiled once more.
        packages = ["--package", "headrace-bench", "--package", "headrace-py", "--bins"]
        subprocess.run([cargo, "build", "--release", "--quiet", *packages], cwd=ROOT, check=True)
        return str(ROOT / "target" / "release" / "headrace-bench")
    if CARRIED.exists():
        return str(CARRIED)
    raise SystemExit(f"benchmarks: no cargo to build native/bench with, and no {CARRIED.relative_to(ROOT)}")


def cpu_s(pid: int) -> float:
    """CPU seconds that a process has used, all its threads, to the nanosecond."""
    return time.clock_gettime(~pid << 3 | 2)  # CPUCLOCK_SCHED of a process: include/linux/posix-timers.h


class Program:
    """A process on cores of its own. The first line it prints is `greeting`: it is ready."""

    def __init__(self, command: list[str], cores: set[int]) -> None:
        self._name = " ".join(command[:4])
        with pinned(cores):
            self.process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, bufsize=1
            )
        self.greeting = self._line()

    def _line(self) -> str:
        assert self.process.stdout is not None
        line = self.process.stdout.readline()
        if not line:
            self.close()
            raise RuntimeError(f"{self._name}: ended with status {self.process.returncode} (see standard error)")
        return line.strip()

    def send(self, **job: object) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write(json.dumps(job) + "\n")
        self.process.stdin.flush()

    def answer(self) -> dict[str, Any]:
        got: dict[str, Any] = json.loads(self._line())
        return got

    def ask(self, **job: object) -> dict[str, Any]:
        self.send(**job)
        return self.answer()

    def close(self) -> None:
        assert self.process.stdin is not None and self.process.stdout is not None
        self.process.stdin.close()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self.process.stdout.close()


def python(module: str, *arguments: object) -> list[str]:
    return [sys.executable, "-m", f"benchmarks.{module}", *map(str, arguments)]


def native(*arguments: object) -> list[str]:
    return [native_programs(), *map(str, arguments)]
