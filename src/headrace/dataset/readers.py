"""Files to documents, piece by piece.

A document comes in pieces of at most `PIECE_CHARACTERS`, cut behind the last line break that fits, or hard where a line
is longer. The cuts depend on the text alone, not on the kind of file it came from. So a document of any size passes
through bounded memory, and the tokenizer's threads get work of even size. A token never reaches over a cut.
"""

from __future__ import annotations

import codecs
import json
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace.errors import DatasetError
from headrace.units import KIB, MIB, format_bytes

PIECE_CHARACTERS = 256 * KIB
#: Most bytes of one line of a .jsonl file: it must be in memory whole to be parsed.
LINE_BYTES = 256 * MIB
#: Rows of a .parquet file that are in memory at once.
PARQUET_ROWS = 256


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

    path: Path
    #: "text", "jsonl" or "parquet".
    kind: str
    size_bytes: int


def read(source: Source, text_field: str) -> Iterator[Piece]:
    """Every document of one file. `DatasetError` names file and line, row or column."""
    readers = {"text": _read_text, "jsonl": _read_jsonl, "parquet": _read_parquet}
    try:
        yield from readers[source.kind](source, text_field)
    except OSError as error:
        raise DatasetError(
            "a file of the corpus cannot be read", where=str(source.path), found=reason(error)
        ) from error


def reason(error: OSError) -> str:
    """What the operating system says, without number and path."""
    return error.strerror or type(error).__name__


def _read_text(source: Source, text_field: str) -> Iterator[Piece]:
    decoder = codecs.getincrementaldecoder("utf-8")("strict")
    replaced = False
    text = ""
    read_bytes = 0
    with source.path.open("rb") as file:
        while block := file.read(PIECE_CHARACTERS):
            try:
                text += decoder.decode(block)
            except UnicodeDecodeError:
                # A failed call changes nothing in the decoder, so the same block can be decoded again.
                decoder.errors = "replace"
                replaced = True
                text += decoder.decode(block)
            read_bytes += len(block)
            start = 0
            while end := _cut(text, start):
                yield Piece(text=text[start:end], last=False, source_bytes=read_bytes, replaced=replaced)
                start, read_bytes = end, 0
            text = text[start:]
    cut_off = decoder.getstate()[0]
    if cut_off:
        decoder.errors = "replace"
        text += decoder.decode(b"", final=True)
    yield Piece(text=text, last=True, source_bytes=read_bytes, replaced=replaced or bool(cut_off))


def _read_jsonl(source: Source, text_field: str) -> Iterator[Piece]:
    with source.path.open("rb") as file:
        number = 0
        while line := file.readline(LINE_BYTES + 1):
            number += 1
            where = f"{source.path}:{number}"
            if len(line) > LINE_BYTES:
                raise DatasetError("a line is too long", where=where, expected=f"at most {format_bytes(LINE_BYTES)}")
            if line.isspace():
                continue
            try:
                text, replaced = line.decode("utf-8"), False
            except UnicodeDecodeError:
                text, replaced = line.decode("utf-8", "replace"), True
            yield from _in_pieces(_member(text, text_field, where), len(line), replaced)


def _member(line: str, text_field: str, where: str) -> str:
    try:
        record: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        message = getattr(error, "msg", None) or type(error).__name__
        raise DatasetError("a line is not JSON", where=where, found=str(message)) from None
    if not isinstance(record, dict):
        raise DatasetError("a line is not a JSON object", where=where, found=type(record).__name__)
    if text_field not in record:
        names = ", ".join(list(record)[:8])
        raise DatasetError(
            f"a line has no member {text_field!r}",
            where=where,
            found=names or "none",
            next_step="name it: --text-field",
        )
    value = record[text_field]
    if not isinstance(value, str):
        raise DatasetError(
            f"the member {text_field!r} is no text", where=where, expected="a string", found=type(value).__name__
        )
    return value


def _read_parquet(source: Source, text_field: str) -> Iterator[Piece]:
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError:
        raise DatasetError(
            "reading Parquet needs pyarrow", where=str(source.path), next_step="pip install 'headrace[dataset]'"
        ) from None
    try:
        with pyarrow.parquet.ParquetFile(source.path) as file:
            schema = file.schema_arrow
            if text_field not in schema.names:
                raise DatasetError(
                    f"there is no column {text_field!r}",
                    where=str(source.path),
                    found=", ".join(schema.names[:16]) or "no columns",
                    next_step="name it: --text-field",
                )
            kind = schema.field(text_field).type
            if not (pyarrow.types.is_string(kind) or pyarrow.types.is_large_string(kind)):
                raise DatasetError(
                    f"the column {text_field!r} is no text", where=str(source.path), expected="string", found=str(kind)
                )
            row_bytes = source.size_bytes / max(1, file.metadata.num_rows)
            row = 0
            for batch in file.iter_batches(PARQUET_ROWS, columns=[text_field], use_threads=False):
                for value in batch.column(0):
                    text = value.as_py()
                    if text is None:
                        raise DatasetError(f"the column {text_field!r} has no text", where=f"{source.path}, row {row}")
                    yield from _in_pieces(text, row_bytes, False)
                    row += 1
    except (pyarrow.ArrowException, OSError) as error:
        if isinstance(error, OSError) and error.errno is not None:
            raise
        # pyarrow calls damage an OSError, too, one without a number.
        first_line = str(error).partition("\n")[0]
        raise DatasetError("not a Parquet file that can be read", where=str(source.path), found=first_line) from error
    except UnicodeDecodeError as error:
        raise DatasetError("a column's text is not UTF-8", where=str(source.path), found=error.reason) from error


def _in_pieces(text: str, source_bytes: float, replaced: bool) -> Iterator[Piece]:
    """One document in memory, cut at line breaks."""
    try:
        text.encode("utf-8")
    except UnicodeEncodeError:
        # JSON can spell half of a surrogate pair, which is no text in any encoding.
        text = text.encode("utf-16", "surrogatepass").decode("utf-16", "replace")
        replaced = True
    start = 0
    while end := _cut(text, start):
        yield Piece(text=text[start:end], last=False, source_bytes=0, replaced=replaced)
        start = end
    yield Piece(text=text[start:], last=True, source_bytes=source_bytes, replaced=replaced)


def _cut(text: str, start: int) -> int:
    """Where the piece that begins at `start` ends; 0 where the rest is one piece, perhaps an unfinished one."""
    end = start + PIECE_CHARACTERS
    if len(text) <= end:
        return 0
    return text.rfind("\n", start, end) + 1 or end
