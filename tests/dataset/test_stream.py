"""Windows of tokens out of a volume, and datasets that are not what they should be."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from headrace.dataset import Manifest, TokenStream
from headrace.errors import ChecksumMismatch, DatasetError, ObjectNotFound, UsageError
from headrace.testing.devices import MemoryDevice
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts, memory_volume, native_volume
from tests.dataset.test_idx import written_plainly


def test_windows_anywhere(tmp_path: Path) -> None:
    with native_volume() as volume:
        ingest_texts(volume, tmp_path)
        stream = TokenStream.open(volume, "corpus")
        tokens = np.frombuffer(volume.read("corpus.bin"), np.uint16)
        assert stream.token_count == len(tokens)
        chance = np.random.default_rng(1)
        for length in (1, 2, 17, 2048, 2049, 5000):
            starts = chance.integers(0, len(tokens) - length + 1, 40).astype(np.uint64)
            starts[:2] = 0, len(tokens) - length
            buffer = np.empty((40, length), np.uint16)
            stream.submit_windows(starts, length, buffer).wait()
            assert np.array_equal(buffer, np.stack([tokens[int(s) : int(s) + length] for s in starts]))
        assert np.array_equal(stream.read_window(5, len(tokens) - 5), tokens[5:])


def test_what_cannot_be_read_is_refused_before_anything_moves(tmp_path: Path) -> None:
    with memory_volume() as volume:
        ingest_texts(volume, tmp_path)
        stream = TokenStream.open(volume, "corpus")
        starts = np.zeros(2, np.uint64)
        for buffer in (np.empty((2, 9), np.uint16), np.empty((2, 10), np.int16), np.empty((2, 20), np.uint16)[:, ::2]):
            with pytest.raises(UsageError, match="buffer"):
                stream.submit_windows(starts, 10, buffer)
        for start in (stream.token_count - 9, 1 << 63):
            with pytest.raises(UsageError, match="leaves the stream"):
                stream.submit_windows(np.array([0, start], np.uint64), 10, np.empty((2, 10), np.uint16))
        assert stream.sample_count(1) == stream.token_count - 1
        assert stream.sample_count(stream.token_count - 1) == 1
        with pytest.raises(DatasetError, match="shorter than one sample"):
            stream.sample_count(stream.token_count)
        with pytest.raises(UsageError, match="sequence_length"):
            stream.sample_count(0)


def test_a_flipped_byte_is_never_handed_out(tmp_path: Path) -> None:
    devices = [MemoryDevice(16 << 20)]
    with Volume.create(devices=devices) as volume:
        ingest_texts(volume, tmp_path)
        stream = TokenStream.open(volume, "corpus")
        content = volume.read("corpus.bin")[:4096]
        place = devices[0].data.find(content)
        devices[0].data[place + 1000] ^= 1
        with pytest.raises(ChecksumMismatch, match=r"corpus\.bin"):
            stream.read_window(0, 10)
        stream.read_window(4096, 10)


def _put(volume: Volume, objects: dict[str, bytes]) -> None:
    with volume.session(run_id="test") as session, session.transaction() as transaction:
        for name, data in objects.items():
            transaction.put(name, data)


def test_a_pair_from_elsewhere_needs_no_manifest() -> None:
    tokens = np.arange(1000, dtype="<i4") * 70
    with memory_volume() as volume:
        _put(volume, {"m.bin": tokens.tobytes(), "m.idx": written_plainly(np.dtype("<i4"), [400, 600], [0, 2])})
        stream = TokenStream.open(volume, "m")
        assert (stream.dtype, stream.token_count, stream.document_count) == (np.int32, 1000, 1)
        assert stream.manifest is None
        assert stream.read_window(990, 10).tolist() == tokens[990:].tolist()
        assert stream.index().document_starts().tolist() == [0, 1000]


GOOD_IDX = written_plainly(np.dtype("<u2"), [4, 6])
MANIFEST = Manifest(
    documents=2, tokens=10, dtype="uint16", tokens_sha256="0", tokenizer_sha256="0", vocabulary=9,
    end_of_document="</s>", end_of_document_id=1, corpus={}, headrace="0",
)  # fmt: skip


def _changed(**fields: object) -> bytes:
    return json.dumps({**json.loads(MANIFEST.encode()), **fields}).encode()


@pytest.mark.parametrize(
    ("objects", "error", "say"),
    [
        ({}, ObjectNotFound, "d.bin"),
        ({"bin": bytes(20)}, ObjectNotFound, "d.idx"),
        ({"bin": bytes(20), "idx": b""}, DatasetError, "too short"),
        ({"bin": bytes(20), "idx": GOOD_IDX[:-1]}, DatasetError, "wrong size"),
        ({"bin": bytes(21), "idx": GOOD_IDX}, DatasetError, "do not fit their index"),
        ({"bin": bytes(20), "idx": GOOD_IDX, "json": b"{"}, DatasetError, "not JSON"),
        ({"bin": bytes(20), "idx": GOOD_IDX, "json": b"[]"}, DatasetError, "not a dataset's manifest"),
        ({"bin": bytes(20), "idx": GOOD_IDX, "json": _changed(manifest=2)}, DatasetError, "manifest 1"),
        ({"bin": bytes(20), "idx": GOOD_IDX, "json": _changed(tokens="10")}, DatasetError, "'tokens'"),
        ({"bin": bytes(20), "idx": GOOD_IDX, "json": _changed(tokens=11)}, DatasetError, "11 tokens"),
        ({"bin": bytes(20), "idx": GOOD_IDX, "json": bytes(2 << 20)}, DatasetError, "2.0 MiB"),
    ],
)
def test_a_dataset_that_is_none(objects: dict[str, bytes], error: type[Exception], say: str) -> None:
    with memory_volume() as volume:
        _put(volume, {f"d.{end}": data for end, data in objects.items()})
        with pytest.raises(error) as caught:
            TokenStream.open(volume, "d")
        assert say in str(caught.value)


def test_the_index_must_fit_the_tokens() -> None:
    with memory_volume() as volume:
        _put(volume, {"d.bin": bytes(22), "d.idx": GOOD_IDX})
        stream = TokenStream.open(volume, "d")
        with pytest.raises(DatasetError, match="does not fit"):
            stream.index()


def test_a_manifest_comes_back() -> None:
    assert Manifest.decode(MANIFEST.encode(), "d.json") == MANIFEST
