"""Processes that decode, for functions that keep other threads from running: pure Python, mostly.

Each has a thread here that hands it some records of a batch at a time and waits for what becomes of them, so that a
batch of processes is one of threads to whoever waits for it. They are started afresh, not forked: the threads of the
native engine do not survive a fork. Bytes go there, and arrays come back, through `memory`.

A process that dies, or that is at one record for longer than is allowed, is an error of the records that it had, and
is ended; another one is started when there is something to decode.
"""

from __future__ import annotations

import contextlib
import logging
import os
import pickle
import queue
import select
import signal
import socket
import subprocess
import sys
import threading
import time
import weakref
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import Any, TypeAlias, TypeVar

from headrace.dataset.decoding.decoder import Decoder, Record, Threads
from headrace.dataset.decoding.memory import BEGIN, DONE, PLACE, RAISED, READY, Shared, fields_of
from headrace.errors import DecoderLost, DeviceTimeout, UsageError
from headrace.units import MIB

T = TypeVar("T")
#: The program itself, where it is needed: whether it is a "module" or a "path", which, and its arguments.
Program: TypeAlias = "tuple[str, str, list[str]] | None"

_log = logging.getLogger("headrace")

#: This is such a process.
INSIDE = False
#: What one gets to start, to import what decodes.
START_S = 300.0
#: Bytes of records that are handed over at a time; one record always is.
_CHUNK_BYTES = 8 * MIB
#: How often a thread that waits for a process looks where that is.
_LOOK_S = 1.0
_END_S = 10.0


def decoder_of(
    decode: Callable[[Record], T] | None, *, threads: int, processes: int, patience_s: float
) -> Decoder[T] | None:
    """None: whoever asks for a batch decodes it."""
    if decode is None:
        return None
    if processes:
        return Processes(decode, processes, patience_s)
    return Threads(decode, threads) if threads else None


class Processes(Decoder[T]):
    """`decode` must be one that a process of its own can import: `UsageError` where it cannot be pickled.

    `patience_s`: what a process gets for one record; and what comes of it must fit into 4 GiB with the rest of its
    part of a batch (`DatasetError`). `DecoderLost`: it died. `DeviceTimeout`: it hung, and was ended.
    """

    def __init__(self, decode: Callable[[Record], T], count: int, patience_s: float) -> None:
        if INSIDE:
            raise UsageError(
                "a process that decodes would start others: it runs the program once more to find `decode`",
                next_step='put what the program does under `if __name__ == "__main__":`, or decode into a module',
            )
        program = program_of(decode)
        self._parts: _Parts = queue.SimpleQueue()
        self._hands = [_Hand(program, patience_s) for _ in range(count)]
        # Also when nobody closes it, or the program ends: daemons, as Python would wait for others until they have
        # decoded what they are at, and that may never end.
        self._pid = os.getpid()
        self._finish = weakref.finalize(self, _finish, self._parts, self._hands, self._pid)
        self._threads = [
            threading.Thread(target=hand.work, args=(self._parts,), name="headrace-decode", daemon=True)
            for hand in self._hands
        ]
        try:
            for hand, thread in zip(self._hands, self._threads, strict=True):
                # They import what they need while the first records are read.
                hand.start()
                thread.start()
        except BaseException:
            self.close()
            raise

    @property
    def pids(self) -> list[int]:
        return sorted(pid for hand in self._hands for pid in hand.pids)

    @property
    def held_bytes(self) -> int:
        return sum(hand.held_bytes for hand in self._hands)

    def begin(self, names: Sequence[str], records: Sequence[Record]) -> list[Future[Sequence[T]]]:
        # Every process has its part soon, and two, so that a slow one holds up less.
        most = max(1, -(-len(records) // (2 * len(self._hands))))
        futures: list[Future[Sequence[T]]] = []

        def hand_over(start: int, end: int) -> None:
            if start < end:
                futures.append(Future())
                self._parts.put((futures[-1], names[start:end], records[start:end]))

        start = size = 0
        for at, record in enumerate(records):
            length = sum(map(len, record.values()))
            if at - start == most or size + length > _CHUNK_BYTES:
                hand_over(start, at)
                start, size = at, 0
            size += length
        hand_over(start, len(records))
        return futures

    def close(self) -> None:
        """At once: what is being decoded is given up."""
        self._finish()
        if os.getpid() != self._pid:
            return  # A fork: they are its parent's, and so are the threads that may hold what is locked.
        for thread in self._threads:
            if thread.ident is not None:
                thread.join()
        for hand in self._hands:
            hand.end()


#: What becomes of records, what they are called, and they; None: nothing more comes.
_Parts: TypeAlias = "queue.SimpleQueue[tuple[Future[Any], Sequence[str], Sequence[Record]] | None]"


def _finish(parts: _Parts, hands: Sequence[_Hand], pid: int) -> None:
    if os.getpid() != pid:
        return  # A fork: they are its parent's.
    with contextlib.suppress(queue.Empty):
        while (part := parts.get_nowait()) is not None:
            part[0].cancel()
    for hand in hands:
        parts.put(None)
        hand.close()


class _Hand:
    """A thread's: one process, and the next one where it is gone."""

    def __init__(self, program: tuple[Program, bytes], patience_s: float) -> None:
        self._program, self._patience_s = program, patience_s
        # Python may come to `close` at any line, where nobody has closed it.
        self._lock = threading.RLock()
        self._closed = False
        self._process: _Process | None = None

    @property
    def pids(self) -> list[int]:
        process = self._process
        return [] if process is None else [process.pid]

    @property
    def held_bytes(self) -> int:
        process = self._process
        return 0 if process is None else process.shared.held_bytes

    def start(self) -> _Process:
        """The process, a new one where there is none."""
        with self._lock:
            if self._closed:
                raise UsageError("what decodes records is closed")
            if self._process is not None and (status := self._process.ended()) is not None:
                _log.warning("a process that decodes records has died: %s; another one is started", how(status))
                self.end()
            if self._process is None:
                try:
                    self._process = _Process(self._program)
                except OSError as error:
                    raise DecoderLost("a process that decodes could not be started", found=str(error)) from error
            return self._process

    def close(self) -> None:
        """Kill the process: whoever waits for it goes on, and sees it end."""
        with self._lock:
            self._closed = True
            if self._process is not None:
                self._process.kill()

    def end(self) -> None:
        """See the process end."""
        with self._lock:
            process, self._process = self._process, None
            if process is not None:
                process.end()

    def work(self, parts: _Parts) -> None:
        try:
            while (part := parts.get()) is not None:
                self._decode(*part)
                # Nobody but those who wait for them has the records, and what becomes of them.
                part = None
        finally:
            self.end()

    def _decode(self, future: Future[Any], names: Sequence[str], records: Sequence[Record]) -> None:
        if not future.set_running_or_notify_cancel():
            return
        try:
            future.set_result(self._run(names, records))
        except BaseException as error:
            future.set_exception(error)

    def _run(self, names: Sequence[str], records: Sequence[Record]) -> Any:
        process = self.start()
        try:
            return process.run(names, records, self._patience_s)
        finally:
            if not process.usable:
                self.end()


class _Process:
    """One, with the memory that it shares. Used by one thread at a time, but for `kill`."""

    def __init__(self, program: tuple[Program, bytes]) -> None:
        self.shared = Shared.make()
        self._socket, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        try:
            with theirs:
                place = self.shared.put(program, BEGIN)
                arguments = [theirs.fileno(), self.shared.descriptor, *place]
                # In a session of its own, so that Ctrl-C in a terminal comes to the loader alone.
                self._process = subprocess.Popen(
                    [sys.executable, "-m", "headrace.dataset.decoding.worker", *map(str, arguments)],
                    stdin=subprocess.DEVNULL,
                    pass_fds=[theirs.fileno(), self.shared.descriptor],
                    start_new_session=True,
                    env={
                        # One core each.
                        "OMP_NUM_THREADS": "1",
                        **os.environ,
                        "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                    },
                )
        except BaseException:
            self._socket.close()
            self.shared.close()
            raise
        self._started = time.monotonic()
        self._ready = False
        #: It waits for records, or can be made to.
        self.usable = True

    @property
    def pid(self) -> int:
        return self._process.pid

    def run(self, names: Sequence[str], records: Sequence[Record], patience_s: float) -> Any:
        """What becomes of these records, or what `decode` raised."""
        self.usable = False
        try:
            if not self._ready:
                self._await_ready(names[0], max(0.0, self._started + START_S - time.monotonic()))
            self.shared.at = 0
            asked = self.shared.put((list(names), fields_of(records)), BEGIN)
            with contextlib.suppress(OSError):  # One that has died is found so below.
                self._socket.send(PLACE.pack(0, *asked), socket.MSG_NOSIGNAL)
            kind, place = self._answer(names, patience_s)
            answer = self.shared.take(place, own=True)
            self.shared.shrink(self.shared.behind(place))
            if kind == RAISED:
                self.usable = True
                raise _from_there(*answer)
            if kind != DONE:
                raise DecoderLost("a process that decodes records says what cannot be", found=str(kind))
            self.usable = True
            return answer
        finally:
            if not self.usable:
                self.kill()

    def ended(self) -> int | None:
        """How, where it has."""
        return self._process.poll()

    def kill(self) -> None:
        self._process.kill()

    def end(self) -> int:
        """See it end. Returns how it did."""
        self._socket.close()
        self.usable = False
        try:
            # It has closed its socket, or sees that this one is closed.
            status = self._process.wait(_END_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            status = self._process.wait()
        self.shared.close()
        return status

    def _await_ready(self, name: str, patience_s: float) -> None:
        kind, place = self._answer([name], patience_s, "a process that decodes records did not start in time")
        if kind == RAISED:
            raise _from_there(*self.shared.take(place, own=True))
        self._ready = kind == READY

    def _answer(
        self, names: Sequence[str], patience_s: float, late: str = "a record was not decoded in time"
    ) -> tuple[int, tuple[int, int, int]]:
        poll = select.poll()
        poll.register(self._socket, select.POLLIN)
        seen, until = -1, time.monotonic() + patience_s
        while not poll.poll(max(1, int(1000 * min(_LOOK_S, until - time.monotonic())))):
            if self.shared.at != seen:
                seen, until = self.shared.at, time.monotonic() + patience_s
            elif time.monotonic() >= until:
                self.kill()
                raise DeviceTimeout(
                    late, where=names[min(seen, len(names) - 1)], expected=f"within {patience_s:g} s",
                    next_step="its process was ended; the next call decodes the batch again",
                )  # fmt: skip
        try:
            said = self._socket.recv(PLACE.size)
        except OSError:
            said = b""
        if len(said) < PLACE.size:
            at = names[max(0, min(self.shared.at, len(names) - 1))]
            raise DecoderLost(
                "a process that decodes records died", where=at, found=how(self.end()),
                next_step="the next call starts another one and decodes the batch again; where memory was short, use "
                "fewer processes",
            )  # fmt: skip
        kind, begin, length, end = PLACE.unpack(said)
        return kind, (begin, length, end)


class _There(Exception):
    """Where in a process an exception came from: its text, as the cause of it."""

    def __str__(self) -> str:
        return f"\n{self.args[0]}"


def _from_there(error: Exception, text: str) -> Exception:
    error.__cause__ = _There(text)
    return error


def how(status: int) -> str:
    """A process ended."""
    if status >= 0:
        return f"exit status {status}"
    return f"killed by {signal.Signals(-status).name if -status in {*map(int, signal.Signals)} else -status}"


def program_of(decode: Callable[..., Any]) -> tuple[Program, bytes]:
    """What a process needs to decode so: the program itself, where `decode` stands in that, and `decode`. `UsageError`:
    another process cannot have it."""
    try:
        pickled = pickle.dumps(decode)
    except Exception as error:
        raise UsageError(
            "decode cannot be used by other processes: it cannot be pickled",
            where=getattr(decode, "__qualname__", repr(decode)),
            expected="a function at the top of a module, or a functools.partial of one",
            found=f"{type(error).__name__}: {error}",
            next_step="move it to the top of a module, or decode in threads",
        ) from error
    return _main_of(pickled), pickled


def _main_of(pickled: bytes) -> Program:
    """`UsageError`: it is needed, and has no file."""
    if b"__main__" not in pickled:
        return None
    program = sys.modules["__main__"]
    spec, path = getattr(program, "__spec__", None), getattr(program, "__file__", None)
    if spec is not None:
        return "module", spec.name, sys.argv
    if path is None or not os.path.exists(path):  # noqa: PTH110
        raise UsageError(
            "decode is defined where other processes cannot import it: in an interactive session",
            next_step="put it into a module, or decode in threads",
        )
    return "path", os.path.abspath(path), sys.argv  # noqa: PTH100
