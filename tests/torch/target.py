"""A target over NVMe/TCP that tests kill and start again: what it had not flushed is gone then."""

from __future__ import annotations

from contextlib import ExitStack
from pathlib import Path

from headrace.testing.serve import ServeProcess, free_port, serving

NQN = "nqn.2026-01.io.headrace:torch"


class Target:
    """`headrace serve` of two files on one port, with a volatile cache."""

    def __init__(self, folder: Path, *, size: str = "256MiB", cache: str = "128MiB") -> None:
        self.port = free_port()
        self.kills = 0
        self._images = [f"{folder}/image{i}:{size}" for i in (1, 2)]
        self._cache = cache
        self._stack = ExitStack()
        self.start()

    def start(self) -> None:
        options = ["--volatile-cache", self._cache]
        serve = serving(NQN, *self._images, port=self.port, options=options)
        self.server: ServeProcess = self._stack.enter_context(serve)

    def uris(self, **options: object) -> list[str]:
        return [self.server.uri(nsid, **options) for nsid in (1, 2)]

    def kill(self) -> None:
        self.kills += 1
        self.server.process.kill()
        self.close()

    def close(self) -> None:
        self._stack.close()
