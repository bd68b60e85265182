"""Processes that never outlive their owner.

Three nets, one below the other:
* `Processes.close` kills every process that was started and all of its descendants (torchrun puts its workers into
  sessions of their own, so a signal to the process group would miss them).
* Each process is started through a leash: it asks the kernel to be killed when its parent dies (`PR_SET_PDEATHSIG`), so
  a SIGKILL of the owner is enough too. Workers do the same for themselves with `die_with_parent`.
* Each leads a session of its own, so Ctrl-C on the terminal reaches the owner alone, which then closes in order.
"""

from __future__ import annotations

import ctypes
import os
import re
import select
import signal
import subprocess
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType

from headrace.accidents.peace import in_peace
from headrace.errors import HeadraceError

_PR_SET_PDEATHSIG = 1
#: One that closed its pipes, or was killed, is about to end.
_END_S = 30.0

#: The line that closes a traceback, also behind torchrun's "[rank0]: ".
_EXCEPTION = re.compile(r"(\[rank\d+\]: ?)?(\w+\.)*[A-Z]\w*(Error|Exception|Failed|Exit|Interrupt): ")

#: Runs in a bare interpreter, before the program: argv = owner's pid, program, arguments.
_LEASH = (
    "import ctypes, os, signal, sys; "
    f"ctypes.CDLL(None).prctl({_PR_SET_PDEATHSIG}, signal.SIGKILL, 0, 0, 0); "
    "sys.exit(1) if os.getppid() != int(sys.argv[1]) else os.execv(sys.argv[2], sys.argv[2:])"
)


def die_with_parent() -> None:
    """Ask the kernel to kill this process when the one that started it is gone; at once if it is gone already."""
    parent = os.getppid()
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0)
    if os.getppid() != parent or parent == 1:
        os.kill(os.getpid(), signal.SIGKILL)


class ChildFailed(HeadraceError):
    """A process that was started here ended with an error; the message says which, and the tail of its log follows."""

    fault = "headrace"


class Child:
    """One process; its output goes to `log`."""

    def __init__(self, name: str, process: subprocess.Popen[bytes], log: Path) -> None:
        self.name = name
        self.log = log
        self._process = process
        self._heard = b""

    @property
    def pid(self) -> int:
        return self._process.pid

    def poll(self) -> int | None:
        """Exit status, negative for a signal; None while it runs."""
        return self._process.poll()

    def wait(self, timeout_s: float) -> int:
        """Raises `ChildFailed` when it still runs after `timeout_s`."""
        try:
            return self._process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            raise ChildFailed(
                f"{self.name} did not end", expected=f"an end within {timeout_s:.0f} s", where=str(self.log)
            ) from None

    def check(self, timeout_s: float) -> None:
        """Wait for its end; raises `ChildFailed`, with the end of its log, unless it succeeded."""
        self.expect(self.wait(timeout_s))

    def expect(self, status: int) -> None:
        if status != 0:
            raise self.failure(f"{self.name} failed", status)

    def failure(self, what: str, status: int | None) -> ChildFailed:
        """An error about this process: its own sentence where its last line is one, else the last lines of its log."""
        lines = self.tail()
        own = lines[-1].partition("headrace: error: ") if lines else ("", "", "")
        if own[1] and not own[0]:
            return ChildFailed(f"{what}: {own[2]}")
        found = "still running" if status is None else _status_text(status)
        # What went wrong first is what a launcher's own closing words hide.
        causes = [line for line in self.tail(400) if _EXCEPTION.match(line)]
        tail = "".join(f"\n    {line}" for line in [*causes[:1], *lines])
        return ChildFailed(what, found=found, next_step=f"from its log, {self.log}:{tail}")

    def tail(self, lines: int = 12) -> list[str]:
        try:
            with self.log.open("rb") as file:
                file.seek(max(0, self.log.stat().st_size - 65536))
                return file.read().decode("utf-8", "replace").splitlines()[-lines:]
        except OSError:
            return []

    # ---- of one that was started to talk ----

    def tell(self, line: str) -> None:
        """To its standard input; raises `ChildFailed` where it has ended."""
        assert self._process.stdin is not None
        try:
            self._process.stdin.write(line.encode() + b"\n")
            self._process.stdin.flush()
        except OSError:
            raise self.failure(f"{self.name} ended", self.wait(_END_S)) from None

    def hear(self, timeout_s: float) -> str:
        """The next line of its standard output; raises `ChildFailed` when there is none after `timeout_s`."""
        assert self._process.stdout is not None
        deadline = time.monotonic() + timeout_s
        while b"\n" not in self._heard:
            left = max(0.0, deadline - time.monotonic())
            if not select.select([self._process.stdout], [], [], left)[0]:
                raise self.failure(f"{self.name} said nothing for {timeout_s:g} s", None)
            piece = os.read(self._process.stdout.fileno(), 1 << 16)
            if not piece:
                raise self.failure(f"{self.name} ended", self.wait(_END_S))
            self._heard += piece
        line, _, self._heard = self._heard.partition(b"\n")
        return line.decode()

    def fileno(self) -> int:
        """Of its standard output, for `select`: it has said something, or ended."""
        assert self._process.stdout is not None
        return self._process.stdout.fileno()

    def talks(self) -> bool:
        """There is something to be heard now."""
        return b"\n" in self._heard or bool(select.select([self], [], [], 0.0)[0])

    def kill(self) -> None:
        """SIGKILL, and wait until the kernel has taken it away. Its descendants are left to their leashes."""
        self._process.kill()
        self._process.wait()
        self.let_go()

    def let_go(self) -> None:
        """Close what it talks through."""
        for pipe in (self._process.stdin, self._process.stdout):
            if pipe is not None:
                with suppress(OSError):
                    pipe.close()

    def stop(self, timeout_s: float = 10.0) -> int:
        """SIGTERM, then SIGKILL when it takes too long; the exit status."""
        if self._process.poll() is None:
            self._process.terminate()
            try:
                self._process.wait(timeout_s)
            except subprocess.TimeoutExpired:
                self.kill()
        return self._process.wait()


class Processes:
    """All processes of a job. A context manager: on the way out, whatever the reason, none is left."""

    def __init__(self, env: Mapping[str, str] | None = None) -> None:
        """`env`: for every process, besides this one's own."""
        self._env = dict(env or {})
        self._children: list[Child] = []

    def start(
        self,
        name: str,
        arguments: Sequence[str],
        *,
        log: Path,
        env: Mapping[str, str] | None = None,
        talk: bool = False,
    ) -> Child:
        """Start `python ARGUMENTS` (this interpreter), its output appended to `log`. `talk`: but for standard output,
        which its `Child` hears, and it is told by standard input."""
        leash = [sys.executable, "-I", "-S", "-c", _LEASH, str(os.getpid()), sys.executable, *arguments]
        environment = {**os.environ, "PYTHONUNBUFFERED": "1", **self._env, **(env or {})}
        with log.open("ab") as output:
            process = subprocess.Popen(
                leash,
                stdin=subprocess.PIPE if talk else subprocess.DEVNULL,
                stdout=subprocess.PIPE if talk else output,
                stderr=output if talk else subprocess.STDOUT,
                env=environment,
                start_new_session=True,
            )
        child = Child(name, process, log)
        self._children.append(child)
        return child

    def close(self) -> None:
        """Kill everything. A Ctrl-C while this runs is put off until nothing is left but what the kernel holds in a
        call, as on a mount that hangs: that ends when it may, and is not waited for."""
        with in_peace():
            living = [child.pid for child in self._children if child.poll() is None]
            family = [*living, *descendants(living)]
            for pid in family:
                _kill(pid)
            deadline = time.monotonic() + _END_S
            while any(_alive(pid) for pid in family) and time.monotonic() < deadline:
                time.sleep(0.01)
            for child in self._children:
                child.poll()
                child.let_go()
            self._children.clear()

    def __enter__(self) -> Processes:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def descendants(pids: Sequence[int]) -> list[int]:
    """All processes below `pids` (which are not in the list), by the parents that /proc names."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            parent = _parent(int(entry.name))
            if parent is not None:
                children.setdefault(parent, []).append(int(entry.name))
    found: list[int] = []
    queue = list(pids)
    while queue:
        below = children.get(queue.pop(), [])
        found += below
        queue += below
    return found


def _stat(pid: int) -> list[str] | None:
    try:
        text = Path(f"/proc/{pid}/stat").read_text(encoding="utf-8", errors="replace")
    except OSError:
        return None
    # The name in parentheses may hold anything, so only what follows its end is split.
    return text[text.rindex(")") + 2 :].split()


def _parent(pid: int) -> int | None:
    fields = _stat(pid)
    return None if fields is None else int(fields[1])


def _alive(pid: int) -> bool:
    fields = _stat(pid)
    return fields is not None and fields[0] not in ("Z", "X")


def _kill(pid: int) -> None:
    try:
        os.kill(pid, signal.SIGKILL)
    except ProcessLookupError:
        return


def _status_text(status: int) -> str:
    if status < 0:
        try:
            return f"ended by {signal.Signals(-status).name}"
        except ValueError:
            return f"ended by signal {-status}"
    return f"exit status {status}"
