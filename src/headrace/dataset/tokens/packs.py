"""A packing that is computed once and stored beside the stream.

`NAME.packed-4096` (or `NAME.padded-4096`) has the pieces of all samples of 4096 inputs, in the order of the samples,
and the runs in which they are found; `NAME.packed-4096.json` says what it is of. Tokens stay where they are.

    pieces  16 P   of each piece: first token in the stream, u64; tokens, u32; how-manieth piece of its document, u32
    runs    16 R   of each run: samples, u64; pieces of each of them, u64

Little-endian. Samples of a run follow one another, so the pieces of sample s are found by arithmetic and come with one
read; what is in memory is the runs, a few hundred for a quarter of a million pieces. The same stream and options give
the same bytes (`headrace.dataset.tokens.packing`). What comes from the table is checked before anything is read by it.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass
from importlib.metadata import version
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataset.tokens.packing import CHUNK_PIECES, LAYOUTS, LONG, Chunk, cut, pack, pad, piece_counts
from headrace.dataset.tokens.stream import MAX_MANIFEST_BYTES, TokenStream
from headrace.errors import DatasetError, ObjectExists, ObjectNotFound, UsageError
from headrace.units import KIB, format_bytes
from headrace.volume import ObjectInfo, Session, VolumeTransfer
from headrace.volume.data.names import check_name

PIECE = np.dtype([("start", "<u8"), ("length", "<u4"), ("part", "<u4")])
RUN = np.dtype([("samples", "<u8"), ("pieces", "<u8")])
assert PIECE.itemsize == RUN.itemsize == 16
#: Layout of `NAME.packed-N.json`.
PACKING_VERSION = 1
MAX_SEQUENCE_LENGTH = 1 << 24
#: 256 MiB of runs: more than any stream that fits a volume has.
_MAX_RUNS = 1 << 24
_MAX_SAMPLES = 1 << 48
_CHECKSUM_BLOCK_BYTES = 4 * KIB
#: Documents whose lengths are in memory at once.
_DOCUMENTS = CHUNK_PIECES

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class PackOptions:
    """How documents become samples."""

    #: Inputs of a sample; it has room for one token more.
    sequence_length: int
    #: "packed": several documents a sample, best fit. "padded": one.
    layout: str = "packed"
    #: What becomes of longer documents: "split", "truncate" or "drop" (`headrace.dataset.tokens.packing`).
    long: str = "split"

    def __post_init__(self) -> None:
        check_length(self.sequence_length)
        for name, known in (("layout", LAYOUTS), ("long", LONG)):
            if getattr(self, name) not in known:
                expected = " or ".join(known) if len(known) == 2 else ", ".join(known)
                raise UsageError(f"{name} is none", expected=expected, found=repr(getattr(self, name)))


def check_length(sequence_length: int) -> None:
    """`UsageError` where no sample can be so long."""
    if not isinstance(sequence_length, int) or not 1 <= sequence_length <= MAX_SEQUENCE_LENGTH:
        expected = f"1 to {MAX_SEQUENCE_LENGTH}"
        raise UsageError("sequence_length is out of range", expected=expected, found=str(sequence_length))


@dataclass(frozen=True, kw_only=True)
class PackManifest:
    """`NAME.packed-N.json`."""

    layout: str
    sequence_length: int
    long: str
    samples: int
    pieces: int
    runs: int
    #: Pieces of the sample that has most.
    most_pieces: int
    #: In samples, all together; more than the stream has where documents are split, for cuts share a token.
    tokens: int
    documents: int
    #: Longer than a sample.
    long_documents: int
    #: Without a target, or dropped.
    left_out_documents: int
    #: SHA-256 of the table, hex: what the samples are.
    sha256: str
    #: Of which tokens: how many, their type, SHA-256 where their manifest has it, the volume's allocation.
    token_count: int
    dtype: str
    tokens_sha256: str
    object: str
    headrace: str

    @property
    def fill(self) -> float:
        """Share of all places in samples that hold a token."""
        return self.tokens / (self.samples * (self.sequence_length + 1))

    def encode(self) -> bytes:
        """JSON with sorted keys."""
        return (json.dumps({"packing": PACKING_VERSION, **asdict(self)}, indent=1, sort_keys=True) + "\n").encode()

    @staticmethod
    def decode(data: bytes, where: str) -> PackManifest:
        """`DatasetError` where the bytes are none, of a newer version, or say what cannot be."""
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            raise DatasetError("the packing's manifest is not JSON", where=where) from None
        told = fields.pop("packing", None) if isinstance(fields, dict) else None
        if told != PACKING_VERSION:
            expected = f"packing {PACKING_VERSION}"
            raise DatasetError("not a packing's manifest", where=where, expected=expected, found=repr(told))
        for name, kind in PackManifest.__annotations__.items():
            value = fields.get(name)
            good = isinstance(value, str) if kind == "str" else type(value) is int and value >= 0
            if not good:
                raise DatasetError(f"the packing's manifest has no valid {name!r}", where=where, found=repr(value)[:80])
        manifest = PackManifest(**{name: fields[name] for name in PackManifest.__annotations__})
        for name, low, high in (
            ("sequence_length", 1, MAX_SEQUENCE_LENGTH),
            ("samples", 1, _MAX_SAMPLES),
            ("runs", 1, min(_MAX_RUNS, manifest.samples)),
            ("most_pieces", 1, manifest.sequence_length + 1),
            ("pieces", manifest.samples, manifest.samples * manifest.most_pieces),
        ):
            value = getattr(manifest, name)
            if not low <= value <= high:
                raise DatasetError(
                    f"the packing's manifest has no valid {name!r}",
                    where=where,
                    expected=f"{low} to {high}",
                    found=str(value),
                )
        return manifest


def packing_name(name: str, layout: str, sequence_length: int) -> str:
    """Of the object beside the stream `name`."""
    return f"{name}.{layout}-{sequence_length}"


class Packing:
    """A stored packing, opened: which pieces a sample has. Threads may share it."""

    def __init__(self, stream: TokenStream, info: ObjectInfo, manifest: PackManifest, runs: npt.NDArray[Any]) -> None:
        self.stream = stream
        self.info = info
        self.manifest = manifest
        self._each = runs["pieces"].astype(np.int64)
        samples = runs["samples"].astype(np.int64)
        self._sample_ends = np.cumsum(samples)
        self._sample_starts = self._sample_ends - samples
        self._piece_starts = np.cumsum(samples * self._each) - samples * self._each

    @classmethod
    def open(cls, stream: TokenStream, layout: str, sequence_length: int) -> Packing:
        """The packing of `stream` for samples of this kind: reads its manifest and its runs.

        `ObjectNotFound`: there is none. `DatasetError`: it is of other tokens, or none.
        """
        if layout not in LAYOUTS:
            raise UsageError("layout is none", expected=" or ".join(LAYOUTS), found=repr(layout))
        name = packing_name(stream.name, layout, sequence_length)
        volume, length = stream.volume, f"--sequence-length {sequence_length}"
        try:
            info, head = volume.stat(name), volume.stat(f"{name}.json")
        except ObjectNotFound as error:
            raise ObjectNotFound(
                "the dataset is not packed so",
                where=stream.name,
                expected=name,
                next_step=f"`headrace dataset pack {stream.name} {length} --layout {layout}`",
            ) from error
        if head.length_bytes > MAX_MANIFEST_BYTES:
            raise DatasetError("not a packing's manifest", where=head.name, found=format_bytes(head.length_bytes))
        manifest = PackManifest.decode(volume.read(head.name), head.name)
        told = (manifest.layout, manifest.sequence_length, manifest.token_count, manifest.dtype)
        wanted = (layout, sequence_length, stream.token_count, stream.dtype.name)
        same = manifest.tokens_sha256 == stream.manifest.tokens_sha256 if stream.manifest else None
        if told != wanted or not (manifest.object == stream.identity if same is None else same):
            raise DatasetError(
                "the packing is of other tokens",
                where=name,
                expected="{}, {} inputs, {} tokens of {}, ".format(*wanted) + stream.identity,
                found="{}, {} inputs, {} tokens of {}, ".format(*told) + manifest.object,
                next_step=f"`headrace dataset pack {stream.name} {length} --layout {layout} --replace`",
            )
        size = PIECE.itemsize * manifest.pieces + RUN.itemsize * manifest.runs
        if info.length_bytes != size:
            raise DatasetError(
                "the packing does not fit its manifest",
                where=name,
                expected=f"{size} bytes",
                found=str(info.length_bytes),
            )
        runs = np.empty(manifest.runs, RUN)
        volume.submit_read(info, [PIECE.itemsize * manifest.pieces], [runs.nbytes], [runs], [0]).wait()
        _check_runs(runs, manifest, name)
        return cls(stream, info, manifest, runs)

    def submit(self, samples: I64) -> PackRead:
        """Start to read which pieces these samples have. `UsageError` for numbers of no sample."""
        if len(samples) and not 0 <= int(samples.min()) <= int(samples.max()) < self.manifest.samples:
            raise UsageError(
                "no such sample",
                where=self.info.name,
                expected=f"0 to {self.manifest.samples - 1}",
                found=f"{int(samples.min())} to {int(samples.max())}",
            )
        run = np.searchsorted(self._sample_ends, samples, side="right")
        counts = self._each[run]
        first = self._piece_starts[run] + (samples - self._sample_starts[run]) * counts
        table = np.empty(int(counts.sum()), PIECE)
        places = np.cumsum(counts) - counts
        size = PIECE.itemsize
        transfer = self.stream.reads.submit_read(self.info, first * size, counts * size, [table], places * size)
        return PackRead(self, samples, counts, table, transfer)


@dataclass(frozen=True)
class PackRead:
    """Pieces of some samples on their way. Made by `Packing.submit`."""

    packing: Packing
    samples: I64
    #: Pieces of each sample.
    counts: I64
    table: npt.NDArray[Any]
    transfer: VolumeTransfer

    def pieces(self) -> tuple[I64, I64, I64, I64]:
        """Of all samples: starts in the stream, lengths, row (0 for the first sample) and place in the row, int64[n]
        each. Once the transfer is done; its error, or `DatasetError` where the table cannot be.
        """
        self.transfer.wait()
        starts, lengths = self.table["start"].astype(np.int64), self.table["length"].astype(np.int64)
        rows = np.repeat(np.arange(len(self.samples), dtype=np.int64), self.counts)
        ends = np.cumsum(lengths)
        before = np.concatenate([np.zeros(1, np.int64), ends])[np.cumsum(self.counts) - self.counts]
        places = ends - lengths - before[rows]
        capacity, tokens = self.packing.manifest.sequence_length + 1, self.packing.stream.token_count
        wrong = (lengths < 1) | (lengths > capacity) | (places + lengths > capacity)
        wrong |= (starts < 0) | (starts > tokens - lengths)
        if wrong.any():
            piece = int(np.argmax(wrong))
            raise DatasetError(
                "the packing has a piece that cannot be",
                where=f"{self.packing.info.name}, sample {int(self.samples[rows[piece]])}",
                expected=f"within {tokens} tokens, and {capacity} a sample",
                found=f"{int(lengths[piece])} tokens from {int(starts[piece])}, at place {int(places[piece])}",
                next_step="pack the dataset again, with --replace",
            )
        return starts, lengths, rows, places


def _check_runs(runs: npt.NDArray[Any], manifest: PackManifest, where: str) -> None:
    # As whole numbers of Python's, which have no end, where 64 bits might not do.
    each, samples = runs["pieces"].tolist(), runs["samples"].tolist()
    found = (sum(samples), sum(a * b for a, b in zip(samples, each, strict=True)), max(each))
    wanted = (manifest.samples, manifest.pieces, manifest.most_pieces)
    if found != wanted or not all(samples) or not all(each):
        raise DatasetError(
            "the packing's runs do not fit its manifest",
            where=where,
            expected="{} samples, {} pieces, {} at most in one".format(*wanted),
            found="{}, {}, {}".format(*found),
            next_step="pack the dataset again, with --replace",
        )


# ---- making one ---------------------------------------------------------------------------------------------------


class Packer:
    """The bytes of a packing, and what is counted on the way. Memory is bounded: one chunk, and the runs."""

    def __init__(
        self, stream: TokenStream, options: PackOptions, progress: Callable[[float], None] | None = None
    ) -> None:
        self.stream = stream
        self.options = options
        self._progress = progress
        self._hash = hashlib.sha256()
        self._runs: list[npt.NDArray[Any]] = []
        self._samples = self._pieces = self._tokens = self._most = self._long = self._left_out = 0

    def blocks(self) -> Iterator[bytes]:
        """The table. `DatasetError` where the stream gives no sample."""
        for chunk in self._chunks():
            pieces = chunk.pieces
            table = np.empty(len(pieces.starts), PIECE)
            table["start"], table["length"], table["part"] = pieces.starts, pieces.lengths, pieces.parts
            runs = np.empty(len(chunk.run_samples), RUN)
            runs["samples"], runs["pieces"] = chunk.run_samples, chunk.run_pieces
            self._runs.append(runs)
            self._samples += int(chunk.run_samples.sum())
            self._pieces += len(table)
            self._tokens += int(pieces.lengths.sum())
            self._most = max(self._most, int(chunk.run_pieces.max()))
            yield self._hashed(table)
        if not self._samples:
            raise DatasetError(
                "the dataset gives no sample",
                where=self.stream.name,
                expected="a document of two tokens or more",
                found=f"{self.stream.document_count} documents, {self._left_out} left out",
            )
        for runs in self._runs:
            yield self._hashed(runs)

    def manifest(self) -> PackManifest:
        """Of all that `blocks` gave."""
        stream, options = self.stream, self.options
        return PackManifest(
            layout=options.layout,
            sequence_length=options.sequence_length,
            long=options.long,
            samples=self._samples,
            pieces=self._pieces,
            runs=sum(map(len, self._runs)),
            most_pieces=self._most,
            tokens=self._tokens,
            documents=stream.document_count,
            long_documents=self._long,
            left_out_documents=self._left_out,
            sha256=self._hash.hexdigest(),
            token_count=stream.token_count,
            dtype=stream.dtype.name,
            tokens_sha256=stream.manifest.tokens_sha256 if stream.manifest else "",
            object=stream.identity,
            headrace=version("headrace"),
        )

    def _hashed(self, rows: npt.NDArray[Any]) -> bytes:
        data = rows.tobytes()
        self._hash.update(data)
        return data

    def _chunks(self) -> Iterator[Chunk]:
        length, long = self.options.sequence_length, self.options.long
        total = self.stream.document_count
        for first in range(0, total, _DOCUMENTS):
            count = min(_DOCUMENTS, total - first)
            starts = self.stream.document_starts(first, count)
            lengths = np.diff(starts)
            self._long += int(np.count_nonzero(lengths > length + 1))
            self._left_out += int(np.count_nonzero(piece_counts(lengths, length, long) == 0))
            for pieces in cut(starts, length, long):
                yield pad(pieces) if self.options.layout == "padded" else pack(pieces, length + 1)
            if self._progress is not None:
                self._progress((first + count) / total)


def pack_stream(
    session: Session,
    name: str,
    options: PackOptions,
    *,
    replace: bool = False,
    progress: Callable[[float], None] | None = None,
) -> PackManifest:
    """Pack the dataset `name` of the session's volume, and store the packing beside it, in one commit.

    `progress` is called with 0 to 1. `ObjectExists` where there is one and `replace` is not given; `DatasetError` where
    the dataset gives no sample.
    """
    volume = session.volume
    stream = TokenStream.open(volume, name)
    target = packing_name(name, options.layout, options.sequence_length)
    taken = [each for each in (target, f"{target}.json") if each in volume]
    if taken and not replace:
        raise ObjectExists("the dataset is packed so already", where=taken[0], next_step="--replace makes it again")
    packer = Packer(stream, options, progress)
    check_name(f"{target}.json")
    with session.transaction() as transaction:
        for each in taken:
            transaction.delete(each)
        transaction.write_stream(target, packer.blocks(), checksum_block_bytes=_CHECKSUM_BLOCK_BYTES)
        manifest = packer.manifest()
        transaction.put(f"{target}.json", manifest.encode())
    return manifest
