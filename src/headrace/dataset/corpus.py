"""Where documents come from: files in a fixed order, read as a stream.

A corpus is a list of sources in the byte order of their relative paths, so that the same files give the same stream on
every machine. Its documents come in pieces (`headrace.dataset.readers`), so that one of any size passes through bounded
memory.

| kind | one document is | files |
|---|---|---|
| text | one file | `.txt`, `.md`, `.rst`, `.py`, and suffixes that the caller names |
| jsonl | one line's field (`text`) | `.jsonl` |
| parquet | one row of a column (`text`) | `.parquet`, by record batch of a row group |

Text is UTF-8. What is not is replaced by U+FFFD, and the documents in which that happened are counted and shown, for a
corpus of millions of files must not stop at one of them. Empty documents are counted and left out. Everything else that
is wrong (a line that is not JSON, a missing column, a file that cannot be read) stops the ingest with file and line.
"""

from __future__ import annotations

import os
import sysconfig
from collections.abc import Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path

from headrace.dataset.readers import Piece, Source, read, reason
from headrace.errors import DatasetError, UsageError
from headrace.units import MIB

TEXT_SUFFIXES = (".txt", ".md", ".rst", ".py")
JSONL_SUFFIX = ".jsonl"
PARQUET_SUFFIX = ".parquet"

#: A standard library smaller than this (some distributions strip it) is filled up with the installed packages' text.
DEFAULT_CORPUS_BYTES = 16 * MIB
_PACKAGES = ("site-packages", "dist-packages")


@dataclass(frozen=True, kw_only=True)
class CorpusOptions:
    """How to read a corpus."""

    #: Stop after this many bytes of text (UTF-8); the document under way is cut at a character. None: all.
    limit_bytes: int | None = None
    #: Member of a .jsonl line and column of a .parquet file that hold the text.
    text_field: str = "text"
    #: Suffixes of text files in a folder besides `TEXT_SUFFIXES`, with the dot: `(".c", ".h")`.
    extra_suffixes: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        if self.limit_bytes is not None and self.limit_bytes <= 0:
            raise UsageError("limit_bytes is not a size", expected="more than 0", found=str(self.limit_bytes))
        if not self.text_field:
            raise UsageError("text_field is empty", expected="the name of a JSON member or column")
        for suffix in self.extra_suffixes:
            if not suffix.startswith(".") or len(suffix) < 2:
                raise UsageError("extra_suffixes holds no suffix", expected="a dot and letters", found=repr(suffix))


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
    #: The byte limit ended the pass.
    limited: bool = False


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
        limit = min(limits) if limits else None
        document_empty = True
        document_replaced = False
        for source in self.sources:
            for piece in read(source, self.options.text_field):
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


def open_corpus(path: str | os.PathLike[str] | None, options: CorpusOptions | None = None) -> Corpus:
    """The corpus at `path` (a folder or one file), or the text that comes with this Python where it is None.

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
    root = Path(path)
    ignored = 0
    if root.is_dir():
        sources, ignored = _folder(root, text_suffixes)
        if not sources:
            raise DatasetError(
                "the corpus is empty",
                where=str(root),
                expected="files with " + ", ".join((*text_suffixes, JSONL_SUFFIX, PARQUET_SUFFIX)),
                found=f"{ignored} other files",
            )
    elif root.is_file():
        # Named by itself a file is text unless its suffix says otherwise.
        kind = _kind(root.name, text_suffixes) or "text"
        sources = (Source(path=root, kind=kind, size_bytes=root.stat().st_size),)
    else:
        raise DatasetError("there is no such corpus", where=str(root), expected="a folder or a file")
    if not any(source.size_bytes for source in sources):
        raise DatasetError("the corpus is empty", where=str(root), expected="text", found=f"{len(sources)} empty files")
    return Corpus(description=str(path), sources=sources, options=options, ignored_files=ignored)


def _kind(name: str, text_suffixes: tuple[str, ...]) -> str | None:
    lowered = name.lower()
    if lowered.endswith(JSONL_SUFFIX):
        return "jsonl"
    if lowered.endswith(PARQUET_SUFFIX):
        return "parquet"
    return "text" if lowered.endswith(text_suffixes) else None


def _folder(
    root: Path, text_suffixes: tuple[str, ...], without: tuple[str, ...] = ()
) -> tuple[tuple[Source, ...], int]:
    """Files under `root` in the byte order of their paths; hidden ones and links to folders are left out."""
    found: list[tuple[bytes, Source]] = []
    ignored = 0

    def stop(error: OSError) -> None:
        raise DatasetError("a folder of the corpus cannot be read", where=str(error.filename), found=reason(error))

    for folder, folders, names in os.walk(root, onerror=stop):
        folders[:] = [name for name in folders if not name.startswith(".") and name not in without]
        for name in names:
            kind = None if name.startswith(".") else _kind(name, text_suffixes)
            path = Path(folder, name)
            if kind is None or not path.is_file():
                ignored += 1
                continue
            relative = os.fsencode(path.relative_to(root).as_posix())
            found.append((relative, Source(path=path, kind=kind, size_bytes=path.stat().st_size)))
    found.sort(key=lambda entry: entry[0])
    return tuple(source for _, source in found), ignored


def _python_text() -> tuple[Source, ...]:
    """The standard library, and where that is small the installed packages after it."""
    without = (*_PACKAGES, "__pycache__")
    sources, _ = _folder(Path(sysconfig.get_path("stdlib")), TEXT_SUFFIXES, without)
    if sum(source.size_bytes for source in sources) < DEFAULT_CORPUS_BYTES:
        packages = Path(sysconfig.get_path("purelib"))
        if packages.is_dir():
            sources += _folder(packages, TEXT_SUFFIXES, ("__pycache__",))[0]
    return sources


def _cut(piece: Piece, room: int) -> tuple[Piece, int]:
    """The start of a piece, at most `room` bytes of UTF-8, as the end of its document."""
    encoded = piece.text.encode("utf-8", "surrogatepass")[:room]
    text = encoded.decode("utf-8", "ignore")
    return (
        Piece(text=text, last=True, source_bytes=piece.source_bytes, replaced=piece.replaced),
        len(text.encode("utf-8")),
    )
