"""`headrace dataset`: what it shows of datasets, what it stores beside them, and one line for whatever is wrong."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.cli import main
from headrace.dataset import (
    IngestOptions,
    Sampler,
    TokenStream,
    WorkOptions,
    ingest,
    ingest_records,
    open_records,
    open_samples,
)
from headrace.volume import Volume
from tests.dataset.corpora import put_stream, some_lengths, texts, write_jsonl

LENGTHS = [*some_lengths(80, 20), 1, 200]


class Case:
    def __init__(self, folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
        self.uri = f"file:{folder}/a.img"
        self._capsys = capsys
        with Volume.create(f"{self.uri}?create=16MiB") as volume:
            put_stream(volume, "corpus", LENGTHS)

    def put(self, objects: dict[str, bytes]) -> None:
        with (
            Volume.open(self.uri, write=True) as volume,
            volume.session(run_id="test") as session,
            session.transaction() as transaction,
        ):
            for end, data in objects.items():
                if f"corpus.{end}" in volume:
                    transaction.delete(f"corpus.{end}")
                transaction.put(f"corpus.{end}", data)

    def read(self, name: str) -> bytearray:
        with Volume.open(self.uri) as volume:
            return bytearray(volume.read(name))

    def run(self, *arguments: str) -> tuple[int, str, str]:
        where = [self.uri] if arguments[0] == "ls" else ["--volume", self.uri]
        status = main(["dataset", *arguments, *where])
        said = self._capsys.readouterr()
        return status, said.out, said.err

    def good(self, *arguments: str) -> str:
        status, out, err = self.run(*arguments)
        assert status == 0, err
        return out

    def refused(self, *arguments: str) -> str:
        status, out, err = self.run(*arguments)
        assert status in (1, 2) and not out
        (line,) = err.splitlines()
        assert line.startswith("headrace: error: ")
        return line


@pytest.fixture
def case(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Case:
    return Case(tmp_path, capsys)


def test_pack(case: Case) -> None:
    said = json.loads(case.good("pack", "corpus", "--sequence-length", "31", "--json"))
    assert (said["name"], said["documents"], said["left_out_documents"]) == (
        "corpus.packed-31",
        len(LENGTHS),
        sum(length < 2 for length in LENGTHS),
    )
    assert 0.9 < said["fill"] <= 1
    assert "corpus.padded-31" in case.good("pack", "corpus", "-l", "31", "--layout", "padded", "--long", "drop")
    assert "--replace" in case.refused("pack", "corpus", "-l", "31")
    assert "corpus.packed-31" in case.good("pack", "corpus", "-l", "31", "--replace")
    assert "sequence_length" in case.refused("pack", "corpus", "-l", "0")
    assert "nobody.bin" in case.refused("pack", "nobody", "-l", "31")
    assert "--long" in case.refused("pack", "corpus", "-l", "31", "--long", "keep")


def _folder(folder: Path) -> Path:
    (folder / "images").mkdir()
    for name, data in {"a.jpg": b"one", "a.cls": b"1", "b.jpg": b"two"}.items():
        (folder / "images" / name).write_bytes(data)
    return folder / "images"


def test_ls(case: Case, tmp_path: Path) -> None:
    case.good("pack", "corpus", "-l", "31")
    case.good("pack", "corpus", "-l", "31", "--layout", "padded")
    with Volume.open(case.uri, write=True) as volume:
        put_stream(volume, "other/set", [10, 20], dtype="<i4", manifest=False)
        with volume.session(run_id="test") as session, session.transaction() as transaction:
            for name in ("alone.idx", "alone.bin.txt", "bad.idx", "bad.bin", "no.bin", "x\ny.idx", "x\ny.bin"):
                transaction.put(name, b"nothing")
            transaction.put("worse.records", b"nothing")
            transaction.put("worse.records.idx", b"nothing")
        with volume.session(run_id="test") as session:
            ingest_records(_folder(tmp_path), session, "images", WorkOptions(workers=1))
    rows = [line.split("\t") for line in case.good("ls").splitlines()]
    assert [row[4] for row in rows] == ["bad", "corpus", "images", "other/set", "worse", "x\\ny"]
    assert rows[0][0] == "-" and rows[0][5].startswith("damaged: the token index")
    assert rows[1] == [str(len(LENGTHS)), f"{sum(LENGTHS):,}", "uint16", rows[1][3], "corpus", "packed-31 padded-31"]
    assert rows[2] == ["2", "-", "records", "7 B", "images", ""]
    assert rows[3][:3] == ["2", "30", "int32"]
    assert rows[4][0] == "-" and "damaged" in rows[4][5]
    assert json.loads(case.good("ls", "--json", "--prefix", "im")) == {
        "name": "images", "packings": [], "records": 2, "length_bytes": 7
    }  # fmt: skip
    told = [json.loads(line) for line in case.good("ls", "--json", "--prefix", "o").splitlines()]
    assert told == [
        {"name": "other/set", "packings": [], "documents": 2, "tokens": 30, "dtype": "int32", "length_bytes": 120}
    ]


def test_info(case: Case) -> None:
    case.good("pack", "corpus", "-l", "31")
    told = json.loads(case.good("info", "corpus", "--json"))
    assert (told["documents"], told["tokens"], told["longest"]) == (len(LENGTHS), sum(LENGTHS), max(LENGTHS))
    for row in told["lengths"]:
        inside = [length for length in LENGTHS if row["from"] <= length <= row["to"]]
        assert (row["documents"], row["tokens"]) == (len(inside), sum(inside))
    assert sum(row["documents"] for row in told["lengths"]) == len(LENGTHS)
    (packing,) = told["packings"]
    assert packing["name"] == "corpus.packed-31" and packing["fill"] > 0.9
    said = case.good("info", "corpus")
    assert "packed-31" in said and "128 to 255" in said and "#" in said
    case.put({"packed-31": b"short"})
    assert "damaged: the packing does not fit" in case.good("info", "corpus")
    assert "nobody.bin" in case.refused("info", "nobody")


def test_peek_shows_text(case: Case, tmp_path: Path) -> None:
    documents = [f"document {i}\x1b[31m says\n{text}" for i, text in enumerate(texts(30))]
    with Volume.open(case.uri, write=True) as volume, volume.session(run_id="test") as session:
        ingest(write_jsonl(tmp_path / "t.jsonl", documents), session, "text", IngestOptions(vocab_size=300))
    case.good("pack", "text", "-l", "64")
    said = case.good("peek", "text", "--first", "4", "--count", "2", "--tokens", "1000")
    assert "document 4 of 30" in said and "  | document 5\\x1b[31m says" in said and "\x1b" not in said
    lines = case.good("peek", "text", "-n", "30", "--tokens", "100000", "--json").splitlines()
    assert [json.loads(line)["parts"][0]["text"] for line in lines] == [text + "<|endoftext|>" for text in documents]
    assert "tokens more" in case.good("peek", "text", "--tokens", "2")
    # Samples, in the order in which a loader gives them.
    lines = case.good("peek", "text", "--what", "packed", "-l", "64", "--seed", "5", "--json").splitlines()
    told = [json.loads(line) for line in lines]
    with Volume.open(case.uri) as volume:
        samples = open_samples(TokenStream.open(volume, "text"), "packed", 64)
        expected = Sampler(samples.sample_count, 5).indices(0, 0, 3)
        places = samples.plan(expected[:1]).places()
    assert [each["number"] for each in told] == expected.tolist()
    assert [part["start"] for part in told[0]["parts"]] == places.starts.tolist()
    assert "window 0 of" in case.good("peek", "text", "--what", "windows", "-l", "64", "-n", "1")


def test_peek_shows_records(case: Case, tmp_path: Path) -> None:
    folder = tmp_path / "some"
    folder.mkdir()
    for number in range(9):
        (folder / f"{number}.cls").write_text(f"class\x1b {number}")
        (folder / f"{number}.bin").write_bytes(bytes(range(number, 128 + number)))
        (folder / f"{number}.txt").write_text("wä\n" * 100)
    with Volume.open(case.uri, write=True) as volume, volume.session(run_id="test") as session:
        ingest_records(open_records(folder), session, "some")
    said = case.good("peek", "some", "--count", "1", "--tokens", "18")
    assert "record 0 of 9: 0\n" in said and "  bin, 128 bytes\n  | 00 01 02 " in said and "\x1b" not in said
    assert "  | wä\n  | w\n  | ... 382 bytes more" in said
    lines = case.good("peek", "some", "--what", "records", "--seed", "5", "-n", "9", "--json").splitlines()
    told = [json.loads(line) for line in lines]
    assert [each["number"] for each in told] == Sampler(9, 5).indices(0, 0, 9).tolist()
    for each in told:
        fields = {field["kind"]: field for field in each["fields"]}
        assert each["key"] == str(each["number"])
        assert bytes.fromhex(fields["bin"]["hex"]) == bytes(range(each["number"], 128 + each["number"]))
        assert fields["txt"]["bytes"] == 400 and fields["txt"]["text"] == "wä\n" * 50
    assert "no such records" in case.refused("peek", "some", "--first", "9")
    assert "--sequence-length" in case.refused("peek", "some", "-l", "4")


def test_peek_without_a_tokenizer_shows_numbers(case: Case) -> None:
    tokens = np.frombuffer(case.read("corpus.bin"), np.uint16)
    said = case.good("peek", "corpus", "-n", "1", "--tokens", "5")
    assert " ".join(map(str, tokens[: min(5, LENGTHS[0])].tolist())) in said
    assert "no such documents" in case.refused("peek", "corpus", "--first", "82")
    assert "--sequence-length" in case.refused("peek", "corpus", "--what", "windows")
    assert "--sequence-length" in case.refused("peek", "corpus", "-l", "4")
    assert "not packed so" in case.refused("peek", "corpus", "--what", "packed", "-l", "4")


def test_verify(case: Case, tmp_path: Path) -> None:
    # `put_stream` stores no tokenizer, though its manifest has one.
    told = json.loads(case.run("verify", "corpus", "--json")[1])
    assert list(told["damaged"]) == ["tokenizer"]
    with Volume.open(case.uri, write=True) as volume, volume.session(run_id="test") as session:
        ingest(write_jsonl(tmp_path / "t.jsonl", texts(30)), session, "text", IngestOptions(vocab_size=300))
    case.good("pack", "text", "-l", "64")
    case.good("pack", "text", "-l", "9", "--layout", "padded", "--long", "truncate")
    assert json.loads(case.good("verify", "text", "--json")) == {
        "name": "text",
        "checked": ["documents", "tokens", "tokenizer", "text.packed-64", "text.padded-9"],
        "damaged": {},
    }
    assert "fit together" in case.good("verify", "text")


@pytest.mark.parametrize("what", ["token", "vocabulary", "end", "index", "packing", "told"])
def test_verify_finds_what_does_not_fit(case: Case, what: str) -> None:
    """Whatever is changed, by somebody who made the checksums good again."""
    case.good("pack", "corpus", "-l", "31")
    tokens = np.frombuffer(case.read("corpus.bin"), np.uint16).copy()
    expected = {"tokenizer"}
    if what in ("token", "vocabulary", "end"):
        last = sum(LENGTHS) - 1
        place, value = {"token": (last - 1, int(tokens[-2]) ^ 1), "vocabulary": (3, 500), "end": (last, 7)}[what]
        tokens[place] = value
        case.put({"bin": tokens.tobytes()})
        expected |= {"tokens"}
    elif what == "index":
        index = case.read("corpus.idx")
        there = slice(34 + 4 * len(LENGTHS), 34 + 12 * len(LENGTHS))
        pointers = np.frombuffer(bytes(index[there]), "<i8").copy()
        pointers[LENGTHS.index(max(LENGTHS))] += 2
        index[there] = pointers.tobytes()
        case.put({"idx": bytes(index)})
        expected |= {"documents", "tokens", "corpus.packed-31"}
    elif what == "packing":
        table = case.read("corpus.packed-31")
        table[0:16], table[16:32] = table[16:32], table[0:16]
        case.put({"packed-31": bytes(table)})
        expected |= {"corpus.packed-31"}
    else:
        told = json.loads(case.read("corpus.packed-31.json"))
        told["long_documents"] += 1
        case.put({"packed-31.json": json.dumps(told).encode()})
        expected |= {"corpus.packed-31"}
    status, out, err = case.run("verify", "corpus", "--json")
    assert status == 1 and set(json.loads(out)["damaged"]) == expected, out
    assert "parts of the dataset are damaged" in json.loads(err.splitlines()[-1])["error"]["message"]
    status, out, err = case.run("verify", "corpus")
    assert status == 1 and not out and len([line for line in err.splitlines() if "DAMAGED" in line]) == len(expected)
