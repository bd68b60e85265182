"""Samples of one size from anywhere, batch after batch: what a shuffled training set is to storage."""

from __future__ import annotations

from headrace.bench.figures import PER_S, SECONDS, Figure, Outcome, rate
from headrace.bench.patterns.flows import measure, noted
from headrace.bench.patterns.options import Options
from headrace.bench.patterns.samples import Grid, by_chance, read_again, split
from headrace.bench.places.protocol import Place, Tell
from headrace.units import KIB, format_bytes

REQUEST = 128 * KIB


def run(place: Place, options: Options, tell: Tell) -> Outcome:
    """One round. Latencies are of batches: until all samples of one have come."""
    request = options.request_bytes or REQUEST
    cache = place.forget(options.cache)
    grid = Grid(place, request)
    again = read_again(place, options)
    _, batch = split(options.depth)
    found = measure(
        place, options, lambda flow: by_chance(grid, options, flow, batch, again=again), tell, "random samples"
    )
    figures = [rate("read", found.bytes, found.seconds)]
    if found.seconds > 0:
        figures.append(Figure(name="samples", value=found.requests / found.seconds, unit=PER_S))
    if found.latencies is not None:
        note = f"batches of {batch}"
        figures.append(Figure(name="p50", value=found.latencies.p50, unit=SECONDS, note=note))
        figures.append(Figure(name="p99", value=found.latencies.p99, unit=SECONDS, note=note))
    return Outcome(
        pattern="random", path=place.name, work=format_bytes(request), flows=options.flows, bytes=found.bytes,
        seconds=found.seconds, series=found.series, latencies=found.latencies, figures=figures, cache=cache,
        notes=noted(found, options),
    )  # fmt: skip
