"""Slices read by processes, on all cores: who reads what, what becomes of it, and of workers that die.

One thread holds all connections. It hands out slices and space, takes receipts, and commits each slice when it is
complete, with all that belongs to it. A worker that dies takes the slice that it was at along, and nothing else: the
transaction of that is given up, and the slice is read again by another one, a bounded number of times.

When it ends early, an error or Ctrl-C, writes that are under way are waited for: what they wrote is nobody's then, and
its space is free at once.
"""

from __future__ import annotations

import os
import pickle
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from contextlib import suppress
from multiprocessing.connection import Connection, wait
from typing import IO, Any

import numpy as np

from headrace.dataset.corpus import CorpusCounts
from headrace.dataset.output import U8, Job, Output
from headrace.dataset.slices import Done, Order, Task
from headrace.dataset.work import CHECKSUM_BLOCK_BYTES, Work
from headrace.errors import DatasetError, HeadraceError
from headrace.volume import Session, Transaction

#: A slice whose workers have died so often is not tried again.
MOST_DEATHS = 3
#: The longest that nothing is looked at.
_WAIT_S = 0.25
#: What writes under way, and then processes, get to end.
_END_S = 30.0

#: Slice, what was counted of it, tokens; None where it begins anew.
Tell = Callable[[int, "CorpusCounts | None", int], None]
#: A slice was read, and is in the volume.
Finished = Callable[[int, Done], None]


def read_here(
    session: Session, work: Work, job: Job, order: Order, part_bytes: int, tell: Tell, finished: Finished
) -> None:
    """All slices, one after another, in this process."""
    while (task := order.take()) is not None:
        index = task.index
        with _transaction(session, work, index) as transaction:

            def store(part: int, data: U8, transaction: Transaction = transaction, index: int = index) -> None:
                transaction.put(work.part(index, part), data, checksum_block_bytes=CHECKSUM_BLOCK_BYTES)

            def told(counts: CorpusCounts, tokens: int, index: int = index) -> None:
                tell(index, counts, tokens)

            output = Output(store, told, part_bytes)
            done = job.run(task, output)
            work.finish(transaction, index, done, output.side)
        work.began()
        finished(index, done)


def _transaction(session: Session, work: Work, index: int) -> Transaction:
    transaction = session.transaction()
    try:
        if work.has(index):
            work.forget(transaction, index)
    except BaseException:
        transaction.abort()
        raise
    return transaction


class _Worker:
    """A process, and what it is at."""

    def __init__(self) -> None:
        ours, theirs = socket.socketpair()
        with theirs:
            # What it says where it cannot say it over the connection.
            self.said: IO[bytes] = tempfile.TemporaryFile()  # noqa: SIM115
            environment = {
                **os.environ,
                "PYTHONPATH": os.pathsep.join(path for path in sys.path if path),
                # One core each: the library's threads would stand in each other's way.
                "TOKENIZERS_PARALLELISM": "false",
                "RAYON_NUM_THREADS": "1",
            }
            try:
                # In a session of its own, so that Ctrl-C in a terminal comes here alone.
                self.process = subprocess.Popen(
                    [sys.executable, "-m", "headrace.dataset.worker", str(theirs.fileno())],
                    stdin=subprocess.DEVNULL,
                    stdout=self.said,
                    stderr=self.said,
                    pass_fds=[theirs.fileno()],
                    start_new_session=True,
                    env=environment,
                )
            except BaseException:
                ours.close()
                self.said.close()
                raise
        self.connection: Connection[Any, Any] = Connection(ours.detach())
        self.task: Task | None = None
        self.transaction: Transaction | None = None
        #: It was given space, and has not answered.
        self.writing = False
        #: Part that it is at.
        self.part = 0

    def give_up(self) -> None:
        """What it was at is part of nothing."""
        if self.transaction is not None:
            self.transaction.abort()
        self.task = self.transaction = None
        self.writing = False

    def end(self, until: float) -> str:
        """Close the connection, and see it end; killed where it does not. Returns why it ended, in words."""
        self.connection.close()
        try:
            status = self.process.wait(max(0.1, until - time.monotonic()))
        except subprocess.TimeoutExpired:
            self.process.kill()
            status = self.process.wait()
        with self.said as said:
            said.seek(max(0, said.seek(0, os.SEEK_END) - 4096))
            last = said.read().decode("utf-8", "replace").strip().rpartition("\n")[2]
        if status < 0:
            name = signal.Signals(-status).name if -status in {*map(int, signal.Signals)} else str(-status)
            return f"killed by {name}"
        return last or f"exit status {status}"


class Pool:
    """Workers of one ingest."""

    def __init__(
        self, session: Session, work: Work, job: Job, order: Order, part_bytes: int, tell: Tell, finished: Finished
    ) -> None:
        self._session, self._work, self._order = session, work, order
        self._tell, self._finished = tell, finished
        #: Workers write to the volume themselves; else they send what they have here.
        self.direct = reachable(session)
        self._hello = pickle.dumps((session.volume if self.direct else None, job, part_bytes))
        self._workers: list[_Worker] = []
        self._deaths: dict[int, int] = {}

    def run(self, count: int) -> None:
        """Read all slices with `count` processes, or fewer where there is less to do."""
        try:
            while not self._order.complete:
                self._hand_out(count)
                self._listen()
        finally:
            self._end()

    def _hand_out(self, count: int) -> None:
        idle = [worker for worker in self._workers if worker.task is None]
        given: list[tuple[_Worker, Task]] = []
        new: list[_Worker] = []
        while (idle or len(self._workers) < count) and (task := self._order.take()) is not None:
            if idle:
                worker = idle.pop()
            else:
                worker = _Worker()
                self._workers.append(worker)
                new.append(worker)
            worker.task, worker.part = task, 0
            worker.transaction = _transaction(self._session, self._work, task.index)
            given.append((worker, task))
        # When all have been started: what is sent waits for the process to come up.
        for worker in new:
            self._send(worker, self._hello)
        for worker, task in given:
            self._send(worker, task)

    def _listen(self) -> None:
        self._session.look()
        by_connection = {worker.connection: worker for worker in self._workers}
        for connection in wait(list(by_connection), _WAIT_S):
            worker = by_connection[connection]  # type: ignore[index]
            try:
                message = worker.connection.recv()
            except (EOFError, OSError):
                self._died(worker)
                continue
            self._take(worker, *message)

    def _take(self, worker: _Worker, what: str, *rest: Any) -> None:
        if what in ("failed", "defect"):
            # No receipt comes: nobody waits for one.
            worker.writing = False
        if what == "failed":
            raise rest[0]
        if what == "defect":
            raise RuntimeError(f"a worker of the ingest failed:\n{rest[0]}")
        task, transaction = worker.task, worker.transaction
        assert task is not None and transaction is not None
        if what == "counts":
            self._tell(task.index, *rest)
        elif what == "space":
            worker.part, length = rest
            self._grant(worker, transaction, self._work.part(task.index, worker.part), length)
        elif what == "receipt":
            transaction.accept(rest[0])
            worker.writing = False
        elif what == "bytes":
            name = self._work.part(task.index, worker.part)
            transaction.put(name, rest[0], checksum_block_bytes=CHECKSUM_BLOCK_BYTES)
        elif what == "done":
            self._complete(worker, task, transaction, *rest)

    def _grant(self, worker: _Worker, transaction: Transaction, name: str, length: int) -> None:
        if not self.direct:
            self._send(worker, None)
            return
        grant = transaction.allocate(name, length, checksum_block_bytes=CHECKSUM_BLOCK_BYTES)
        worker.writing = True
        self._send(worker, grant)

    def _complete(self, worker: _Worker, task: Task, transaction: Transaction, done: Done, side: U8) -> None:
        self._work.finish(transaction, task.index, done, np.asarray(side))
        transaction.commit()
        self._work.began()
        worker.task = worker.transaction = None
        self._finished(task.index, done)

    def _send(self, worker: _Worker, message: Any) -> None:
        # A worker that is dead is found so when it is listened to.
        with suppress(OSError):
            worker.connection.send(message)

    def _died(self, worker: _Worker) -> None:
        self._workers.remove(worker)
        why = worker.end(time.monotonic() + _END_S)
        task = worker.task
        worker.give_up()
        if task is None:
            return
        deaths = self._deaths[task.index] = self._deaths.get(task.index, 0) + 1
        if deaths >= MOST_DEATHS:
            first = task.portions[0].source.location if task.portions else ""
            raise DatasetError(
                f"workers died {deaths} times at one part of the corpus", where=f"slice {task.index}, from {first}",
                found=why, next_step="where memory is short, use fewer workers: --workers",
            )  # fmt: skip
        self._tell(task.index, None, 0)
        self._order.give_back(task)

    def _end(self) -> None:
        until = time.monotonic() + _END_S
        workers, self._workers = self._workers, []
        for worker in workers:
            self._see_written(worker, until)
        for worker in workers:
            worker.connection.close()
        for worker in workers:
            worker.end(until)
            worker.give_up()

    def _see_written(self, worker: _Worker, until: float) -> None:
        """Wait for the receipt of a write that is under way."""
        with suppress(EOFError, OSError, HeadraceError, pickle.UnpicklingError):
            while worker.writing and worker.connection.poll(max(0.0, until - time.monotonic())):
                message = worker.connection.recv()
                if message[0] == "receipt" and worker.transaction is not None:
                    worker.transaction.accept(message[1])
                    worker.writing = False
                elif message[0] in ("failed", "defect"):
                    return


def reachable(session: Session) -> bool:
    """Can other processes open the volume? Memory of this one they cannot see, nor devices that have no address."""
    if any(device.describe().get("transport") == "memory" for device in session.volume.devices):
        return False
    try:
        pickle.dumps(session.volume)
    except (TypeError, AttributeError, pickle.PicklingError):
        return False
    return True
