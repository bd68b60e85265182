"""Training that is fed while it saves: what a checkpoint does to the reads beside it.

The feed alone, as fast as it can; then at half of that rate, alone; then at that rate while ranks save. A feed that is
kept waiting falls behind, and its batches come late: lateness is counted from when a batch was due.
"""

from __future__ import annotations

import time
from collections.abc import Iterator
from dataclasses import replace

from headrace.bench.figures import SECONDS, SHARE, Figure, Outcome, rate
from headrace.bench.layouts import layout, total_bytes
from headrace.bench.patterns import random
from headrace.bench.patterns.checkpoint import save, shards_of, work_of
from headrace.bench.patterns.flows import Flows, Measured
from headrace.bench.patterns.options import Options
from headrace.bench.patterns.samples import Grid, by_chance, read_again, split
from headrace.bench.places.protocol import Place, Ranges, Tell
from headrace.bench.ranks import Ranks
from headrace.errors import UsageError
from headrace.units import format_bytes, format_rate

#: Of what the feed reaches alone, what it is to keep.
SHARE_OF_ALONE = 0.5
_MOST_S = 3600.0


def run(place: Place, options: Options, tell: Tell, ranks: Ranks | None = None) -> Outcome:
    """One round; `options.seconds` for each of the two parts without a save."""
    if ranks is None:
        with Ranks(options.ranks) as started:
            return run(place, options, tell, started)
    request = options.request_bytes or random.REQUEST
    cache = place.forget(options.cache)
    grid = Grid(place, request)
    _, batch = split(options.depth)

    # Each part has an order of its own, and goes on from the start where a part reads all: what comes from memory
    # then is told.
    def feed(part: int) -> Flows:
        chosen = replace(options, seed=options.seed * 4 + part)

        def work(flow: int) -> Iterator[Ranges]:
            return by_chance(grid, chosen, flow, batch, again=True)

        return Flows(place, replace(chosen, seconds=_MOST_S if part == 2 else options.seconds), work, pace_s=pace_s)

    pace_s = 0.0
    alone = _until_time(feed(0), tell, "feed, as fast as it can")
    if not alone.bytes or not alone.seconds:
        raise UsageError("the feed read nothing in its time", where=place.name, next_step="give more time (--seconds)")
    wanted = SHARE_OF_ALONE * alone.bytes / alone.seconds
    pace_s = batch * min(request, alone.bytes / alone.requests) * options.flows / wanted
    quiet = _until_time(feed(1), tell, "feed, paced, alone")
    files = layout(options.model, options.ranks, options.scale)
    total = total_bytes(files)
    with place.room(shards_of(files), options.cache) as room:
        ranks.open(room.for_writer())
        flows = feed(2)
        try:
            flows.start()
            begun = time.perf_counter()
            _, save_s = save(
                ranks, room, files,
                lambda moved: tell(moved / total, f"feeding while saving: {format_bytes(moved)} of it saved"),
            )  # fmt: skip
            # Until the save was over, not until the last batch came: a feed that gets nothing more keeps less.
            seconds = time.perf_counter() - begun
            fed = flows.end()
        except BaseException:
            ranks.close()
            flows.abandon()
            raise
        ranks.leave()
    figures = [
        Figure(
            name="feed kept", value=min(1.0, fed.bytes / seconds / wanted), unit=SHARE,
            note=f"of {format_rate(wanted)}, half of what it reaches alone",
        ),
        *_latency("batch p99 alone", quiet),
        *_latency("batch p99 while saving", fed),
        rate("save", total, save_s),
    ]  # fmt: skip
    notes = []
    if not read_again(place, options) and alone.bytes + quiet.bytes + fed.bytes > sum(
        i.length_bytes for i in place.items
    ):
        notes.append("more was read than there are data: some of it came from this machine's memory (more: --size)")
    return Outcome(
        pattern="mixed", path=place.name, work=f"{format_bytes(request)} beside {work_of(options)}",
        flows=options.flows, bytes=fed.bytes + total, seconds=seconds, series=fed.series, latencies=fed.latencies,
        figures=figures, cache=cache, durable=place.durable, notes=notes,
    )  # fmt: skip


def _until_time(flows: Flows, tell: Tell, text: str) -> Measured:
    try:
        flows.start()
        flows.wait(tell, text)
        return flows.end()
    except BaseException:
        flows.abandon()
        raise


def _latency(name: str, measured: Measured) -> list[Figure]:
    if measured.latencies is None:
        return []
    return [Figure(name=name, value=measured.latencies.p99, unit=SECONDS)]
