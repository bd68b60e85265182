"""Memory of batches: used again when its last view is gone, never before, and not more of it kept than was said."""

from __future__ import annotations

import gc
import random
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.dataset import AheadOptions, RecordsAhead
from headrace.dataset.ingestion.records import ingest_records, open_records
from headrace.dataset.records.memory import KeptMemory
from headrace.dataset.records.records import Records
from headrace.units import MIB
from tests.dataset.corpora import native_volume


def address(array: Any) -> int:
    return int(np.frombuffer(array, np.uint8).__array_interface__["data"][0])


@pytest.mark.parametrize(
    "view",
    [
        lambda lease: lease,
        lambda lease: lease[5:10],
        lambda lease: lease.view("<u4")[3:4].reshape(1, 1),
        lambda lease: lease.data[7:9],
        lambda lease: np.frombuffer(lease.data[64:128], "<f8"),
        lambda lease: memoryview(lease).cast("B")[1:][1:],
    ],
)
def test_what_anybody_sees_is_not_given_out_again(view: Callable[[Any], Any]) -> None:
    memory = KeptMemory(64 * MIB)
    lease = memory.take(2 * MIB)
    place = address(lease)
    seen = view(lease)
    del lease
    other = memory.take(2 * MIB)
    assert address(other) != place and memory.made_bytes == 4 * MIB and memory.free_bytes() == 0
    del seen
    assert memory.free_bytes() == 2 * MIB
    again = memory.take(2 * MIB - 3)
    assert address(again) == place and len(again) == 2 * MIB - 3
    assert memory.made_bytes == 4 * MIB and memory.free_bytes() == 0


def test_a_batch_gets_what_fits_it_and_no_more_than_the_bound_is_kept() -> None:
    memory = KeptMemory(20 * MIB)
    held = [memory.take(size * MIB) for size in (4, 8, 10)]
    places = [address(each) for each in held]
    while held:
        held.pop(0)
    # 22 MiB: the one that came back first is given up.
    assert memory.free_bytes() == 18 * MIB
    # Half as long again may be given, and nothing longer.
    small = memory.take(5 * MIB)
    assert address(small) not in places[1:]
    assert address(memory.take(6 * MIB)) == places[1]
    assert address(memory.take(9 * MIB)) == places[2]
    memory.close()
    del small
    assert memory.free_bytes() == 0
    # What is short is the allocator's business.
    before = memory.made_bytes
    assert len(memory.take(0)) == 0 and len(memory.take(MIB - 1)) == MIB - 1 and memory.made_bytes == before


def test_parts_end_in_other_threads_and_in_garbage() -> None:
    memory = KeptMemory(8 * MIB)
    chance = random.Random(3)
    stop = threading.Event()
    held: list[tuple[Any, int]] = []

    def drop() -> None:
        while not stop.is_set():
            try:
                lease, mark = held.pop()
            except IndexError:
                stop.wait(0.001)
                continue
            assert lease[0] == lease[-1] == mark
            cycle: list[Any] = [lease]
            cycle.append(cycle)
            del lease, cycle

    threads = [threading.Thread(target=drop) for _ in range(3)]
    for thread in threads:
        thread.start()
    for turn in range(160):
        lease = memory.take(chance.randrange(MIB, 2 * MIB))
        lease[0] = lease[-1] = turn % 251
        held.append((lease, turn % 251))
        if turn % 40 == 0:
            gc.collect()
        assert memory.free_bytes() <= 8 * MIB + 3 * 2 * MIB
    del lease
    while held:
        stop.wait(0.001)
    stop.set()
    for thread in threads:
        thread.join()
    gc.collect()
    assert memory.free_bytes() <= 8 * MIB and not memory._out


def test_records_that_are_kept_stay_and_the_others_memory_is_used_again(tmp_path: Path) -> None:
    chance = random.Random(1)
    bodies = [chance.randbytes(chance.randrange(100_000, 900_000)) for _ in range(12)]
    for number, body in enumerate(bodies):
        (tmp_path / f"{number:02}.bin").write_bytes(body)
    with native_volume(member_bytes=32 * MIB) as volume:
        with volume.session(run_id="test") as session:
            ingest_records(open_records(tmp_path), session, "a")
        records = Records.open(volume, "a")
        wanted = [[chance.randrange(12) for _ in range(6)] for _ in range(60)]
        options = AheadOptions(prefetch=3, kept_bytes=16 * MIB)
        with RecordsAhead(records, wanted, options=options) as ahead:
            kept: list[tuple[int, Any]] = []
            for number, found in enumerate(ahead):
                assert [bytes(record["bin"]) for record in found] == [bodies[each] for each in wanted[number]]
                if number % 10 == 0:
                    kept.append((wanted[number][2], np.frombuffer(found[2]["bin"], np.uint8)))
            assert all(bytes(body) == bodies[number] for number, body in kept)
            metrics = ahead.metrics()
            assert 0 < metrics.kept_bytes <= 16 * MIB
            # Those ahead, in hand, kept by us and kept for the next, and as much again for lengths that did not fit.
            assert metrics.made_bytes < metrics.payload_bytes / 2
            del found
        assert ahead.metrics().kept_bytes == 0
        assert all(bytes(body) == bodies[number] for number, body in kept)
