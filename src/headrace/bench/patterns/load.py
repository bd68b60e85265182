"""All of the data once, as fast as they come, from the opening of the first file on: a model that is loaded."""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

import numpy as np

from headrace.bench.figures import SECONDS, Figure, Outcome, rate
from headrace.bench.patterns.flows import Flows
from headrace.bench.patterns.options import Options, memory_bytes
from headrace.bench.patterns.samples import Grid, split
from headrace.bench.places.protocol import Place, Ranges, Tell
from headrace.units import MIB

REQUEST = 8 * MIB
#: Where flows and depth are many.
_LEAST = MIB // 4
#: Pieces that are looked at: more than any model has.
_MOST_PIECES = 1 << 20
#: A load has no time that is up: it is bounded by its bytes, and by this.
_MOST_S = 600.0


def run(place: Place, options: Options, tell: Tell) -> Outcome:
    """One round. Flows take turns: flow k reads the k-th piece, and every `flows`-th from there on."""
    most = memory_bytes() // 8 // (options.flows * options.depth)
    request = options.request_bytes or max(_LEAST, min(REQUEST, most // MIB * MIB))
    cache = place.forget(options.cache)
    grid = Grid(place, request)
    lengths = grid.ranges(np.arange(min(len(grid), _MOST_PIECES), dtype=np.int64)).length
    pieces = int(np.searchsorted(np.cumsum(lengths), options.budget_bytes)) + 1
    pieces = min(pieces, len(lengths))
    # Of a large device, another stretch in each round: the first one may be in its own cache from then on.
    first = int(np.random.default_rng(options.seed).integers(0, len(grid) - pieces + 1))
    _, batch = split(options.depth)

    def work(flow: int) -> Iterator[Ranges]:
        mine = np.arange(first + flow, first + pieces, options.flows, dtype=np.int64)
        for at in range(0, len(mine), batch):
            yield grid.ranges(mine[at : at + batch])

    begun = time.perf_counter()
    flows = Flows(place, _bounded(options), work)
    try:
        flows.start()
        flows.wait(tell, "model load")
        found = flows.end()
    except BaseException:
        flows.abandon()
        raise
    # Connecting and opening is part of a load.
    seconds = time.perf_counter() - begun
    notes = () if found.exhausted else (f"not all of it came within {_MOST_S:.0f} s",)
    return Outcome(
        pattern="load", path=place.name, flows=options.flows, bytes=found.bytes, seconds=seconds, series=found.series,
        latencies=None, cache=cache, notes=notes,
        figures=(rate("read", found.bytes, seconds), Figure(name="time", value=seconds, unit=SECONDS)),
    )  # fmt: skip


def _bounded(options: Options) -> Options:
    return replace(options, seconds=_MOST_S, budget_bytes=1 << 60)
