"""Loaders in turns: each in a process of its own, on the same cores, in an order that turns from round to round.

A peer with worker processes is measured with none and with one, and counts with the better.
"""

from __future__ import annotations

import json
import statistics
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from functools import cached_property
from typing import Any

from benchmarks import peers
from benchmarks.cores import layout
from benchmarks.figures import Figure
from benchmarks.programs import Program
from headrace.units import MIB

SUITE = "feed"
OURS = "headrace"
#: How often a loader is made anew for what that takes.
TIMES = 3
Row = dict[str, Any]


class Turns:
    """`prefix`: of the names of figures. `where`: what the loaders' processes are told behind their name."""

    def __init__(
        self,
        module: str,
        names: Sequence[str],
        workers: Sequence[str],
        where: Sequence[str],
        stack: ExitStack,
        *,
        rounds: int,
        turn_s: float,
        prefix: str = "",
    ) -> None:
        """`workers`: those whose worker processes are asked for by a number."""
        self.names, self._workers = list(names), workers
        self._module, self._where, self._stack = module, where, stack
        self._rounds, self._turn_s = rounds, turn_s
        self._prefix = prefix
        self._programs: dict[tuple[str, int], Program] = {}

    def loader(self, name: str, workers: int = 0) -> Program:
        """The process of a loader, started when it is first asked for."""
        if (name, workers) not in self._programs:
            python = sys.executable if name == OURS else peers.python()
            command = [python, "-m", self._module, name, *self._where, str(workers)]
            program = Program(command, set(layout().usable))
            self._stack.callback(program.close)
            self._programs[name, workers] = program
        return self._programs[name, workers]

    def version(self, name: str) -> str:
        """The package of a loader, and its version."""
        return str(json.loads(self.loader(name).greeting)["version"])

    @cached_property
    def rows(self) -> Mapping[str, list[Row]]:
        """Each loader's answers, one a round, with as many workers as are best for it."""
        ways = [(name, workers) for name in self.names for workers in ((0, 1) if name in self._workers else (0,))]
        got: dict[tuple[str, int], list[Row]] = {way: [] for way in ways}
        for way in ways:
            self.loader(*way).ask(seconds=min(0.2, self._turn_s))
        for turn in range(self._rounds):
            at = turn % len(ways)
            for way in ways[at:] + ways[:at]:
                got[way].append(self.loader(*way).ask(seconds=self._turn_s))
        best = {}
        for name in self.names:
            of_one = [rows for way, rows in got.items() if way[0] == name]
            best[name] = max(of_one, key=lambda rows: statistics.median(map(bytes_per_s, rows)))
        return best

    def figures(self, kind: str, of: Callable[[Row], float], unit: str) -> Iterator[Figure]:
        """Of each loader its own."""
        for name, rows in self.rows.items():
            yield self._figure(kind, name, list(map(of, rows)), unit)

    def beside(self, kind: str, of: Callable[[Row], float], unit: str, best: Any, **bound: Any) -> Figure:
        """Ours over the peer for which `best` finds the best median, round by round."""
        medians = {name: statistics.median(map(of, rows)) for name, rows in self.rows.items() if name != OURS}
        peer = best(medians, key=lambda name: medians[name])
        ratios = [of(a) / of(b) for a, b in zip(self.rows[OURS], self.rows[peer], strict=True)]
        return Figure(
            suite=SUITE, figure=f"{self._prefix}{kind}", value=statistics.median(ratios), unit=f"of {peer}",
            samples=ratios, ours=statistics.median(map(of, self.rows[OURS])), peer=medians[peer], measured_in=unit,
            version=self.version(peer), **bound,
        )  # fmt: skip

    def memory(self) -> Iterator[Figure]:
        """Most resident memory of that process, its modules and the pages of files that it maps included."""
        for name, rows in self.rows.items():
            # It only grows.
            yield self._figure("memory", name, [float(rows[-1]["peak_bytes"]) / MIB], "MiB")

    def first(self) -> Iterator[Figure]:
        """From nothing but an imported module to the first batch."""
        for name in self.names:
            yield self._figure("first", name, self.loader(name).ask(first=TIMES)["first_s"], "s")

    def resume(self, more: Sequence[str] = ()) -> Iterator[Figure]:
        """From a state at half of an epoch to the next batch, in a new loader. `more`: loaders that take no turns."""
        for name in [*self.names, *more]:
            answer = self.loader(name).ask(resume=TIMES)
            if answer["resume_s"] is None:
                yield self._figure("resume", name, [], "offers no states")
            else:
                unit = "s" if answer["same"] else "s, to another batch"
                yield self._figure("resume", name, answer["resume_s"], unit)

    def _figure(self, kind: str, name: str, samples: list[float], unit: str) -> Figure:
        return Figure(
            suite=SUITE, figure=f"{self._prefix}{kind}_{name}", unit=unit, samples=samples, version=self.version(name),
            value=statistics.median(samples) if samples else None,
        )  # fmt: skip


def bytes_per_s(row: Row) -> float:
    return float(row["bytes"] / row["seconds"])


def cpu_per_gb(row: Row) -> float:
    return float(row["cpu_s"] / row["bytes"] * 1e9)
