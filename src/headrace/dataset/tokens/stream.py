"""A token stream in a volume: `NAME.bin`, `NAME.idx`, and what describes them.

Tokens lie in the order of the documents, each document ended by the end-of-document token, without gaps. Windows of
them are read at any token, natively, verified, straight into the caller's buffer.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace.dataset.tokens.idx import HEADER_BYTES, Index, IndexHeader, parse_idx, parse_idx_header
from headrace.errors import DatasetError, UsageError
from headrace.units import KIB, MIB, format_bytes
from headrace.volume import ObjectInfo, Volume, VolumeTransfer
from headrace.volume.stage.read import Near

#: Of what is read in small ranges: little more is verified than is wanted.
CHECKSUM_BLOCK_BYTES = 4 * KIB
#: Layout of `NAME.json`.
MANIFEST_VERSION = 1
#: `NAME.json` has a few hundred bytes.
MAX_MANIFEST_BYTES = 1 * MIB
#: Entries of the index that are read at once where it is read in parts.
_INDEX_ENTRIES = 1 << 18

I64 = npt.NDArray[np.int64]


@dataclass(frozen=True, kw_only=True)
class Manifest:
    """`NAME.json`: what was ingested. The same corpus and settings give the same bytes, so it holds no date."""

    documents: int
    tokens: int
    #: "uint16" or "int32".
    dtype: str
    #: SHA-256 of `NAME.bin`, hex: the same tokens anywhere have the same.
    tokens_sha256: str
    #: SHA-256 of `NAME.tokenizer.json`, hex.
    tokenizer_sha256: str
    vocabulary: int
    end_of_document: str
    end_of_document_id: int
    #: What was read: description, text bytes, limit, replaced and empty documents.
    corpus: dict[str, Any]
    headrace: str

    def encode(self) -> bytes:
        """JSON with sorted keys."""
        fields = {"manifest": MANIFEST_VERSION, **self.__dict__}
        return (json.dumps(fields, indent=1, sort_keys=True, ensure_ascii=False) + "\n").encode()

    @staticmethod
    def decode(data: bytes, where: str) -> Manifest:
        """`DatasetError` where the bytes are no manifest, or one of a newer version."""
        try:
            fields = json.loads(data)
        except (ValueError, RecursionError):
            raise DatasetError("the dataset's manifest is not JSON", where=where) from None
        version = fields.pop("manifest", None) if isinstance(fields, dict) else None
        if version != MANIFEST_VERSION:
            expected = f"manifest {MANIFEST_VERSION}"
            raise DatasetError("not a dataset's manifest", where=where, expected=expected, found=repr(version))
        wanted = {name: (dict if name == "corpus" else kind) for name, kind in _MANIFEST_KINDS.items()}
        for name, kind in wanted.items():
            if not isinstance(fields.get(name), kind) or isinstance(fields.get(name), bool):
                raise DatasetError(f"the dataset's manifest has no valid {name!r}", where=where)
        return Manifest(**{name: fields[name] for name in wanted})


_MANIFEST_KINDS: dict[str, type] = {
    "documents": int, "tokens": int, "dtype": str, "tokens_sha256": str, "tokenizer_sha256": str, "vocabulary": int,
    "end_of_document": str, "end_of_document_id": int, "corpus": dict, "headrace": str,
}  # fmt: skip


class TokenStream:
    """Windows of tokens out of one dataset. Holds nothing but a few numbers; threads may share it.

    `dtype`: uint16 or int32, little-endian. `token_count`, `document_count`: of the whole. `manifest`: None where the
    pair came from elsewhere.
    """

    def __init__(
        self,
        volume: Volume,
        name: str,
        *,
        bin_info: ObjectInfo,
        idx_info: ObjectInfo,
        header: IndexHeader,
        manifest: Manifest | None,
    ) -> None:
        self.volume = volume
        self.name = name
        self.bin_info = bin_info
        self.idx_info = idx_info
        self.header = header
        self.dtype = header.dtype
        self.token_count = bin_info.length_bytes // header.dtype.itemsize
        self.document_count = header.document_count
        self.manifest = manifest
        #: Where it is staged: its bytes, and those of its packings, are read from there as far as they are there.
        self.near: Near | None = None

    @property
    def reads(self) -> Volume | Near:
        """What ranges of its objects are read from."""
        return self.volume if self.near is None else self.near

    @classmethod
    def open(cls, volume: Volume, name: str) -> TokenStream:
        """The dataset `name`: reads the head of the index and the manifest, nothing that grows with the data.

        `ObjectNotFound`: there is no `NAME.bin` or `NAME.idx`. `DatasetError`: they are no token stream, or do not fit.
        """
        bin_info = volume.stat(f"{name}.bin")
        idx_info = volume.stat(f"{name}.idx")
        head = volume.read(idx_info.name, 0, min(HEADER_BYTES, idx_info.length_bytes))
        header = parse_idx_header(head, idx_info.length_bytes, idx_info.name)
        if bin_info.length_bytes % header.dtype.itemsize:
            raise DatasetError(
                "the tokens do not fit their index",
                where=bin_info.name,
                expected=f"a multiple of {header.dtype.itemsize} bytes",
                found=str(bin_info.length_bytes),
            )
        stream = cls(
            volume,
            name,
            bin_info=bin_info,
            idx_info=idx_info,
            header=header,
            manifest=_manifest(volume, f"{name}.json"),
        )
        manifest = stream.manifest
        if manifest is not None:
            told = (manifest.documents, manifest.tokens, manifest.dtype)
            found = (stream.document_count, stream.token_count, stream.dtype.name)
            if told != found:
                raise DatasetError(
                    "the dataset's manifest does not fit its tokens",
                    where=f"{name}.json",
                    expected="{} documents, {} tokens of {}".format(*found),
                    found="{} documents, {} tokens of {}".format(*told),
                )
        return stream

    def index(self) -> Index:
        """The whole index, checked against itself and the tokens' length: 20 bytes of memory a document."""
        data = self.volume.read(self.idx_info.name)
        return parse_idx(data, self.idx_info.name, self.bin_info.length_bytes)

    @property
    def identity(self) -> str:
        """What only these very tokens have: the volume and, in it, the allocation."""
        return f"{self.volume.id}/{self.bin_info.name}#{self.bin_info.sequence}"

    def document_starts(self, first: int, count: int) -> I64:
        """Where documents `[first, first + count)` begin, and where the last of them ends: int64[count + 1], tokens.

        Reads those entries of the index, and memory is bounded by `count`. `UsageError`: there are not so many
        documents. `DatasetError`: the index is none.
        """
        if not 0 <= first <= first + count <= self.document_count:
            raise UsageError(
                "no such documents",
                where=self.name,
                expected=f"within {self.document_count}",
                found=f"{first} to {first + count}",
            )
        header, itemsize = self.header, self.dtype.itemsize
        sequences = self._entries(HEADER_BYTES + 12 * header.sequence_count, first, count + 1)
        if int(sequences[0]) < 0 or int(sequences[-1]) > header.sequence_count or np.any(np.diff(sequences) < 0):
            raise self._index_is_wrong(first, "a document index that rises")
        # One sequence a document is one range; else those entries that are wanted out of the range.
        low, high = int(sequences[0]), min(int(sequences[-1]) + 1, header.sequence_count)
        starts = np.full(count + 1, self.token_count * itemsize, np.int64)
        for begin in range(low, high, _INDEX_ENTRIES):
            pointers = self._entries(HEADER_BYTES + 4 * header.sequence_count, begin, min(_INDEX_ENTRIES, high - begin))
            here = slice(*np.searchsorted(sequences, [begin, begin + len(pointers)]).tolist())
            starts[here] = pointers[sequences[here] - begin]
        if np.any(starts % itemsize) or np.any(np.diff(starts) < 0) or int(starts[0]) < 0:
            raise self._index_is_wrong(first, "pointers that rise by whole tokens")
        starts //= itemsize
        if int(starts[-1]) > self.token_count:
            raise self._index_is_wrong(first, f"at most {self.token_count} tokens")
        return starts

    def _entries(self, base: int, first: int, count: int) -> I64:
        """Entries of a column of the index, eight bytes each."""
        buffer = np.empty(count, "<i8")
        if count:
            self.reads.submit_read(self.idx_info, [base + 8 * first], [buffer.nbytes], [buffer], [0]).wait()
        return buffer

    def _index_is_wrong(self, first: int, expected: str) -> DatasetError:
        return DatasetError(
            "the token index is damaged, or none",
            where=f"{self.idx_info.name}, documents from {first}",
            expected=expected,
            found="others",
        )

    def tokenizer_json(self) -> bytes:
        """`NAME.tokenizer.json`. `ObjectNotFound` where the pair came without one."""
        return self.volume.read(f"{self.name}.tokenizer.json")

    def sample_count(self, sequence_length: int) -> int:
        """Windows of `sequence_length` inputs and one more for the last target: window s is tokens
        `[s * sequence_length, (s + 1) * sequence_length]`, so neighbours share one token and none is left out but at
        the end. `UsageError` for a length below 1, `DatasetError` where not one fits."""
        if sequence_length < 1:
            raise UsageError("sequence_length is no length", expected="1 or more", found=str(sequence_length))
        count = (self.token_count - 1) // sequence_length
        if count < 1:
            raise DatasetError(
                "the dataset is shorter than one sample",
                where=self.bin_info.name,
                expected=f"{sequence_length + 1} tokens or more",
                found=str(self.token_count),
            )
        return count

    def submit_windows(
        self, starts: npt.NDArray[np.uint64], length_tokens: int, buffer: npt.NDArray[Any], *, verify: bool = True
    ) -> VolumeTransfer:
        """Start to read tokens `[start, start + length_tokens)` for each start into the rows of `buffer`.

        `starts`: uint64[n], tokens, any order, may overlap. `buffer`: `dtype[n, length_tokens]`, C-contiguous, the
        transfer's until it is done. `UsageError`: a wrong buffer, or a window that leaves the stream.
        """
        shape = (len(starts), length_tokens)
        if buffer.shape != shape or buffer.dtype != self.dtype or not buffer.flags.c_contiguous:
            raise UsageError(
                "a buffer of the wrong shape",
                where=self.name,
                expected=f"contiguous {self.dtype.name}{list(shape)}",
                found=f"{buffer.dtype.name}{list(buffer.shape)}",
            )
        if len(starts) and (length_tokens > self.token_count or int(starts.max()) > self.token_count - length_tokens):
            raise UsageError(
                "a window leaves the stream",
                where=self.name,
                expected=f"at most {self.token_count} tokens",
                found=f"{length_tokens} tokens from {int(starts.max())}",
            )
        places = np.arange(len(starts), dtype=np.int64) * length_tokens
        return self.submit_pieces(
            starts.astype(np.int64), np.full(len(starts), length_tokens, np.int64), buffer, places, verify=verify
        )

    def submit_pieces(
        self,
        starts: I64,
        lengths: I64,
        buffer: npt.NDArray[Any],
        places: I64,
        *,
        verify: bool = True,
        room_bytes: int = 0,
    ) -> VolumeTransfer:
        """Start to read tokens `[start, start + length)` of each piece to `buffer.flat[place:]`.

        All int64[n], tokens. `buffer`: of `dtype`, C-contiguous, the transfer's until it is done. `room_bytes`: of
        `Volume.submit_read`. `UsageError`: a piece leaves the stream or the buffer.
        """
        itemsize = self.dtype.itemsize
        return self.reads.submit_read(
            self.bin_info, starts * itemsize, lengths * itemsize, [buffer], places * itemsize, verify=verify,
            room_bytes=room_bytes,
        )  # fmt: skip

    def read_window(self, start: int, length_tokens: int) -> npt.NDArray[Any]:
        """Tokens `[start, start + length_tokens)`: dtype[length_tokens]. The convenience of `submit_windows`."""
        buffer = np.empty((1, length_tokens), self.dtype)
        self.submit_windows(np.array([start], np.uint64), length_tokens, buffer).wait()
        return buffer.reshape(length_tokens)

    def describe(self) -> str:
        """One line for people."""
        return (
            f"{self.name}: {self.token_count:,} tokens of {self.dtype.name} in {self.document_count:,} documents, "
            f"{format_bytes(self.bin_info.length_bytes)}"
        )


def _manifest(volume: Volume, name: str) -> Manifest | None:
    if name not in volume:
        return None
    info = volume.stat(name)
    if info.length_bytes > MAX_MANIFEST_BYTES:
        raise DatasetError("not a dataset's manifest", where=name, found=format_bytes(info.length_bytes))
    return Manifest.decode(volume.read(name), name)
