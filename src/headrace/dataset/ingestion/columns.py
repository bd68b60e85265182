"""Documents out of tables: a column of Parquet files, and of Arrow files as `datasets` keeps them."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from headrace.dataset.ingestion.places import reason
from headrace.dataset.ingestion.readers import Bad, Piece, Portion, Source, in_pieces, opened
from headrace.errors import DatasetError
from headrace.units import MIB

#: Rows of Parquet that are in memory at once, and their bytes, as far as rows are alike; of Arrow it is the file's own
#: batches.
PARQUET_ROWS = 256
PARQUET_BYTES = 64 * MIB


def read_parquet(portion: Portion, text_field: str, bad: Bad) -> Iterator[Piece]:
    """The row groups that begin in the portion, where each group has an even share of the file's bytes."""
    source = portion.source
    library = _library(source)
    try:
        with opened(source) as content:
            metadata = library.parquet.read_metadata(content.file)
            _check_column(metadata.schema.to_arrow_schema(), text_field, source)
            count, size = metadata.num_row_groups, source.size_bytes
            stop = size if portion.stop is None else portion.stop
            groups = [group for group in range(count) if portion.start <= group * size // count < stop]
            row_bytes = size / max(1, metadata.num_rows)
            row = sum(metadata.row_group(group).num_rows for group in range(groups[0])) if groups else 0
            rows = _rows(metadata, groups, text_field)
            with library.parquet.ParquetFile(content.file, metadata=metadata, read_dictionary=[text_field]) as file:
                for batch in file.iter_batches(rows, groups, columns=[text_field], use_threads=False):
                    yield from _texts(batch.column(0), row, row_bytes, text_field, source, bad)
                    row += batch.num_rows
    except DatasetError as error:
        bad(error)
    except (library.ArrowException, OSError) as error:
        _refuse("not a Parquet file that can be read", source, error, bad)


def _rows(metadata: Any, groups: Sequence[int], text_field: str) -> int:
    """To be read at once. That texts which are there often stay in their dictionary is the other half of the bound."""
    largest = 1.0
    for group in map(metadata.row_group, groups):
        for place in range(group.num_columns):
            column = group.column(place)
            if column.path_in_schema == text_field:
                largest = max(largest, column.total_uncompressed_size / max(1, group.num_rows))
                break
    return max(1, min(PARQUET_ROWS, int(PARQUET_BYTES / largest)))


def read_arrow(portion: Portion, text_field: str, bad: Bad) -> Iterator[Piece]:
    """An IPC file or stream, batch by batch."""
    source = portion.source
    library = _library(source)
    try:
        with opened(source) as content:
            row, first = 0, True
            for batch in _batches(library, content.file, portion):
                if first:
                    _check_column(batch.schema, text_field, source)
                    first = False
                each = max(0, content.taken()) / max(1, batch.num_rows)
                yield from _texts(batch.column(text_field), row, each, text_field, source, bad)
                row += batch.num_rows
    except DatasetError as error:
        bad(error)
    except (library.ArrowException, OSError) as error:
        _refuse("not an Arrow file that can be read", source, error, bad)


def _batches(library: Any, file: Any, portion: Portion) -> Iterator[Any]:
    try:
        found = library.ipc.open_file(file)
    except library.ArrowInvalid:
        # A stream has no list of its batches: who has its begin reads all of it.
        if portion.start == 0:
            file.seek(0)
            yield from library.ipc.open_stream(file)
        return
    count, size = found.num_record_batches, portion.source.size_bytes
    stop = size if portion.stop is None else portion.stop
    for index in range(count):
        if portion.start <= index * size // count < stop:
            yield found.get_batch(index)


def _texts(column: Any, row: int, row_bytes: float, text_field: str, source: Source, bad: Bad) -> Iterator[Piece]:
    # Rows of a part of a file are counted from its begin.
    for place, value in enumerate(column, row):
        try:
            text = value.as_py()
        except UnicodeDecodeError as error:
            where = f"{source.location}, row {place}"
            bad(DatasetError("a column's text is not UTF-8", where=where, found=error.reason))
            continue
        if text is None:
            bad(DatasetError(f"the column {text_field!r} has no text", where=f"{source.location}, row {place}"))
            continue
        yield from in_pieces(text, row_bytes, False)


def _check_column(schema: Any, text_field: str, source: Source) -> None:
    if schema.names.count(text_field) != 1:
        raise DatasetError(
            f"there is no column {text_field!r}" if text_field not in schema.names else "two columns have one name",
            where=source.location,
            found=", ".join(schema.names[:16]) or "no columns",
            next_step="name it: --text-field",
        )
    import pyarrow.types as types

    kind = schema.field(text_field).type
    plain = kind.value_type if types.is_dictionary(kind) else kind
    is_view = getattr(types, "is_string_view", lambda _: False)
    if not (types.is_string(plain) or types.is_large_string(plain) or is_view(plain)):
        raise DatasetError(
            f"the column {text_field!r} is no text", where=source.location, expected="string", found=str(kind)
        )


def _refuse(what: str, source: Source, error: BaseException, bad: Bad) -> None:
    if isinstance(error, OSError) and (error.errno is not None or type(error) is not OSError):
        raise error
    # pyarrow calls damage an OSError, too, a plain one without a number.
    bad(DatasetError(what, where=source.location, found=reason(error)))


def _library(source: Source) -> Any:
    try:
        import pyarrow
        import pyarrow.ipc
        import pyarrow.parquet
    except ImportError:
        raise DatasetError(
            "reading Parquet and Arrow needs pyarrow",
            where=source.location,
            next_step="pip install 'headrace[dataset]'",
        ) from None
    return pyarrow
