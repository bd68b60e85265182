"""What documents come in: packed files, tables, URLs; and what becomes of files that are bad."""

from __future__ import annotations

import errno
import gzip
import io
import json
import os
import random
from collections.abc import Iterator
from itertools import pairwise
from pathlib import Path
from typing import Any, BinaryIO

import fsspec
import pyarrow
import pyarrow.ipc
import pyarrow.parquet
import pytest

from headrace.dataset import CorpusOptions, open_corpus
from headrace.dataset.ingestion import columns, readers
from headrace.dataset.ingestion.readers import Portion, read
from headrace.errors import CorpusUnreadable, DatasetError
from tests.dataset.corpora import texts, write_jsonl, write_parquet
from tests.dataset.test_corpus import documents


def _pack(data: bytes, packed: str) -> bytes:
    if packed == "gz":
        # In two members, as `cat a.gz b.gz` makes them.
        return gzip.compress(data[:100]) + gzip.compress(data[100:])
    return pyarrow.compress(data[:100], "zstd", asbytes=True) + pyarrow.compress(data[100:], "zstd", asbytes=True)


@pytest.mark.parametrize("packed", ["gz", "zst"])
@pytest.mark.parametrize("kind", ["txt", "jsonl", "json"])
def test_packed_files(tmp_path: Path, kind: str, packed: str) -> None:
    expected = ["\n".join(texts(40))] if kind == "txt" else texts(40)
    data = expected[0] if kind == "txt" else "".join(json.dumps({"text": text}) + "\n" for text in expected)
    (tmp_path / f"a.{kind}.{packed}").write_bytes(_pack(data.encode(), packed))
    corpus = open_corpus(tmp_path)
    found, counts = documents(corpus)
    assert found == expected
    assert counts.source_bytes <= corpus.size_bytes
    # Named by itself, too.
    assert documents(open_corpus(tmp_path / f"a.{kind}.{packed}"))[0] == expected


@pytest.mark.parametrize("packed", ["gz", "zst"])
def test_a_packed_file_that_is_cut_off_or_damaged(tmp_path: Path, packed: str) -> None:
    chance = random.Random(1)
    lines = [json.dumps({"text": f"{chance.random()}"}) for _ in range(40_000)]
    whole = _pack("\n".join(lines).encode(), packed)
    path = tmp_path / f"a.jsonl.{packed}"
    damaged = bytearray(whole)
    damaged[len(whole) // 2 : len(whole) // 2 + 64] = bytes(64)
    for bad in (whole[: len(whole) // 2], bytes(damaged), b"not packed at all"):
        path.write_bytes(bad)
        with pytest.raises(DatasetError, match=rf"a\.jsonl\.{packed}.*--bad skip") as caught:
            documents(open_corpus(path))
        assert "\n" not in str(caught.value)
        (tmp_path / "b.jsonl").write_text('{"text": "after"}')
        found, counts = documents(open_corpus(tmp_path, CorpusOptions(bad="skip")))
        # What came before the damage, and the next file.
        assert found[-1] == "after" and counts.bad_records >= 1
        assert [json.dumps({"text": text}) for text in found[:100]] == lines[: min(100, len(found) - 1)] + (
            ['{"text": "after"}'] if len(found) <= 100 else []
        )


@pytest.mark.parametrize("packed", ["gz", "zst"])
def test_a_packed_text_ends_at_its_damage(tmp_path: Path, packed: str) -> None:
    chance = random.Random(1)
    text = "".join(f"{chance.random()}\n" for _ in range(60_000))
    whole = _pack(text.encode(), packed)
    (tmp_path / f"a.txt.{packed}").write_bytes(whole[: len(whole) * 2 // 3])
    (tmp_path / "b.txt").write_text("after")
    with pytest.raises(DatasetError, match=r"damaged or cut off.*--bad skip"):
        documents(open_corpus(tmp_path))
    (begin, after), counts = documents(open_corpus(tmp_path, CorpusOptions(bad="skip")))
    assert text.startswith(begin) and len(begin) >= readers.PIECE_CHARACTERS // 2
    assert (after, counts.documents, counts.bad_records) == ("after", 2, 1)


def test_arrow_files_and_saved_datasets(tmp_path: Path) -> None:
    import datasets

    expected = [*texts(90), ""]
    table = pyarrow.table({"n": list(range(91)), "text": expected})
    with pyarrow.ipc.new_file(tmp_path / "a.arrow", table.schema) as writer:
        writer.write_table(table, max_chunksize=20)
    assert documents(open_corpus(tmp_path / "a.arrow"))[0] == texts(90)

    saved = datasets.Dataset.from_dict({"text": expected})
    saved.save_to_disk(tmp_path / "saved", num_shards=3)
    # What `map` leaves beside them is no part of the dataset.
    (tmp_path / "saved" / "cache-1.arrow").write_bytes((tmp_path / "a.arrow").read_bytes())
    corpus = open_corpus(tmp_path / "saved")
    assert [source.name for source in corpus.sources] == [f"data-0000{n}-of-00003.arrow" for n in range(3)]
    found, counts = documents(corpus)
    assert found == texts(90) and counts.empty_documents == 1

    datasets.DatasetDict({"train": saved, "test": saved}).save_to_disk(tmp_path / "splits")
    with pytest.raises(DatasetError, match=r"several datasets.*test, train"):
        open_corpus(tmp_path / "splits")
    state = tmp_path / "saved" / "state.json"
    told = json.loads(state.read_text())
    for change, say in (
        ({"_indices_data_files": [{"filename": "i.arrow"}]}, "flatten_indices"),
        ({"_data_files": [{"filename": "other.arrow"}]}, "lacks files.*other.arrow"),
        ({"_data_files": 3}, "cannot be read"),
    ):
        state.write_text(json.dumps({**told, **change}))
        with pytest.raises(DatasetError, match=say):
            open_corpus(tmp_path / "saved")


def test_columns_of_other_kinds_of_text(tmp_path: Path) -> None:
    column = pyarrow.array(["a", "b", "a"])
    for number, kind in enumerate((pyarrow.large_string(), pyarrow.dictionary(pyarrow.int32(), pyarrow.string()))):
        pyarrow.parquet.write_table(pyarrow.table({"text": column.cast(kind)}), tmp_path / f"{number}.parquet")
    assert documents(open_corpus(tmp_path))[0] == ["a", "b", "a"] * 2


def test_urls(tmp_path: Path) -> None:
    files = fsspec.filesystem("memory")
    folder = f"headrace-{os.getpid()}-{tmp_path.name}"
    try:
        files.pipe({f"/{folder}/b/x.jsonl": b'{"text": "one"}\n{"text": "two"}\n', f"/{folder}/a.txt": b"three"})
        files.pipe({f"/{folder}/c.jsonl.gz": gzip.compress(b'{"text": "four"}'), f"/{folder}/.hidden.txt": b"no"})
        write_parquet(tmp_path / "d.parquet", ["five"])
        files.pipe(f"/{folder}/d.parquet", (tmp_path / "d.parquet").read_bytes())
        corpus = open_corpus(f"memory://{folder}")
        assert [source.name for source in corpus.sources] == ["a.txt", "b/x.jsonl", "c.jsonl.gz", "d.parquet"]
        assert documents(corpus)[0] == ["three", "one", "two", "four", "five"]
        assert documents(open_corpus(f"memory://{folder}/b/x.jsonl"))[0] == ["one", "two"]
        before = open_corpus(f"memory://{folder}").fingerprint()
        assert before == corpus.fingerprint()
        files.pipe(f"/{folder}/a.txt", b"other")
        assert open_corpus(f"memory://{folder}").fingerprint() != before
        files.rm(f"/{folder}/a.txt")
        with pytest.raises(DatasetError, match=r"a\.txt"):
            documents(corpus)
    finally:
        files.rm(f"/{folder}", recursive=True)
    (tmp_path / "e.txt").write_text("six")
    assert documents(open_corpus(f"file://{tmp_path}/e.txt"))[0] == ["six"]
    for url, say in ((f"memory://{folder}", "no such corpus"), ("nowhere://x/y", "nowhere"), ("file:///none", "none")):
        with pytest.raises(DatasetError, match=say):
            open_corpus(url)


def test_portions_give_each_document_once(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(12))
    path.write_text("\n \n" + path.read_text() + '{"text": "the last has no end of line"}')
    write_parquet(tmp_path / "b.parquet", texts(60))
    table = pyarrow.table({"text": texts(60)})
    for name, writer in (("c", pyarrow.ipc.new_file), ("d", pyarrow.ipc.new_stream)):
        with writer(tmp_path / f"{name}.arrow", table.schema) as file:
            file.write_table(table, max_chunksize=7)
    for source in open_corpus(tmp_path).sources:
        whole = [piece.text for piece in read(Portion(source), "text", _raise)]
        for size in (7, 100, 1000, source.size_bytes - 1):
            if size < 100 and source.kind != "jsonl":
                continue
            cuts = [*range(0, source.size_bytes, size), None]
            found, taken = [], 0.0
            for start, stop in pairwise(cuts):
                for piece in read(Portion(source, start or 0, stop), "text", _raise):
                    found.append(piece.text)
                    taken += piece.source_bytes
            assert found == whole, (source.name, size)


def test_rows_that_are_large_are_read_a_few_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    # Each of its own, and one again and again: that stays in its dictionary.
    found = {"own": [f"{number:05}" * 200 for number in range(300)], "same": ["same" * 25_000] * 300}
    for name, rows in found.items():
        pyarrow.parquet.write_table(pyarrow.table({"text": rows}), tmp_path / f"{name}.parquet")
    sizes: list[int] = []
    texts_of = columns._texts

    def spy(column: Any, *rest: Any) -> Iterator[Any]:
        sizes.append(column.nbytes)
        return texts_of(column, *rest)

    monkeypatch.setattr(columns, "_texts", spy)
    monkeypatch.setattr(columns, "PARQUET_BYTES", 8000)
    assert documents(open_corpus(tmp_path))[0] == [*found["own"], *found["same"]]
    assert len(sizes) > 40
    # Of the first file as many rows as fit; of the other one its dictionary, and never 256 times as much.
    assert max(sizes) < 400_000


def test_a_line_of_too_many_values(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINE_VALUES", 100)
    good = json.dumps({"text": '[,{\\"' * 500, "n": list(range(90))})
    bad = json.dumps({"text": "x", "n": list(range(110))})
    # Bytes that would make a search for the ends of strings begin anew at each of them.
    long = '{"text": "' + '\\"' * 200_000
    (tmp_path / "a.jsonl").write_text(f"{good}\n{bad}\n{long}\n{good}\n")
    found, counts = documents(open_corpus(tmp_path, CorpusOptions(bad="skip")))
    assert found == ['[,{\\"' * 500] * 2
    assert counts.bad_records == 2
    assert "a.jsonl:2" in counts.bad_shown[0] and "too many values" in counts.bad_shown[0]


def test_a_line_that_begins_at_a_cut(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", ["a", "", "bc", "d"])
    source = open_corpus(path).sources[0]
    for place in range(1, source.size_bytes):
        found = [
            piece.text for cuts in ((0, place), (place, None)) for piece in read(Portion(source, *cuts), "text", _raise)
        ]
        assert found == ["a", "", "bc", "d"], place


def _raise(error: DatasetError) -> None:
    raise error


def test_a_bad_line_far_behind_is_named_by_its_number(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "a.jsonl", texts(60))
    path.write_text(path.read_text() + "no json\n")
    source = open_corpus(path).sources[0]
    with pytest.raises(DatasetError, match=r"a\.jsonl:61"):
        list(read(Portion(source, source.size_bytes // 2, None), "text", _raise))


def test_lines_before_a_bad_one_are_counted_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text('{"text": "good"}\n' * 60 + "no json\n" * 40)
    source = open_corpus(path).sources[0]
    opens: list[str] = []
    plain = readers.open_binary

    def counted(location: str) -> BinaryIO:
        opens.append(location)
        return plain(location)

    monkeypatch.setattr(readers, "open_binary", counted)
    found: list[DatasetError] = []
    assert len(list(read(Portion(source, source.size_bytes // 2, None), "text", found.append))) > 0
    assert [each.where for each in found] == [f"{path}:{number}" for number in range(61, 101)]
    assert len(opens) == 2


def test_bad_records_are_left_out_where_that_is_asked_for(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINE_BYTES", 200)
    (tmp_path / "a.txt").write_bytes(b"\x7fELF\0\0\0" * 100)
    lines = [
        '{"text": "1"}',
        "no json",
        '{"text": 2}',
        '{"other": "x"}',
        "[]",
        json.dumps({"text": "x" * 300}),
        '{"text": "2"}',
    ]
    (tmp_path / "b.jsonl").write_text("\n".join(lines))
    pyarrow.parquet.write_table(pyarrow.table({"text": ["3", None, "4"]}), tmp_path / "c.parquet")
    pyarrow.parquet.write_table(pyarrow.table({"body": ["no"]}), tmp_path / "d.parquet")
    (tmp_path / "e.parquet").write_bytes(b"nothing of that kind")
    invalid = pyarrow.array([b"5", b"\xff\xfe", b"6"]).view(pyarrow.string())
    with pyarrow.ipc.new_stream(tmp_path / "f.arrow", pyarrow.schema({"text": pyarrow.string()})) as writer:
        writer.write_table(pyarrow.table({"text": invalid}))
    (tmp_path / "g.txt").write_text("7")
    found, counts = documents(open_corpus(tmp_path, CorpusOptions(bad="skip")))
    assert found == ["1", "2", "3", "4", "5", "6", "7"]
    assert counts.bad_records == 1 + 5 + 1 + 1 + 1 + 1
    assert len(counts.bad_shown) == 8
    for place, say in enumerate(
        ("a.txt", "b.jsonl:2", "b.jsonl:3", "b.jsonl:4", "b.jsonl:5", "b.jsonl:6", "c.parquet, row 1")
    ):
        assert say in counts.bad_shown[place]
    with pytest.raises(DatasetError, match=r"a\.txt.*binary data|binary data.*a\.txt"):
        documents(open_corpus(tmp_path))


@pytest.mark.parametrize("error", [OSError(errno.EIO, "no luck"), FileNotFoundError("gone"), ConnectionError("reset")])
@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.jsonl", "a.jsonl.gz", "a.jsonl.zst", "a.parquet", "a.arrow"])
def test_a_file_that_cannot_be_had_is_never_left_out(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, error: OSError
) -> None:
    (tmp_path / name).write_bytes(bytes(100))

    class Broken(io.BytesIO):
        def read(self, *_: object) -> bytes:
            raise error

        read1 = readline = read  # type: ignore[assignment]

    monkeypatch.setattr(readers, "open_binary", lambda _: Broken(bytes(100)))
    with pytest.raises(CorpusUnreadable, match=r"cannot be read at .*/a\..*found (no luck|gone|reset)") as caught:
        documents(open_corpus(tmp_path, CorpusOptions(bad="skip")))
    assert "--bad skip" not in str(caught.value)
