"""Text into a volume: one pass to train a tokenizer (unless one is given), one to write tokens.

Both passes stream. Tokens go into the volume block by block as they come; what grows with the data is four bytes a
document, the lengths for the index. All four objects are one transaction: after an error, Ctrl-C or a crash nothing of
them is visible.

    NAME.bin              tokens, uint16 or int32, each document ended by the end-of-document token
    NAME.idx              where the documents lie, in Megatron's layout (`headrace.dataset.idx`)
    NAME.tokenizer.json   the tokenizer, byte for byte
    NAME.json             what was ingested (`headrace.dataset.stream.Manifest`)

The same corpus and settings give the same bytes.
"""

from __future__ import annotations

import hashlib
import os
import time
from array import array
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataset.corpus import Corpus, CorpusCounts, open_corpus
from headrace.dataset.idx import MAX_SEQUENCE_TOKENS, encode_idx
from headrace.dataset.readers import Piece
from headrace.dataset.stream import Manifest
from headrace.dataset.tokenizer import TextTokenizer, load_tokenizer, train_tokenizer
from headrace.errors import DatasetError, ObjectExists, UsageError
from headrace.units import KIB, MIB, format_bytes
from headrace.volume import Session
from headrace.volume.data.names import check_name

#: Checksum block of `.bin` and `.idx`: reads of single windows verify hardly more than they want.
CHECKSUM_BLOCK_BYTES = 4 * KIB
#: Tokens go to the volume in blocks of this many bytes.
BLOCK_BYTES = 4 * MIB
#: Text that the tokenizer's threads get at once, in characters; between two such calls Ctrl-C is heard.
_ENCODE_CHARACTERS = 2 * MIB
_ENCODE_PIECES = 4096


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

    def __post_init__(self) -> None:
        if self.tokenizer is None and self.end_of_document is not None:
            raise UsageError("end_of_document belongs to a tokenizer that is given", found=repr(self.end_of_document))
        if self.train_bytes <= 0:
            raise UsageError("train_bytes is out of range", expected="more than 0", found=str(self.train_bytes))


@dataclass(frozen=True, kw_only=True)
class IngestProgress:
    """How far an ingest is."""

    #: "tokenizer" (training), "tokens" or "commit".
    phase: str
    documents: int
    tokens: int
    text_bytes: int
    #: Since the phase began.
    seconds: float
    #: 0 to 1 of the phase, by bytes.
    fraction: float

    @property
    def tokens_per_s(self) -> float:
        return self.tokens / self.seconds if self.seconds > 0 else 0.0

    @property
    def left_s(self) -> float | None:
        """Seconds until the phase ends at this speed; None where nobody can tell yet."""
        return self.seconds * (1 / self.fraction - 1) if self.fraction > 0.01 else None


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
    `DatasetError`: corpus or tokenizer. `ObjectExists`: the name is taken. `VolumeFull`: the tokens do not fit. In each
    case, and when interrupted, nothing is visible.
    """
    options = options or IngestOptions()
    began = time.monotonic()
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
    tell = _Teller(progress)
    if options.tokenizer is not None:
        tokenizer = load_tokenizer(options.tokenizer, options.end_of_document)
    else:
        tokenizer = _train(corpus, options, tell)
    tokens = _TokenWriter(corpus, tokenizer, tell)
    with session.transaction() as transaction:
        transaction.write_stream(names["bin"], tokens.blocks(), checksum_block_bytes=CHECKSUM_BLOCK_BYTES)
        if not tokens.counts.documents:
            found = f"{tokens.counts.empty_documents} empty documents"
            raise DatasetError("the corpus is empty", where=corpus.description, expected="text", found=found)
        lengths = np.frombuffer(tokens.lengths, np.int32)
        transaction.write_stream(
            names["idx"], encode_idx(tokenizer.dtype, lengths), checksum_block_bytes=CHECKSUM_BLOCK_BYTES
        )
        transaction.put(names["tokenizer.json"], tokenizer.json)
        manifest = tokens.manifest()
        transaction.put(names["json"], manifest.encode())
        tell.now("commit", tokens.counts, tokens.token_count, 1.0)
    return IngestReport(
        name=name,
        sequence=transaction.sequence,
        manifest=manifest,
        seconds=time.monotonic() - began,
        ignored_files=corpus.ignored_files,
    )


def _train(corpus: Corpus, options: IngestOptions, tell: _Teller) -> TextTokenizer:
    counts = CorpusCounts()
    sample = corpus.spread(options.train_bytes)
    whole = min(options.train_bytes, sample.size_bytes, corpus.options.limit_bytes or sample.size_bytes)

    def texts() -> Iterator[str]:
        for piece in sample.pieces(counts, options.train_bytes):
            tell.sometimes("tokenizer", counts, 0, min(1.0, counts.text_bytes / max(1, whole)))
            yield piece.text

    return train_tokenizer(texts(), options.vocab_size)


class _TokenWriter:
    """Tokens of a corpus in blocks, and everything that is counted on the way."""

    def __init__(self, corpus: Corpus, tokenizer: TextTokenizer, tell: _Teller) -> None:
        self.corpus = corpus
        self.tokenizer = tokenizer
        self.tell = tell
        self.counts = CorpusCounts()
        self.token_count = 0
        #: Tokens of each document, int32.
        self.lengths = array("i")
        self._hash = hashlib.sha256()

    def blocks(self) -> Iterator[npt.NDArray[np.uint8]]:
        """The bytes of `.bin`: blocks of `BLOCK_BYTES`, the last one shorter. A block is not changed afterwards."""
        dtype = self.tokenizer.dtype
        block_tokens = BLOCK_BYTES // dtype.itemsize
        block, used = np.empty(block_tokens, dtype), 0
        for tokens in self._documents():
            start = 0
            while start < len(tokens):
                count = min(len(tokens) - start, block_tokens - used)
                block[used : used + count] = tokens[start : start + count]
                start, used = start + count, used + count
                if used == block_tokens:
                    yield self._hashed(block)
                    block, used = np.empty(block_tokens, dtype), 0
        if used:
            yield self._hashed(block[:used])

    def manifest(self) -> Manifest:
        """Of all that `blocks` gave."""
        counts, limit = self.counts, self.corpus.options.limit_bytes
        return Manifest(
            documents=len(self.lengths),
            tokens=self.token_count,
            dtype=self.tokenizer.dtype.name,
            tokens_sha256=self._hash.hexdigest(),
            tokenizer_sha256=self.tokenizer.sha256,
            vocabulary=self.tokenizer.vocabulary,
            end_of_document=self.tokenizer.end_of_document,
            end_of_document_id=self.tokenizer.end_id,
            corpus={
                "description": self.corpus.description,
                "files": len(self.corpus.sources),
                "text_bytes": counts.text_bytes,
                "limit_bytes": limit,
                "replaced_documents": counts.replaced_documents,
                "empty_documents": counts.empty_documents,
            },
            headrace=version("headrace"),
        )

    def _hashed(self, block: npt.NDArray[Any]) -> npt.NDArray[np.uint8]:
        data = block.view(np.uint8)
        self._hash.update(data.data)
        return data

    def _documents(self) -> Iterator[npt.NDArray[Any]]:
        """Tokens piece by piece, the end of each document behind its last piece."""
        end = np.array([self.tokenizer.end_id], self.tokenizer.dtype)
        length = 0
        self.tell.now("tokens", self.counts, 0, 0.0)
        for pieces in _batches(self.corpus.pieces(self.counts)):
            for piece, tokens in zip(pieces, self.tokenizer.encode([piece.text for piece in pieces]), strict=True):
                yield tokens
                length += len(tokens)
                if piece.last:
                    yield end
                    length += 1
                    if length > MAX_SEQUENCE_TOKENS:
                        raise DatasetError(
                            "a document is too long for the index",
                            where=f"document {len(self.lengths)} of {self.corpus.description}",
                            expected=f"at most {MAX_SEQUENCE_TOKENS} tokens",
                            found=str(length),
                        )
                    self.lengths.append(length)
                    self.token_count += length
                    length = 0
            self.tell.sometimes("tokens", self.counts, self.token_count + length, self._fraction())

    def _fraction(self) -> float:
        limit = self.corpus.options.limit_bytes
        done = self.counts.source_bytes / max(1, self.corpus.size_bytes)
        return min(1.0, max(done, self.counts.text_bytes / limit if limit is not None else 0.0))


def _batches(pieces: Iterator[Piece]) -> Iterator[list[Piece]]:
    """Pieces in groups that keep the tokenizer's threads busy, and no longer than a moment."""
    batch: list[Piece] = []
    characters = 0
    for piece in pieces:
        batch.append(piece)
        characters += len(piece.text)
        if characters >= _ENCODE_CHARACTERS or len(batch) >= _ENCODE_PIECES:
            yield batch
            batch, characters = [], 0
    if batch:
        yield batch


class _Teller:
    """Calls the caller's progress function, not too often."""

    EVERY_S = 0.25

    def __init__(self, progress: Callable[[IngestProgress], None] | None) -> None:
        self._progress = progress
        self._phase = ""
        self._began = 0.0
        self._last = 0.0

    def sometimes(self, phase: str, counts: CorpusCounts, tokens: int, fraction: float) -> None:
        now = time.monotonic()
        if phase != self._phase or now - self._last >= self.EVERY_S:
            self.now(phase, counts, tokens, fraction)

    def now(self, phase: str, counts: CorpusCounts, tokens: int, fraction: float) -> None:
        now = time.monotonic()
        if phase != self._phase:
            self._phase, self._began = phase, now
        self._last = now
        if self._progress is not None:
            self._progress(
                IngestProgress(
                    phase=phase,
                    documents=counts.documents,
                    tokens=tokens,
                    text_bytes=counts.text_bytes,
                    seconds=now - self._began,
                    fraction=fraction,
                )
            )


def describe_progress(now: IngestProgress) -> str:
    """One line for people."""
    if now.phase == "tokenizer":
        return f"training a tokenizer: {now.documents:,} documents, {format_bytes(now.text_bytes)} read"
    if now.phase == "commit":
        return f"committing {now.tokens:,} tokens"
    left = now.left_s
    return f"{now.documents:,} documents, {now.tokens:,} tokens, {now.tokens_per_s:,.0f} tokens/s, " + (
        f"{left:.0f} s left" if left is not None else "time left not known yet"
    )
