"""Documents out of files: order, cuts, limits, and one clear line for everything that is wrong."""

from __future__ import annotations

import json
import os
import tracemalloc
from pathlib import Path

import pyarrow
import pyarrow.parquet
import pytest

from headrace.dataset import Corpus, CorpusOptions, open_corpus
from headrace.dataset.ingestion import readers
from headrace.dataset.ingestion.corpus import CorpusCounts
from headrace.errors import DatasetError, UsageError


def documents(corpus: Corpus, limit_bytes: int | None = None) -> tuple[list[str], CorpusCounts]:
    counts = CorpusCounts()
    texts, open_text = [], ""
    for piece in corpus.pieces(counts, limit_bytes):
        open_text += piece.text
        if piece.last:
            texts.append(open_text)
            open_text = ""
    assert not open_text, "the last document has no end"
    return texts, counts


def write_parquet(path: Path, texts: list[str | None], column: str = "text", rows: int = 3) -> None:
    table = pyarrow.table({"id": list(range(len(texts))), column: pyarrow.array(texts, pyarrow.string())})
    pyarrow.parquet.write_table(table, path, row_group_size=rows)


TEXTS = ["first\n", "zweites Dokument, mit Ümlauten\n\n", "x" * 10_000, "最後\r\n", "\ufffd is a character too"]


def test_a_folder_is_read_in_the_byte_order_of_its_paths(tmp_path: Path) -> None:
    for name in ("b.txt", "a/z.md", "a.rst", "B.py", "a/b/c.TXT", "ä.txt"):
        path = tmp_path / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(name)
    (tmp_path / "picture.png").write_bytes(b"\x89PNG")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "no.txt").write_text("no")
    (tmp_path / "a" / "loop").symlink_to(tmp_path)
    corpus = open_corpus(tmp_path)
    assert documents(corpus)[0] == ["B.py", "a.rst", "a/b/c.TXT", "a/z.md", "b.txt", "ä.txt"]
    assert corpus.ignored_files == 1
    more = open_corpus(tmp_path, CorpusOptions(extra_suffixes=(".PNG",)))
    assert documents(more)[1].replaced_documents == 1


def test_every_kind_gives_the_same_documents(tmp_path: Path) -> None:
    folder = tmp_path / "texts"
    folder.mkdir()
    for index, text in enumerate(TEXTS):
        (folder / f"{index}.txt").write_bytes(text.encode())
    lines = tmp_path / "c.jsonl"
    lines.write_text("\n".join(json.dumps({"id": i, "text": t}, ensure_ascii=i % 2 == 0) for i, t in enumerate(TEXTS)))
    write_parquet(tmp_path / "c.parquet", list(TEXTS))
    for path in (folder, lines, tmp_path / "c.parquet"):
        texts, counts = documents(open_corpus(path))
        assert texts == TEXTS, path
        assert counts.documents == len(TEXTS)
        assert counts.replaced_documents == counts.empty_documents == 0
        assert counts.text_bytes == sum(len(text.encode()) for text in TEXTS)
        assert counts.source_bytes == pytest.approx(open_corpus(path).size_bytes)


def test_a_mixed_folder_takes_each_file_by_its_kind(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    (tmp_path / "b.jsonl").write_text('{"text": "two"}\n\n{"text": "three"}\n')
    write_parquet(tmp_path / "c.parquet", ["four", "five"])
    assert documents(open_corpus(tmp_path))[0] == ["one", "two", "three", "four", "five"]


def test_cuts_depend_on_the_text_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 64)
    lines = "".join(f"line {i} é\n" * (i % 3) + "ß" * (i * 7 % 150) for i in range(80))
    (tmp_path / "a.txt").write_bytes(lines.encode())
    (tmp_path / "a.jsonl").write_text(json.dumps({"text": lines}))
    write_parquet(tmp_path / "a.parquet", [lines])
    cuts = []
    for kind in ("txt", "jsonl", "parquet"):
        pieces = list(open_corpus(tmp_path / f"a.{kind}").pieces(CorpusCounts()))
        assert all(len(piece.text) <= 64 for piece in pieces)
        assert [piece.last for piece in pieces] == [False] * (len(pieces) - 1) + [True]
        cuts.append([piece.text for piece in pieces])
    assert len(cuts[0]) > 20
    assert cuts[0] == cuts[1] == cuts[2]
    assert "".join(cuts[0]) == lines


def test_a_large_file_passes_through_little_memory(tmp_path: Path) -> None:
    path = tmp_path / "large.txt"
    with path.open("w") as file:
        for index in range(400_000):
            file.write(f"{index:>15} a line of a large file that must never be whole in memory\n")
    assert path.stat().st_size > 25_000_000
    tracemalloc.start()
    total = sum(len(piece.text) for piece in open_corpus(path).pieces(CorpusCounts()))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert total == path.stat().st_size
    assert peak < 4 << 20


@pytest.mark.parametrize("limit", [1, 2, 7, 9, 10, 11, 12, 13, 1000])
def test_the_limit_is_exact_and_cuts_at_a_character(tmp_path: Path, limit: int) -> None:
    (tmp_path / "a.txt").write_text("äöü\n")
    (tmp_path / "b.txt").write_text("12345")
    whole = "äöü\n12345".encode()
    corpus = open_corpus(tmp_path, CorpusOptions(limit_bytes=limit))
    texts, counts = documents(corpus)
    assert "".join(texts) == whole[:limit].decode("utf-8", "ignore")
    assert counts.limited == (limit <= len(whole))
    assert counts.text_bytes == len("".join(texts).encode())
    # A pass's own limit is the tighter one.
    assert documents(open_corpus(tmp_path), limit)[0] == texts


def test_a_sample_is_spread_over_the_sources(tmp_path: Path) -> None:
    for index in range(100):
        (tmp_path / f"{index:03}.txt").write_text("0123456789")
    names = [source.path.stem for source in open_corpus(tmp_path).spread(250).sources]
    assert names == [f"{index:03}" for index in range(0, 100, 4)]
    assert open_corpus(tmp_path).spread(1000) == open_corpus(tmp_path).spread(10**9) == open_corpus(tmp_path)
    limited = open_corpus(tmp_path, CorpusOptions(limit_bytes=101)).spread(50)
    assert [source.path.stem for source in limited.sources] == ["000", "002", "004", "006", "008", "010"]
    one = open_corpus(tmp_path / "000.txt")
    assert one.spread(1) == one


def test_bytes_that_are_not_utf8_are_replaced_and_counted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "PIECE_CHARACTERS", 16)
    (tmp_path / "a.txt").write_bytes("grün\n".encode("latin-1") * 10)
    (tmp_path / "b.txt").write_bytes("grün\n".encode() * 10)
    (tmp_path / "c.txt").write_bytes(b"cut off: \xe2\x82")
    (tmp_path / "d.jsonl").write_bytes(b'{"text": "gr\xfcn"}\n{"text": "\\ud800 half a pair"}\n{"text": "good"}')
    texts, counts = documents(open_corpus(tmp_path))
    assert texts == [
        "gr\ufffdn\n" * 10, "grün\n" * 10, "cut off: \ufffd", "gr\ufffdn", "\ufffd half a pair", "good",
    ]  # fmt: skip
    assert counts.replaced_documents == 4


def test_empty_documents_are_left_out_and_counted(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("")
    (tmp_path / "b.jsonl").write_text('{"text": ""}\n{"text": "x"}\n')
    texts, counts = documents(open_corpus(tmp_path))
    assert texts == ["x"]
    assert (counts.documents, counts.empty_documents) == (1, 2)


def test_the_default_corpus_is_this_python_and_large_enough() -> None:
    corpus = open_corpus(None)
    assert corpus.size_bytes > 5_000_000
    assert any(source.path.name == "argparse.py" for source in corpus.sources)
    assert corpus == open_corpus(None)
    texts, counts = documents(open_corpus(None, CorpusOptions(limit_bytes=300_000)))
    assert counts.text_bytes <= 300_000 and counts.limited and len(texts) > 3


def _bad_corpora(folder: Path) -> dict[str, tuple[Path, list[str]]]:
    """Name -> the path, and what the error must say."""
    cases: dict[str, tuple[Path, list[str]]] = {
        "nothing there": (folder / "none", ["no such corpus", str(folder / "none")])
    }

    def case(name: str, file: str, content: bytes, *say: str) -> None:
        path = folder / name.replace(" ", "-") / file
        path.parent.mkdir()
        path.write_bytes(content)
        cases[name] = (path, [str(path), *say])

    case("no json", "a.jsonl", b'{"text": "a"}\n{"text": \n', "a.jsonl:2", "not JSON")
    case("a list", "a.jsonl", b"\n[1]\n", "a.jsonl:2", "not a JSON object", "list")
    case("no member", "a.jsonl", b'{"body": "x", "id": 3}\n', "a.jsonl:1", "'text'", "body, id", "--text-field")
    case("no string", "a.jsonl", b'{"text": 3}\n', "a.jsonl:1", "int")
    case("too deep", "a.jsonl", b'{"text": ' + b"[" * 100_000 + b"]" * 100_000 + b"}", "a.jsonl:1", "not JSON")
    case("no parquet", "a.parquet", b"PAR1 but not really", "Parquet")
    (folder / "empty").mkdir()
    cases["empty folder"] = (folder / "empty", ["corpus is empty", ".jsonl", "0 other files"])
    (folder / "empty files").mkdir()
    (folder / "empty files" / "a.txt").write_bytes(b"")
    cases["empty files"] = (folder / "empty files", ["corpus is empty"])
    write_parquet(folder / "b.parquet", ["x"], column="body")
    cases["no column"] = (folder / "b.parquet", ["'text'", "id, body", "--text-field"])
    pyarrow.parquet.write_table(pyarrow.table({"text": [1, 2]}), folder / "c.parquet")
    cases["a column of numbers"] = (folder / "c.parquet", ["'text'", "expected string", "int64"])
    write_parquet(folder / "d.parquet", ["x", "y", "z", "a", None])
    cases["no value"] = (folder / "d.parquet", ["row 4"])
    whole = (folder / "d.parquet").read_bytes()
    (folder / "e.parquet").write_bytes(whole[:30] + bytes(len(whole) - 60) + whole[-30:])
    cases["a damaged parquet"] = (folder / "e.parquet", ["Parquet"])
    return cases


def test_everything_wrong_is_one_clear_line(tmp_path: Path) -> None:
    for name, (path, say) in _bad_corpora(tmp_path).items():
        with pytest.raises(DatasetError) as caught:
            documents(open_corpus(path))
        message = str(caught.value)
        assert "\n" not in message, name
        for words in say:
            assert words in message, (name, message)


@pytest.mark.skipif(os.getuid() == 0, reason="root may read everything")
def test_a_file_that_may_not_be_read(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    (tmp_path / "a.txt").chmod(0)
    with pytest.raises(DatasetError, match=r"a\.txt.*[Pp]ermission"):
        documents(open_corpus(tmp_path))


def test_a_file_that_is_gone_meanwhile(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("x")
    corpus = open_corpus(tmp_path)
    (tmp_path / "a.txt").unlink()
    with pytest.raises(DatasetError, match=r"a\.txt.*No such file"):
        documents(corpus)


def test_a_line_longer_than_the_bound_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(readers, "LINE_BYTES", 100)
    (tmp_path / "a.jsonl").write_text('{"text": "x"}\n{"text": "' + "x" * 200 + '"}\n')
    with pytest.raises(DatasetError, match=r"a\.jsonl:2.*at most 100 B"):
        documents(open_corpus(tmp_path))


@pytest.mark.parametrize("options", [{"limit_bytes": 0}, {"text_field": ""}, {"extra_suffixes": ("c",)}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        CorpusOptions(**options)  # type: ignore[arg-type]
