"""Who reads the slices of an ingest: processes of this machine. (`ray_hire.py`: of many.)"""

from __future__ import annotations

import os
import select
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import IO, Protocol

from headrace.dataset.ingestion.channel import Channel


class Hired(Protocol):
    """A worker."""

    channel: Channel
    #: The machine that it runs on, for messages; empty: this one.
    node: str

    def stop(self) -> None:
        """End it wherever it is: it is not heard of any more."""

    def end(self, until: float) -> str:
        """See it end, its channel is closed. Returns why it ended, in words."""
        ...


class Hire(Protocol):
    """Where workers come from."""

    #: They are of other machines: what they see under a name may be something else.
    far: bool

    def one(self) -> Hired | None:
        """Another worker; None where there is none just now."""
        ...

    def look(self, at_work: int) -> None:
        """Called often, `at_work` workers are known. Raises what keeps others from coming."""

    def fileno(self) -> int:
        """Something is to be looked at when this can be read; -1: never."""
        ...

    def close(self, until: float) -> None:
        """No more of them. Those that there are have ended."""


class Process:
    """A process that reads slices, and the other end of its socket. Paths are seen from `folder` where there is such a
    one."""

    def __init__(self, folder: str | None = None) -> None:
        self.socket, theirs = socket.socketpair()
        with theirs:
            # What it says where it cannot say it over the connection.
            self._said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                # One core each: the library's threads would stand in each other's way.
                "TOKENIZERS_PARALLELISM": "false",
                "RAYON_NUM_THREADS": "1",
            }
            try:
                # In a session of its own, so that Ctrl-C in a terminal comes here alone.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "headrace.dataset.ingestion.worker", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=self._said,
                    stderr=self._said,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    cwd=folder if folder is not None and Path(folder).is_dir() else None,
                    env=environment,
                )
            except BaseException:
                self.socket.close()
                self._said.close()
                raise

    def kill(self) -> None:
        self._process.kill()

    def end(self, until: float) -> str:
        """See it end, for its socket is closed; killed where it does not. Returns why it ended, in words."""
        try:
            status = self._process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        return how_it_ended(status, self._said)


def how_it_ended(status: int, said: IO[bytes]) -> str:
    """Of a process: its signal, or the last line that it said."""
    with said:
        said.seek(max(0, said.seek(0, os.SEEK_END) - 4096))
        last = said.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
    if status < 0:
        name = signal.Signals(-status).name if -status in {*map(int, signal.Signals)} else str(-status)
        return f"killed by {name}"
    return last or f"exit status {status}"


class Local:
    """One of this machine."""

    node = ""

    def __init__(self) -> None:
        self._process = Process()
        self.channel = Channel(self._process.socket)

    def stop(self) -> None:
        self._process.kill()

    def end(self, until: float) -> str:
        self.channel.close()
        return self._process.end(until)


class LocalHire:
    """Processes of this machine, as many as are asked for."""

    far = False

    def one(self) -> Local:
        return Local()

    def look(self, at_work: int) -> None:
        """They come when they are asked for."""

    def fileno(self) -> int:
        return -1

    def close(self, until: float) -> None:
        """Each was ended by itself."""


def wait_for(channels: list[Channel], others: list[int], wait_s: float, act: Callable[[Channel], None]) -> None:
    """Wait until something came, or can be sent that waits; `act` on each channel that has something to read.

    `others`: descriptors that end the wait, too.
    """
    poll = select.poll()
    by_descriptor = {channel.fileno(): channel for channel in channels}
    for descriptor, channel in by_descriptor.items():
        poll.register(descriptor, select.POLLIN | (select.POLLOUT if channel.waiting else 0))
    for descriptor in others:
        poll.register(descriptor, select.POLLIN)
    for descriptor, event in poll.poll(wait_s * 1000):
        found = by_descriptor.get(descriptor)
        if found is None:
            continue
        if event & select.POLLOUT:
            found.flush()
        if event & ~select.POLLOUT:
            act(found)
