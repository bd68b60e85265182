"""Files to documents, piece by piece.

A document comes in pieces of at most `PIECE_CHARACTERS`, cut behind the last line break that fits, or hard where a line
is longer. The cuts depend on the text alone, not on the kind of file it came from. So a document of any size passes
through bounded memory, and the tokenizer's threads get work of even size. A token never reaches over a cut.

A **portion** is what one worker reads of a file. Lines belong to the portion in which they begin, row groups of Parquet
and batches of Arrow to the one that their share of the file begins in; everything else is read whole. So the portions
of a file together give each document once, in order, wherever they are cut.

What is wrong with a record (a line that is not JSON), or with a file from some place on (a gzip file that was cut off),
goes to `bad`, which raises it, or counts it and lets the reading go on behind it. A file whose bytes could not be had
(a disk's or a network's error) is no such thing: `CorpusUnreadable` always ends the reading.
"""

from __future__ import annotations

import codecs
import gzip
import io
import json
import re
import zlib
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any, BinaryIO, TypeAlias, cast

from headrace.dataset.ingestion.places import AGAIN, is_url, one, open_binary, reason
from headrace.errors import CorpusUnreadable, DatasetError, HeadraceError
from headrace.units import KIB, MIB, format_bytes

PIECE_CHARACTERS = 256 * KIB
#: Most bytes of one line of a .jsonl file: it must be in memory whole to be parsed.
LINE_BYTES = 64 * MIB
#: Values of a line, which take much more memory than they have bytes; counted where a line has so many bytes.
LINE_VALUES = 1 << 20
_STRINGS = re.compile(r'"[^"\\]*(?:\\.[^"\\]*)*(?:"|\\?\Z)', re.DOTALL)
#: What is read at a time of a file that is unpacked, or of which lines are counted.
_BLOCK_BYTES = 256 * KIB
_EVERYWHERE = "all machines must see the same files under the same names: a shared folder, or a URL"


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a document."""

    text: str
    #: The document ends with this piece.
    last: bool
    #: Bytes of the source that were read for it: sizes in the file system's terms, for progress.
    source_bytes: float
    #: Some bytes were not UTF-8 and stand as U+FFFD.
    replaced: bool = False


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """One file."""

    #: A path, or an fsspec URL.
    location: str
    #: Its path below the corpus.
    name: str
    #: "text", "jsonl", "parquet" or "arrow"; of records "tar" or "file"; "raw" for tokens.
    kind: str
    size_bytes: int
    #: Changes when the content does: time of the last change, or what an object store calls it.
    stamp: str = ""
    #: "gz", "zst", or as it is.
    packed: str = ""

    @property
    def path(self) -> Path:
        return Path(self.location)

    @property
    def divisible(self) -> bool:
        """Its portions can be read without what lies before them."""
        return self.kind in ("parquet", "arrow", "raw") or (self.kind == "jsonl" and not self.packed)


@dataclass(frozen=True, slots=True)
class Portion:
    """Bytes `[start, stop)` of a file as it lies (stop None: to its end)."""

    source: Source
    start: int = 0
    stop: int | None = None

    @property
    def size_bytes(self) -> int:
        return (self.source.size_bytes if self.stop is None else self.stop) - self.start


#: Takes what is wrong with a record or the rest of a file.
Bad: TypeAlias = Callable[[DatasetError], None]


def read(portion: Portion, text_field: str, bad: Bad) -> Iterator[Piece]:
    """Every document of one portion. What `bad` is given names file and line, row or column."""
    from headrace.dataset.ingestion.columns import read_arrow, read_parquet

    readers = {"text": _read_text, "jsonl": _read_jsonl, "parquet": read_parquet, "arrow": read_arrow}
    source, inside = portion.source, False
    try:
        for piece in readers[source.kind](portion, text_field, bad):
            inside = not piece.last
            yield piece
    except DatasetError:
        raise
    except Exception as error:
        damage = wrong(source, error)
        if damage is None:
            raise
        bad(damage)
        if inside:
            # A part of this document is out already: it ends here.
            yield Piece(text="", last=True, source_bytes=0)


def check_sources(portions: Sequence[Portion]) -> None:
    """Are these the files that were listed? On another machine others may have their names. DatasetError."""
    for source in {portion.source.location: portion.source for portion in portions}.values():
        try:
            found = one(source.location)
        except (DatasetError, OSError) as error:
            said = error.found if isinstance(error, DatasetError) else reason(error)
            raise CorpusUnreadable(
                "a file of the corpus is not there", where=source.location, found=said, next_step=_EVERYWHERE
            ) from error
        if (found.size_bytes, found.stamp) != (source.size_bytes, source.stamp):
            raise DatasetError(
                "a file of the corpus is another one, or was changed", where=source.location,
                expected=f"{source.size_bytes} bytes, stamp {source.stamp}",
                found=f"{found.size_bytes} bytes, stamp {found.stamp}", next_step=_EVERYWHERE,
            )  # fmt: skip


def wrong(source: Source, error: Exception) -> DatasetError | None:
    """What an error while this file was read means; None: a defect of ours."""
    if _damaged(source, error):
        return DatasetError("a packed file is damaged or cut off", where=source.location, found=reason(error))
    if isinstance(error, OSError) or (is_url(source.location) and not isinstance(error, HeadraceError)):
        return CorpusUnreadable(
            "a file of the corpus cannot be read", where=source.location, found=reason(error), next_step=AGAIN
        )
    return None


def _damaged(source: Source, error: Exception) -> bool:
    """Are the bytes wrong, whenever they are read? Else only this reading failed."""
    if not source.packed:
        return False
    if isinstance(error, (EOFError, zlib.error, gzip.BadGzipFile)):
        return True
    # pyarrow calls damage a plain OSError without a number; what networks and disks raise has one, or is a kind of it.
    return source.packed == "zst" and type(error) is OSError and error.errno is None


class Opened:
    """A file of the corpus, unpacked."""

    def __init__(self, source: Source, raw: BinaryIO) -> None:
        self._raw = raw
        self._before = 0
        self.file: BinaryIO = raw
        if source.packed == "gz":
            unpacked = cast("io.RawIOBase", gzip.GzipFile(fileobj=raw, mode="rb"))
            self.file = io.BufferedReader(unpacked, _BLOCK_BYTES)
        elif source.packed == "zst":
            self.file = io.BufferedReader(_Zstandard(raw, source.location), _BLOCK_BYTES)

    def taken(self) -> int:
        """Bytes of the file as it lies that were read since this was asked the last time."""
        now = self._raw.tell()
        before, self._before = self._before, now
        return now - before


@contextmanager
def opened(source: Source) -> Iterator[Opened]:
    with open_binary(source.location) as raw:
        yield Opened(source, raw)


class _Zstandard(io.RawIOBase):
    """Unpacked by pyarrow, which Parquet needs anyway."""

    def __init__(self, raw: BinaryIO, where: str) -> None:
        try:
            import pyarrow
        except ImportError:
            raise CorpusUnreadable(
                "reading .zst needs pyarrow", where=where, next_step="pip install 'headrace[dataset]'"
            ) from None
        self._stream = pyarrow.CompressedInputStream(pyarrow.PythonFile(cast("io.IOBase", raw), mode="r"), "zstd")

    def readable(self) -> bool:
        return True

    def readinto(self, buffer: Any) -> int:
        data = self._stream.read(len(buffer))
        buffer[: len(data)] = data
        return len(data)


def _read_text(portion: Portion, text_field: str, bad: Bad) -> Iterator[Piece]:
    source = portion.source
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    replaced = False
    text = ""
    read_bytes = 0
    with opened(source) as content:
        first = True
        while block := content.file.read(PIECE_CHARACTERS):
            if first and b"\0" in block:
                bad(DatasetError("a text file holds binary data", where=source.location, found="a zero byte"))
                return
            first = False
            try:
                text += decoder.decode(block)
            except UnicodeDecodeError:
                # A failed call changes nothing in the decoder, so the same block can be decoded again.
                decoder.errors = "replace"
                replaced = True
                text += decoder.decode(block)
            read_bytes += content.taken()
            start = 0
            while end := cut(text, start):
                yield Piece(text=text[start:end], last=False, source_bytes=read_bytes, replaced=replaced)
                start, read_bytes = end, 0
            text = text[start:]
    cut_off = decoder.getstate()[0]
    if cut_off:
        decoder.errors = "replace"
        text += decoder.decode(b"", final=True)
    yield Piece(text=text, last=True, source_bytes=read_bytes, replaced=replaced or bool(cut_off))


def _read_jsonl(portion: Portion, text_field: str, bad: Bad) -> Iterator[Piece]:
    source = portion.source
    with opened(source) as content:
        file = content.file
        place = 0
        if portion.start:
            # The line that begins here, or the first one behind it.
            file.seek(portion.start - 1)
            content.taken()
            place = portion.start - 1 + _skip_line(file)
        number = 0
        line_of = _Lines(source, place)
        while portion.stop is None or place < portion.stop:
            line = file.readline(LINE_BYTES + 1)
            if not line:
                break
            number += 1
            place += len(line)
            if len(line) > LINE_BYTES:
                where = line_of(number)
                place += _skip_line(file)
                bad(DatasetError("a line is too long", where=where, expected=f"at most {format_bytes(LINE_BYTES)}"))
                continue
            if line.isspace():
                continue
            try:
                encoded, replaced = line.decode("utf-8"), False
            except UnicodeDecodeError:
                encoded, replaced = line.decode("utf-8", "replace"), True
            try:
                text = _member(encoded, text_field)
            except DatasetError as error:
                error.where = line_of(number)
                bad(error)
                continue
            yield from in_pieces(text, content.taken(), replaced)


def _skip_line(file: BinaryIO) -> int:
    """Read to behind the next line break; returns how many bytes that were."""
    skipped = 0
    while block := file.readline(_BLOCK_BYTES):
        skipped += len(block)
        if block.endswith(b"\n"):
            break
    return skipped


class _Lines:
    """Where the `number`-th line from byte `begin` on is. The lines before are only counted when that is asked, and
    once: there may be as many bad lines as good ones."""

    def __init__(self, source: Source, begin: int) -> None:
        self._source, self._begin = source, begin
        self._before: int | None = None

    def __call__(self, number: int) -> str:
        if self._before is None:
            self._before = self._count()
        return f"{self._source.location}:{self._before + number}"

    def _count(self) -> int:
        before, left = 0, self._begin
        if left:
            with open_binary(self._source.location) as file:
                while left > 0 and (block := file.read(min(_BLOCK_BYTES, left))):
                    before += block.count(b"\n")
                    left -= len(block)
        return before


def _member(line: str, text_field: str) -> str:
    if len(line) > LINE_VALUES:
        bare = _STRINGS.sub("", line)
        if (values := sum(bare.count(sign) for sign in "{[,")) > LINE_VALUES:
            raise DatasetError("a line has too many values", expected=f"at most {LINE_VALUES}", found=f"about {values}")
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        message = getattr(error, "msg", None) or type(error).__name__
        raise DatasetError("a line is not JSON", found=str(message)) from None
    if not isinstance(record, dict):
        raise DatasetError("a line is not a JSON object", found=type(record).__name__)
    if text_field not in record:
        names = ", ".join(list(record)[:8])
        raise DatasetError(
            f"a line has no member {text_field!r}", found=names or "none", next_step="name it: --text-field"
        )
    value = record[text_field]
    if not isinstance(value, str):
        raise DatasetError(f"the member {text_field!r} is no text", expected="a string", found=type(value).__name__)
    return value


def in_pieces(text: str, source_bytes: float, replaced: bool) -> Iterator[Piece]:
    """One document in memory, cut at line breaks."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair, which is no text in any encoding.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        replaced = True
    start = 0
    while end := cut(text, start):
        yield Piece(text=text[start:end], last=False, source_bytes=0, replaced=replaced)
        start = end
    yield Piece(text=text[start:], last=True, source_bytes=source_bytes, replaced=replaced)


def cut(text: str, start: int) -> int:
    """Where the piece that begins at `start` ends; 0 where the rest is one piece, perhaps an unfinished one."""
    end = start + PIECE_CHARACTERS
    if len(text) <= end:
        return 0
    return text.rfind("\n", start, end) + 1 or end
