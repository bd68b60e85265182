"""Corpora and volumes for the tests of this room."""

from __future__ import annotations

import hashlib
import json
import random
from collections.abc import Iterable, Sequence
from pathlib import Path

import numpy as np
import pyarrow
import pyarrow.parquet

from headrace.dataset import IngestOptions, Manifest, ingest
from headrace.dataset.tokens.idx import encode_idx
from headrace.testing.devices import MemoryDevice
from headrace.units import MIB
from headrace.volume import Volume

_WORDS = [
    "the", "channel", "brings", "water", "to", "a", "turbine", "and", "the", "loader", "brings", "tokens", "to", "a",
    "model", "ä", "水", "<|endoftext|>", "0123",
]  # fmt: skip


def texts(count: int, seed: int = 1) -> list[str]:
    """Documents of 1 to 200 words, the same for the same seed."""
    chance = random.Random(seed)
    return [
        " ".join(chance.choices(_WORDS, k=chance.randint(1, 200))) + "\n" * chance.randint(0, 3) for _ in range(count)
    ]


def write_folder(folder: Path, documents: Iterable[str]) -> Path:
    folder.mkdir()
    for index, text in enumerate(documents):
        (folder / f"{index:05}.txt").write_bytes(text.encode())
    return folder


def write_jsonl(path: Path, documents: Iterable[str]) -> Path:
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in documents))
    return path


def write_parquet(path: Path, documents: Iterable[str]) -> Path:
    pyarrow.parquet.write_table(pyarrow.table({"text": list(documents)}), path, row_group_size=7)
    return path


def memory_volume(members: int = 2, member_bytes: int = 16 * MIB) -> Volume:
    """On the plain reference engine."""
    return Volume.create(devices=[MemoryDevice(member_bytes) for _ in range(members)], stripe_bytes=64 << 10)


def native_volume(members: int = 2, member_bytes: int = 16 * MIB) -> Volume:
    """On the native engine, in memory of this process."""
    return Volume.create([f"mem:{member_bytes}" for _ in range(members)], stripe_bytes=64 << 10)


def ingest_texts(volume: Volume, folder: Path, name: str = "corpus", count: int = 200, seed: int = 1) -> None:
    """A small dataset; vocabulary 300."""
    path = write_jsonl(folder / f"{name}.jsonl", texts(count, seed))
    with volume.session(run_id="test") as session:
        ingest(path, session, name, IngestOptions(vocab_size=300))


def put_stream(
    volume: Volume,
    name: str,
    lengths: Sequence[int],
    *,
    dtype: str = "<u2",
    manifest: bool = True,
    vocabulary: int = 500,
) -> np.ndarray:
    """A dataset of documents of these lengths, their tokens by chance, each ended by token 0; returns the tokens."""
    chance = np.random.default_rng(len(name) + sum(lengths))
    tokens = chance.integers(1, vocabulary, sum(lengths)).astype(dtype)
    ends = np.cumsum(lengths)
    tokens[ends[np.array(lengths) > 0] - 1] = 0
    objects = {"bin": tokens.tobytes(), "idx": b"".join(encode_idx(tokens.dtype, np.array(lengths, np.int32)))}
    if manifest:
        told = Manifest(
            documents=len(lengths), tokens=len(tokens), dtype=tokens.dtype.name,
            tokens_sha256=hashlib.sha256(tokens.tobytes()).hexdigest(), tokenizer_sha256="0", vocabulary=vocabulary,
            end_of_document="</s>", end_of_document_id=0, corpus={}, headrace="0",
        )  # fmt: skip
        objects["json"] = told.encode()
    with volume.session(run_id="test") as session, session.transaction() as transaction:
        for end, data in objects.items():
            if f"{name}.{end}" in volume:
                transaction.delete(f"{name}.{end}")
            transaction.put(f"{name}.{end}", data, checksum_block_bytes=4096)
    return tokens


def some_lengths(count: int, typical: int, seed: int = 1) -> list[int]:
    """Lengths as documents have them: many short ones, a few long ones."""
    drawn = np.random.default_rng(seed).lognormal(np.log(typical), 1.0, count)
    return np.maximum(1, drawn).astype(int).tolist()
