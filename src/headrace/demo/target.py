"""The target of the demo: `headrace serve` as a process of its own, to be killed and started again where it was."""

from __future__ import annotations

import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.demo.processes import Child, Processes

NQNS = ("nqn.2026-01.io.headrace:demo-a", "nqn.2026-01.io.headrace:demo-b")

#: Each namespace keeps this much of unflushed writes in memory, to lose it when it is killed.
VOLATILE_CACHE = "256MiB"

START_TIMEOUT_S = 30.0

#: How long a host waits for the target to come back. The demo's outage is two seconds; a laptop under load needs more.
LOSS_TIMEOUT_S = 120


@dataclass(frozen=True, kw_only=True)
class Life:
    """When the target ran, on the system's clock; `ended` is None while it does."""

    began: float
    ended: float | None = None


class TargetProcess:
    """Two subsystems with one file-backed namespace each, behind a volatile write cache."""

    def __init__(self, processes: Processes, directory: Path, namespace_bytes: int) -> None:
        self._processes = processes
        self._log = directory / "logs" / "target.log"
        self._files = [directory / f"namespace-{letter}.img" for letter in "ab"]
        self._namespace_bytes = namespace_bytes
        #: Zero until the first start has found free ones.
        self._ports = [0, 0]
        self._child: Child | None = None
        self.lives: list[Life] = []
        self.io_engine = ""

    @property
    def uris(self) -> list[str]:
        """Addresses of the two members, each on a port of its own."""
        return [
            f"nvme+tcp://127.0.0.1:{port}/{nqn}?nsid=1&loss_timeout={LOSS_TIMEOUT_S}"
            for port, nqn in zip(self._ports, NQNS, strict=True)
        ]

    def start(self) -> None:
        """Returns when it accepts connections. The second start takes the ports of the first."""
        arguments = ["-m", "headrace", "serve", "--json", "--volatile-cache", VOLATILE_CACHE]
        for nqn, file in zip(NQNS, self._files, strict=True):
            arguments += ["--subsystem", f"{nqn}={file}:{self._namespace_bytes}"]
        for port in self._ports:
            arguments += ["--listen", f"127.0.0.1:{port}"]
        offset = self._log.stat().st_size if self._log.exists() else 0
        self._child = self._processes.start("the target", arguments, log=self._log)
        ready = self._wait_ready(self._child, offset)
        self._ports = [int(address.rpartition(":")[2]) for address in ready["listen"]]
        self.io_engine = ready["io_engine"]
        self.lives.append(Life(began=time.time()))

    def _wait_ready(self, child: Child, offset: int) -> dict[str, Any]:
        deadline = time.monotonic() + START_TIMEOUT_S
        while time.monotonic() < deadline:
            status = child.poll()
            for line in self._log.read_bytes()[offset:].decode("utf-8", "replace").splitlines(keepends=True):
                if line.startswith('{"event": "ready"') and line.endswith("\n"):
                    ready: dict[str, Any] = json.loads(line)
                    return ready
            if status is not None:
                raise child.failure("the target did not start", status)
            time.sleep(0.02)
        raise child.failure(f"the target was not ready after {START_TIMEOUT_S:.0f} s", child.poll())

    def kill(self) -> float:
        """SIGKILL: what was not flushed is gone. Returns when it was dead, on the system's clock."""
        assert self._child is not None
        self._child.kill()
        return self._end()

    def stop(self) -> None:
        """SIGTERM: in order."""
        assert self._child is not None
        status = self._child.stop()
        self._end()
        self._child.expect(status)

    def _end(self) -> float:
        now = time.time()
        self.lives[-1] = Life(began=self.lives[-1].began, ended=now)
        return now

    def check(self) -> None:
        """Raises when it ended by itself."""
        assert self._child is not None
        status = self._child.poll()
        if status is not None:
            raise self._child.failure("the target ended by itself", status)
