"""Suite `records`: records of 0.1 to 15 MB, in random order, over a shaped link.

Two nodes (`headrace.testing.nodes`): a target in memory, and a client whose link carries 2 Gbit/s and holds 256 KiB.
What the link carries is what a bare socket gets over it in the same run, in turns; nothing else is shaped.
"""

from __future__ import annotations

import statistics
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path

import numpy as np

from benchmarks.figures import Figure
from benchmarks.pairs import interleaved
from benchmarks.shaped import Client, serve, serve_bare
from headrace.testing.nodes import Link, Nodes, NodesUnavailable
from headrace.units import KIB, MIB

SUITE = "records"
FIGURES = {
    "link": "bytes of records of 0.1 to 15 MB, verified, in random order, over those of a bare socket on the same link",
    "cpu": "CPU seconds a GB of the process that gets them, over those of the bare socket's",
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
    count, rounds, seconds = (24, 3, 0.4) if quick else (400, 9, 3.0)
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-")))
        (folder / "files").mkdir()
        total = write_records(folder / "files", count)
        try:
            target, node = stack.enter_context(Nodes(2, shared=[folder]))
            (uri,) = serve(target, [node], stack, NQN, f"mem:{total * 9 // 8 // MIB + 96}MiB")
            cli = [sys.executable, "-m", "headrace.cli"]
            node.run([*cli, "volume", "create", uri])
            node.run([*cli, "ingest", str(folder / "files"), "records", "--records", "--volume", uri], timeout_s=300)
            node.shape(down=LINK)
        except NodesUnavailable as error:
            print(f"suite {SUITE} is skipped: {error}", file=sys.stderr)
            return
        client = Client(node, "benchmarks.records_client", [*serve_bare(target, stack), uri, "records"], stack)
        costs: dict[str, list[float]] = {"records": [], "bare": []}

        def measure(what: str) -> float:
            answer = client.ask(**{what: seconds})
            costs[what].append(answer["cpu_s_per_gb"])
            return float(answer["bytes_per_s"])

        pairs = interleaved(lambda: measure("records"), lambda: measure("bare"), rounds)
    cpu = [ours / statistics.median(costs["bare"]) for ours in costs["records"]]
    figures = [
        Figure(
            suite=SUITE, figure="link", value=pairs.median_ratio, unit="of a bare socket", at_least=0.9,
            samples=pairs.ratios, noise=pairs.noise, ours=statistics.median(pairs.ours) / 1e6,
            peer=statistics.median(pairs.peer) / 1e6, measured_in="MB/s",
        ),
        Figure(
            suite=SUITE, figure="cpu", value=statistics.median(cpu), unit="of a bare socket", samples=cpu,
            ours=statistics.median(costs["records"]), peer=statistics.median(costs["bare"]), measured_in="s/GB",
        ),
    ]  # fmt: skip
    yield from (figure for figure in figures if not only or figure.figure in only)
