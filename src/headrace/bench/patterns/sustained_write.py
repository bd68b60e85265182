"""Writes that go on for long: files one after another, each durable before the next, the same ones again and again.

A device's cache of fast cells and a cloud volume's credits are larger than what a short run writes. The space that is
taken stays small: files are written over. In a volume each is a new object, so there it takes what it writes.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from headrace.bench.figures import Outcome
from headrace.bench.meter import series_of
from headrace.bench.patterns.ingest import Writing
from headrace.bench.patterns.options import Options
from headrace.bench.patterns.sustained import judged, outcome
from headrace.bench.places import open_writer
from headrace.bench.places.protocol import Place, Shard, Tell, Writer
from headrace.bench.sustained import Judgement
from headrace.units import MIB, format_bytes

_FILE = 64 * MIB
#: Files that a slot of the series holds at least: each is slow at its end, where it is made durable.
_FILES_A_SLOT = 4


def run(place: Place, options: Options, tell: Tell, size_bytes: int = 0) -> tuple[Outcome, Judgement]:
    """One run, until the time is up or the budget is written; as `sustained.run`. `size_bytes`: space to be taken,
    where files can be written over."""
    count = _count(place, options, size_bytes)
    shards = [Shard(f"sustained-{number:05}", _FILE) for number in range(count)]
    numbers: Iterator[int] = iter(range(count)) if place.kind == "volume" else itertools.cycle(range(count))
    with place.room(shards, options.cache) as room:
        spec = room.for_writer()
        writers: list[Writer] = []
        try:
            for _ in range(options.flows):
                writers.append(open_writer(spec))
            writing = Writing(writers, numbers, options)
            writing.run(tell, place.name, "sustained writes")
            seconds = max(meter.last for meter in writing.meters) - writing.begun
        finally:
            for writer in writers:
                writer.close()
    series = series_of(writing.meters, writing.started_s)
    judgement = judged(series, seconds, _FILES_A_SLOT * options.flows * _FILE, "writing")
    made = outcome(
        "sustained_write", place, options, series.total_bytes, seconds, series, judgement,
        work=f"files of {format_bytes(_FILE)}", durable=place.durable,
    )  # fmt: skip
    return made, judgement


def room_bytes(place: Place, options: Options, size_bytes: int) -> int:
    """The space that it takes at once."""
    return _count(place, options, size_bytes) * _FILE


def _count(place: Place, options: Options, size_bytes: int) -> int:
    """Files: no two writers at one, so two for each."""
    if place.kind == "volume":
        return max(options.flows, options.budget_bytes // _FILE)
    return max(2 * options.flows, size_bytes // _FILE)
