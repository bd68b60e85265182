"""`headrace serve` as a process of its own, for the length of a `with` block."""

from __future__ import annotations

import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager

from tests.interop.kernel import free_port


class ServeProcess:
    """The process, its port, and all that it printed."""

    def __init__(self, nqn: str, port: int, process: subprocess.Popen[str]) -> None:
        self.nqn = nqn
        self.port = port
        self.process = process
        self._lines: list[str] = []
        self._reader = threading.Thread(target=self._follow)
        self._reader.start()

    def _follow(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            self._lines.append(line)

    def output(self) -> str:
        return "".join(self._lines)

    def uri(self, nsid: int = 1, **options: object) -> str:
        query = "&".join([f"nsid={nsid}", *(f"{key}={value}" for key, value in options.items())])
        return f"nvme+tcp://127.0.0.1:{self.port}/{self.nqn}?{query}"

    def stop(self, timeout_s: float = 10) -> int:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        try:
            self.process.wait(timeout_s)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        self._reader.join(timeout_s)
        return self.process.returncode


def accepts(port: int) -> bool:
    import socket

    try:
        with socket.create_connection(("127.0.0.1", port), 0.5):
            return True
    except OSError:
        return False


@contextmanager
def serving(
    nqn: str,
    *namespaces: str,
    options: tuple[str, ...] = (),
    prefix: tuple[str, ...] = (),
    env: Mapping[str, str] | None = None,
) -> Iterator[ServeProcess]:
    """Namespaces as `headrace serve` takes them; `prefix`: a command that runs it (setpriv, ...)."""
    port = free_port()
    arguments = ["--listen", f"127.0.0.1:{port}", "--nqn", nqn]
    command = [*prefix, sys.executable, "-m", "headrace.cli", "serve", *namespaces, *arguments, *options]
    process = subprocess.Popen(
        command, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=env
    )
    target = ServeProcess(nqn, port, process)
    try:
        deadline = time.monotonic() + 20
        while not accepts(port):
            if process.poll() is not None or time.monotonic() > deadline:
                target.stop()
                raise RuntimeError(f"headrace serve did not start: {' '.join(command)}\n{target.output()}")
            time.sleep(0.05)
        yield target
    finally:
        target.stop()
