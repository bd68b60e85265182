"""Where documents come from: files in a fixed order, read as a stream.

A corpus is a list of sources in the byte order of their relative paths, so that the same files give the same stream on
every machine. Its documents come in pieces (`readers`), so that one of any size passes through bounded memory.

| kind | one document is | files |
|---|---|---|
| text | one file | `.txt`, `.md`, `.rst`, `.py`, and suffixes that the caller names |
| jsonl | one line's field (`text`) | `.jsonl`, `.ndjson` |
| parquet | one row of a column (`text`) | `.parquet` |
| arrow | the same | `.arrow`, `.feather`; a folder that `datasets` saved: the files that its `state.json` names |

Text and lines may be packed: `.gz`, `.zst` (and then `.json` is taken for lines, too). Files lie in a folder of this
machine or behind an fsspec URL.

Text is UTF-8. What is not is replaced by U+FFFD, and the documents in which that happened are counted and shown, for a
corpus of millions of files must not stop at one of them. Empty documents are counted and left out. Everything else that
is wrong (a line that is not JSON, a missing column, a file that is cut off) stops the ingest with file and line, or is
counted, shown and left out where that is asked for (`bad="skip"`).
"""

from __future__ import annotations

import hashlib
import json
import os
import sysconfig
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.dataset.ingestion import places
from headrace.dataset.ingestion.readers import Bad, Piece, Portion, Source, read
from headrace.errors import CorpusUnreadable, DatasetError, UsageError
from headrace.units import MIB, format_bytes

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSONL_SUFFIXES = (".jsonl", ".ndjson")
PARQUET_SUFFIX = ".parquet"
ARROW_SUFFIXES = (".arrow", ".feather")
PACKED_SUFFIXES = {".gz": "gz", ".zst": "zst"}

#: A standard library smaller than this (some distributions strip it) is filled up with the installed packages' text.
DEFAULT_CORPUS_BYTES = 16 * MIB
_PACKAGES = ("site-packages", "dist-packages")
#: Bad records that are shown.
SHOWN = 8
#: `datasets` describes a saved dataset in some kilobytes.
_MAX_STATE_BYTES = 16 * MIB


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """How to read a corpus."""

    #: Stop after this many bytes of text (UTF-8); the document under way is cut at a character. None: all.
    limit_bytes: int | None = None
    #: Member of a .jsonl line and column of a .parquet or .arrow file that hold the text.
    text_field: str = "text"
    #: Suffixes of text files in a folder besides `TEXT_SUFFIXES`, with the dot: `(".c", ".h")`.
    extra_suffixes: tuple[str, ...] = ()
    #: What becomes of records that cannot be read: "fail", or "skip" to count them and leave them out.
    bad: str = "fail"

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.limit_bytes <= 0:
            raise UsageError("limit_bytes is not a size", expected="more than 0", found=str(self.limit_bytes))
        if not self.text_field:
            raise UsageError("text_field is empty", expected="the name of a JSON member or column")
        for suffix in self.extra_suffixes:
            if not suffix.startswith(".") or len(suffix) < 2:
                raise UsageError("extra_suffixes holds no suffix", expected="a dot and letters", found=repr(suffix))
        if self.bad not in ("fail", "skip"):
            raise UsageError("what to do with bad records", expected='"fail" or "skip"', found=repr(self.bad))


@dataclass
class CorpusCounts:
    """What one pass over a corpus met; complete when the pass is."""

    documents: int = 0
    text_bytes: int = 0
    #: Bytes of the sources read so far, out of `Corpus.size_bytes`.
    source_bytes: float = 0.0
    #: Documents in which bytes that are not UTF-8 became U+FFFD.
    replaced_documents: int = 0
    #: Documents without a character.
    empty_documents: int = 0
    #: Records, and rests of files, that could not be read, and were left out.
    bad_records: int = 0
    #: The first of them, in words.
    bad_shown: list[str] = field(default_factory=list)
    #: The byte limit ended the pass.
    limited: bool = False

    def skip(self, error: DatasetError) -> None:
        """A record that is left out."""
        self.bad_records += 1
        if len(self.bad_shown) < SHOWN:
            self.bad_shown.append(printable(str(error)))


@dataclass(frozen=True, kw_only=True)
class Corpus:
    """Sources in their order. Made by `open_corpus`; read by `pieces`, as often as needed."""

    #: For people and the manifest: what was asked for.
    description: str
    sources: tuple[Source, ...]
    options: CorpusOptions = field(default_factory=CorpusOptions)
    #: Files of a folder that are of no known kind.
    ignored_files: int = 0

    @property
    def size_bytes(self) -> int:
        """Of all sources, as they lie on disk."""
        return sum(source.size_bytes for source in self.sources)

    def fingerprint(self) -> str:
        """Of names, sizes and times of the sources: another one where any of them was changed."""
        digest = hashlib.sha256()
        for source in self.sources:
            name = os.fsencode(source.name)
            facts = f"{len(name)} {source.kind} {source.packed} {source.size_bytes} {source.stamp}\0"
            digest.update(facts.encode() + name)
        return digest.hexdigest()

    def spread(self, wanted_bytes: int) -> Corpus:
        """Every n-th source, so that about `wanted_bytes` of them, and not much less, are left: a sample that is more
        than the start of the alphabet. Where the corpus has a limit it is a sample of what comes before it."""
        sources, total = self.sources, 0
        if self.options.limit_bytes is not None:
            for count, source in enumerate(sources):
                if total >= self.options.limit_bytes:
                    sources = sources[:count]
                    break
                total += source.size_bytes
        stride = max(1, sum(source.size_bytes for source in sources) // wanted_bytes)
        return replace(self, sources=sources[::stride])

    def pieces(self, counts: CorpusCounts, limit_bytes: int | None = None) -> Iterator[Piece]:
        """All documents, piece by piece, in order; `counts` is kept up to date before each piece is given.

        `limit_bytes`: a tighter limit for this pass (training of a tokenizer). `DatasetError`: see the module text.
        """
        limits = [limit for limit in (limit_bytes, self.options.limit_bytes) if limit is not None]
        portions = (Portion(source) for source in self.sources)
        return pieces(portions, self.options, counts, min(limits) if limits else None)


def pieces(
    portions: Iterator[Portion] | Sequence[Portion], options: CorpusOptions, counts: CorpusCounts, limit: int | None
) -> Iterator[Piece]:
    """The documents of these portions, as `Corpus.pieces` gives them; `limit`: bytes of text."""

    bad = bad_of(options, counts)
    document_empty = True
    document_replaced = False
    for portion in portions:
        for piece in read(portion, options.text_field, bad):
            counts.source_bytes += piece.source_bytes
            text_bytes = len(piece.text.encode("utf-8", "surrogatepass"))
            if limit is not None and counts.text_bytes + text_bytes >= limit:
                piece, text_bytes = _cut(piece, limit - counts.text_bytes)
                counts.limited = True
            counts.text_bytes += text_bytes
            document_empty = document_empty and not piece.text
            document_replaced = document_replaced or piece.replaced
            if piece.last:
                counts.empty_documents += document_empty
                counts.replaced_documents += document_replaced
                counts.documents += not document_empty
            if not (piece.last and document_empty):
                yield piece
            if piece.last:
                document_empty, document_replaced = True, False
            if counts.limited:
                return


def bad_of(options: CorpusOptions, counts: CorpusCounts) -> Bad:
    """What becomes of bad records."""

    def fail(error: DatasetError) -> None:
        if error.next_step is None:
            error.next_step = "mend it, or leave what is bad out: --bad skip"
        raise error

    def skip(error: DatasetError) -> None:
        if isinstance(error, CorpusUnreadable):
            raise error
        counts.skip(error)

    return skip if options.bad == "skip" else fail


def open_corpus(path: str | os.PathLike[str] | None, options: CorpusOptions | None = None) -> Corpus:
    """The corpus at `path` (a folder or one file, or an fsspec URL of one), or the text that comes with this Python
    where it is None.

    `DatasetError`: there is no such path, no file of a known kind in it, or a file cannot be examined.
    """
    options = options or CorpusOptions()
    text_suffixes = TEXT_SUFFIXES + tuple(suffix.lower() for suffix in options.extra_suffixes)
    if path is None:
        sources = _python_text()
        if not sources:
            raise DatasetError(
                "this Python comes without its library's source",
                where=sysconfig.get_path("stdlib"),
                next_step="name a corpus: --corpus PATH",
            )
        return Corpus(description="Python's standard library", sources=sources, options=options)
    where = os.fspath(path)
    folder, found = places.look(where)
    if folder:
        sources, ignored = _folder(where, found, text_suffixes)
        if not sources:
            known = (*text_suffixes, *JSONL_SUFFIXES, PARQUET_SUFFIX, *ARROW_SUFFIXES)
            raise DatasetError(
                "the corpus is empty",
                where=where,
                expected="files with " + ", ".join(known),
                found=f"{ignored} other files",
                next_step="files of other kinds are kept as records: --records",
            )
    else:
        # Named by itself a file is text unless its suffix says otherwise.
        kind, packed = _kind(found[0].name, text_suffixes) or ("text", _packed(found[0].name.lower())[1])
        sources, ignored = (source_of(found[0], kind, packed),), 0
    if not any(source.size_bytes for source in sources):
        raise DatasetError("the corpus is empty", where=where, expected="text", found=f"{len(sources)} empty files")
    return Corpus(description=printable(where), sources=sources, options=options, ignored_files=ignored)


def printable(text: str) -> str:
    """Names of files need not be UTF-8."""
    return text.encode("utf-8", "backslashreplace").decode()


def _packed(name: str) -> tuple[str, str]:
    """A name without what says how it is packed, and that."""
    for suffix, packed in PACKED_SUFFIXES.items():
        if name.endswith(suffix):
            return name[: -len(suffix)], packed
    return name, ""


def _kind(name: str, text_suffixes: tuple[str, ...]) -> tuple[str, str] | None:
    lowered, packed = _packed(name.lower())
    if lowered.endswith(JSONL_SUFFIXES) or (packed and lowered.endswith(".json")):
        return "jsonl", packed
    if not packed and lowered.endswith(PARQUET_SUFFIX):
        return "parquet", ""
    if not packed and lowered.endswith(ARROW_SUFFIXES):
        return "arrow", ""
    return ("text", packed) if lowered.endswith(text_suffixes) else None


def source_of(found: places.Found, kind: str, packed: str) -> Source:
    return Source(
        location=found.location, name=found.name, kind=kind, size_bytes=found.size_bytes, stamp=found.stamp,
        packed=packed,
    )  # fmt: skip


def _folder(
    where: str, found: Sequence[places.Found], text_suffixes: tuple[str, ...]
) -> tuple[tuple[Source, ...], int]:
    """Sources of a folder, and how many files are of no known kind."""
    saved = _saved_dataset(where, {each.name: each for each in found})
    if saved is not None:
        return tuple(source_of(each, "arrow", "") for each in saved), 0
    sources = []
    for each in found:
        kind = _kind(each.name, text_suffixes)
        if kind is not None:
            sources.append(source_of(each, *kind))
    return tuple(sources), len(found) - len(sources)


def _saved_dataset(where: str, files: dict[str, places.Found]) -> list[places.Found] | None:
    """The files, in their order, of a dataset that `datasets` saved: others beside them are caches, and not part of it.
    None where the folder is none."""
    if "dataset_dict.json" in files:
        splits = sorted(name.partition("/")[0] for name in files if name.endswith("/state.json"))
        raise DatasetError(
            "the folder holds several datasets", where=where, found=", ".join(splits), next_step="name one of them"
        )
    state = files.get("state.json")
    if state is None or not any(name.endswith(".arrow") for name in files):
        return None
    try:
        if state.size_bytes > _MAX_STATE_BYTES:
            raise ValueError(format_bytes(state.size_bytes))
        with places.open_binary(state.location) as file:
            said = json.loads(file.read(_MAX_STATE_BYTES))
        names = [str(each["filename"]) for each in said["_data_files"]]
        indices = said.get("_indices_data_files")
    except (OSError, ValueError, RecursionError, KeyError, TypeError, AttributeError) as error:
        raise DatasetError(
            "a saved dataset's state cannot be read", where=state.location, found=places.reason(error)
        ) from error
    if indices:
        raise DatasetError(
            "the saved dataset is a selection of its files' rows", where=where,
            next_step="save it as it is meant: dataset.flatten_indices().save_to_disk(...)",
        )  # fmt: skip
    missing = [name for name in names if name not in files]
    if missing or not names:
        raise DatasetError("a saved dataset lacks files", where=where, found=", ".join(map(str, missing[:4])) or "none")
    return [files[name] for name in names]


def _python_text() -> tuple[Source, ...]:
    """The standard library, and where that is small the installed packages after it."""
    stdlib = places.below(sysconfig.get_path("stdlib"), (*_PACKAGES, "__pycache__"))
    sources = _text_of(stdlib)
    if sum(source.size_bytes for source in sources) < DEFAULT_CORPUS_BYTES:
        packages = Path(sysconfig.get_path("purelib"))
        if packages.is_dir():
            sources += _text_of(places.below(str(packages), ("__pycache__",)))
    return sources


def _text_of(found: Sequence[places.Found]) -> tuple[Source, ...]:
    return tuple(source_of(each, "text", "") for each in found if _kind(each.name, TEXT_SUFFIXES) == ("text", ""))


def _cut(piece: Piece, room: int) -> tuple[Piece, int]:
    """The start of a piece, at most `room` bytes of UTF-8, as the end of its document."""
    encoded = piece.text.encode("utf-8", "surrogatepass")[:room]
    text = encoded.decode("utf-8", "ignore")
    return (
        Piece(text=text, last=True, source_bytes=piece.source_bytes, replaced=piece.replaced),
        len(text.encode("utf-8")),
    )
