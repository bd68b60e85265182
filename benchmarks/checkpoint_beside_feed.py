"""Suite `checkpoint-beside-feed`: what a save that nobody waits for costs the reads of training, and what it gets.

A target in memory, behind a way of 50 MB/s that is shared evenly by all connections, both directions together
(`shared_way`). A feed takes half of it, in bursts (`beside_client`). A save is written beside it, by the same process,
or by another one, which knows of the feed only by what its own writes take. Each round: steps alone, a save alone (that
is what the way carries, on this machine and just now), and then steps beside a save of each kind.
"""

from __future__ import annotations

import math
import os
import statistics
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks.beside_client import RECORDS
from benchmarks.figures import Figure
from benchmarks.programs import Program, python
from benchmarks.records import write_records
from headrace.testing.serve import serving
from headrace.units import MIB

SUITE = "checkpoint-beside-feed"
FIGURES = {
    "wait": "p99 of the seconds that a step waits for data, beside a save, over steps without one",
    "rate": "bytes a second of the save, over what it gets alone and unpaced, less what the feed got beside it",
    "wait_other_process": "as `wait`, where another process saves",
    "rate_other_process": "as `rate`, where another process saves",
    "wait_unpaced": "p99 beside a save with WriterOptions(pacing=False)",
    "rate_unpaced": "what that one wrote",
}
NQN = "nqn.2026-01.io.headrace:benchmark-beside"
RATE = 50e6
FILES = 64
SMALLEST, LARGEST = 100_000, 2_000_000


@dataclass
class Side:
    """One way to save, in the rounds."""

    waits: list[float] = field(default_factory=list)
    ratios: list[float] = field(default_factory=list)
    rates: list[float] = field(default_factory=list)
    pacing: list[Any] = field(default_factory=list)


def p99(waits: Sequence[float]) -> float:
    return sorted(waits)[max(0, math.ceil(0.99 * len(waits)) - 1)]


def run(quick: bool, only: Sequence[str] = ()) -> Iterator[Figure]:
    rounds, length = (3, 48 * MIB) if quick else (7, 256 * MIB)
    wanted = [name for name in FIGURES if not only or name in only]
    kinds = [kind for kind in ("", "_other_process", "_unpaced") if any(name.endswith(kind) for name in wanted)]
    sides = {kind: Side() for kind in kinds if any(name in (f"wait{kind}", f"rate{kind}") for name in wanted)}
    alone: list[float] = []
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="headrace-benchmark-")))
        (folder / "files").mkdir()
        total = write_records(folder / "files", FILES, SMALLEST, LARGEST)
        target = stack.enter_context(
            serving(NQN, f"mem:{total * 9 // 8 // MIB + 96}MiB", *[f"mem:{3 * length // MIB + 96}MiB"] * 2)
        )
        cli = [sys.executable, "-m", "headrace.cli"]
        for number in (1, 2, 3):
            subprocess.run([*cli, "volume", "create", target.uri(number)], check=True, stdout=subprocess.DEVNULL)
        ingest = [*cli, "ingest", str(folder / "files"), "records", "--records", "--volume", target.uri()]
        subprocess.run(ingest, check=True, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        cores = os.sched_getaffinity(0)
        way = stack.enter_context(closing(Program(python("shared_way", target.port, RATE), cores)))
        # A volume of records, and one for the saves of each process: a volume has one that writes.
        uris = [f"nvme+tcp://127.0.0.1:{way.greeting}/{NQN}?nsid={number}" for number in (1, 2, 3)]
        feeder, saver = (
            stack.enter_context(closing(Program(python("beside_client", uris[0], uri, RATE, "records"), cores)))
            for uri in uris[1:]
        )
        # Which steps there are does not depend on what goes on beside them.
        steps = max(8, length // (RECORDS * total // FILES))
        for _ in range(rounds):
            without = feeder.ask(steps=steps)["waits"]
            bare = saver.ask(save=length, paced=False)
            carries = bare["written"] / bare["saved"]
            alone.append(p99(without))
            for kind, side in sides.items():
                if kind == "_other_process":
                    answer = beside(feeder, saver, folder / "saved", length)
                else:
                    answer = feeder.ask(save=length, paced=kind == "", beside=True)
                waits = answer["waits"]
                both = min(len(waits), len(without))
                side.waits.append(p99(waits[:both]))
                side.ratios.append(p99(waits[:both]) / p99(without[:both]))
                rest = carries - answer["bytes"] / answer["seconds"]
                side.rates.append(answer["written"] / answer["saved"] / rest)
                side.pacing.append(answer["pacing"])
                if quick:
                    print(f"{SUITE}{kind}: {answer['pacing']}", file=sys.stderr)
    for kind, side in sides.items():
        bound = kind != "_unpaced"
        wait = Figure(
            suite=SUITE, figure=f"wait{kind}", value=statistics.median(side.ratios), unit="of steps without a save",
            at_most=1.3 if bound else None, samples=side.ratios, ours=1e3 * statistics.median(side.waits),
            peer=1e3 * statistics.median(alone), measured_in="ms",
        )  # fmt: skip
        rate = Figure(
            suite=SUITE, figure=f"rate{kind}", value=statistics.median(side.rates), unit="of the rest of the way",
            at_least=0.75 if bound else None, samples=side.rates,
        )  # fmt: skip
        yield from (figure for figure in (wait, rate) if figure.figure in wanted)


def beside(feeder: Program, saver: Program, done: Path, length: int) -> dict[str, Any]:
    """Steps of one process until the other one has saved."""
    done.unlink(missing_ok=True)
    feeder.send(until=str(done))
    saver.send(save=length, paced=True)
    saved = saver.answer()
    done.touch()
    return {**feeder.answer(), **saved}
