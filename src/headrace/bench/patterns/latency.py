"""One small read at a time in each flow: what an index, a header or the first byte of a file costs."""

from __future__ import annotations

from headrace.bench.figures import PER_S, SECONDS, Figure, Outcome
from headrace.bench.patterns.flows import measure, noted
from headrace.bench.patterns.options import Options
from headrace.bench.patterns.samples import Grid, by_chance, read_again
from headrace.bench.places.protocol import Place, Tell
from headrace.units import KIB, format_bytes

REQUEST = 4 * KIB
#: Places that a flow chooses at a time.
_BATCH = 64


def run(place: Place, options: Options, tell: Tell) -> Outcome:
    """One round. Latencies are of single reads, as Python sees them: its own call is in them, some ten microseconds."""
    request = options.request_bytes or REQUEST
    cache = place.forget(options.cache)
    grid = Grid(place, request)
    again = read_again(place, options)
    found = measure(
        place, options, lambda flow: by_chance(grid, options, flow, _BATCH, again=again), tell, "single small reads",
        alone=True,
    )  # fmt: skip
    figures: list[Figure] = []
    if found.latencies is not None:
        spread = found.latencies
        for name, value in (("p50", spread.p50), ("p99", spread.p99), ("p99.9", spread.p999)):
            figures.append(Figure(name=name, value=value, unit=SECONDS))
    if found.seconds > 0:
        figures.append(Figure(name="reads", value=found.requests / found.seconds, unit=PER_S))
    return Outcome(
        pattern="latency", path=place.name, work=format_bytes(request), flows=options.flows, bytes=found.bytes,
        seconds=found.seconds, series=found.series, latencies=found.latencies, figures=figures, cache=cache,
        notes=noted(found, options),
    )  # fmt: skip
