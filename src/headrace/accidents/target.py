"""`headrace serve` as a process of its own, to be killed and started again where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.accidents.processes import Child, Processes
from headrace.fabric.control import ask

#: Each namespace keeps this much of unflushed writes in memory, to lose it when it is killed.
VOLATILE_CACHE = "256MiB"

START_TIMEOUT_S = 30.0

#: How long a host waits for the target to come back. An outage takes a second or two; a laptop under load needs more.
LOSS_TIMEOUT_S = 120


@dataclass(frozen=True, kw_only=True)
class Life:
    """When the target ran, on the system's clock; `ended` is None while it does."""

    began: float
    ended: float | None = None


class TargetProcess:
    """Subsystems with one file-backed namespace each, every one on a port of its own, behind a volatile write cache."""

    def __init__(
        self,
        processes: Processes,
        media: Mapping[str, Path],
        namespace_bytes: int,
        *,
        log: Path,
        start_timeout_s: float = START_TIMEOUT_S,
    ) -> None:
        """`media`: the file of each subsystem, by NQN; made where there is none."""
        self._processes = processes
        self._log = log
        self._media = dict(media)
        self._namespace_bytes = namespace_bytes
        self._start_timeout_s = start_timeout_s
        #: Zero until the first start has found free ones.
        self._ports = [0] * len(self._media)
        self._child: Child | None = None
        self._ready: dict[str, Any] = {}
        self.lives: list[Life] = []

    @property
    def uris(self) -> list[str]:
        """Addresses of the namespaces."""
        return [
            f"nvme+tcp://127.0.0.1:{port}/{nqn}?nsid=1&loss_timeout={LOSS_TIMEOUT_S}"
            for port, nqn in zip(self._ports, self._media, strict=True)
        ]

    @property
    def io_engine(self) -> str:
        return str(self._ready["io_engine"])

    def start(self) -> None:
        """Returns when it accepts connections. The second start takes the ports of the first."""
        arguments = ["-m", "headrace", "serve", "--json", "--volatile-cache", VOLATILE_CACHE]
        for nqn, file in self._media.items():
            arguments += ["--subsystem", f"{nqn}={file}:{self._namespace_bytes}"]
        for port in self._ports:
            arguments += ["--listen", f"127.0.0.1:{port}"]
        offset = self._log.stat().st_size if self._log.exists() else 0
        self._child = self._processes.start("the target", arguments, log=self._log)
        self._ready = self._wait_ready(self._child, offset)
        self._ports = [int(address.rpartition(":")[2]) for address in self._ready["listen"]]
        self.lives.append(Life(began=time.time()))

    def _wait_ready(self, child: Child, offset: int) -> dict[str, Any]:
        deadline = time.monotonic() + self._start_timeout_s
        while time.monotonic() < deadline:
            status = child.poll()
            for line in self._log.read_bytes()[offset:].decode("utf-8", "replace").splitlines(keepends=True):
                if line.startswith('{"event": "ready"') and line.endswith("\n"):
                    ready: dict[str, Any] = json.loads(line)
                    return ready
            if status is not None:
                raise child.failure("the target did not start", status)
            time.sleep(0.02)
        raise child.failure(f"the target was not ready after {self._start_timeout_s:.0f} s", child.poll())

    def status(self) -> dict[str, Any]:
        """What its control socket says."""
        return ask(Path(self._ready["socket"]), {"do": "status"})

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
