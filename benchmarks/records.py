"""Suite `records`: records of 0.1 to 15 MB, in random order, over a shaped link.

Two nodes (`headrace.testing.nodes`): a target in memory, and a client whose link carries 2 Gbit/s and holds 256 KiB.
What the link carries is what a bare socket gets over it in the same run, in turns; nothing else is shaped.
"""

from __future__ import annotations

import json
import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import numpy as np

from benchmarks.figures import Figure
from benchmarks.shaped import bare_rate, serve
from headrace.testing.nodes import Link, Nodes, NodesUnavailable
from headrace.units import KIB, MIB

SUITE = "records"
FIGURES = {
    "link": "bytes of records of 0.1 to 15 MB, verified, in random order, over those of a bare socket on the same link",
    "cpu": "CPU seconds a GB of the process that gets them",
}
LINK = Link(rate_bits=2e9, buffer_bytes=256 * KIB)
SMALLEST, LARGEST = 100_000, 15_000_000
NQN = "nqn.2026-01.io.headrace:benchmark-records"


def write_records(folder: Path, count: int, smallest: int = SMALLEST, largest: int = LARGEST) -> int:
    """Files of random bytes, as many of each decade of lengths; how long they are together."""
    chance = np.random.default_rng(1)
    lengths = np.exp(np.linspace(np.log(smallest), np.log(largest), count)).astype(int)
    for number, length in enumerate(chance.permutation(lengths).tolist()):
        (folder / f"{number:05}.bin").write_bytes(chance.bytes(length))
    return int(lengths.sum())


def run(quick: bool, only: Sequence[str] = ()) -> Iterator[Figure]:
    count, rounds, seconds = (40, 3, 1.5) if quick else (400, 7, 8.0)
    shares: list[float] = []
    answers: list[dict[str, Any]] = []
    bare: list[float] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-")))
        (folder / "files").mkdir()
        total = write_records(folder / "files", count)
        try:
            nodes = stack.enter_context(Nodes(2, shared=[folder]))
            target, client = nodes
            (uri,) = serve(target, [client], stack, NQN, f"mem:{-(-total // MIB) + total // MIB // 8 + 96}MiB")
            cli = [sys.executable, "-m", "headrace.cli"]
            client.run([*cli, "volume", "create", uri])
            client.run([*cli, "ingest", str(folder / "files"), "records", "--records", "--volume", uri], timeout_s=300)
            client.shape(down=LINK)
        except NodesUnavailable as error:
            print(f"suite {SUITE} is skipped: {error}", file=sys.stderr)
            return
        for _ in range(rounds):
            bare.append(bare_rate(target, client, seconds / 2))
            command = [sys.executable, "-m", "benchmarks.records_client", uri, "records", str(seconds)]
            answers.append(json.loads(client.run(command, timeout_s=120 + 4 * seconds).stdout))
        # What the bare socket got before and after.
        bare.append(bare_rate(target, client, seconds / 2))
    rates = [answer["bytes_per_s"] for answer in answers]
    shares = [rate / ((bare[turn] + bare[turn + 1]) / 2) for turn, rate in enumerate(rates)]
    costs = [answer["cpu_s_per_gb"] for answer in answers]
    figures = [
        Figure(
            suite=SUITE, figure="link", value=statistics.median(shares), unit="of a bare socket", at_least=0.9,
            samples=shares, ours=statistics.median(rates) / 1e6, peer=statistics.median(bare) / 1e6, measured_in="MB/s",
        ),
        Figure(suite=SUITE, figure="cpu", value=statistics.median(costs), unit="s/GB", samples=costs),
    ]  # fmt: skip
    yield from (figure for figure in figures if not only or figure.figure in only)
