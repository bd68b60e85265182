"""Text into a volume: one pass to train a tokenizer (unless one is given), one to write tokens, on all cores.

The corpus is read in slices (`slices.py`), by processes where there are several (`pool.py`). What a slice gives is
durable in the volume before the next is begun (`work.py`), so an ingest that was interrupted, or killed at any place,
goes on where it was. The four objects of the dataset appear in one commit at the end, made out of the slices without
moving a byte; before it nothing of the dataset is visible.

    NAME.bin              tokens, uint16 or int32, each document ended by the end-of-document token
    NAME.idx              where the documents lie, in Megatron's layout (`headrace.dataset.tokens.idx`)
    NAME.tokenizer.json   the tokenizer, byte for byte
    NAME.json             what was ingested (`headrace.dataset.Manifest`)

The same corpus and settings give the same bytes, whatever the number of workers and of interruptions.
"""

from __future__ import annotations

import os
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import numpy as np

from headrace.dataset.ingestion.corpus import SHOWN, Corpus, CorpusCounts, CorpusOptions, open_corpus, pieces
from headrace.dataset.ingestion.output import Output
from headrace.dataset.ingestion.progress import IngestProgress, Teller
from headrace.dataset.ingestion.readers import Piece
from headrace.dataset.ingestion.run import Run, RunReport, Totals, WorkOptions, compose, free_names
from headrace.dataset.ingestion.slices import Done, Task, slice_bytes, slices_of
from headrace.dataset.ingestion.tokenizer import (
    TextTokenizer,
    library_version,
    load_tokenizer,
    parse_tokenizer,
    train_tokenizer,
)
from headrace.dataset.tokens.idx import I32, MAX_SEQUENCE_TOKENS, encode_idx_blocks
from headrace.dataset.tokens.stream import CHECKSUM_BLOCK_BYTES, Manifest
from headrace.errors import DatasetError, UsageError
from headrace.units import MIB
from headrace.volume import Session, Transaction

#: Text that the tokenizer's threads get at once, in characters; between two such calls Ctrl-C is heard.
_ENCODE_CHARACTERS = 2 * MIB
_ENCODE_PIECES = 4096
#: Of the plan: raised when the same plan gives other bytes.
_PLAN_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class IngestOptions(WorkOptions):
    """How text becomes tokens."""

    #: A `tokenizer.json`. None: a byte-level BPE is trained on the corpus.
    tokenizer: str | os.PathLike[str] | None = None
    #: The token that ends a document, where the given tokenizer does not make it plain.
    end_of_document: str | None = None
    #: Tokens of a trained tokenizer, at most.
    vocab_size: int = 8192
    #: Bytes of text that a tokenizer is trained on: files spread evenly over the corpus, or the start of a single one.
    train_bytes: int = 16 * MIB

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.tokenizer is None and self.end_of_document is not None:
            raise UsageError("end_of_document belongs to a tokenizer that is given", found=repr(self.end_of_document))
        if self.train_bytes <= 0:
            raise UsageError("train_bytes is out of range", expected="more than 0", found=str(self.train_bytes))


@dataclass(frozen=True, kw_only=True)
class IngestReport(RunReport):
    """What was committed."""

    manifest: Manifest
    #: Files of the corpus' folder that are of no known kind, and were left out.
    ignored_files: int
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
    names = free_names(session, name, ("bin", "idx", "tokenizer.json", "json"))
    return _Ingest(corpus, session, name, names, options, Teller(progress)).run()


class _Ingest:
    """One call of `ingest`."""

    def __init__(
        self, corpus: Corpus, session: Session, name: str, names: dict[str, str], options: IngestOptions, tell: Teller
    ) -> None:
        self.corpus, self.session, self.name, self.names = corpus, session, name, names
        self.options, self.tell = options, tell
        self.slice_bytes = options.slice_bytes or slice_bytes(corpus.size_bytes, len(corpus.sources))
        slices = slices_of(corpus.sources, self.slice_bytes)
        self.slices = Run(corpus, session, name, slices, options, tell)
        self.work = self.slices.work

    def run(self) -> IngestReport:
        slices, corpus, options = self.slices, self.corpus, self.options
        # Before anything is dropped: it may not be there.
        given = load_tokenizer(options.tokenizer, options.end_of_document) if options.tokenizer is not None else None
        if options.restart:
            slices.drop()
        tokenizer = self._tokenizer(given)
        tokens_sha256 = slices.read(
            TextJob(tokenizer.json, tokenizer.end_of_document, corpus.options, corpus.description), "tokens"
        )
        totals = slices.totals()
        if not totals.documents:
            slices.drop()
            raise DatasetError(
                "the corpus is empty", where=corpus.description, expected="text",
                found=f"{totals.empty_documents} empty documents, {totals.bad_records} bad ones",
            )  # fmt: skip
        manifest = self._manifest(tokenizer, totals, tokens_sha256)
        with self.session.transaction() as transaction:
            self._compose(transaction, tokenizer, totals, manifest)
        return IngestReport(
            **slices.told(transaction.sequence),
            manifest=manifest,
            ignored_files=corpus.ignored_files,
            bad_shown=tuple(totals.bad_shown[:SHOWN]),
        )

    # ---- the tokenizer and the plan ----

    def _tokenizer(self, given: TextTokenizer | None) -> TextTokenizer:
        """The one that is given, the one that an unfinished ingest has trained, or a new one; with the plan."""
        options, work = self.options, self.work
        plan: dict[str, Any] = {
            "version": _PLAN_VERSION,
            "corpus": self.corpus.fingerprint(),
            "files": len(self.corpus.sources),
            "slices": len(self.slices.order.slices),
            "slice_bytes": self.slice_bytes,
            "text_field": self.corpus.options.text_field,
            "limit_bytes": self.corpus.options.limit_bytes,
            "tokenizers": library_version(),
        }
        if given is not None:
            plan.update(tokenizer=given.sha256, end_of_document=given.end_of_document)
            work.plan(plan, {})
            return given
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

    # ---- the end ----

    def _manifest(self, tokenizer: TextTokenizer, totals: Totals, tokens_sha256: str) -> Manifest:
        corpus = self.corpus
        return tokenizer.manifest(
            documents=totals.documents,
            tokens=totals.tokens,
            dtype=tokenizer.dtype,
            tokens_sha256=tokens_sha256,
            corpus={
                "description": corpus.description,
                "files": len(corpus.sources),
                "text_bytes": totals.text_bytes,
                "limit_bytes": corpus.options.limit_bytes,
                "replaced_documents": totals.replaced_documents,
                "empty_documents": totals.empty_documents,
                "bad_records": totals.bad_records,
            },
        )

    def _compose(self, transaction: Transaction, tokenizer: TextTokenizer, totals: Totals, manifest: Manifest) -> None:
        work, names, settled = self.work, self.names, self.slices.order.settled
        compose(transaction, names["bin"], self.slices.parts())

        def lengths() -> Iterator[I32]:
            for index in range(settled):
                yield np.frombuffer(work.side(index), np.int32)

        transaction.write_stream(
            names["idx"],
            encode_idx_blocks(tokenizer.dtype, totals.documents, lengths),
            checksum_block_bytes=CHECKSUM_BLOCK_BYTES,
        )
        transaction.put(names["tokenizer.json"], tokenizer.json)
        transaction.put(names["json"], manifest.encode())
        work.drop(transaction)


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
