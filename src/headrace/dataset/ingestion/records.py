"""Records into a volume: tars of WebDataset, and folders of files, byte for byte.

    NAME.records        the fields' bytes, one after another
    NAME.records.idx    the index (`records_index.py`)
    NAME.json           what was ingested

In slices, by workers, to be gone on with, as text is (`ingest_text.py`). The order is that of the files' names and, in
tars, of the members. At the end the index of all records is in memory, some 60 bytes each and their keys.
"""

from __future__ import annotations

import json
import os
import struct
from array import array
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from importlib.metadata import version
from typing import Any

import numpy as np

from headrace.dataset.ingestion import places
from headrace.dataset.ingestion.archives import Field, key_of, read_files, read_tar
from headrace.dataset.ingestion.corpus import SHOWN, Corpus, CorpusCounts, CorpusOptions, bad_of, printable, source_of
from headrace.dataset.ingestion.output import U8, Output
from headrace.dataset.ingestion.progress import IngestProgress, Teller
from headrace.dataset.ingestion.readers import Bad, Portion, Source, wrong
from headrace.dataset.ingestion.run import Run, RunReport, WorkOptions, compose, free_names
from headrace.dataset.ingestion.slices import FILE_BYTES, Done, Slice, Task, slice_bytes
from headrace.dataset.records.index import (
    FIELD,
    HASHED,
    MOST_KINDS,
    RECORD,
    U64,
    RecordHeader,
    blocks_of,
    bucket_bits,
    buckets_of,
    encode_kinds,
    hash_key,
)  # fmt: skip
from headrace.dataset.tokens.stream import CHECKSUM_BLOCK_BYTES
from headrace.errors import DatasetError
from headrace.volume import Session

TAR_SUFFIXES = {".tar": "", ".tar.gz": "gz", ".tgz": "gz", ".tar.zst": "zst"}
#: Of the plan: raised when the same plan gives other bytes.
_PLAN_VERSION = 1


@dataclass(frozen=True, kw_only=True)
class RecordsReport(RunReport):
    """What was committed."""

    #: `NAME.json`.
    manifest: dict[str, Any]
    #: Files that are no tars, beside tars, and were left out.
    ignored_files: int
    #: See `IngestReport`.
    bad_shown: tuple[str, ...]


def open_records(path: str | os.PathLike[str], *, bad: str = "fail") -> Corpus:
    """The tars in a folder, or where it has none all its files; or one file; or an fsspec URL. DatasetError."""
    where = os.fspath(path)
    options = CorpusOptions(bad=bad)
    _, found = places.look(where)
    tars = tuple(source_of(each, "tar", packed) for each in found if (packed := _tar(each.name)) is not None)
    sources = tars or tuple(source_of(each, "file", "") for each in found)
    if not sources:
        raise DatasetError("the corpus is empty", where=where, expected="tars, or files of any kind")
    ignored = len(found) - len(sources)
    return Corpus(description=printable(where), sources=sources, options=options, ignored_files=ignored)


def _tar(name: str) -> str | None:
    lowered = name.lower()
    return next((packed for suffix, packed in TAR_SUFFIXES.items() if lowered.endswith(suffix)), None)


def ingest_records(
    corpus: Corpus | str | os.PathLike[str],
    session: Session,
    name: str,
    options: WorkOptions | None = None,
    *,
    progress: Callable[[IngestProgress], None] | None = None,
) -> RecordsReport:
    """Keep the records of `corpus` as the dataset `name`; see `ingest` for errors, and what is kept after them."""
    options = options or WorkOptions()
    if not isinstance(corpus, Corpus):
        corpus = open_records(corpus)
    names = free_names(session, name, ("records", "records.idx", "json"))
    tell = Teller(progress)
    size = options.slice_bytes or slice_bytes(corpus.size_bytes, len(corpus.sources))
    run = Run(corpus, session, name, _slices(corpus.sources, size), options, tell)
    if options.restart:
        run.drop()
    plan = {
        "version": _PLAN_VERSION, "kind": "records", "corpus": corpus.fingerprint(), "files": len(corpus.sources),
        "slices": len(run.order.slices), "slice_bytes": size,
    }  # fmt: skip
    run.work.plan(plan, {})
    sha256 = run.read(RecordJob(corpus.options), "records")
    totals = run.totals()
    index = _Index([run.work.side(index) for index in range(run.order.settled)], run, bad_of(corpus.options, totals))
    if not index.count:
        run.drop()
        found = f"{totals.bad_records} bad records"
        raise DatasetError("the corpus is empty", where=corpus.description, expected="records", found=found)
    manifest = {
        "manifest": 1,
        "kind": "records",
        "records": index.count,
        "fields": len(index.fields),
        "kinds": index.kind_counts(),
        "bytes": index.data_bytes,
        "records_sha256": sha256,
        "corpus": {
            "description": corpus.description,
            "files": len(corpus.sources),
            "bad_records": totals.bad_records,
        },
        "headrace": version("headrace"),
    }
    with session.transaction() as transaction:
        compose(transaction, names["records"], run.parts())
        transaction.write_stream(names["records.idx"], index.encode(), checksum_block_bytes=CHECKSUM_BLOCK_BYTES)
        transaction.put(names["json"], (json.dumps(manifest, indent=1, sort_keys=True) + "\n").encode())
        run.work.drop(transaction)
    return RecordsReport(
        **run.told(transaction.sequence),
        manifest=manifest,
        ignored_files=corpus.ignored_files,
        bad_shown=tuple(totals.bad_shown[:SHOWN]),
    )


def _slices(sources: Sequence[Source], size: int) -> list[Slice]:
    """As `slices_of`, but the files of one record stay together."""
    result: list[Slice] = []
    portions: list[Portion] = []
    weight = 0
    for source in sources:
        if weight >= size and (source.kind == "tar" or key_of(source.name)[0] != key_of(portions[-1].source.name)[0]):
            result.append(Slice(len(result), tuple(portions)))
            portions, weight = [], 0
        portions.append(Portion(source))
        weight += source.size_bytes + FILE_BYTES
    if portions:
        result.append(Slice(len(result), tuple(portions)))
    return result


# ---- one slice ---------------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class RecordJob:
    """Slices of files and tars to records."""

    options: CorpusOptions

    def run(self, task: Task, output: Output) -> Done:
        """The fields' bytes of one slice, and where they are beside them."""
        counts = CorpusCounts()
        records = _Records(output, counts, bad_of(self.options, counts))
        whole = 0
        for portion in task.portions:
            records.read(portion)
            whole += portion.size_bytes
            counts.source_bytes = whole
        records.end()
        side = records.side.encode()
        return Done(
            parts=output.finish(side),
            side_bytes=len(side),
            limit_bytes=None,
            limited=False,
            text_bytes=counts.text_bytes,
            counts={
                "documents": counts.documents,
                "tokens": counts.text_bytes,
                "source_bytes": round(counts.source_bytes),
                "replaced_documents": 0,
                "empty_documents": 0,
                "bad_records": counts.bad_records,
                "bad_shown": counts.bad_shown,
            },
        )


class _Side:
    """Where the records of a slice are, and what they are called."""

    _HEAD = struct.Struct("<QQQQ")

    def __init__(self) -> None:
        #: Of each record: fields, bytes of the key, its hash.
        self.fields, self.key_bytes, self.hashes = array("I"), array("I"), array("Q")
        #: Of each field.
        self.offsets, self.lengths, self.kinds = array("Q"), array("Q"), array("I")
        self.keys = bytearray()
        self.names: list[str] = []

    def encode(self) -> U8:
        names = json.dumps(self.names).encode()
        head = self._HEAD.pack(len(self.fields), len(self.offsets), len(self.keys), len(names))
        columns = (self.hashes, self.offsets, self.lengths, self.fields, self.key_bytes, self.kinds)
        return np.frombuffer(head + b"".join(map(bytes, columns)) + self.keys + names, np.uint8)

    @classmethod
    def decode(cls, data: bytes) -> dict[str, Any]:
        """The columns, as arrays."""
        records, fields, key_bytes, _ = cls._HEAD.unpack_from(data)
        at = cls._HEAD.size
        found: dict[str, Any] = {}
        for name, kind, count in (
            ("hashes", "<u8", records), ("offsets", "<u8", fields), ("lengths", "<u8", fields),
            ("fields", "<u4", records), ("key_bytes", "<u4", records), ("kinds", "<u4", fields),
        ):  # fmt: skip
            found[name] = np.frombuffer(data, kind, count, at)
            at += found[name].nbytes
        found["keys"] = data[at : at + key_bytes]
        found["names"] = json.loads(data[at + key_bytes :])
        return found


class _Records:
    """Fields to records."""

    def __init__(self, output: Output, counts: CorpusCounts, bad: Bad) -> None:
        self._output, self._counts, self._bad = output, counts, bad
        self.side = _Side()
        self._kinds: dict[str, int] = {}
        self._place = 0
        #: Of the record that is open: its key, and (kind, offset, length) of its fields.
        self._key: bytes | None = None
        self._open: list[tuple[str, int, int]] = []
        #: A field of it could not be read: none of it is kept.
        self._broken = False

    def read(self, portion: Portion) -> None:
        source = portion.source
        reader = read_tar if source.kind == "tar" else read_files
        before = self._counts.source_bytes
        try:
            for field in reader(portion, self._bad):
                self._field(field, before + portion.size_bytes)
        except Exception as error:
            damage = error if isinstance(error, DatasetError) else wrong(source, error)
            if damage is None:
                raise
            self._broken = True
            self._bad(damage)
        if source.kind == "tar":
            self.end()

    def _field(self, field: Field, most_source_bytes: float) -> None:
        if field.key != self._key:
            self.end()
            self._key = field.key
        elif any(field.kind == kind for kind, _, _ in self._open):
            self._bad(DatasetError("a record has a name twice", where=field.where, found=field.kind or "no suffix"))
            return
        start, counts = self._place, self._counts
        for block in field.blocks:
            self._output.write(np.frombuffer(block, np.uint8))
            self._place += len(block)
            counts.text_bytes += len(block)
            counts.source_bytes = min(counts.source_bytes + len(block), most_source_bytes)
            self._output.tell(counts, counts.text_bytes)
        self._open.append((field.kind, start, self._place - start))

    def end(self) -> None:
        """The record that is open is complete."""
        key, found, broken = self._key, self._open, self._broken
        self._key, self._open, self._broken = None, [], False
        if key is None or broken or not found:
            return
        side = self.side
        # Before a row of it is kept: rows without their record would shift those of all others.
        if len(self._kinds) + sum(kind not in self._kinds for kind, _, _ in found) > MOST_KINDS:
            where, expected = printable(os.fsdecode(key)), f"at most {MOST_KINDS}"
            self._bad(DatasetError("the records have too many kinds of fields", where=where, expected=expected))
            return
        for kind, offset, length in found:
            if kind not in self._kinds:
                self._kinds[kind] = len(self._kinds)
                side.names.append(kind)
            side.offsets.append(offset)
            side.lengths.append(length)
            side.kinds.append(self._kinds[kind])
        side.fields.append(len(found))
        side.key_bytes.append(len(key))
        side.hashes.append(hash_key(key))
        side.keys += key
        self._counts.documents += 1


# ---- all of them -------------------------------------------------------------------------------------------------


class _Index:
    """The index of all slices together."""

    def __init__(self, sides: Sequence[bytes], run: Run, bad: Bad) -> None:
        found = [_Side.decode(side) for side in sides]
        self.kinds: list[str] = list(dict.fromkeys(name for side in found for name in side["names"]))
        if len(self.kinds) > MOST_KINDS:
            raise DatasetError("the records have too many kinds of fields", expected=f"at most {MOST_KINDS}")
        places_of = {name: place for place, name in enumerate(self.kinds)}
        begins = np.cumsum([0, *(sum(run.order.done[index].parts) for index in range(len(found)))])
        self.data_bytes = int(begins[-1])
        self.fields = np.zeros(sum(len(side["offsets"]) for side in found), FIELD)
        at = 0
        for side, begin in zip(found, begins.tolist(), strict=False):
            rows = self.fields[at : at + len(side["offsets"])]
            rows["offset"], rows["length"] = side["offsets"] + np.uint64(begin), side["lengths"]
            rows["kind"] = np.array([places_of[name] for name in side["names"]], np.uint32)[side["kinds"]]
            at += len(rows)
        self._counts = np.concatenate([side["fields"] for side in found]).astype(np.int64)
        self._key_bytes = np.concatenate([side["key_bytes"] for side in found]).astype(np.int64)
        self._hashes: U64 = np.concatenate([side["hashes"] for side in found])
        self._keys = b"".join(side["keys"] for side in found)
        self._order = np.argsort(self._hashes, kind="stable")
        self._leave_out(self._repeated(bad))
        self.count = len(self._counts)

    def _repeated(self, bad: Bad) -> list[int]:
        """Records whose key one before them has."""
        ordered = self._hashes[self._order]
        ends = np.cumsum(self._key_bytes)
        result: list[int] = []
        seen: dict[bytes, int] = {}
        last = -1
        # Only among those of one hash.
        for place in np.flatnonzero(ordered[1:] == ordered[:-1]).tolist():
            if place != last + 1 or ordered[place] != ordered[last]:
                seen = {}
            for record in self._order[place : place + 2].tolist():
                key = self._keys[int(ends[record] - self._key_bytes[record]) : int(ends[record])]
                if seen.setdefault(key, record) != record and record not in result[-1:]:
                    text = printable(os.fsdecode(key))
                    bad(DatasetError("two records have one key", where=text, found=f"records {seen[key]} and {record}"))
                    result.append(record)
            last = place
        return result

    def _leave_out(self, records: Sequence[int]) -> None:
        if not records:
            return
        keep = np.ones(len(self._counts), bool)
        keep[list(records)] = False
        self.fields = self.fields[np.repeat(keep, self._counts)]
        letters = np.frombuffer(self._keys, np.uint8)[np.repeat(keep, self._key_bytes)]
        self._keys = letters.tobytes()
        self._counts, self._key_bytes, self._hashes = self._counts[keep], self._key_bytes[keep], self._hashes[keep]
        self._order = np.argsort(self._hashes, kind="stable")

    def kind_counts(self) -> dict[str, int]:
        counts = np.bincount(self.fields["kind"].astype(np.int64), minlength=len(self.kinds)).tolist()
        return dict(zip(self.kinds, counts, strict=True))

    def encode(self) -> Iterator[bytes]:
        """The bytes of the index, in blocks."""
        bits = bucket_bits(self.count)
        header = RecordHeader(
            kinds=len(self.kinds), records=self.count, fields=len(self.fields), key_bytes=len(self._keys),
            data_bytes=self.data_bytes, bucket_bits=bits,
        )  # fmt: skip
        yield header.encode()
        yield encode_kinds(self.kinds)
        records = np.zeros(self.count + 1, RECORD)
        records["first"][1:], records["key"][1:] = np.cumsum(self._counts), np.cumsum(self._key_bytes)
        hashed = np.zeros(self.count, HASHED)
        hashed["hash"], hashed["record"] = self._hashes[self._order], self._order
        for table in (records, self.fields, buckets_of(hashed["hash"], bits), hashed):
            for block in blocks_of(table):
                yield block.tobytes()
        yield self._keys
