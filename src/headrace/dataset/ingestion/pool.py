"""Slices read by workers: who reads what, what becomes of it, and of workers that die.

One thread holds all channels. It hands out slices and space, takes receipts, and commits each slice when it is
complete, with all that belongs to it. A worker that dies takes the slice that it was at along, and nothing else: the
transaction of that is given up, and the slice is read again by another one, a bounded number of times. A worker that
is not heard of any more (stopped, a machine that hangs) is dead, too: each says now and then that it lives.

When it ends early, an error or Ctrl-C, writes that are under way are waited for: what they wrote is nobody's then, and
its space is free at once.
"""

from __future__ import annotations

import pickle
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np

from headrace.dataset.ingestion.channel import Channel, Gone
from headrace.dataset.ingestion.corpus import CorpusCounts
from headrace.dataset.ingestion.hire import Hire, Hired, wait_for
from headrace.dataset.ingestion.output import U8, Job, Output
from headrace.dataset.ingestion.places import is_url
from headrace.dataset.ingestion.slices import Done, Order, Task
from headrace.dataset.ingestion.work import Work
from headrace.dataset.tokens.stream import CHECKSUM_BLOCK_BYTES
from headrace.errors import DatasetError, HeadraceError
from headrace.volume import Session, Transaction, Volume

#: A slice whose workers have died so often is not tried again.
MOST_DEATHS = 3
#: A worker that has a slice says something this often at the least, whatever it is at.
ALIVE_EVERY_S = 5.0
#: One that has not said anything for so long is dead.
MOST_SILENCE_S = 180.0
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

            output = Output(store, told, part_bytes, task.most_parts)
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
    """One, and what it is at."""

    def __init__(self, hired: Hired) -> None:
        self.hired = hired
        self.channel = hired.channel
        #: When it was heard of.
        self.heard = time.monotonic()
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


class Pool:
    """Workers of one ingest."""

    def __init__(
        self,
        session: Session,
        work: Work,
        job: Job,
        order: Order,
        part_bytes: int,
        tell: Tell,
        finished: Finished,
        hire: Hire,
    ) -> None:
        self._session, self._work, self._order, self._hire = session, work, order, hire
        self._tell, self._finished = tell, finished
        #: Workers write to the volume themselves; else they send what they have here.
        self.direct = reachable(session)
        if hire.far and not self.direct:
            raise DatasetError(
                "other machines cannot reach the volume", where=", ".join(session.volume.uris) or "memory",
                expected="members that they can open by the same address", found="memory of this process",
            )  # fmt: skip
        volume = session.volume
        # Not the volume itself, which pickles as who its session is now: one that renews itself becomes another host,
        # and whoever joins it late would be told that it is lost. Each grant says whom to write as.
        again = partial(Volume.open, volume.uris, write=True, degraded=volume.degraded, keep=volume.keep)
        self._hello = pickle.dumps((again if self.direct else None, job, part_bytes, hire.far))
        self._workers: list[_Worker] = []
        #: As many were at work at a time.
        self.most = 0
        self._deaths: dict[int, int] = {}

    def run(self, count: int) -> None:
        """Read all slices with `count` workers, or fewer where there is less to do."""
        try:
            while not self._order.complete:
                self._hand_out(count)
                self._listen()
        finally:
            self._end()

    def _hand_out(self, count: int) -> None:
        idle = [worker for worker in self._workers if worker.task is None]
        while (task := self._order.take()) is not None:
            worker = idle.pop() if idle else self._another(count)
            if worker is None:
                self._order.give_back(task)
                return
            worker.task, worker.part, worker.heard = task, 0, time.monotonic()
            worker.transaction = _transaction(self._session, self._work, task.index)
            worker.channel.send(_from_anywhere(task) if self._hire.far else task)

    def _another(self, count: int) -> _Worker | None:
        if len(self._workers) >= count or (hired := self._hire.one()) is None:
            return None
        worker = _Worker(hired)
        self._workers.append(worker)
        self.most = max(self.most, len(self._workers))
        worker.channel.send(self._hello)
        return worker

    def _listen(self) -> None:
        self._session.look()
        by_channel = {worker.channel: worker for worker in self._workers}
        others = [descriptor] if (descriptor := self._hire.fileno()) >= 0 else []
        wait_for(list(by_channel), others, _WAIT_S, lambda channel: self._hear(by_channel[channel]))
        self._hire.look(len(self._workers))
        for worker in list(self._workers):
            if worker.task is not None and time.monotonic() - worker.heard > MOST_SILENCE_S:
                worker.hired.stop()
                self._died(worker, f"nothing was heard of it for {MOST_SILENCE_S:.0f} s")

    def _hear(self, worker: _Worker) -> None:
        try:
            messages = worker.channel.receive()
        except Gone:
            self._died(worker)
            return
        worker.heard = time.monotonic()
        for message in messages:
            self._take(worker, *message)

    def _take(self, worker: _Worker, what: str, *rest: Any) -> None:
        if what == "alive":
            return
        if what in ("failed", "defect"):
            # No receipt comes: nobody waits for one.
            worker.writing = False
        if what == "failed":
            raise _seen_from(worker.hired.node, rest[0])
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
            worker.channel.send(None)
            return
        grant = transaction.allocate(name, length, checksum_block_bytes=CHECKSUM_BLOCK_BYTES)
        worker.writing = True
        worker.channel.send(grant)

    def _complete(self, worker: _Worker, task: Task, transaction: Transaction, done: Done, side: U8) -> None:
        self._work.finish(transaction, task.index, done, np.asarray(side))
        transaction.commit()
        self._work.began()
        worker.task = worker.transaction = None
        self._finished(task.index, done)

    def _died(self, worker: _Worker, why: str | None = None) -> None:
        self._workers.remove(worker)
        ended = worker.hired.end(time.monotonic() + _END_S)
        task = worker.task
        worker.give_up()
        if task is None:
            return
        deaths = self._deaths[task.index] = self._deaths.get(task.index, 0) + 1
        if deaths >= MOST_DEATHS:
            first = task.portions[0].source.location if task.portions else ""
            raise DatasetError(
                f"workers died {deaths} times at one part of the corpus", where=f"slice {task.index}, from {first}",
                found=why or ended, next_step="where memory is short, use fewer workers: --workers",
            )  # fmt: skip
        self._tell(task.index, None, 0)
        self._order.give_back(task)

    def _end(self) -> None:
        until = time.monotonic() + _END_S
        workers, self._workers = self._workers, []
        self._see_written([worker for worker in workers if worker.writing], until)
        for worker in workers:
            worker.channel.close()
        for worker in workers:
            worker.hired.end(until)
            worker.give_up()
        self._hire.close(until)

    def _see_written(self, workers: list[_Worker], until: float) -> None:
        """Wait for the receipts of writes that are under way."""
        by_channel = {worker.channel: worker for worker in workers}

        def hear(channel: Channel) -> None:
            worker = by_channel[channel]
            try:
                for message in channel.receive():
                    if message[0] == "receipt" and worker.transaction is not None:
                        worker.transaction.accept(message[1])
                    if message[0] in ("receipt", "failed", "defect"):
                        del by_channel[channel]
            except (Gone, HeadraceError, pickle.UnpicklingError):
                by_channel.pop(channel, None)

        while by_channel and time.monotonic() < until:
            wait_for(list(by_channel), [], _WAIT_S, hear)


def _from_anywhere(task: Task) -> Task:
    """Paths that do not depend on where a process stands."""
    portions = tuple(
        portion
        if is_url(portion.source.location)
        else replace(portion, source=replace(portion.source, location=str(portion.source.path.absolute())))
        for portion in task.portions
    )
    return replace(task, portions=portions)


def _seen_from(node: str, error: HeadraceError) -> HeadraceError:
    """What happened on another machine says on which."""
    if node:
        error.where = f"{error.where}, seen from {node}" if error.where else node
    return error


def reachable(session: Session) -> bool:
    """Can other processes open the volume? Memory of this one they cannot see, nor devices that have no address."""
    if any(device.describe().get("transport") == "memory" for device in session.volume.devices):
        return False
    try:
        pickle.dumps(session.volume)
    except (TypeError, AttributeError, pickle.PicklingError):
        return False
    return True
