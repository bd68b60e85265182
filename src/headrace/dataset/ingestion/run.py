"""What every ingest has in common: slices read by workers, in an order that is settled, and how far that is."""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

from headrace.dataset.ingestion import places
from headrace.dataset.ingestion.corpus import Corpus, CorpusCounts
from headrace.dataset.ingestion.hire import Hire, LocalHire
from headrace.dataset.ingestion.output import PART_BYTES, Job
from headrace.dataset.ingestion.pool import Pool, read_here
from headrace.dataset.ingestion.progress import Teller
from headrace.dataset.ingestion.ray_hire import RayHire, check_address
from headrace.dataset.ingestion.slices import Done, Order, Slice, known_parts, parts_of_a_slice, too_many_parts
from headrace.dataset.ingestion.work import Work
from headrace.errors import ObjectExists, UsageError
from headrace.units import KIB, MIB
from headrace.volume import Session, Transaction
from headrace.volume.catalog.changes import MAX_SLICES
from headrace.volume.data.names import check_name


@dataclass(frozen=True, kw_only=True)
class WorkOptions:
    """Who does the work, and how much of it at a time. The result does not depend on it."""

    #: Processes that read. 1: none but this one; None: one for each core, where there is so much to do.
    workers: int | None = None
    #: Bytes of files that are read at a time, and done again after a crash. None: by the size of the corpus.
    slice_bytes: int | None = None
    #: Memory that each worker may fill with what it has read.
    part_bytes: int = PART_BYTES
    #: Begin anew where an earlier ingest of this name was not finished.
    restart: bool = False
    #: Address of a Ray cluster whose CPUs are the workers: "auto", "HOST:PORT". None: this machine's.
    ray: str | None = None

    def __post_init__(self) -> None:
        if self.workers is not None and not 1 <= self.workers <= 4096:
            raise UsageError("workers is out of range", expected="1 to 4096", found=str(self.workers))
        if self.slice_bytes is not None and self.slice_bytes < 1:
            raise UsageError("slice_bytes is out of range", expected="1 or more", found=str(self.slice_bytes))
        if not 4 * KIB <= self.part_bytes <= 1024 * MIB or self.part_bytes % 8:
            raise UsageError(
                "part_bytes is out of range", expected="4 KiB to 1 GiB, a multiple of 8", found=str(self.part_bytes)
            )


def free_names(session: Session, name: str, ends: Sequence[str]) -> dict[str, str]:
    """End -> name of each object of a dataset to be. ObjectExists where one is there."""
    names = {end: f"{name}.{end}" for end in ends}
    for object_name in names.values():
        check_name(object_name)
        if object_name in session.volume:
            raise ObjectExists(
                "the dataset exists",
                where=object_name,
                next_step="take another name, or delete its objects with `headrace volume rm`: "
                + " ".join(each for each in names.values() if each in session.volume),
            )
    return names


class Totals(CorpusCounts):
    """Of several slices."""

    tokens: int = 0

    def add(self, done: Done) -> None:
        counts = done.counts
        self.documents += counts["documents"]
        self.tokens += counts["tokens"]
        self.text_bytes += done.text_bytes
        self.source_bytes += counts["source_bytes"]
        self.replaced_documents += counts["replaced_documents"]
        self.empty_documents += counts["empty_documents"]
        self.bad_records += counts["bad_records"]
        self.bad_shown += counts["bad_shown"]


@dataclass(frozen=True, kw_only=True)
class RunReport:
    """What is told of every ingest."""

    name: str
    #: Of the commit.
    sequence: int
    seconds: float
    #: Slices that the corpus was read in, and how many of them an earlier run had done.
    slices: int
    resumed: int
    #: Processes that read them; 1: this one.
    workers: int
    #: They wrote to the volume themselves (else all of it went through this process).
    direct: bool


class Run:
    """The slices of one corpus, read into what is kept of an ingest."""

    def __init__(
        self, corpus: Corpus, session: Session, name: str, slices: Sequence[Slice], options: WorkOptions, tell: Teller
    ) -> None:
        self._began = time.monotonic()
        self.corpus, self.session, self.options, self.tell = corpus, session, options, tell
        most = parts_of_a_slice(MAX_SLICES, len(slices))
        known = known_parts(slices, options.part_bytes, most)
        if known > MAX_SLICES:
            raise too_many_parts(MAX_SLICES, f"{known} or more")
        self.name = name
        self.work = Work(session, name)
        self.order = Order(slices, corpus.options.limit_bytes, most_parts=MAX_SLICES)
        self.workers = self._workers(len(slices))
        #: Workers write to the volume themselves.
        self.direct = True
        self.resumed = 0
        self._done = Totals()
        #: Slices under way: what was counted of each, and tokens.
        self._under_way: dict[int, tuple[CorpusCounts, int]] = {}

    def told(self, sequence: int) -> dict[str, Any]:
        """The fields of `RunReport`, of what was committed as this sequence."""
        return {
            "name": self.name,
            "sequence": sequence,
            "seconds": time.monotonic() - self._began,
            "slices": len(self.order.slices),
            "resumed": self.resumed,
            "workers": self.workers,
            "direct": self.direct,
        }

    def _workers(self, slices: int) -> int:
        here = any(places.own_to_a_process(source.location) for source in self.corpus.sources[:1])
        wanted, ray = self.options.workers, self.options.ray
        if here and (ray is not None or (wanted is not None and wanted > 1)):
            raise UsageError(
                "other processes cannot see this corpus", where=self.corpus.description, expected="workers=1",
                found=f"ray={ray!r}" if ray is not None else str(wanted),
            )  # fmt: skip
        if ray is not None:
            check_address(ray)
            # All that the cluster has room for.
            return min(wanted or slices, slices)
        if wanted is None:
            wanted = 1 if here else len(os.sched_getaffinity(0))
        return max(1, min(wanted, slices))

    def _hire(self) -> Hire:
        if self.options.ray is None:
            return LocalHire()
        return RayHire(self.options.ray, self.options.workers, len(self.order.slices))

    def drop(self) -> None:
        """Forget what an earlier run has done."""
        with self.session.transaction() as transaction:
            self.work.drop(transaction)

    def read(self, job: Job, phase: str) -> str:
        """Read all slices, but those that an earlier run has read; returns SHA-256 of their bytes, one after another.

        The work has its plan.
        """
        session, work, order = self.session, self.work, self.order
        found = work.find(order.slices)
        if self.corpus.options.bad == "fail":
            # An earlier run may have left out what this one is not to.
            found = {index: done for index, done in found.items() if not done.counts["bad_records"]}
        self.resumed = len(found)
        for index, done in sorted(found.items()):
            self._done.add(done)
            order.finish(index, done)
        self.tell.begin(phase, self._done.documents, self._done.tokens, self._fraction())
        self._tell()
        with _Hash(work, order) as digest:
            digest.follow()

            def finished(index: int, done: Done) -> None:
                self._under_way.pop(index, None)
                self._done.add(done)
                order.finish(index, done)
                self._tell()
                digest.follow()

            if self.workers == 1 and self.options.ray is None:
                read_here(session, work, job, order, self.options.part_bytes, self._told, finished)
            else:
                hire = self._hire()
                pool = Pool(session, work, job, order, self.options.part_bytes, self._told, finished, hire)
                self.direct = pool.direct
                pool.run(self.workers)
                self.workers = pool.most
            totals = self.totals()
            self.tell.begin("commit")
            self.tell.now(totals.documents, totals.tokens, totals.text_bytes, 1.0)
            return digest.result()

    def totals(self) -> Totals:
        """Of the slices that are the dataset."""
        totals = Totals()
        for index in range(self.order.settled):
            totals.add(self.order.done[index])
        return totals

    def parts(self) -> list[str]:
        """Names of what they gave, in order."""
        settled = range(self.order.settled)
        return [name for name, _ in self.work.parts((index, self.order.done[index]) for index in settled)]

    # ---- how far ----

    def _told(self, index: int, counts: CorpusCounts | None, tokens: int) -> None:
        if counts is None:
            self._under_way.pop(index, None)
        else:
            self._under_way[index] = counts, tokens
        if self.tell.due():
            self._tell()

    def _tell(self) -> None:
        counted = [counts for counts, _ in self._under_way.values()]
        done = self._done
        self.tell.now(
            done.documents + sum(counts.documents for counts in counted),
            done.tokens + sum(tokens for _, tokens in self._under_way.values()),
            done.text_bytes + sum(counts.text_bytes for counts in counted),
            self._fraction(),
            done.bad_records + sum(counts.bad_records for counts in counted),
        )

    def _fraction(self) -> float:
        limit, done = self.corpus.options.limit_bytes, self._done
        counted = [counts for counts, _ in self._under_way.values()]
        part = (done.source_bytes + sum(counts.source_bytes for counts in counted)) / max(1, self.corpus.size_bytes)
        if limit is not None:
            part = max(part, (done.text_bytes + sum(counts.text_bytes for counts in counted)) / limit)
        return min(1.0, part)


class _Hash:
    """SHA-256 of what all slices gave, in order, as it lies in the volume: read behind those who write."""

    def __init__(self, work: Work, order: Order) -> None:
        self._work, self._order = work, order
        self._hash = hashlib.sha256()
        self._next = 0
        self._ended = False
        self._thread = ThreadPoolExecutor(1, "headrace-ingest-hash")
        self._last: Future[None] | None = None

    def follow(self) -> None:
        """Go on to where the order is settled."""
        start, self._next = self._next, self._order.settled
        parts = list(self._work.parts((index, self._order.done[index]) for index in range(start, self._next)))
        if parts:
            if self._last is not None and self._last.done():
                self._last.result()
            self._last = self._thread.submit(self._read, parts, self._last)

    def _read(self, parts: list[tuple[str, int]], before: Future[None] | None) -> None:
        if before is not None:
            before.result()
        for name, length in parts:
            for block in self._work.blocks(name, length):
                if self._ended:
                    return
                self._hash.update(block.data)

    def result(self) -> str:
        if self._last is not None:
            self._last.result()
        return self._hash.hexdigest()

    def __enter__(self) -> _Hash:
        return self

    def __exit__(self, *_: object) -> None:
        self._ended = True
        self._thread.shutdown(cancel_futures=True)


def compose(transaction: Transaction, name: str, parts: Sequence[str]) -> None:
    """One object of these, without copying."""
    if len(parts) == 1:
        transaction.rename(parts[0], name)
    else:
        transaction.compose(name, [(part, 0, None) for part in parts])
