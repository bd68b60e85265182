"""Figures `records` of the suite `feed`: records of 0.1 to 15 MB beside the loaders of PyPI, theirs from local files in
the page cache, ours over NVMe/TCP from a target in memory, verified."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import ExitStack
from pathlib import Path

from benchmarks.feed_record_loaders import LOADERS
from benchmarks.figures import Figure
from benchmarks.records import write_records
from benchmarks.turns import Turns, bytes_per_s, cpu_per_gb
from headrace.dataset.ingestion.records import ingest_records, open_records
from headrace.testing.serve import serving
from headrace.units import MIB
from headrace.volume import Volume

NQN = "nqn.2026-01.io.headrace:benchmark-feed-records"
#: Those whose worker processes are asked for by a number.
WORKERS = ("files", "streaming", "litdata", "webdataset")
MEMBERS = 2


def measure(count: int, rounds: int, turn_s: float) -> Iterator[Figure]:
    """`count` records, as many of each decade of lengths."""
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-")))
        (folder / "files").mkdir()
        half = write_records(folder / "files", count) // MEMBERS
        size = -(-(half + half // 8) // MIB) * MIB + 96 * MIB
        target = stack.enter_context(serving(NQN, *[f"mem:{size}"] * MEMBERS))
        uris = [target.uri(nsid) for nsid in range(1, MEMBERS + 1)]
        with Volume.create(uris) as volume, volume.session() as session:
            ingest_records(open_records(folder / "files"), session, "records")
        turns = Turns(
            "benchmarks.feed_record_loaders", list(LOADERS), WORKERS, [str(folder), " ".join(uris)], stack,
            rounds=rounds, turn_s=turn_s, prefix="records_",
        )  # fmt: skip
        yield turns.beside("rate", lambda row: bytes_per_s(row) / 1e6, "MB/s", max)
        yield from turns.figures("rate", lambda row: bytes_per_s(row) / 1e6, "MB/s")
        yield turns.beside("cpu", cpu_per_gb, "s/GB", min)
        yield from turns.figures("cpu", cpu_per_gb, "s/GB")
        yield from turns.memory()
        yield from turns.first()
        yield from turns.resume()
