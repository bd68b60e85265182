"""A token stream that Megatron's tools have written, into a volume as it is: `PREFIX.bin` and `PREFIX.idx`.

    NAME.bin, NAME.idx                  byte for byte
    NAME.tokenizer.json, NAME.json      where a tokenizer is given

Before a token is moved the whole index is looked at, in bounded memory: no number of it is believed later that does not
fit the others. The tokens move in slices, by workers, to be gone on with, as those of a text do (`ingest_text.py`).
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import BinaryIO

import numpy as np

from headrace.dataset.ingestion import places
from headrace.dataset.ingestion.corpus import Corpus, CorpusCounts, printable, source_of
from headrace.dataset.ingestion.output import Output
from headrace.dataset.ingestion.places import open_binary, reason
from headrace.dataset.ingestion.progress import IngestProgress, Teller
from headrace.dataset.ingestion.readers import wrong
from headrace.dataset.ingestion.run import Run, RunReport, WorkOptions, compose, free_names
from headrace.dataset.ingestion.slices import Done, Task, slice_bytes, slices_of
from headrace.dataset.ingestion.tokenizer import load_tokenizer
from headrace.dataset.tokens.idx import HEADER_BYTES, IndexCheck, IndexHeader, parse_idx_header
from headrace.dataset.tokens.stream import CHECKSUM_BLOCK_BYTES, Manifest
from headrace.errors import DatasetError, UsageError
from headrace.units import MIB
from headrace.volume import Session

#: Read at a time.
_BLOCK_BYTES = 4 * MIB
_BLOCK_ITEMS = 1 << 18
#: Of the plan: raised when the same plan gives other bytes.
_PLAN_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class ImportReport(RunReport):
    """What was committed."""

    documents: int
    tokens: int
    #: "uint16" or "int32".
    dtype: str
    #: SHA-256 of `NAME.bin`, hex.
    tokens_sha256: str
    #: `NAME.json`; None where no tokenizer was given.
    manifest: Manifest | None


def megatron_prefix(location: str) -> str | None:
    """The prefix of a pair of files that is named by it, or by one of the two; None where there is no such pair."""
    prefix = location.removesuffix(".idx").removesuffix(".bin")
    try:
        both = all(places.is_folder(f"{prefix}.{end}") is False for end in ("bin", "idx"))
    except OSError as error:
        raise DatasetError("the corpus cannot be read", where=location, found=reason(error)) from error
    return prefix if both else None


def import_megatron(
    prefix: str,
    session: Session,
    name: str,
    options: WorkOptions | None = None,
    *,
    tokenizer: str | os.PathLike[str] | None = None,
    end_of_document: str | None = None,
    progress: Callable[[IngestProgress], None] | None = None,
) -> ImportReport:
    """Take `PREFIX.bin` and `PREFIX.idx` over as the dataset `name`; see `ingest` for errors, and what is kept after.

    DatasetError where index and tokens do not fit, or are no tokens. `tokenizer`: the `tokenizer.json` that they were
    made with, kept beside them.
    """
    options = options or WorkOptions()
    if tokenizer is None and end_of_document is not None:
        raise UsageError("end_of_document belongs to a tokenizer that is given", found=repr(end_of_document))
    given = None if tokenizer is None else load_tokenizer(tokenizer, end_of_document)
    names = free_names(session, name, ("bin", "idx", "tokenizer.json", "json"))
    tell = Teller(progress)
    try:
        found = [places.one(f"{prefix}.{end}") for end in ("bin", "idx")]
        header = check_idx(found[1].location, found[1].size_bytes, found[0].size_bytes)
    except OSError as error:
        raise DatasetError("the token stream cannot be read", where=prefix, found=reason(error)) from error
    sources = source_of(found[0], "raw", ""), source_of(found[1], "raw", "")
    corpus = Corpus(description=printable(prefix), sources=sources[:1])
    size = options.slice_bytes or slice_bytes(corpus.size_bytes)
    run = Run(corpus, session, name, slices_of(corpus.sources, size), options, tell)
    if options.restart:
        run.drop()
    whole = Corpus(description=prefix, sources=sources)
    plan = {"version": _PLAN_VERSION, "kind": "megatron", "corpus": whole.fingerprint(), "slice_bytes": size}
    run.work.plan(plan, {})
    sha256 = run.read(RawJob(header.dtype.itemsize), "tokens")
    tokens = found[0].size_bytes // header.dtype.itemsize
    manifest = None
    if given is not None:
        manifest = given.manifest(
            documents=header.document_count,
            tokens=tokens,
            dtype=header.dtype,
            tokens_sha256=sha256,
            # Whether Megatron's tools were told to end documents nobody knows.
            corpus={"description": corpus.description, "files": 2, "documents_end": False},
        )
    with session.transaction() as transaction:
        compose(transaction, names["bin"], run.parts())
        transaction.write_stream(
            names["idx"],
            _blocks(found[1].location),
            length_bytes=found[1].size_bytes,
            checksum_block_bytes=CHECKSUM_BLOCK_BYTES,
        )
        if given is not None and manifest is not None:
            transaction.put(names["tokenizer.json"], given.json)
            transaction.put(names["json"], manifest.encode())
        run.work.drop(transaction)
    return ImportReport(
        **run.told(transaction.sequence),
        documents=header.document_count,
        tokens=tokens,
        dtype=header.dtype.name,
        tokens_sha256=sha256,
        manifest=manifest,
    )


def check_idx(location: str, length_bytes: int, bin_bytes: int) -> IndexHeader:
    """An index, looked at from its begin to its end without being in memory. DatasetError where a number does not fit
    the others, or the tokens of `bin_bytes`."""
    with open_binary(location) as lengths, open_binary(location) as pointers, open_binary(location) as documents:
        header = parse_idx_header(_exactly(lengths, min(HEADER_BYTES, length_bytes), location), length_bytes, location)
        check, count = IndexCheck(header, location), header.sequence_count
        pointers.seek(HEADER_BYTES + 4 * count)
        documents.seek(HEADER_BYTES + 12 * count)
        for start in range(0, count, _BLOCK_ITEMS):
            items = min(_BLOCK_ITEMS, count - start)
            check.sequences(
                np.frombuffer(_exactly(lengths, 4 * items, location), "<i4"),
                np.frombuffer(_exactly(pointers, 8 * items, location), "<i8"),
            )
        for start in range(0, header.document_entries, _BLOCK_ITEMS):
            items = min(_BLOCK_ITEMS, header.document_entries - start)
            check.documents(np.frombuffer(_exactly(documents, 8 * items, location), "<i8"))
        check.end(bin_bytes)
    return header


def _exactly(file: BinaryIO, length_bytes: int, location: str) -> bytes:
    data = file.read(length_bytes)
    if len(data) != length_bytes:
        expected, found = f"{length_bytes} bytes", f"{len(data)} bytes"
        raise DatasetError("the token index was cut off meanwhile", where=location, expected=expected, found=found)
    return data


def _blocks(location: str) -> Iterator[bytes]:
    try:
        with open_binary(location) as file:
            while block := file.read(_BLOCK_BYTES):
                yield block
    except OSError as error:
        raise DatasetError("the token index cannot be read", where=location, found=reason(error)) from error


@dataclass(frozen=True)
class RawJob:
    """Slices of a file of tokens, as they are."""

    itemsize: int

    def run(self, task: Task, output: Output) -> Done:
        """The bytes of one slice."""
        counts = CorpusCounts()
        for portion in task.portions:
            try:
                left = portion.size_bytes
                with open_binary(portion.source.location) as file:
                    file.seek(portion.start)
                    while left and (block := file.read(min(_BLOCK_BYTES, left))):
                        output.write(np.frombuffer(block, np.uint8))
                        left -= len(block)
                        counts.source_bytes += len(block)
                        output.tell(counts, int(counts.source_bytes) // self.itemsize)
            except Exception as error:
                damage = wrong(portion.source, error)
                if damage is None:
                    raise
                raise damage from error
            if left:
                raise DatasetError("the tokens were cut off meanwhile", where=portion.source.location)
        return Done(
            parts=output.finish(np.zeros(0, np.uint8)),
            side_bytes=0,
            limit_bytes=None,
            limited=False,
            text_bytes=0,
            counts={
                "documents": 0,
                "tokens": int(counts.source_bytes) // self.itemsize,
                "source_bytes": round(counts.source_bytes),
                "replaced_documents": 0,
                "empty_documents": 0,
                "bad_records": 0,
                "bad_shown": [],
            },
        )
