"""One process of a job has the session of its volume, and the others ask it: where to write, and to publish.

The writer of DCP needs no such thing, as DCP brings all ranks together before and after they write. Interfaces of files
do not: `torch-checkpointing` writes on each rank by itself and has one of them rename a folder, and `headrace://` only
sees files that are opened and closed. So

    rank 0           begins the session with its first write, and a desk: a thread that answers
    other ranks      ask for a grant when a file is closed, write it on their own associations, hand in the receipt

What is asked and answered goes through the store with which the job rendezvoused, under a token that the desk draws.
The desk waits in the store, not in turns, and ends with its process, or with `close`. Who asks waits `deadline_s` at
most.

Any of them may be killed at any moment, and leaves in the store what it had put there. So the desk beats (`beats`), and
who waits for its answer looks whether it does. Who asks takes a number, and then puts its question there. A number
under which nothing comes for as long as a dead process is waited for is passed over; who was only slow finds that
there, and takes another one.
"""

from __future__ import annotations

import contextlib
import json
import os
import socket
import threading
import time
import uuid
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch.distributed as dist

from headrace import errors
from headrace.errors import CheckpointFailed, HeadraceError, UsageError
from headrace.torch.ranks.aside import Aside, LeftBehind, StoreClient
from headrace.torch.ranks.beats import BEATS, Beats, Pulse
from headrace.units import format_seconds

#: What the desk may be idle for: it then asks the store anew.
_IDLE_S = 86400.0
#: Who gives no sign of life for so long is taken for dead.
STALL_S = 60.0
#: What a store that is there takes to answer at most.
_ANSWER_S = 5.0
_FIELDS = ("what", "where", "expected", "found", "next_step")
_STOP = "stop"
#: In the place of a question: nobody put one there in time.
_PASSED = "passed over"
#: The stubs know neither stores nor what they have.
_stores: Any = dist


@dataclass(frozen=True)
class Job:
    """Which rank of a job this is, and where its store is: picklable, for processes that a rank starts."""

    rank: int = 0
    world: int = 1
    #: Of the TCPStore of the job; "" with a port of 0: a FileStore at `path`.
    host: str = ""
    port: int = 0
    path: str = ""
    #: Of this job alone: others may have the same store, under prefixes of theirs, and workers that were started again
    #: in place find the store as it was.
    name: str = ""

    @classmethod
    def here(cls) -> Job:
        """As torch.distributed says, of this process; a job of one where it is not initialised."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        return cls.of(dist.distributed_c10d._get_default_store(), dist.get_rank(), dist.get_world_size())

    @classmethod
    def of(cls, store: Any, rank: int, world: int) -> Job:
        """The job whose ranks have this store, under this prefix. UsageError where it cannot be reached from others."""
        given = store
        while isinstance(store, _stores.PrefixStore):
            store = store.underlying_store
        place: dict[str, Any]
        if isinstance(store, _stores.TCPStore):
            place = {"host": store.host, "port": store.port}
        elif isinstance(store, _stores.FileStore):
            place = {"path": store.path}
        else:
            place = {}
        if place:
            restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
            # What a prefix is cannot be asked; whoever comes first draws a name that stands under it.
            name = given.compare_set(f"headrace/job/{restart}", "", uuid.uuid4().hex)
            return cls(rank, world, name=bytes(name).decode(), **place)
        raise UsageError(
            "the store of this job cannot be reached from other processes",
            expected="a TCPStore or a FileStore",
            found=type(store).__name__,
        )

    def store(self, prefix: str) -> Any:
        """A client of its own, for one thread."""
        return _stores.PrefixStore(self._keys(prefix), self._connected())

    def client(self, prefix: str, limit_s: float) -> StoreClient:
        """One whose questions end."""
        return StoreClient(self._keys(prefix), self._connected(), limit_s)

    def _keys(self, prefix: str) -> str:
        return f"headrace/desk/{self.name}/{prefix}"

    def _connected(self) -> Any:
        if self.path:
            return _stores.FileStore(self.path)
        return _stores.TCPStore(self.host, self.port, None, False, timedelta(seconds=60), wait_for_workers=False)


Answer = Callable[[dict[str, Any]], Any]


@dataclass(frozen=True)
class _Place:
    """Where a desk is, as it says in the store."""

    token: str
    #: How long its beats may stay away.
    stall_s: float
    node: str
    pid: int
    #: When that process began, in the node's ticks: its number may be another's by now.
    began: int

    @classmethod
    def here(cls, stall_s: float) -> _Place:
        return cls(uuid.uuid4().hex, stall_s, socket.gethostname(), os.getpid(), _began(os.getpid()) or 0)

    @classmethod
    def found(cls, store: Any) -> _Place | None:
        # Between the two questions it may be taken away.
        try:
            return cls(**json.loads(bytes(store.get("desk")))) if store.check(["desk"]) else None
        except dist.DistStoreError as error:
            if _is_timeout(error):
                return None
            raise

    def __str__(self) -> str:
        return f"process {self.pid} on node {self.node}"


def _began(pid: int) -> int | None:
    """In ticks since the node was started (`proc_pid_stat(5)`); None where it has ended, whether its parent knows it
    or not."""
    try:
        # The name in parentheses may hold anything.
        fields = Path(f"/proc/{pid}/stat").read_text(errors="replace").rpartition(")")[2].split()
    except OSError:
        return None
    return None if fields[0] in ("Z", "X") else int(fields[19])


def _is_timeout(error: Exception) -> bool:
    """Of a wait in a store that answers; `StoreClient` says else that it does not."""
    return "timeout" in str(error).lower()


class Desk:
    """Answers what the processes of a job ask under `prefix`, one after another, on a thread of its own.

    Args:
        answer: from what was asked to what is answered, both as JSON has them; a HeadraceError goes to who asked.
        stall_s: after so long without a sign of life it is taken for dead, and so is who took a number and did not ask.
    """

    def __init__(self, job: Job, prefix: str, answer: Answer, stall_s: float = STALL_S) -> None:
        self._answer = answer
        self._place = _Place.here(stall_s)
        self._token = self._place.token
        self._ours = job.client(prefix, stall_s + _ANSWER_S)
        self._store = job.store(prefix)
        #: The number whose question is waited for; 0 while one is answered.
        self._due = 0
        passing = _Passing(job.store(prefix), self._token, lambda: self._due)
        self._pulse = Pulse(job.store(prefix), 0, stall_s, passing.look)
        self._thread = threading.Thread(target=self._run, name="headrace-desk", daemon=True)
        self._thread.start()
        self._ours.set("desk", json.dumps(asdict(self._place)))

    def close(self) -> None:
        """Who asks from now on finds no desk."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            self._ours.set_timeout(timedelta(seconds=_ANSWER_S))
            if _Place.found(self._ours) == self._place:
                self._ours.delete_key("desk")
            _put(self._ours, self._token, _STOP)
        # Where the store is gone, so is what the thread waited for.
        self._thread.join(30)

    def _run(self) -> None:
        number = 0
        # Where the store is gone, so are all who could ask.
        with contextlib.suppress(dist.DistError, RuntimeError), self._pulse:
            while True:
                number += 1
                key = f"{self._token}/{number}"
                self._due = number
                asked = self._wait(f"{key}/asked")
                self._due = 0
                if asked == _PASSED.encode():
                    continue  # It stays there, for who comes late.
                if asked == _STOP.encode():
                    return
                self._store.delete_key(f"{key}/asked")
                self._store.set(f"{key}/answer", self._say(asked))

    def _wait(self, key: str) -> bytes:
        while True:
            self._store.set_timeout(timedelta(seconds=_IDLE_S))
            try:
                return bytes(self._store.get(key))
            except dist.DistStoreError as error:
                if not _is_timeout(error):
                    raise

    def _say(self, asked: bytes) -> bytes:
        try:
            return json.dumps({"answer": self._answer(json.loads(asked))}).encode()
        except HeadraceError as error:
            fields = {name: getattr(error, name) for name in _FIELDS}
            return json.dumps({"kind": type(error).__name__, "fields": fields}).encode()
        except Exception as error:
            # Whatever it was: who asked must hear of it, and the others still want to ask.
            fields = {"what": "the process with the session failed", "found": f"{type(error).__name__}: {error}"}
            return json.dumps({"kind": "CheckpointFailed", "fields": fields}).encode()


class _Passing:
    """Passes over numbers that somebody took, and put no question there. `store`: a client of its own."""

    def __init__(self, store: Any, token: str, due: Callable[[], int]) -> None:
        self._store = store
        self._token = token
        self._due = due
        self._held = (0, 0)
        self._looks = 0

    def look(self) -> None:
        """To be called with each beat."""
        due, key = self._due(), f"{self._token}/asked"
        taken = int(self._store.get(key)) if self._store.check([key]) else 0
        if due != self._held[0] or not 0 < due <= taken:
            self._held, self._looks = (due, taken), 0
            return
        self._looks += 1
        if self._looks >= BEATS:
            # Also what was taken when this one was: it took as long.
            for number in range(due, max(due, self._held[1]) + 1):
                self._store.compare_set(f"{self._token}/{number}/asked", "", _PASSED)
            self._looks = 0


class Inquirer:
    """Asks the desk under `prefix`, wherever in the job it is. Thread-safe, one at a time."""

    def __init__(self, job: Job, prefix: str, deadline_s: float) -> None:
        self._job = job
        self._prefix = prefix
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._store = job.client(prefix, min(STALL_S, deadline_s) + _ANSWER_S)
        #: What waits in the store, and with which client: one that does not end is left behind with it.
        self._aside = Aside("headrace-asks")
        self._waiting: Any = None

    def ask(self, what: dict[str, Any]) -> Any:
        """Its answer. The HeadraceError that befell it; CheckpointFailed where there is none in time, or where the
        desk gives no sign of life."""
        with self._lock:
            end = time.monotonic() + self._deadline_s
            with self._store_errors():
                place = _Place(**json.loads(self._wait("desk", end, lambda: "")))
            with self._store_errors(place):
                key = _put(self._store, place.token, json.dumps(what))
                said = json.loads(self._wait(f"{key}/answer", end, self._looks(place), place))
                self._store.delete_key(f"{key}/answer")
        if "kind" in said:
            kind = getattr(errors, said["kind"], None)
            if not (isinstance(kind, type) and issubclass(kind, HeadraceError)):
                kind = CheckpointFailed
            raise kind(said["fields"].pop("what"), **said["fields"])
        return said["answer"]

    def _looks(self, place: _Place) -> Callable[[], str]:
        """What has become of that desk, asked now and then; "": nothing, as far as is known."""
        beats, due = Beats(self._store, place.stall_s), 0.0

        def look() -> str:
            nonlocal due
            now = time.monotonic()
            if now < due:
                return ""
            due = now + place.stall_s / BEATS
            if _Place.found(self._store) != place:
                return "has given it up"
            if beats.silent([0]):
                return f"gave no sign of life for {format_seconds(place.stall_s)}"
            return ""

        return look

    def _wait(self, key: str, end: float, look: Callable[[], str], place: _Place | None = None) -> bytes:
        """What is put there; CheckpointFailed where `look` says that nothing will be."""
        if self._waiting is None:
            self._waiting = self._job.store(self._prefix)
        store, found = self._waiting, ""
        store.set_timeout(timedelta(seconds=max(end - time.monotonic(), 0.01)))

        def over() -> bool:
            nonlocal found
            try:
                found = look() or ("does not answer" if time.monotonic() >= end + _ANSWER_S else "")
            except dist.DistError as error:
                found = f"cannot be looked for: {str(error).splitlines()[0]}"
            return bool(found)

        try:
            return self._aside.call(lambda: bytes(store.get(key)), over)
        except LeftBehind:
            self._waiting = None
            raise CheckpointFailed(
                f"the process that has the session of the volume {found}",
                where=self._where(place),
                next_step="what was not published is given up: save again; see the log of rank 0",
            ) from None
        except BaseException:
            # It may still wait over this one.
            self._waiting = None
            raise

    def is_there(self) -> bool:
        """Somebody has begun the session, or had it and was killed."""
        with self._lock, self._store_errors():
            return self._store.check(["desk"])

    def is_beside(self) -> bool:
        """For rank 0: another process of this rank, which lives, has the session."""
        with self._lock, self._store_errors():
            self._store.set_timeout(timedelta(seconds=_ANSWER_S))
            place = _Place.found(self._store)
        return place is not None and place.pid != os.getpid() and _began(place.pid) == place.began

    def _where(self, place: _Place | None) -> str:
        seen = f"rank {self._job.rank}"
        return seen if place is None else f"{place}, as seen by {seen}"

    @contextlib.contextmanager
    def _store_errors(self, place: _Place | None = None) -> Iterator[None]:
        try:
            yield
        except (dist.DistError, RuntimeError) as error:
            raise CheckpointFailed(
                "the process that has the session of the volume does not answer",
                where=self._where(place),
                expected=f"an answer within {self._deadline_s:.0f} s",
                found=str(error).splitlines()[0],
                next_step="see the log of rank 0, which begins the session when it writes",
            ) from error


def _put(store: StoreClient, token: str, value: str) -> str:
    while True:
        key = f"{token}/{store.add(f'{token}/asked', 1)}"
        if store.compare_set(f"{key}/asked", "", value) == value.encode():
            return key
