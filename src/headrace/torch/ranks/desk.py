"""One process of a job has the session of its volume, and the others ask it: where to write, and to publish.

The writer of DCP needs no such thing, as DCP brings all ranks together before and after they write. Interfaces of files
do not: `torch-checkpointing` writes on each rank by itself and has one of them rename a folder, and `headrace://` only
sees files that are opened and closed. So

    rank 0           begins the session with its first write, and a desk: a thread that answers
    other ranks      ask for a grant when a file is closed, write it on their own associations, hand in the receipt

What is asked and answered goes through the store with which the job rendezvoused, under a token that the desk draws.
The desk waits in the store, not in turns, and ends with its process, or with `close`. Who asks waits `deadline_s` at
most.
"""

from __future__ import annotations

import contextlib
import json
import os
import threading
import uuid
from collections.abc import Callable
from dataclasses import dataclass
from datetime import timedelta
from typing import Any

import torch.distributed as dist

from headrace import errors
from headrace.errors import CheckpointFailed, HeadraceError, UsageError

#: What the desk may be idle for: it then asks the store anew.
_IDLE_S = 86400.0
_FIELDS = ("what", "where", "expected", "found", "next_step")
_STOP = b"stop"
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
    #: Workers that were started again in place find the store as it was.
    restart: str = "0"

    @classmethod
    def here(cls) -> Job:
        """As torch.distributed says, of this process; a job of one where it is not initialised."""
        if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size() == 1:
            return cls()
        store: Any = dist.distributed_c10d._get_default_store()
        while isinstance(store, _stores.PrefixStore):
            store = store.underlying_store
        rank, world = dist.get_rank(), dist.get_world_size()
        restart = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
        if isinstance(store, _stores.TCPStore):
            return cls(rank, world, host=store.host, port=store.port, restart=restart)
        if isinstance(store, _stores.FileStore):
            return cls(rank, world, path=store.path, restart=restart)
        raise UsageError(
            "the store of this job cannot be reached from other processes",
            expected="a TCPStore or a FileStore",
            found=type(store).__name__,
        )

    def store(self, prefix: str) -> Any:
        """A client of its own, for one thread."""
        store: Any
        if self.path:
            store = _stores.FileStore(self.path)
        else:
            store = _stores.TCPStore(self.host, self.port, None, False, timedelta(seconds=60), wait_for_workers=False)
        return _stores.PrefixStore(f"headrace/desk/{self.restart}/{prefix}", store)


Answer = Callable[[dict[str, Any]], Any]


class Desk:
    """Answers what the processes of a job ask under `prefix`, one after another, on a thread of its own.

    Args:
        answer: from what was asked to what is answered, both as JSON has them; a HeadraceError goes to who asked.
    """

    def __init__(self, job: Job, prefix: str, answer: Answer) -> None:
        self._answer = answer
        # The process, for those of the same rank: whether it is there still.
        self._token = f"{os.getpid()}.{uuid.uuid4().hex}"
        self._ours = job.store(prefix)
        self._store = job.store(prefix)
        self._thread = threading.Thread(target=self._run, name="headrace-desk", daemon=True)
        self._thread.start()
        self._ours.set("desk", self._token)

    def close(self) -> None:
        """Who asks from now on finds no desk."""
        with contextlib.suppress(dist.DistError, RuntimeError):
            if bytes(self._ours.get("desk")).decode() == self._token:
                self._ours.delete_key("desk")
            _put(self._ours, self._token, _STOP)
        # Where the store is gone, so is what the thread waited for.
        self._thread.join(30)

    def _run(self) -> None:
        number = 0
        while True:
            number += 1
            key = f"{self._token}/{number}"
            try:
                asked = self._wait(f"{key}/asked")
                if asked == _STOP:
                    return
                self._store.delete_key(f"{key}/asked")
                self._store.set(f"{key}/answer", self._say(asked))
            except (dist.DistError, RuntimeError):
                # The store is gone, and with it all who could ask.
                return

    def _wait(self, key: str) -> bytes:
        while True:
            self._store.set_timeout(timedelta(seconds=_IDLE_S))
            try:
                return bytes(self._store.get(key))
            except dist.DistStoreError as error:
                if "timeout" not in str(error).lower():
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


class Inquirer:
    """Asks the desk under `prefix`, wherever in the job it is. Thread-safe, one at a time."""

    def __init__(self, job: Job, prefix: str, deadline_s: float) -> None:
        self._rank = job.rank
        self._deadline_s = deadline_s
        self._lock = threading.Lock()
        self._store = job.store(prefix)

    def ask(self, what: dict[str, Any]) -> Any:
        """Its answer. The HeadraceError that befell it; CheckpointFailed where there is none in time."""
        with self._lock:
            try:
                self._store.set_timeout(timedelta(seconds=self._deadline_s))
                token = bytes(self._store.get("desk")).decode()
                key = _put(self._store, token, json.dumps(what).encode())
                said = json.loads(bytes(self._store.get(f"{key}/answer")))
                self._store.delete_key(f"{key}/answer")
            except (dist.DistError, RuntimeError) as error:
                raise CheckpointFailed(
                    "the process that has the session of the volume does not answer",
                    where=f"rank {self._rank}",
                    expected=f"an answer within {self._deadline_s:.0f} s",
                    found=str(error).splitlines()[0],
                    next_step="see the log of rank 0, which begins the session when it writes",
                ) from error
        if "kind" in said:
            kind = getattr(errors, said["kind"], None)
            if not (isinstance(kind, type) and issubclass(kind, HeadraceError)):
                kind = CheckpointFailed
            raise kind(said["fields"].pop("what"), **said["fields"])
        return said["answer"]

    def has_desk(self) -> bool:
        """For rank 0: another process of this rank has the session."""
        with self._lock:
            if not self._store.check(["desk"]):
                return False
            pid = int(bytes(self._store.get("desk")).decode().partition(".")[0])
        try:
            os.kill(pid, 0)
        except ProcessLookupError:
            return False
        return pid != os.getpid()


def _put(store: Any, token: str, value: bytes) -> str:
    key = f"{token}/{store.add(f'{token}/asked', 1)}"
    store.set(f"{key}/asked", value)
    return key
