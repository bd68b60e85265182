"""`headrace serve` as a process of its own, for tests and benchmarks that want a real target."""

from __future__ import annotations

import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from headrace.fabric.control import ask, socket_folder

#: Not that of a test's seed: two processes with the same one would choose the same ports.
_CHANCE = random.SystemRandom()
#: One for each port that was given out, bound and never listening, until this process ends.
_HELD: list[socket.socket] = []


def free_port() -> int:
    """A TCP port of 127.0.0.1 that nobody listens on now, and that stays the caller's until this process ends.

    The kernel gives it to nobody by itself: one that the kernel chose could belong to anybody's connection by the time
    the caller listens on it. Nor does this function, called here or in another process: it stays bound, which keeps out
    everybody but those who ask for the port by its number and set SO_REUSEADDR, as servers do. A connection to it is
    refused while nobody listens, also while a target that was killed is away."""
    end = int(Path("/proc/sys/net/ipv4/ip_local_port_range").read_text().split()[0])
    for _ in range(1000):
        # Where the kernel has all of them, its choice must do.
        port = _CHANCE.randrange(10_000, end) if end > 11_000 else 0
        probe = socket.socket()
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            probe.close()
            continue
        # Not before: with it, a port that another process holds in the same way would seem to be free.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        _HELD.append(probe)
        return int(probe.getsockname()[1])
    raise OSError("no port of 127.0.0.1 is free")


def _accepts(port: int) -> bool:
    try:
        with socket.create_connection(("127.0.0.1", port), 0.5):
            return True
    except OSError:
        return False


class ServeProcess:
    """The process, its port, its control socket, and all that it printed."""

    def __init__(self, nqn: str, port: int, process: subprocess.Popen[str]) -> None:
        self.nqn = nqn
        self.port = port
        self.process = process
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._follow, name="headrace-serve-output")
        self._reader.start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    def output(self) -> str:
        return "".join(self._lines)

    def uri(self, nsid: int = 1, **options: object) -> str:
        """The address of one namespace; options are those of `headrace.device.open_device`."""
        query = "&".join([f"nsid={nsid}", *(f"{key}={value}" for key, value in options.items())])
        return f"nvme+tcp://127.0.0.1:{self.port}/{self.nqn}?{query}"

    def ask(self, verb: str, **request: Any) -> dict[str, Any]:
        """A request to its control socket, as `ask("ana", state="inaccessible", portal="1")`."""
        path = socket_folder() / f"{self.process.pid}.sock"
        deadline = time.monotonic() + 20
        # It listens for hosts before it does for this.
        while not path.exists() and time.monotonic() < deadline and self.process.poll() is None:
            time.sleep(0.02)
        return ask(path, {"do": verb, **request})

    def stop(self, timeout_s: float = 10) -> int:
        """SIGTERM, and SIGKILL when the time has passed; returns the exit status."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout_s)
        return self.process.returncode


@contextmanager
def serving(
    nqn: str,
    *namespaces: str,
    options: Sequence[str] = (),
    prefix: Sequence[str] = (),
    env: Mapping[str, str] | None = None,
    start_timeout_s: float = 90,
    port: int | None = None,
) -> Iterator[ServeProcess]:
    """Namespaces as `headrace serve` takes them; `options`: more of its options; `prefix`: a command that runs it.
    `port`: of 127.0.0.1; default: a free one.

    Raises RuntimeError, with all that the process printed, when nobody listens after `start_timeout_s`.
    """
    port = port or free_port()
    command = [*prefix, sys.executable, "-m", "headrace.cli", "serve", *namespaces]
    command += ["--listen", f"127.0.0.1:{port}", "--nqn", nqn, *options]
    process = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        env=None if env is None else dict(env),
    )
    target = ServeProcess(nqn, port, process)
    try:
        deadline = time.monotonic() + start_timeout_s
        while not _accepts(port):
            if process.poll() is not None or time.monotonic() > deadline:
                target.stop()
                raise RuntimeError(f"headrace serve did not start: {' '.join(command)}\n{target.output()}")
            time.sleep(0.05)
        yield target
    finally:
        target.stop()
