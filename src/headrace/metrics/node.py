"""Metrics of a node: each rank answers, whoever wants to know asks all of them, local rank 0 serves them."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any

from headrace.errors import UsageError
from headrace.metrics.answers import PATIENCE_S, Answers, ask_all, forget_dead_runs
from headrace.metrics.folder import make_folder, run_folder
from headrace.metrics.report import Devices, Source, node_report, rank_report

if TYPE_CHECKING:
    from typing_extensions import Self

    from headrace.metrics.prometheus import Server

#: To have a socket in the directory before somebody else's end takes that away.
_ATTEMPTS = 3


class NodeMetrics:
    """Of the loaders of this process, and of all others of the run on this node. A context manager; every rank makes
    one.

    `sources`: a loader, several, or several by the names that they are to have. `rank`, `local_rank`: as torchrun says
    (`RANK`, `LOCAL_RANK`), else 0. `folder`: where the ranks of this node find each other; by default one that is made
    from what the launcher says of the job, so that two jobs of a node have two. Ranks in containers of their own need
    one that they share.

    `port`: local rank 0 serves Prometheus at `host`:`port`; 0: a free port, which `address` says, and `targets.json` in
    the folder, for Prometheus' discovery by files. None: nobody is served. On other ranks it means nothing.
    `UsageError` where the port is taken, or where prometheus-client is missing.
    """

    def __init__(
        self,
        sources: Source | Sequence[Source] | Mapping[str, Source],
        *,
        port: int | None = None,
        host: str = "127.0.0.1",
        rank: int | None = None,
        local_rank: int | None = None,
        folder: str | os.PathLike[str] | None = None,
    ) -> None:
        self._sources = _named(sources)
        self._devices = Devices()
        self.rank = _number("rank", rank, "RANK")
        self.local_rank = _number("local_rank", local_rank, "LOCAL_RANK")
        if port is not None and not 0 <= port <= 65535:
            raise UsageError("port is out of range", expected="0 to 65535, or None", found=str(port))
        self.folder = Path(folder) if folder is not None else run_folder()
        self._server: Server | None = None
        serves = port is not None and self.local_rank == 0
        if serves:
            from headrace.metrics.prometheus import Server
        if folder is None:
            make_folder(self.folder.parent)
        self._answers = self._answer()
        if serves:
            assert port is not None
            if folder is None:
                forget_dead_runs(self.folder)
            try:
                self._server = Server(host, port, self.node, self.folder)
            except BaseException:
                self.close()
                raise

    def _answer(self) -> Answers:
        for left in range(_ATTEMPTS - 1, -1, -1):
            make_folder(self.folder)
            try:
                return Answers(self.folder, self.rank, self.rank_report)
            except UsageError:
                # The last rank that was there took the directory away meanwhile.
                if not left or self.folder.exists():
                    raise
        raise AssertionError

    @property
    def address(self) -> tuple[str, int] | None:
        """Host and port of the HTTP server; None where this process has none."""
        return None if self._server is None else self._server.address

    def rank_report(self) -> dict[str, Any]:
        """What this process says of its loaders and their devices."""
        return rank_report(self._sources, self.rank, self.local_rank, os.getpid(), self._devices)

    def node(self, patience_s: float = PATIENCE_S) -> dict[str, Any]:
        """All ranks of this node: `ranks`, what each says; `feeds`, their sums; `paths`, what they say of each path
        together. A rank that does not answer within `patience_s`, or cannot report, is there with `up` False and
        nothing else, but for its `error` where it has said one."""
        ranks: list[Mapping[str, Any]] = [self.rank_report()]
        for rank, pid, report in ask_all(self.folder, patience_s, but=self._answers.path):
            down = {"rank": rank, "pid": pid, "up": False, "feeds": [], "devices": []}
            ranks.append(report if report and "error" not in report else {**down, **(report or {})})
        return node_report(ranks, socket.gethostname())

    def prometheus(self) -> str:
        """The same as text for Prometheus, for a server of the caller's. `UsageError`: prometheus-client is missing."""
        from headrace.metrics.prometheus import exposition

        return exposition(self.node)

    def close(self) -> None:
        """Serve and answer no more. Again: does nothing."""
        if self._server is not None:
            self._server.close()
            self._server = None
        self._answers.close()
        with contextlib.suppress(OSError):
            # The last one of the node.
            self.folder.rmdir()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def _named(sources: Source | Sequence[Source] | Mapping[str, Source]) -> dict[str, Source]:
    if isinstance(sources, Mapping):
        return dict(sources)
    each = list(sources) if isinstance(sources, Sequence) else [sources]
    named: dict[str, Source] = {}
    for source in each:
        name, number = source.name, 1
        while name in named:
            number += 1
            name = f"{source.name} {number}"
        named[name] = source
    return named


def _number(name: str, given: int | None, variable: str) -> int:
    if given is not None:
        if given < 0:
            raise UsageError(f"{name} is out of range", expected="0 or more", found=str(given))
        return given
    text = os.environ.get(variable, "0")
    if not text.isdecimal():
        raise UsageError(f"{name} is no whole number", where=variable, found=repr(text))
    return int(text)
