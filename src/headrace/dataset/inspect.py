"""What a volume has of datasets: which, how long their documents are, and whether all of it fits together."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from headrace.dataset.records.records import Records
from headrace.dataset.tokens.idx import HEADER_BYTES, IndexCheck
from headrace.dataset.tokens.packing import LAYOUTS
from headrace.dataset.tokens.packs import Packer, Packing, PackManifest, PackOptions
from headrace.dataset.tokens.stream import TokenStream
from headrace.errors import DatasetError, HeadraceError, ObjectNotFound, VolumeError
from headrace.units import MIB
from headrace.volume import Volume

I64 = npt.NDArray[np.int64]

#: Documents whose lengths are in memory at once.
DOCUMENTS = 1 << 18
#: Bytes that are read at once.
BLOCK_BYTES = 8 * MIB


@dataclass(frozen=True, kw_only=True)
class Found:
    """A dataset in a volume, opened; or why it cannot be."""

    name: str
    stream: TokenStream | None = None
    records: Records | None = None
    packings: list[str] = field(default_factory=list)
    problem: HeadraceError | None = None


def find_datasets(volume: Volume, prefix: str = "") -> Iterator[Found]:
    """Every pair of `NAME.bin` and `NAME.idx`, or `NAME.records` and its index, in the order of the names of the
    indexes."""
    for piece in volume.listings(prefix):
        for index in range(len(piece)):
            name, dot, end = piece.name(index).rpartition(".")
            if not dot or end != "idx":
                continue
            if name.endswith(".records") and name in volume:
                yield _found_records(volume, name.removesuffix(".records"))
            if f"{name}.bin" not in volume:
                continue
            packings = [packing for packing, _, _ in packings_of(volume, name)]
            try:
                yield Found(name=name, stream=TokenStream.open(volume, name), packings=packings)
            except (DatasetError, VolumeError) as error:
                yield Found(name=name, packings=packings, problem=error)


def _found_records(volume: Volume, name: str) -> Found:
    try:
        return Found(name=name, records=Records.open(volume, name))
    except (DatasetError, VolumeError) as error:
        return Found(name=name, problem=error)


def packings_of(volume: Volume, name: str) -> list[tuple[str, str, int]]:
    """Stored packings of a dataset: name, layout, sequence length; not opened."""
    found = []
    for layout in LAYOUTS:
        head = f"{name}.{layout}-"
        for info in volume.list(head):
            length = info.name.removeprefix(head)
            if length.isascii() and length.isdecimal() and len(length) < 10:
                found.append((info.name, layout, int(length)))
    return sorted(found, key=lambda each: (each[1], each[2]))


# ---- how long documents are ----------------------------------------------------------------------------------------


@dataclass(kw_only=True)
class Lengths:
    """Of documents, in tokens, in bins that double: bin k has lengths of `bin_of` k."""

    documents: list[int] = field(default_factory=lambda: [0] * 65)
    tokens: list[int] = field(default_factory=lambda: [0] * 65)
    shortest: int | None = None
    longest: int = 0

    @staticmethod
    def bin_of(number: int) -> tuple[int, int]:
        """Shortest and longest of a bin: 0, 1, 2 to 3, 4 to 7, ..."""
        return (0, 0) if number == 0 else (1 << (number - 1), (1 << number) - 1)

    def add(self, lengths: I64) -> None:
        if not len(lengths):
            return
        bins = np.searchsorted(1 << np.arange(63, dtype=np.int64), lengths, side="right")
        # Whole numbers: weights of bincount would be floating point.
        for number in np.unique(bins).tolist():
            here = lengths[bins == number]
            self.documents[number] += len(here)
            self.tokens[number] += int(here.sum())
        self.shortest = min(int(lengths.min()), int(lengths.min()) if self.shortest is None else self.shortest)
        self.longest = max(self.longest, int(lengths.max()))

    def rows(self) -> list[tuple[int, int, int, int]]:
        """Shortest, longest, documents, tokens of each bin from the first to the last that has any."""
        used = [number for number, count in enumerate(self.documents) if count]
        if not used:
            return []
        return [
            (*self.bin_of(number), self.documents[number], self.tokens[number])
            for number in range(used[0], used[-1] + 1)
        ]


def document_lengths(stream: TokenStream) -> Iterator[tuple[int, I64]]:
    """First document, and where it and those after it begin and the last ends: int64[n + 1], bounded."""
    for first in range(0, stream.document_count, DOCUMENTS):
        yield first, stream.document_starts(first, min(DOCUMENTS, stream.document_count - first))


def measure(stream: TokenStream) -> Lengths:
    """Read the whole index, a bounded part at a time."""
    lengths = Lengths()
    for _, starts in document_lengths(stream):
        lengths.add(np.diff(starts))
    return lengths


# ---- is it all there -----------------------------------------------------------------------------------------------


@dataclass(frozen=True, kw_only=True)
class Checked:
    """A step of `verify`."""

    #: What was read: "documents", "tokens", "tokenizer", or the name of a packing.
    what: str
    #: 0 to 1 of this.
    fraction: float
    #: What is wrong; the step goes on where it can.
    problem: HeadraceError | None = None


def verify(volume: Volume, name: str) -> Iterator[Checked]:
    """Read the whole dataset and hold every part against every other.

    The index covers the tokens without gap or overlap; tokens have the SHA-256 of the manifest, and are below its
    vocabulary; every document ends with its token, unless the tokens were taken over as they are; the tokenizer has its
    SHA-256; a packing is what its options give.
    What does not open is an error that is raised.
    """
    stream = TokenStream.open(volume, name)
    yield from _checked("documents", _verify_documents(stream))
    yield from _checked("tokens", _verify_tokens(stream))
    if stream.manifest is not None:
        yield from _checked("tokenizer", _verify_tokenizer(stream))
    for packing, layout, length in packings_of(volume, name):
        yield from _checked(packing, _verify_packing(stream, packing, layout, length))


def _checked(what: str, steps: Iterator[float]) -> Iterator[Checked]:
    """An error ends these steps, not the others."""
    try:
        for fraction in steps:
            yield Checked(what=what, fraction=fraction)
    except (DatasetError, VolumeError) as error:
        yield Checked(what=what, fraction=1.0, problem=error)
        return
    yield Checked(what=what, fraction=1.0)


def _verify_documents(stream: TokenStream) -> Iterator[float]:
    header, name = stream.header, stream.idx_info.name
    check, count = IndexCheck(header, name), header.sequence_count
    pointers_at, entries_at = HEADER_BYTES + 4 * count, HEADER_BYTES + 12 * count
    for first in range(0, count, DOCUMENTS):
        here = min(DOCUMENTS, count - first)
        lengths, pointers = np.empty(here, "<i4"), np.empty(here, "<i8")
        places, sizes = [HEADER_BYTES + 4 * first, pointers_at + 8 * first], [lengths.nbytes, pointers.nbytes]
        stream.volume.submit_read(stream.idx_info, places, sizes, [lengths, pointers], [0, 0], [0, 1]).wait()
        check.sequences(lengths, pointers)
        yield (first + here) / count / 2
    for first in range(0, header.document_entries, DOCUMENTS):
        entries = np.empty(min(DOCUMENTS, header.document_entries - first), "<i8")
        stream.volume.submit_read(stream.idx_info, [entries_at + 8 * first], [entries.nbytes], [entries], [0]).wait()
        check.documents(entries)
        yield (1 + (first + len(entries)) / header.document_entries) / 2
    check.end(stream.bin_info.length_bytes)


def _verify_tokens(stream: TokenStream) -> Iterator[float]:
    manifest, digest = stream.manifest, hashlib.sha256()
    for first, starts in document_lengths(stream):
        ends = starts[1:][np.diff(starts) > 0] - 1
        for begin in range(int(starts[0]), int(starts[-1]), BLOCK_BYTES // stream.dtype.itemsize):
            tokens = stream.read_window(begin, min(BLOCK_BYTES // stream.dtype.itemsize, int(starts[-1]) - begin))
            digest.update(tokens.tobytes())
            yield (begin + len(tokens)) / stream.token_count
            if manifest is None:
                continue
            largest, smallest = int(tokens.max()), int(tokens.min())
            if largest >= manifest.vocabulary or smallest < 0:
                found = str(largest if largest >= manifest.vocabulary else smallest)
                raise _wrong(stream.bin_info.name, f"tokens below {manifest.vocabulary}", found)
            here = ends[slice(*np.searchsorted(ends, [begin, begin + len(tokens)]).tolist())]
            wrong = np.flatnonzero(tokens[here - begin] != manifest.end_of_document_id)
            if wrong.size and manifest.corpus.get("documents_end", True):
                place = int(here[wrong[0]])
                document = first + int(np.searchsorted(starts, place, side="right")) - 1
                raise _wrong(
                    f"{stream.bin_info.name}, document {document}",
                    f"token {manifest.end_of_document_id} at its end",
                    f"{int(tokens[place - begin])}",
                )
    if manifest is not None and digest.hexdigest() != manifest.tokens_sha256:
        raise _wrong(stream.bin_info.name, f"tokens of SHA-256 {manifest.tokens_sha256}", digest.hexdigest())


def _verify_tokenizer(stream: TokenStream) -> Iterator[float]:
    assert stream.manifest is not None
    yield 0.0
    try:
        found = hashlib.sha256(stream.tokenizer_json()).hexdigest()
    except ObjectNotFound:
        found = "none"
    if found != stream.manifest.tokenizer_sha256:
        raise _wrong(f"{stream.name}.tokenizer.json", f"SHA-256 {stream.manifest.tokenizer_sha256}", found)


def _verify_packing(stream: TokenStream, name: str, layout: str, length: int) -> Iterator[float]:
    packing = Packing.open(stream, layout, length)
    manifest: PackManifest = packing.manifest
    options = PackOptions(sequence_length=length, layout=layout, long=manifest.long)
    done = [0.0]
    packer = Packer(stream, options, lambda fraction: done.__setitem__(0, fraction))
    offset = 0
    # Made again, and held against what is stored: the same tokens give the same bytes.
    for block in packer.blocks():
        if offset + len(block) > packing.info.length_bytes:
            raise _wrong(name, f"{packing.info.length_bytes} bytes, as stored", f"{offset + len(block)} or more")
        if stream.volume.read(name, offset, len(block)) != block:
            raise _wrong(name, "the samples that its documents give", f"others, in bytes from {offset}")
        offset += len(block)
        yield done[0]
    made = packer.manifest()
    for fact in ("samples", "pieces", "runs", "most_pieces", "tokens", "documents", "long_documents",
                 "left_out_documents", "sha256"):  # fmt: skip
        if getattr(made, fact) != getattr(manifest, fact):
            raise _wrong(f"{name}.json", f"{fact} {getattr(made, fact)}", str(getattr(manifest, fact)))


def _wrong(where: str, expected: str, found: str) -> DatasetError:
    return DatasetError("the dataset does not fit together", where=where, expected=expected, found=found)
