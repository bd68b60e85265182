"""Corpora and volumes for the tests of this room."""

from __future__ import annotations

import json
import random
from collections.abc import Iterable
from pathlib import Path

import pyarrow
import pyarrow.parquet

from headrace.dataset import IngestOptions, ingest
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
