"""Pairs of Megatron's files, taken over as they are; indexes that lie are refused before anything is moved."""

from __future__ import annotations

import hashlib
import json
import struct
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from headrace.cli import main
from headrace.dataset import (
    IngestOptions,
    TokenStream,
    WorkOptions,
    import_megatron,
    ingest,
    ingest_records,
    megatron_prefix,
)
from headrace.dataset.ingestion import megatron as ingest_megatron
from headrace.dataset.ingestion import output, slices
from headrace.dataset.ingestion import run as ingest_run
from headrace.dataset.inspect import verify
from headrace.dataset.tokens.idx import encode_idx
from headrace.errors import DatasetError, DeviceTimeout, UsageError
from headrace.volume import Volume
from tests.dataset.corpora import memory_volume, texts, write_jsonl
from tests.dataset.test_idx import written_plainly
from tests.dataset.test_ingest_workers import interrupt, when_kept


def write_pair(folder: Path, count: int = 400, kind: str = "<u2") -> Path:
    chance = np.random.default_rng(1)
    lengths = chance.integers(0, 90, count).tolist()
    chance.integers(0, 1 << 15, sum(lengths)).astype(kind).tofile(folder / "p.bin")
    (folder / "p.idx").write_bytes(written_plainly(np.dtype(kind), lengths))
    return folder / "p"


@pytest.mark.parametrize("kind", ["<u2", "<i4"])
def test_a_pair_is_taken_over_byte_for_byte(tmp_path: Path, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ingest_megatron, "_BLOCK_ITEMS", 100)
    prefix = write_pair(tmp_path, kind=kind)
    assert megatron_prefix(f"{prefix}.bin") == megatron_prefix(f"{prefix}.idx") == str(prefix)
    assert megatron_prefix(f"{tmp_path}/q.bin") is None
    with memory_volume() as volume, volume.session(run_id="test") as session:
        options = WorkOptions(workers=1, slice_bytes=5001, part_bytes=4096)
        with pytest.raises(KeyboardInterrupt):
            import_megatron(str(prefix), session, "a", options, progress=when_kept(session, interrupt, 2))
        report = import_megatron(str(prefix), session, "a", options)
        assert 2 <= report.resumed < report.slices
        for end in ("bin", "idx"):
            assert volume.read(f"a.{end}") == Path(f"{prefix}.{end}").read_bytes()
        assert report.tokens_sha256 == hashlib.sha256(Path(f"{prefix}.bin").read_bytes()).hexdigest()
        stream = TokenStream.open(volume, "a")
        assert (stream.token_count, stream.document_count) == (report.tokens, report.documents)
        assert stream.manifest is None and stream.dtype == np.dtype(kind)
        assert [info.name for info in volume.list()] == ["a.bin", "a.idx"]


def test_what_we_wrote_comes_back_with_its_tokenizer(tmp_path: Path) -> None:
    path = write_jsonl(tmp_path / "c.jsonl", texts(30))
    with memory_volume() as volume, volume.session(run_id="test") as session:
        ingest(path, session, "a", IngestOptions(vocab_size=300))
        for end in ("bin", "idx", "tokenizer.json"):
            (tmp_path / f"x.{end}").write_bytes(volume.read(f"a.{end}"))
        with pytest.raises(UsageError, match="belongs to a tokenizer"):
            import_megatron(str(tmp_path / "x"), session, "b", end_of_document="e")
        import_megatron(str(tmp_path / "x"), session, "b", tokenizer=tmp_path / "x.tokenizer.json")
        for end in ("bin", "idx", "tokenizer.json"):
            assert volume.read(f"b.{end}") == volume.read(f"a.{end}")
        first, second = TokenStream.open(volume, "a").manifest, TokenStream.open(volume, "b").manifest
        assert first is not None and second is not None
        assert {**vars(first), "corpus": None} == {**vars(second), "corpus": None}


def test_documents_of_others_need_no_end(tmp_path: Path) -> None:
    """Megatron's tools end documents with a token where they are told to."""
    path = write_jsonl(tmp_path / "c.jsonl", texts(30))
    with memory_volume() as volume, volume.session(run_id="test") as session:
        ingest(path, session, "a", IngestOptions(vocab_size=300))
        tokens = np.frombuffer(volume.read("a.bin"), "<u2")
        lengths = np.full(len(tokens) // 7 + 1, 7, np.int32)
        lengths[-1] = len(tokens) % 7
        (tmp_path / "x.bin").write_bytes(tokens.tobytes())
        (tmp_path / "x.idx").write_bytes(b"".join(encode_idx(np.dtype("<u2"), lengths)))
        (tmp_path / "x.json").write_bytes(volume.read("a.tokenizer.json"))
        import_megatron(str(tmp_path / "x"), session, "b", tokenizer=tmp_path / "x.json")
        assert [step.problem for step in verify(volume, "b") if step.problem] == []
        # Tokens that the tokenizer does not have are wrong wherever they came from.
        (tmp_path / "x.bin").write_bytes(np.full(len(tokens), 999, "<u2").tobytes())
        import_megatron(str(tmp_path / "x"), session, "c", tokenizer=tmp_path / "x.json")
        (problem,) = [step.problem for step in verify(volume, "c") if step.problem]
        assert "tokens below 300" in str(problem)


def _set(place: int, form: str, value: int) -> Callable[[bytearray], None]:
    def change(data: bytearray) -> None:
        struct.pack_into(form, data, place if place >= 0 else len(data) + place, value)

    return change


@pytest.mark.parametrize(
    ("change", "say"),
    [
        (_set(0, "<B", 0), "MMIDIDX|no.*index|not"),
        (_set(17, "<B", 6), "float64"),
        (_set(34 + 4 * 7, "<i", -1), "negative length.*sequence 7"),
        (_set(34 + 4 * 399, "<i", 1 << 30), "does not fit its .bin|wrong pointer"),
        (_set(34 + 4 * 400 + 8 * 211, "<q", 3), "wrong pointer.*sequence 211"),
        (_set(34 + 12 * 400, "<q", 1), "document index"),
        (_set(34 + 12 * 400 + 8 * 200, "<q", 3), "document index"),
        (_set(-8, "<q", 401), "document index"),
        (lambda data: data.pop(), "wrong size"),
        (lambda data: data.__delitem__(slice(20, None)), "index"),
    ],
)
def test_an_index_that_lies_is_refused(
    tmp_path: Path, change: Callable[[bytearray], None], say: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(ingest_megatron, "_BLOCK_ITEMS", 100)
    prefix = write_pair(tmp_path)
    data = bytearray((tmp_path / "p.idx").read_bytes())
    change(data)
    (tmp_path / "p.idx").write_bytes(data)
    with memory_volume() as volume, volume.session(run_id="test") as session:
        with pytest.raises(DatasetError, match=say) as caught:
            import_megatron(str(prefix), session, "a")
        assert "p.idx" in str(caught.value) and "\n" not in str(caught.value)
        assert volume.list() == []


@pytest.mark.parametrize("kind", ["tokens", "records"])
def test_too_many_parts_are_refused_before_the_work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kind: str) -> None:
    prefix = write_pair(tmp_path)
    parts = -(-Path(f"{prefix}.bin").stat().st_size // 4096)
    told: list[object] = []
    options = WorkOptions(workers=1, part_bytes=4096)
    with memory_volume() as volume, volume.session(run_id="test") as session:

        def keep() -> None:
            if kind == "tokens":
                import_megatron(str(prefix), session, "a", options, progress=told.append)
            else:
                ingest_records(f"{prefix}.bin", session, "a", options, progress=told.append)

        monkeypatch.setattr(ingest_run, "MAX_SLICES", parts - 1)
        for module in (slices, output):
            monkeypatch.setattr(module, "LARGEST_PART_BYTES", 4096)
        with pytest.raises(DatasetError, match=rf"too many parts.*at most {parts - 1}, found {parts} .*part_bytes"):
            keep()
        assert not told and volume.list() == []
        # The last one grows.
        for module in (slices, output):
            monkeypatch.setattr(module, "LARGEST_PART_BYTES", 8192)
        keep()


def test_the_command_takes_pairs_and_records(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    image = f"file:{tmp_path}/a.img"
    Volume.create([f"{image}?create=64MiB"]).close()
    prefix = write_pair(tmp_path)
    assert main(["ingest", f"{prefix}.bin", "pair", "--volume", image, "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["documents"] == 400 and told["dtype"] == "uint16"
    assert main(["ingest", f"{prefix}.idx", "other", "--volume", image, "--limit", "1KiB"]) == 2
    assert "--limit is for text" in capsys.readouterr().err
    (tmp_path / "in").mkdir()
    (tmp_path / "in" / "x.jpg").write_bytes(b"\0\1")
    (tmp_path / "in" / "x.jpg.lnk").symlink_to("nowhere")
    assert main(["ingest", str(tmp_path / "in"), "images", "--volume", image, "--records"]) == 0
    assert "jpg 1" in capsys.readouterr().out
    assert main(["ingest", str(tmp_path / "in"), "text", "--volume", image]) == 1
    assert "--records" in capsys.readouterr().err


def test_what_ended_the_ingest_is_told_where_the_volume_is_gone_too(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    image = f"file:{tmp_path}/a.img"
    Volume.create([f"{image}?create=64MiB"]).close()
    (tmp_path / "a.tar").write_bytes(b"no tar" * 1000)
    asked: list[str] = []

    def gone(self: Volume, prefix: str) -> bool:
        asked.append(prefix)
        if len(asked) == 1:
            return False
        raise DeviceTimeout("no answer")

    monkeypatch.setattr(Volume, "any", gone)
    assert main(["ingest", str(tmp_path / "a.tar"), "a", "--volume", image, "--records", "--workers", "1"]) == 1
    assert asked == ["a.ingest/"] * 2
    said = capsys.readouterr().err
    assert "a tar is damaged or cut off" in said and "no answer" not in said
