"""Text into a volume: one pass to train a tokenizer (unless one is given), one to write tokens, on all cores.

The corpus is read in slices (`slices.py`), by processes where there are several (`pool.py`). What a slice gives is
durable in the volume before the next is begun (`work.py`), so an ingest that was interrupted, or killed at any place,
goes on where it was. The four objects of the dataset appear in one commit at the end, made out of the slices without
moving a byte; before it nothing of the dataset is visible.

    NAME.bin              tokens, uint16 or int32, each document ended by the end-of-document token
    NAME.idx              where the documents lie, in Megatron's layout (`headrace.dataset.idx`)
    NAME.tokenizer.json   the tokenizer, byte for byte
    NAME.json             what was ingested (`headrace.dataset.stream.Manifest`)

The same corpus and settings give the same bytes, whatever the number of workers and of interruptions.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from functools import lru_cache
from importlib.metadata import version
from typing import Any

import numpy as np

from headrace.dataset import places
from headrace.dataset.corpus import SHOWN, Corpus, CorpusCounts, CorpusOptions, open_corpus, pieces
from headrace.dataset.idx import I32, MAX_SEQUENCE_TOKENS, encode_idx_blocks
from headrace.dataset.output import PART_BYTES, Output
from headrace.dataset.pool import Pool, read_here
from headrace.dataset.progress import IngestProgress, Teller
from headrace.dataset.readers import Piece
from headrace.dataset.slices import Done, Order, Task, slice_bytes, slices_of
from headrace.dataset.stream import Manifest
from headrace.dataset.tokenizer import TextTokenizer, library_version, load_tokenizer, parse_tokenizer, train_tokenizer
from headrace.dataset.work import CHECKSUM_BLOCK_BYTES, Work
from headrace.errors import DatasetError, ObjectExists, UsageError
from headrace.units import KIB, MIB
from headrace.volume import Session, Transaction
from headrace.volume.catalog.changes import MAX_SLICES
from headrace.volume.data.names import check_name

#: Text that the tokenizer's threads get at once, in characters; between two such calls Ctrl-C is heard.
_ENCODE_CHARACTERS = 2 * MIB
_ENCODE_PIECES = 4096
#: Of the plan: raised when the same plan gives other bytes.
_PLAN_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class IngestOptions:
    """How text becomes tokens."""

    #: A `tokenizer.json`. None: a byte-level BPE is trained on the corpus.
    tokenizer: str | os.PathLike[str] | None = None
    #: The token that ends a document, where the given tokenizer does not make it plain.
    end_of_document: str | None = None
    #: Tokens of a trained tokenizer, at most.
    vocab_size: int = 8192
    #: Bytes of text that a tokenizer is trained on: files spread evenly over the corpus, or the start of a single one.
    train_bytes: int = 16 * MIB
    #: Processes that read and tokenize. 1: none but this one; None: one for each core, where there is so much to do.
    workers: int | None = None
    #: Bytes of files that are read at a time, and done again after a crash. None: by the size of the corpus.
    slice_bytes: int | None = None
    #: Memory that each worker may fill with tokens.
    part_bytes: int = PART_BYTES
    #: Begin anew where an earlier ingest of this name was not finished.
    restart: bool = False

    def __post_init__(self) -> None:
        if self.tokenizer is None and self.end_of_document is not None:
            raise UsageError("end_of_document belongs to a tokenizer that is given", found=repr(self.end_of_document))
        if self.train_bytes <= 0:
            raise UsageError("train_bytes is out of range", expected="more than 0", found=str(self.train_bytes))
        if self.workers is not None and not 1 <= self.workers <= 4096:
            raise UsageError("workers is out of range", expected="1 to 4096", found=str(self.workers))
        if self.slice_bytes is not None and self.slice_bytes < 1:
            raise UsageError("slice_bytes is out of range", expected="1 or more", found=str(self.slice_bytes))
        if not 4 * KIB <= self.part_bytes <= 1024 * MIB or self.part_bytes % 8:
            raise UsageError(
                "part_bytes is out of range", expected="4 KiB to 1 GiB, a multiple of 8", found=str(self.part_bytes)
            )


@dataclass(frozen=True, kw_only=True)
class IngestReport:
    """What was committed."""

    name: str
    #: Of the commit.
    sequence: int
    manifest: Manifest
    seconds: float
    #: Files of the corpus' folder that are of no known kind, and were left out.
    ignored_files: int
    #: Slices that the corpus was read in, and how many of them an earlier run had done.
    slices: int
    resumed: int
    #: Processes that read them; 1: this one.
    workers: int
    #: They wrote to the volume themselves (else all of it went through this process).
    direct: bool
    #: Records that were left out, in words; the first of them.
    bad_shown: tuple[str, ...]


def ingest(
    corpus: Corpus | str | os.PathLike[str] | None,
    session: Session,
    name: str,
    options: IngestOptions | None = None,
    *,
    progress: Callable[[IngestProgress], None] | None = None,
) -> IngestReport:
    """Tokenize `corpus` (None: the text that comes with this Python) into the dataset `name`.

    `progress` is called about four times a second, from this thread.
    `DatasetError`: corpus or tokenizer, or an unfinished ingest of other text or settings. `ObjectExists`: the name is
    taken. `VolumeFull`: the tokens do not fit. In each case, and when interrupted, nothing of the dataset is visible;
    slices that were read are kept as `NAME.ingest/...`, and the same call goes on behind them.
    """
    options = options or IngestOptions()
    if not isinstance(corpus, Corpus):
        corpus = open_corpus(corpus)
    names = {end: f"{name}.{end}" for end in ("bin", "idx", "tokenizer.json", "json")}
    for object_name in names.values():
        check_name(object_name)
        if object_name in session.volume:
            raise ObjectExists(
                "the dataset exists",
                where=object_name,
                next_step="take another name, or delete its objects with `headrace volume rm`: "
                + " ".join(each for each in names.values() if each in session.volume),
            )
    return _Ingest(corpus, session, name, names, options, Teller(progress)).run()


class _Ingest:
    """One call of `ingest`."""

    def __init__(
        self, corpus: Corpus, session: Session, name: str, names: dict[str, str], options: IngestOptions, tell: Teller
    ) -> None:
        self.corpus, self.session, self.name, self.names = corpus, session, name, names
        self.options, self.tell = options, tell
        self.began = time.monotonic()
        size = options.slice_bytes or slice_bytes(corpus.size_bytes)
        slices = slices_of(corpus.sources, size)
        self.order = Order(slices, corpus.options.limit_bytes, most_parts=MAX_SLICES)
        self.work = Work(session, name)
        self.workers = self._workers(len(slices))
        self.totals = _Totals()
        #: Slices under way: what was counted of each, and tokens.
        self.under_way: dict[int, tuple[CorpusCounts, int]] = {}

    def run(self) -> IngestReport:
        session, work, order = self.session, self.work, self.order
        if self.options.restart:
            with session.transaction() as transaction:
                work.drop(transaction)
        tokenizer = self._tokenizer()
        resumed = work.find(order.slices)
        for index, done in sorted(resumed.items()):
            self.totals.add(done)
            order.finish(index, done)
        self.tell.begin("tokens", self.totals.documents, self.totals.tokens, self._fraction())
        self._tell()
        job = TextJob(tokenizer.json, tokenizer.end_of_document, self.corpus.options, self.corpus.description)
        with _Hash(work, order) as digest:
            digest.follow()

            def finished(index: int, done: Done) -> None:
                self.under_way.pop(index, None)
                self.totals.add(done)
                order.finish(index, done)
                self._tell()
                digest.follow()

            if self.workers == 1:
                read_here(session, work, job, order, self.options.part_bytes, self._told, finished)
                direct = True
            else:
                pool = Pool(session, work, job, order, self.options.part_bytes, self._told, finished)
                pool.run(self.workers)
                direct = pool.direct
            totals = _Totals()
            for index in range(order.settled):
                totals.add(order.done[index])
            if not totals.documents:
                with session.transaction() as transaction:
                    work.drop(transaction)
                raise DatasetError(
                    "the corpus is empty", where=self.corpus.description, expected="text",
                    found=f"{totals.empty_documents} empty documents, {totals.bad_records} bad ones",
                )  # fmt: skip
            self.tell.begin("commit")
            self.tell.now(totals.documents, totals.tokens, totals.text_bytes, 1.0)
            manifest = self._manifest(tokenizer, totals, digest.result())
        with session.transaction() as transaction:
            self._compose(transaction, tokenizer, totals, manifest)
        return IngestReport(
            name=self.name,
            sequence=transaction.sequence,
            manifest=manifest,
            seconds=time.monotonic() - self.began,
            ignored_files=self.corpus.ignored_files,
            slices=len(order.slices),
            resumed=len(resumed),
            workers=self.workers,
            direct=direct,
            bad_shown=tuple(totals.bad_shown[:SHOWN]),
        )

    def _workers(self, slices: int) -> int:
        here = any(places.own_to_a_process(source.location) for source in self.corpus.sources[:1])
        wanted = self.options.workers
        if here and wanted is not None and wanted > 1:
            raise UsageError(
                "other processes cannot see this corpus", where=self.corpus.description, expected="workers=1",
                found=str(wanted),
            )  # fmt: skip
        if wanted is None:
            wanted = 1 if here else len(os.sched_getaffinity(0))
        return max(1, min(wanted, slices))

    # ---- the tokenizer and the plan ----

    def _tokenizer(self) -> TextTokenizer:
        """The one that is given, the one that an unfinished ingest has trained, or a new one; with the plan."""
        options, work = self.options, self.work
        plan: dict[str, Any] = {
            "version": _PLAN_VERSION,
            "corpus": self.corpus.fingerprint(),
            "files": len(self.corpus.sources),
            "slices": len(self.order.slices),
            "slice_bytes": options.slice_bytes or slice_bytes(self.corpus.size_bytes),
            "text_field": self.corpus.options.text_field,
            "limit_bytes": self.corpus.options.limit_bytes,
            "tokenizers": library_version(),
        }
        if options.tokenizer is not None:
            tokenizer = load_tokenizer(options.tokenizer, options.end_of_document)
            plan.update(tokenizer=tokenizer.sha256, end_of_document=tokenizer.end_of_document)
            work.plan(plan, {})
            return tokenizer
        plan.update(vocab_size=options.vocab_size, train_bytes=options.train_bytes)
        if work.plan(plan, {}):
            json = work.file("tokenizer.json")
            return parse_tokenizer(json, f"{work.prefix}tokenizer.json")
        tokenizer = self._train()
        work.plan(plan, {"tokenizer.json": tokenizer.json})
        return tokenizer

    def _train(self) -> TextTokenizer:
        corpus, options, tell = self.corpus, self.options, self.tell
        counts = CorpusCounts()
        sample = corpus.spread(options.train_bytes)
        whole = min(options.train_bytes, sample.size_bytes, corpus.options.limit_bytes or sample.size_bytes)
        tell.begin("tokenizer")

        def texts() -> Iterator[str]:
            for piece in sample.pieces(counts, options.train_bytes):
                if tell.due():
                    tell.now(counts.documents, 0, counts.text_bytes, min(1.0, counts.text_bytes / max(1, whole)))
                yield piece.text

        return train_tokenizer(texts(), options.vocab_size)

    # ---- how far ----

    def _told(self, index: int, counts: CorpusCounts | None, tokens: int) -> None:
        if counts is None:
            self.under_way.pop(index, None)
        else:
            self.under_way[index] = counts, tokens
        if self.tell.due():
            self._tell()

    def _tell(self) -> None:
        counted = [counts for counts, _ in self.under_way.values()]
        totals = self.totals
        self.tell.now(
            totals.documents + sum(counts.documents for counts in counted),
            totals.tokens + sum(tokens for _, tokens in self.under_way.values()),
            totals.text_bytes + sum(counts.text_bytes for counts in counted),
            self._fraction(),
            totals.bad_records + sum(counts.bad_records for counts in counted),
        )

    def _fraction(self) -> float:
        limit, totals = self.corpus.options.limit_bytes, self.totals
        counted = [counts for counts, _ in self.under_way.values()]
        done = (totals.source_bytes + sum(counts.source_bytes for counts in counted)) / max(1, self.corpus.size_bytes)
        if limit is not None:
            done = max(done, (totals.text_bytes + sum(counts.text_bytes for counts in counted)) / limit)
        return min(1.0, done)

    # ---- the end ----

    def _manifest(self, tokenizer: TextTokenizer, totals: _Totals, tokens_sha256: str) -> Manifest:
        corpus = self.corpus
        return Manifest(
            documents=totals.documents,
            tokens=totals.tokens,
            dtype=tokenizer.dtype.name,
            tokens_sha256=tokens_sha256,
            tokenizer_sha256=tokenizer.sha256,
            vocabulary=tokenizer.vocabulary,
            end_of_document=tokenizer.end_of_document,
            end_of_document_id=tokenizer.end_id,
            corpus={
                "description": corpus.description,
                "files": len(corpus.sources),
                "text_bytes": totals.text_bytes,
                "limit_bytes": corpus.options.limit_bytes,
                "replaced_documents": totals.replaced_documents,
                "empty_documents": totals.empty_documents,
                "bad_records": totals.bad_records,
            },
            headrace=version("headrace"),
        )

    def _compose(self, transaction: Transaction, tokenizer: TextTokenizer, totals: _Totals, manifest: Manifest) -> None:
        work, names, settled = self.work, self.names, range(self.order.settled)
        parts = [name for name, _ in work.parts((index, self.order.done[index]) for index in settled)]
        if len(parts) == 1:
            transaction.rename(parts[0], names["bin"])
        else:
            transaction.compose(names["bin"], [(part, 0, None) for part in parts])

        def lengths() -> Iterator[I32]:
            for index in settled:
                yield np.frombuffer(work.side(index), np.int32)

        transaction.write_stream(
            names["idx"],
            encode_idx_blocks(tokenizer.dtype, totals.documents, lengths),
            checksum_block_bytes=CHECKSUM_BLOCK_BYTES,
        )
        transaction.put(names["tokenizer.json"], tokenizer.json)
        transaction.put(names["json"], manifest.encode())
        work.drop(transaction)


class _Totals(CorpusCounts):
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


class _Hash:
    """SHA-256 of the tokens of all slices, in order, as they lie in the volume: read behind those who write."""

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


@dataclass(frozen=True)
class TextJob:
    """Slices of text to tokens."""

    tokenizer_json: bytes
    end_of_document: str
    options: CorpusOptions
    description: str

    def run(self, task: Task, output: Output) -> Done:
        """The tokens of one slice, and the lengths of its documents (int32) beside them."""
        tokenizer = _parsed(self.tokenizer_json, self.end_of_document)
        counts = CorpusCounts()
        lengths = array("i")
        end = np.array([tokenizer.end_id], tokenizer.dtype)
        tokens = length = 0
        for group in _batches(pieces(task.portions, self.options, counts, task.limit_bytes)):
            for piece, found in zip(group, tokenizer.encode([piece.text for piece in group]), strict=True):
                output.write(found)
                length += len(found)
                if piece.last:
                    output.write(end)
                    length += 1
                    if length > MAX_SEQUENCE_TOKENS:
                        raise DatasetError(
                            "a document is too long for the index",
                            where=f"document {len(lengths)} of slice {task.index} of {self.description}",
                            expected=f"at most {MAX_SEQUENCE_TOKENS} tokens",
                            found=str(length),
                        )
                    lengths.append(length)
                    tokens += length
                    length = 0
            output.tell(counts, tokens + length)
        side = np.frombuffer(lengths, np.uint8) if lengths else np.zeros(0, np.uint8)
        return Done(
            parts=output.finish(side),
            side_bytes=len(side),
            limit_bytes=task.limit_bytes,
            limited=counts.limited,
            text_bytes=counts.text_bytes,
            counts={
                "documents": len(lengths),
                "tokens": tokens,
                "source_bytes": round(counts.source_bytes),
                "replaced_documents": counts.replaced_documents,
                "empty_documents": counts.empty_documents,
                "bad_records": counts.bad_records,
                "bad_shown": counts.bad_shown,
            },
        )


@lru_cache(1)
def _parsed(json: bytes, end_of_document: str) -> TextTokenizer:
    return parse_tokenizer(json, "tokenizer.json", end_of_document)


def _batches(found: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups that keep the tokenizer's threads busy, and no longer than a moment."""
    batch: list[Piece] = []
    characters = 0
    for piece in found:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _ENCODE_CHARACTERS or len(batch) >= _ENCODE_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch
