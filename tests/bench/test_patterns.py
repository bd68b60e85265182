"""Every pattern, in small, on every kind of place: what it moves, what it says, and that nothing of it stays."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from headrace.bench.figures import Outcome, together
from headrace.bench.patterns import checkpoint, ingest, latency, load, mixed, random, sequential
from headrace.bench.patterns.flows import Flows
from headrace.bench.patterns.options import Options
from headrace.bench.patterns.samples import Grid, by_chance, in_order
from headrace.bench.places import Item, Place, open_place
from headrace.bench.ranks import Ranks
from headrace.device import open_device
from headrace.units import KIB, MIB
from headrace.volume import Volume

#: What is read: 16 files, or a stretch of a device.
SIZE = 8 * MIB
READING = (sequential, random, latency, load)


def quiet(fraction: float, text: str) -> None:
    """Progress that nobody looks at."""
    assert 0 <= fraction <= 1 and text


@pytest.fixture(params=["folder", "namespace", "volume"])
def place(request: pytest.FixtureRequest) -> Iterator[Place]:
    name = str(request.getfixturevalue(request.param))
    writable = request.param != "folder"
    if request.param == "namespace":
        with open_device(name) as device:
            for at in (0, device.size_bytes - MIB):
                device.write(at, np.ones(MIB, np.uint8))
    with open_place(f"headrace://{name}" if request.param == "volume" else name, scratch=writable) as opened:
        opened.plan(SIZE, SIZE)
        opened.prepare(SIZE, tell=quiet)
        yield opened
    if request.param == "folder":
        assert not [*Path(name).iterdir()]
    elif request.param == "volume":
        with Volume.open(name) as found:
            assert not found.list()
    else:
        with open_device(name) as device:
            # Both ends are as they were.
            ends = np.empty(MIB, np.uint8)
            for at in (0, device.size_bytes - MIB):
                device.read_into(at, ends)
                assert (ends == 1).all()


def test_each_pattern_moves_what_it_says(place: Place, ranks: Ranks) -> None:
    options = Options(flows=2, seconds=0.2, depth=4, budget_bytes=4 * MIB, ranks=2, scale=0.00005)
    for pattern in READING:
        one = pattern.run(place, options, quiet)
        assert one.series is not None and one.series.total_bytes == one.bytes > 0, one.pattern
        assert one.cache and not one.durable and one.main.value > 0
        assert one.flows == 2 and one.path == place.name
    written = ingest.run(place, options, quiet)
    assert 2 * MIB <= written.bytes <= 4 * MIB and written.durable == place.durable
    saved = checkpoint.run(place, options, quiet, ranks)
    # Of 16.06 GB of weights and 96.4 GB of optimizer, two ranks of eight, at that scale.
    assert saved.bytes == pytest.approx(112.4e9 / 4 * 0.00005, rel=0.01)
    assert {figure.name for figure in saved.figures} == {"save", "restore", "save time", "restore time"}
    both = mixed.run(place, options, quiet, ranks)
    # A save this small may be over before a batch has come.
    assert 0 <= both.main.value <= 1 and both.main.name == "feed kept"
    assert both.main.note and "iB/s" not in both.main.note
    # Rounds of the same work can be put together.
    assert together([saved, checkpoint.run(place, options, quiet, ranks)]).main.n == 2


def test_a_load_reads_everything_once(folder: Path) -> None:
    with open_place(str(folder)) as place:
        place.prepare(3 * MIB + 8 * KIB, tell=quiet)
        total = sum(item.length_bytes for item in place.items)
        one = load.run(place, Options(flows=3, request_bytes=128 * KIB, depth=2), quiet)
        assert one.bytes == total and not one.notes
        assert load.run(place, Options(flows=1, budget_bytes=MIB), quiet).bytes < total


def test_what_is_read_twice_would_be_memory(folder: Path) -> None:
    """A round ends with the data where reading them again would be from the page cache, and goes on where not."""
    with open_place(str(folder)) as place:
        place.prepare(2 * MIB, tell=quiet)
        once: Outcome = sequential.run(place, Options(seconds=30.0), quiet)
        assert once.bytes == 2 * MIB and "twice" in once.notes[0]
        again = sequential.run(place, Options(seconds=0.3, cache="warm"), quiet)
        assert again.bytes > 2 * MIB and not again.notes and "read once before" in again.cache


class _Starved:
    """Reads that never come."""

    bytes = 1
    name = "starved"
    items = (Item("a", MIB),)

    def __init__(self) -> None:
        self.started = threading.Event()

    def reader(self, **_: object) -> _Starved:
        return self

    def start(self, ranges: object) -> _Starved:
        self.started.set()
        return self

    def done(self) -> bool:
        return False

    def wait(self, timeout_s: float | None = None) -> None:
        """Given up at the end."""

    def close(self) -> None: ...


def test_a_feed_that_gets_nothing_is_late() -> None:
    """Of what never comes nothing can be timed: it would be a feed without one late batch."""
    place, options = _Starved(), Options(flows=1, depth=2, seconds=0.1)
    grid = Grid(place, 4 * KIB)  # type: ignore[arg-type]
    flows = Flows(
        place,  # type: ignore[arg-type]
        options,
        lambda flow: by_chance(grid, options, flow, 1, again=True),
        pace_s=0.01,
    )
    flows.start()
    assert place.started.wait(60)
    time.sleep(0.2)
    fed = flows.end()
    assert fed.bytes == 0 and fed.latencies is not None
    assert fed.latencies.max >= 0.15 and fed.latencies.count >= 10


class _Lengths:
    name = "a"

    def __init__(self, *lengths: int) -> None:
        self.items = [Item(str(number), length) for number, length in enumerate(lengths)]


@pytest.mark.parametrize("flows", [1, 2, 3, 7])
def test_flows_share_samples_and_none_is_read_twice(flows: int) -> None:
    grid = Grid(_Lengths(1000, 1, 64, 65, 640), 64)  # type: ignore[arg-type]
    options = Options(flows=flows, depth=3)
    for order in (in_order, by_chance):
        seen: list[tuple[int, int, int]] = []
        for flow in range(flows):
            batches = (
                in_order(grid, options, flow, again=False)
                if order is in_order
                else by_chance(grid, options, flow, 5, again=False)
            )
            for ranges in batches:
                seen += zip(*(column.tolist() for column in ranges), strict=True)
        assert len(seen) == len(set(seen)) == len(grid)
        # Every byte of every item.
        assert sum(length for _, _, length in seen) == 1000 + 1 + 64 + 65 + 640
    around = in_order(grid, options, 0, again=True)
    lap: list[tuple[int, int]] = []
    # Once round, from anywhere: all of the stretch, and none twice.
    stretch = len(grid) // flows
    while len(lap) < stretch:
        ranges = next(around)
        lap += zip(ranges.item.tolist(), ranges.offset.tolist(), strict=True)
    assert len(set(lap)) == len(lap) == stretch
    starts = {next(in_order(grid, Options(seed=seed), 0, again=True)).offset[0] for seed in range(20)}
    assert len(starts) > 1
    first, second = (next(by_chance(grid, Options(flows=flows, seed=seed), 0, 50, again=False)) for seed in (1, 2))
    assert first.offset.tolist() != second.offset.tolist()
    same = next(by_chance(grid, Options(flows=flows, seed=1), 0, 50, again=False))
    assert same.offset.tolist() == first.offset.tolist()
