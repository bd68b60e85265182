"""An epoch of each kind of samples, as a hash, with a stage and without; and a stager in a process of its own."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import numpy as np

from headrace.dataset import (
    Feed,
    FeedOptions,
    Records,
    TokenStream,
    open_samples,
    stages,
)
from headrace.volume import Volume

LENGTH = 63
WAIT_S = 60.0


def feed(
    volume: Volume, name: str, where: Path | str | None, kind: str = "windows", *, length: int = LENGTH, **options: Any
) -> Feed:
    samples = open_samples(TokenStream.open(volume, name), kind, length)
    stage = None if where is None else str(where)
    given = {"sequence_length": length, "global_batch": 64, "epochs": 1, "seed": 3, "stage": stage, **options}
    return Feed({name: samples}, FeedOptions(**given))


def epoch(each: Feed, between: Callable[[int], None] = lambda step: None) -> str:
    """Hash of all batches of an epoch."""
    digest, step = hashlib.sha256(), 0
    while (batch := each.acquire()) is not None:
        digest.update(batch.tokens.tobytes())
        digest.update(batch.samples.tobytes())
        each.release(batch)
        step += 1
        between(step)
    each.close()
    return digest.hexdigest()


def all_records(records: Records, seed: int = 1) -> str:
    """Hash of all records, a few at a time, by chance."""
    digest = hashlib.sha256()
    order = np.random.default_rng(seed).permutation(len(records))
    for first in range(0, len(order), 16):
        for record in records.read(order[first : first + 16]):
            for kind in sorted(record):
                digest.update(kind.encode() + record[kind])
    return digest.hexdigest()


def file_of(where: Path) -> Path:
    (path,) = where.glob("*.stage")
    return path


def flip(path: Path, *places: int) -> None:
    """Change a bit of each of these bytes, in place: readers that have it open see it."""
    with path.open("r+b") as file:
        for place in places:
            file.seek(place)
            byte = file.read(1)
            file.seek(place)
            file.write(bytes([byte[0] ^ 4]))


@contextmanager
def stager(uri: str, name: str, where: Path, *options: str) -> Iterator[subprocess.Popen[str]]:
    """`headrace dataset stage` as a process."""
    command = [sys.executable, "-m", "headrace.cli", "dataset", "stage", name, "--to", str(where), "-V", uri, "--json"]
    process = subprocess.Popen(
        [*command, *options], stdout=subprocess.PIPE, stderr=subprocess.PIPE, stdin=subprocess.DEVNULL, text=True
    )
    try:
        yield process
    finally:
        if process.poll() is None:
            process.kill()
        process.communicate()


def report_of(process: subprocess.Popen[str]) -> dict[str, Any]:
    out, err = process.communicate(timeout=WAIT_S)
    assert process.returncode == 0, err
    report: dict[str, Any] = json.loads(out)
    return report


def there(where: Path) -> int:
    """Chunks that are there."""
    return sum(found.there_chunks for found in stages(where)) if where.is_dir() else 0
