"""A rank's socket, which gives its report to whoever connects; and asking all sockets of a directory.

A report is one JSON object, and the end of the connection. Who asks has a deadline for all of them together, so a rank
that is stopped, or that holds the interpreter for long, costs a part of a second and is said to be silent. A rank that
has died leaves a socket behind that refuses: whoever finds it takes it away. Of a run whose ranks were all killed, the
next one of this user takes away what it left: Prometheus would find the new one's port under the old one's name, too.
"""

from __future__ import annotations

import contextlib
import itertools
import json
import os
import re
import selectors
import socket
import threading
import time
import weakref
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from headrace.errors import UsageError

#: For all ranks of a node together.
PATIENCE_S = 1.0
#: Of what a rank says why it has nothing to say.
_ERROR_LETTERS = 1000
#: Longest report that is taken.
REPORT_BYTES = 16 << 20
#: What a client gets to take its report.
_CLIENT_S = 2.0
#: After a client could not be taken for want of descriptors.
_PAUSE_S = 0.25
_PATH_BYTES = 107
#: Where Prometheus finds the server of a run, in its folder; and among its labels, of those that it drops, the node.
TARGETS, NODE = "targets.json", "__meta_headrace_node"
#: Of runs that are looked at for dead ones.
_RUNS = 1000
_NAME = re.compile(r"rank-([0-9]{1,9})-([0-9]{1,9})\.sock")

_answering: weakref.WeakSet[Answers] = weakref.WeakSet()


class Answers:
    """The socket of this process, and the thread that answers."""

    def __init__(self, folder: Path, rank: int, report: Callable[[], dict[str, Any]]) -> None:
        """`UsageError` where the socket cannot be made."""
        self.path = folder / f"rank-{rank}-{os.getpid()}.sock"
        if any(each.path == self.path for each in list(_answering)):
            raise UsageError(
                "this process answers here already", where=str(self.path),
                next_step="give all loaders to one NodeMetrics, or close the other one first",
            )  # fmt: skip
        self._report = report
        self._listener = _listen(self.path)
        self._wake, self._woken = socket.socketpair()
        self._thread = threading.Thread(target=self._run, name="headrace-metrics", daemon=True)
        self._thread.start()
        _answering.add(self)

    def close(self) -> None:
        if self._listener.fileno() < 0:
            return
        self._wake.send(b"x")
        self._thread.join()
        self._listener.close()
        self.path.unlink(missing_ok=True)
        self._let_go()

    def after_fork(self) -> None:
        """In the child: the thread is the parent's, and so is the socket, which must end with the parent."""
        self._listener.close()
        self._let_go()

    def _let_go(self) -> None:
        self._wake.close()
        self._woken.close()
        _answering.discard(self)

    def _run(self) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(self._listener, selectors.EVENT_READ)
            selector.register(self._woken, selectors.EVENT_READ)
            while True:
                ready = {key.fileobj for key, _ in selector.select()}
                if self._woken in ready:
                    return
                try:
                    client = self._listener.accept()[0]
                except (BlockingIOError, ConnectionAbortedError):
                    continue
                except OSError:
                    # No descriptor is left. The listener stays readable: look away for a while.
                    selector.unregister(self._listener)
                    selector.select(_PAUSE_S)
                    selector.register(self._listener, selectors.EVENT_READ)
                    continue
                with client, contextlib.suppress(OSError):
                    client.settimeout(_CLIENT_S)
                    client.sendall(self._answer())

    def _answer(self) -> bytes:
        try:
            return json.dumps(self._report()).encode()
        except Exception as error:
            # The rank is there, and this is what it has to tell.
            return json.dumps({"error": f"{type(error).__name__}: {error}"[:_ERROR_LETTERS]}).encode()


def _after_fork() -> None:
    for each in list(_answering):
        each.after_fork()


os.register_at_fork(after_in_child=_after_fork)


def _listen(path: Path) -> socket.socket:
    if len(os.fsencode(path)) > _PATH_BYTES:
        raise UsageError("the path of a rank's socket is too long", where=str(path), expected=f"{_PATH_BYTES} bytes")
    listener = socket.socket(socket.AF_UNIX)
    # Nobody asks by this name: a socket that refuses is taken for one of the dead, and away.
    early = path.with_name(path.name.replace("rank-", "new-"))
    try:
        # These names may be of a process of the same number that was killed.
        early.unlink(missing_ok=True)
        listener.bind(str(early))
        listener.listen(16)
        listener.setblocking(False)
        early.replace(path)
    except OSError as error:
        listener.close()
        with contextlib.suppress(OSError):
            early.unlink()
        raise UsageError("a rank's socket cannot be made", where=str(path), found=error.strerror) from None
    return listener


def ask_all(
    folder: Path, patience_s: float = PATIENCE_S, but: Path | None = None
) -> Iterator[tuple[int, int, Mapping[str, Any] | None]]:
    """Rank, process and report of each one that has a socket here, `but` one. None: it did not answer in time, or
    nonsense; with `error` alone: it could not report, and that is why."""
    with selectors.DefaultSelector() as selector, contextlib.ExitStack() as stack:
        said: dict[tuple[int, int], bytearray] = {}
        silent: list[tuple[int, int]] = []
        for path in sorted(folder.glob("rank-*.sock")):
            name = _NAME.fullmatch(path.name)
            if name is None or path == but:
                continue
            who = (int(name[1]), int(name[2]))
            end = stack.enter_context(socket.socket(socket.AF_UNIX))
            end.setblocking(False)
            try:
                end.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
                continue
            except FileNotFoundError:
                continue
            except OSError:
                # So many ask it that there is no room.
                silent.append(who)
                continue
            said[who] = bytearray()
            selector.register(end, selectors.EVENT_READ, who)
        deadline = time.monotonic() + patience_s
        while selector.get_map() and (left := deadline - time.monotonic()) > 0:
            for key, _ in selector.select(left):
                piece = _receive(key.fileobj)
                if piece and len(said[key.data]) + len(piece) <= REPORT_BYTES:
                    said[key.data] += piece
                elif piece != b"" or not said[key.data]:
                    silent.append(key.data)
                if not piece or key.data in silent:
                    selector.unregister(key.fileobj)
        silent += [key.data for key in selector.get_map().values()]
    for who, data in said.items():
        yield *who, None if who in silent else _decoded(data)
    yield from ((*who, None) for who in silent if who not in said)


def forget_dead_runs(but: Path) -> None:
    """What runs of this node beside `but` left, of which nobody answers any more. Where nodes share the temporary
    directory, the sockets of another one refuse here, and are alive there."""
    for told in itertools.islice(but.parent.glob(f"run-*/{TARGETS}"), _RUNS):
        if told.parent == but:
            continue
        with contextlib.suppress(OSError, ValueError, LookupError, TypeError):
            if json.loads(told.read_bytes())[0]["labels"][NODE] != socket.gethostname():
                continue
            before = told.stat().st_mtime_ns
            # A run has its sockets before it writes this file.
            if not _alive(told.parent) and told.stat().st_mtime_ns == before:
                told.unlink()
                told.parent.rmdir()


def _alive(folder: Path) -> bool:
    for path in folder.glob("rank-*.sock"):
        with socket.socket(socket.AF_UNIX) as end:
            end.setblocking(False)
            try:
                end.connect(str(path))
            except ConnectionRefusedError:
                path.unlink(missing_ok=True)
            except FileNotFoundError:
                continue
            except OSError:
                return True
            else:
                return True
    return False


def _receive(end: Any) -> bytes | None:
    """b"": it has ended; None: it broke."""
    try:
        received: bytes = end.recv(1 << 18)
    except OSError:
        return None
    return received


def _decoded(data: bytearray) -> Mapping[str, Any] | None:
    try:
        report = json.loads(data)
    except (ValueError, RecursionError):
        return None
    if isinstance(report, dict) and isinstance(report.get("error"), str):
        return {"error": report["error"][:_ERROR_LETTERS]}
    whole = isinstance(report, dict) and all(isinstance(report.get(name), list) for name in ("feeds", "devices"))
    return report if whole else None
