"""Each flow reads a stretch of the data from its start to its end: shards that are streamed, files that are copied."""

from __future__ import annotations

from headrace.bench.figures import Outcome, rate
from headrace.bench.patterns.flows import measure, noted
from headrace.bench.patterns.options import Options
from headrace.bench.patterns.samples import Grid, in_order, read_again
from headrace.bench.places.protocol import Place, Tell
from headrace.units import MIB, format_bytes

REQUEST = 1 * MIB


def run(place: Place, options: Options, tell: Tell) -> Outcome:
    """One round. Latencies are of batches: what the flow waits for."""
    request = options.request_bytes or REQUEST
    cache = place.forget(options.cache)
    grid = Grid(place, request)
    again = read_again(place, options)
    found = measure(place, options, lambda flow: in_order(grid, options, flow, again=again), tell, "sequential reads")
    return Outcome(
        pattern="sequential", path=place.name, work=format_bytes(request), flows=options.flows, bytes=found.bytes,
        seconds=found.seconds, series=found.series, latencies=found.latencies,
        figures=(rate("read", found.bytes, found.seconds),), cache=cache, notes=noted(found, options),
    )  # fmt: skip
