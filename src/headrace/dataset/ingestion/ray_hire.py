"""Workers of a Ray cluster: `headrace ingest --ray ADDRESS`. The ingest's end of `ray_bridge.py`.

They do what workers of this machine do, and are held to account in the same way (`pool.py`). What is new is that they
come when the cluster has room for them, and go when it loses a node.
"""

from __future__ import annotations

import os
import re
import socket
import subprocess
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import IO, Any

from headrace.dataset.ingestion.channel import Channel, Inbox, encode
from headrace.dataset.ingestion.hire import how_it_ended
from headrace.errors import DatasetError, UsageError

#: Until the cluster has said how large it is.
_UP_S = 60.0
#: Without any worker: the cluster has no room, or loses all that it starts.
_NONE_S = 300.0
_END_S = 10.0
_READ_BYTES = 1 << 16
_ADDRESS = re.compile(r"(\[[0-9a-fA-F:.]+\]|[^\s:/\[\]]+):([0-9]{1,5})")


def check_address(address: str) -> None:
    """UsageError where it cannot be one of a cluster; DatasetError where there is no Ray here."""
    found = _ADDRESS.fullmatch(address)
    if address != "auto" and (found is None or not 1 <= int(found[2]) <= 65535):
        raise UsageError(
            "no address of a Ray cluster", expected="auto, or HOST:PORT", found=repr(address),
            next_step="`ray status` on one of its nodes says it; run this there, too",
        )  # fmt: skip
    if find_spec("ray") is None:
        raise DatasetError("work on a Ray cluster needs Ray", where=address, next_step="pip install 'headrace[ray]'")


class _Remote:
    """One of a node."""

    def __init__(self, hire: RayHire, key: str, node: str, end: socket.socket) -> None:
        self._hire, self._key = hire, key
        self.node = node
        self.channel = Channel(end)

    def stop(self) -> None:
        """The bridge ends it when its socket is closed."""

    def end(self, until: float) -> str:
        self.channel.close()
        # Said before its socket was closed.
        self._hire.hear()
        return self._hire.gone.pop(self._key, "no longer reached")


class RayHire:
    """As many as the cluster has room for, `count` at the most (None: all CPUs) and no more than there are slices."""

    far = True

    def __init__(self, address: str, count: int | None, slices: int) -> None:
        check_address(address)
        self._address = address
        self._begin = "begin", address, count, slices, str(Path.cwd())
        self._process: subprocess.Popen[bytes] | None = None
        self._said: IO[bytes] | None = None
        self._control: socket.socket | None = None
        self._inbox = Inbox()
        self._descriptors: list[int] = []
        self._ready: list[_Remote] = []
        self._error: Exception | None = None
        self._since = time.monotonic()
        #: Workers that the cluster is asked for; known when it is up.
        self.count: int | None = None
        #: Key -> why it ended, of those that have.
        self.gone: dict[str, str] = {}

    def one(self) -> _Remote | None:
        if self._process is None:
            self._start()
        return self._ready.pop(0) if self._ready else None

    def fileno(self) -> int:
        return -1 if self._control is None else self._control.fileno()

    def look(self, at_work: int) -> None:
        if self._process is None:
            return
        self.hear()
        if self._error is not None:
            raise self._error
        if at_work or self._ready:
            self._since = time.monotonic()
        waited, up = time.monotonic() - self._since, self.count is not None
        if waited > (_NONE_S if up else _UP_S):
            raise DatasetError(
                "the Ray cluster gives no worker" if up else "the Ray cluster does not answer",
                where=self._address, found=f"none in {waited:.0f} s",
                next_step="`ray status` says what it is at, and whether CPUs are free",
            )  # fmt: skip

    def hear(self) -> None:
        """Take what the bridge has said."""
        while self._control is not None:
            try:
                data, descriptors, _, _ = socket.recv_fds(self._control, _READ_BYTES, 64)
            except BlockingIOError:
                return
            except OSError:
                data, descriptors = b"", []
            self._descriptors += descriptors
            if not data:
                self._ended()
                return
            for message in self._inbox.add(data):
                self._take(*message)

    def _take(self, what: str, *rest: Any) -> None:
        if what == "up":
            self.count = rest[0]
        elif what == "ready":
            key, node = rest
            if not self._descriptors:
                # The kernel leaves out those for which this process has no number.
                raise DatasetError(
                    "this process may not open so many files as the cluster has workers", where=self._address,
                    next_step="raise the limit (ulimit -n), or use fewer: --workers",
                )  # fmt: skip
            self._ready.append(_Remote(self, key, node, socket.socket(fileno=self._descriptors.pop(0))))
        elif what == "gone":
            key, why = rest
            self.gone[key] = why
        elif what == "failed":
            self._error = rest[0]

    def _start(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            self._said = tempfile.TemporaryFile()  # noqa: SIM115
            try:
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "headrace.dataset.ingestion.ray_bridge", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=self._said,
                    stderr=self._said,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env={**os.environ, "PYTHONPATH": os.pathsep.join(path for path in sys.path if path)},
                )
            except BaseException:
                ours.close()
                raise
        ours.sendall(encode(self._begin))
        ours.setblocking(False)
        self._control = ours
        self._since = time.monotonic()

    def _ended(self) -> None:
        """The bridge has, and nobody asked for it."""
        assert self._process is not None and self._said is not None and self._control is not None
        self._control.close()
        self._control = None
        try:
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        found, self._said = how_it_ended(status, self._said), None
        self._error = self._error or DatasetError(
            "the Ray cluster was lost", where=self._address, found=found[:300],
            next_step="what was done is kept: the same command goes on when the cluster is there",
        )  # fmt: skip

    def close(self, until: float) -> None:
        for each in self._ready:
            each.channel.close()
        for descriptor in self._descriptors:
            os.close(descriptor)
        if self._control is not None:
            self._control.close()
            self._control = None
        if self._process is not None:
            try:
                self._process.wait(max(0.1, min(until - time.monotonic(), _END_S)))
            except subprocess.TimeoutExpired:
                self._process.kill()
                self._process.wait()
        if self._said is not None:
            self._said.close()
            self._said = None
