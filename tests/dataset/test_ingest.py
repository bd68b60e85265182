"""Corpora of every kind into real volumes; what is written against a plain writer and a plain reader."""

from __future__ import annotations

import hashlib
import json
import signal
import subprocess
import sys
from collections.abc import Callable, Iterable
from pathlib import Path

import numpy as np
import pytest
from tokenizers import Tokenizer

from headrace.dataset import (
    CorpusOptions,
    IngestOptions,
    IngestProgress,
    TokenStream,
    ingest,
    open_corpus,
)
from headrace.dataset.ingestion import progress
from headrace.dataset.ingestion import text as ingest_text
from headrace.errors import DatasetError, ObjectExists, ObjectNotFound, UsageError, VolumeFull
from headrace.units import MIB
from headrace.volume import Volume
from tests.dataset.corpora import memory_volume, native_volume, texts, write_folder, write_jsonl, write_parquet
from tests.dataset.test_idx import written_plainly

ENDS = ("bin", "idx", "tokenizer.json", "json")


def objects(volume: Volume, name: str) -> dict[str, bytes]:
    return {end: volume.read(f"{name}.{end}") for end in ENDS}


def written_by_hand(tokenizer_json: bytes, documents: Iterable[str]) -> tuple[bytes, bytes, int]:
    """`.bin`, `.idx` and tokens, one document and one number after another."""
    tokenizer = Tokenizer.from_str(tokenizer_json.decode())
    tokenizer.encode_special_tokens = True
    end = tokenizer.token_to_id("<|endoftext|>")
    rows = [[*tokenizer.encode(text, add_special_tokens=False).ids, end] for text in documents if text]
    tokens = [token for row in rows for token in row]
    return (
        np.array(tokens, "<u2").tobytes(),
        written_plainly(np.dtype("<u2"), [len(row) for row in rows]),
        len(tokens),
    )


@pytest.mark.parametrize("make", [memory_volume, native_volume])
@pytest.mark.parametrize(
    ("write", "where"), [(write_folder, "texts"), (write_jsonl, "c.jsonl"), (write_parquet, "c.parquet")]
)
def test_every_kind_of_source(
    tmp_path: Path, write: Callable[[Path, Iterable[str]], Path], where: str, make: Callable[[], Volume]
) -> None:
    documents = [*texts(150), "", *texts(20, 5)]
    path = write(tmp_path / where, documents)
    with make() as volume:
        with volume.session(run_id="test") as session:
            report = ingest(path, session, "sets/corpus", IngestOptions(vocab_size=300))
        found = objects(volume, "sets/corpus")
        expected_bin, expected_idx, token_count = written_by_hand(found["tokenizer.json"], documents)
        assert found["bin"] == expected_bin
        assert found["idx"] == expected_idx
        assert volume.stat("sets/corpus.bin").checksum_block_bytes == 4096
        manifest = json.loads(found["json"])
        assert (manifest["documents"], manifest["tokens"], manifest["dtype"]) == (170, token_count, "uint16")
        assert manifest["tokens_sha256"] == hashlib.sha256(found["bin"]).hexdigest()
        assert manifest["tokenizer_sha256"] == hashlib.sha256(found["tokenizer.json"]).hexdigest()
        assert manifest["corpus"]["text_bytes"] == sum(len(text.encode()) for text in documents)
        assert manifest["corpus"]["empty_documents"] == 1
        assert report.manifest.tokens == token_count
        assert report.sequence == volume.sequence

        # And read as a file, as any tool of this layout does.
        (tmp_path / "c.bin").write_bytes(found["bin"])
        mapped = np.memmap(tmp_path / "c.bin", np.uint16, "r")
        stream = TokenStream.open(volume, "sets/corpus")
        starts = stream.index().document_starts()
        tokenizer = Tokenizer.from_str(found["tokenizer.json"].decode())
        full = [text for text in documents if text]
        for place in (0, 1, 83, 169):
            window = stream.read_window(int(starts[place]), int(starts[place + 1] - starts[place]))
            assert np.array_equal(window, mapped[starts[place] : starts[place + 1]])
            assert tokenizer.decode(window[:-1].tolist(), skip_special_tokens=False) == full[place]
            assert window[-1] == manifest["end_of_document_id"]


def test_the_same_corpus_gives_the_same_bytes(tmp_path: Path) -> None:
    path = write_folder(tmp_path / "texts", texts(300))
    found = []
    for make in (memory_volume, native_volume):
        with make() as volume, volume.session(run_id="test") as session:
            ingest(path, session, "a", IngestOptions(vocab_size=400))
            found.append(objects(volume, "a"))
    assert found[0] == found[1]


def test_parts_and_batches_do_not_show(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", texts(200))
    found = []
    for part, characters, pieces in ((4 * MIB, 2 * MIB, 4096), (4096, 100, 3), (4096, 1 << 20, 1)):
        monkeypatch.setattr(ingest_text, "_ENCODE_CHARACTERS", characters)
        monkeypatch.setattr(ingest_text, "_ENCODE_PIECES", pieces)
        with memory_volume() as volume, volume.session(run_id="test") as session:
            ingest(path, session, "a", IngestOptions(vocab_size=300, part_bytes=part))
            found.append(objects(volume, "a"))
    assert found[0] == found[1] == found[2]


def test_the_default_corpus_with_a_limit() -> None:
    corpus = open_corpus(None, CorpusOptions(limit_bytes=400_000))
    with native_volume() as volume, volume.session(run_id="test") as session:
        report = ingest(corpus, session, "python", IngestOptions(vocab_size=1000))
        assert report.manifest.corpus["text_bytes"] <= 400_000
        stream = TokenStream.open(volume, "python")
        assert 50_000 < stream.token_count < 400_000
        assert stream.document_count == report.manifest.documents
        assert stream.index().token_count == stream.token_count


def test_a_given_tokenizer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", texts(50))
    with memory_volume() as volume, volume.session(run_id="test") as session:
        ingest(path, session, "a", IngestOptions(vocab_size=300))
        (tmp_path / "t.json").write_bytes(volume.read("a.tokenizer.json"))
        ingest(path, session, "b", IngestOptions(tokenizer=tmp_path / "t.json", end_of_document="e"))
        first, second = objects(volume, "a"), objects(volume, "b")
        assert second["tokenizer.json"] == first["tokenizer.json"]
        assert len(second["bin"]) == len(first["bin"])
        end = json.loads(second["json"])["end_of_document_id"]
        starts = TokenStream.open(volume, "b").index().document_starts()
        assert set(np.frombuffer(second["bin"], "<u2")[starts[1:] - 1].tolist()) == {end}


def test_large_numbers_are_int32(tmp_path: Path) -> None:
    from tokenizers import models, pre_tokenizers

    engine = Tokenizer(models.WordLevel({"a": 0, "</s>": 1, "far": 1 << 20}, unk_token="a"))
    engine.pre_tokenizer = pre_tokenizers.Whitespace()
    engine.save(str(tmp_path / "t.json"))
    path = write_jsonl(tmp_path / "c.jsonl", ["far a far", "a far"] * 10)
    with memory_volume() as volume, volume.session(run_id="test") as session:
        ingest(path, session, "a", IngestOptions(tokenizer=tmp_path / "t.json"))
        stream = TokenStream.open(volume, "a")
        assert stream.dtype == np.int32
        assert volume.read("a.idx")[17] == 4
        assert stream.read_window(0, 7).tolist() == [1 << 20, 0, 1 << 20, 1, 0, 1 << 20, 1]


def test_progress_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(progress.Teller, "EVERY_S", 0.0)
    monkeypatch.setattr(ingest_text, "_ENCODE_PIECES", 10)
    told: list[IngestProgress] = []
    path = write_jsonl(tmp_path / "c.jsonl", texts(200))
    with memory_volume() as volume, volume.session(run_id="test") as session:
        report = ingest(path, session, "a", IngestOptions(vocab_size=300), progress=told.append)
    phases = [now.phase for now in told]
    assert sorted(set(phases), key=phases.index) == ["tokenizer", "tokens", "commit"]
    tokens = [now for now in told if now.phase == "tokens"]
    assert len(tokens) >= 20
    for name in ("documents", "tokens", "seconds", "fraction"):
        values = [getattr(now, name) for now in tokens]
        assert values == sorted(values)
    assert tokens[0].tokens == 0 and tokens[0].left_s is None
    assert tokens[-1].fraction == pytest.approx(1.0)
    assert tokens[-1].tokens_per_s == pytest.approx(tokens[-1].tokens / tokens[-1].seconds)
    assert tokens[-1].left_s == pytest.approx(0.0, abs=1e-6)
    assert told[-1].tokens == report.manifest.tokens
    assert all(progress.describe_progress(now) for now in told)


# ---- nothing half-visible ---------------------------------------------------------------------------------------


def _nothing_visible(volume: Volume) -> None:
    assert volume.list() == []
    with pytest.raises(ObjectNotFound):
        TokenStream.open(volume, "a")


def test_a_bad_line_late_leaves_nothing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", texts(100))
    with path.open("a") as file:
        file.write("not json\n")
    with memory_volume() as volume, volume.session(run_id="test") as session:
        with pytest.raises(DatasetError, match=r"c\.jsonl:101"):
            ingest(path, session, "a", IngestOptions(vocab_size=300, train_bytes=2000))
        _nothing_visible(volume)
        # The session goes on.
        ingest(write_jsonl(path, texts(20)), session, "a", IngestOptions(vocab_size=300))
        assert len(volume.list("a.")) == 4


def test_an_empty_corpus_leaves_nothing(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", ["", ""])
    with memory_volume() as volume, volume.session(run_id="test") as session:
        with pytest.raises(DatasetError, match="corpus is empty"):
            ingest(path, session, "a", IngestOptions(vocab_size=300))
        _nothing_visible(volume)


def test_a_full_device_is_one_clear_line(tmp_path: Path) -> None:
    path = tmp_path / "c.txt"
    path.write_text("0123456 9\n" * 220_000)
    with native_volume(1, 4 * MIB) as volume, volume.session(run_id="test") as session:
        with pytest.raises(VolumeFull) as caught:
            # 257 tokens: a byte is a token, two bytes of media for each.
            ingest(path, session, "a", IngestOptions(vocab_size=257))
        assert "\n" not in str(caught.value)
        _nothing_visible(volume)


def test_a_taken_name_is_refused_before_any_work(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", texts(10))
    with memory_volume() as volume, volume.session(run_id="test") as session:
        with session.transaction() as transaction:
            transaction.put("a.idx", b"somebody's")
        told: list[IngestProgress] = []
        with pytest.raises(ObjectExists, match=r"a\.idx"):
            ingest(path, session, "a", progress=told.append)
        with pytest.raises(UsageError, match="not a name"):
            ingest(path, session, "a//b", progress=told.append)
        assert not told
        assert [info.name for info in volume.list()] == ["a.idx"]


@pytest.mark.parametrize("options", [{"train_bytes": 0}, {"end_of_document": "</s>"}])
def test_wrong_options_are_refused(options: dict[str, object]) -> None:
    with pytest.raises(UsageError):
        IngestOptions(**options)  # type: ignore[arg-type]


# ---- the command line -------------------------------------------------------------------------------------------


def _command(*arguments: str, **keywords: object) -> subprocess.Popen[str]:
    return subprocess.Popen(
        [sys.executable, "-m", "headrace.cli", "ingest", *arguments],
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        **keywords,  # type: ignore[call-overload]
    )


@pytest.fixture
def image(tmp_path: Path) -> str:
    uri = f"file:{tmp_path}/a.img?create=64MiB"
    Volume.create([uri]).close()
    return f"file:{tmp_path}/a.img"


def test_the_command(tmp_path: Path, image: str) -> None:
    path = write_folder(tmp_path / "texts", texts(40))
    (path / "notes.bin").write_bytes(b"x")
    arguments = (str(path), "corpus", "--volume", image, "--vocab-size", "300")
    child = _command(*arguments, "--json")
    out, error = child.communicate(timeout=60)
    assert child.returncode == 0, error
    answer = json.loads(out)
    assert answer["documents"] == 40
    assert answer["ignored_files"] == 1
    assert "training a tokenizer" in error and "committing" in error
    with Volume.open([image]) as volume:
        assert TokenStream.open(volume, "corpus").token_count == answer["tokens"]
    again = _command(*arguments)
    _, error = again.communicate(timeout=60)
    assert again.returncode != 0
    assert error.count("\n") == 1 and "the dataset exists" in error
    plain = _command(str(path), "other", *arguments[2:], "--limit", "1KiB")
    out, _ = plain.communicate(timeout=60)
    assert plain.returncode == 0
    assert "other" in out and "files of other kinds" in out


def test_ctrl_c_leaves_nothing_visible(tmp_path: Path, image: str) -> None:
    write_jsonl(tmp_path / "t.jsonl", texts(30))
    with Volume.create(["mem:16MiB"]) as volume, volume.session() as session:
        ingest(tmp_path / "t.jsonl", session, "t", IngestOptions(vocab_size=300))
        (tmp_path / "t.json").write_bytes(volume.read("t.tokenizer.json"))
    path = write_jsonl(tmp_path / "c.jsonl", texts(300) * 200)
    child = _command(str(path), "corpus", "--volume", image, "--tokenizer", str(tmp_path / "t.json"))
    assert child.stderr is not None
    line = child.stderr.readline()
    assert "tokens" in line, line
    child.send_signal(signal.SIGINT)
    # Had it gone on to its end instead, the status would be another one.
    _, error = child.communicate(timeout=200)
    assert child.returncode == 130, error
    assert error.splitlines()[-1] == "headrace: error: interrupted"
    with Volume.open([image], write=True) as volume:
        assert all(info.name.startswith("corpus.ingest/") for info in volume.list())
        # The session was closed in order, with nothing under way: the next one opens at once, and may use all space.
        found = volume.info()
        assert found.writer is not None and found.writer.state == "closed"
        assert found.quarantined_bytes == 0
