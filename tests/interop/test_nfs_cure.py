"""What `examples/nfs_cure` holds against each other, without its guest: agreement, and each way to disagree."""

from __future__ import annotations

import time
from collections.abc import Iterable
from dataclasses import replace
from typing import Any

import pytest

from examples.nfs_cure.inside import Rest
from examples.nfs_cure.judge import Row, disagreements, judge, too_busy
from examples.nfs_cure.loaders import FileBatches
from examples.nfs_cure.picture import page, text
from examples.nfs_cure.world import MEASURED, World
from headrace.measure import Watch

#: Quick: a step of images takes 2 ms.
WORLD = World(dilation=1.0, steps=20)


class Waits:
    """A loader that waits for reads."""

    def __init__(self, wait_s: float) -> None:
        self.wait_s, self.waited = wait_s, (0.0, 0.0, 0)

    def __iter__(self) -> Iterable[int]:
        for number in range(20):
            started = time.perf_counter()
            time.sleep(self.wait_s)
            waited = self.waited[0] + time.perf_counter() - started
            self.waited = (waited, waited, 0)
            yield number


@pytest.fixture(scope="module")
def rows(tmp_path_factory: pytest.TempPathFactory) -> list[Row]:
    """As if NFS gave half of what is needed, and all else five times that."""
    folder = tmp_path_factory.mktemp("watch")
    measured: list[dict[str, Any]] = []
    for job, path in MEASURED:
        slow = (job, path) == ("images", "nfs")
        waits = Waits(0.02 if slow else 0.0)
        with Watch(folder / f"{job}-{path}", device=None, rank=0, world=1) as watch:
            for _ in watch.loader(Rest(iter(waits), waits)):
                with watch.compute():
                    time.sleep(0.02)
        # A step is waited for as long as it computes: as if reading one took both.
        rate = (0.5 if slow else 5.0) * WORLD.needed_bytes_per_s
        measured.append(
            {
                "job": job, "path": path, "bytes_per_s": rate, "bench_au": 0.5 if slow else 1.0, "bytes": 100,
                "medium_bytes": 100, "bench_bytes": 100, "bench_medium_bytes": 100,
            }
        )  # fmt: skip
    found = judge(WORLD, measured, folder)
    assert found[0].cause == "fetch" and found[0].storage_share > 0.1
    assert found[0].bench_au == pytest.approx(found[0].plan_au, abs=0.01) and found[0].plan_problem == "yes"
    assert all(row.bench_au == row.plan_au == 1 and row.plan_problem == "no" for row in found[1:])
    # How long a sleep takes on a busy machine is not what is looked at here.
    return [
        replace(
            row,
            cause="fetch",
            watch_au=0.53,
            bench_au=0.55,
            plan_au=0.55,
            plan_problem="yes",
            plan_gain=45.0,
            starved_share=0.0,
        )
        if row is found[0]
        else replace(row, cause=None, watch_au=0.99, starved_share=0.0, watch_sentence="Storage is not your problem.")
        for row in found
    ]


def test_they_agree(rows: list[Row]) -> None:
    assert disagreements(rows) == []
    assert too_busy(rows) is None and "25% of the time" in str(too_busy([replace(rows[0], starved_share=0.25)]))
    assert "| images with captions | NFS" in text(rows)
    assert "within 5 points" in page(rows, WORLD, [])


@pytest.mark.parametrize(
    ("number", "change", "said"),
    [
        (0, {"watch_au": 0.61}, "images over nfs: bench says AU 55.0%, watch saw 61.0%"),
        (0, {"plan_au": 0.45}, "images over nfs: plan says AU 45.0%"),
        (0, {"cause": "preparation"}, "watch does not say that reads are waited for"),
        (0, {"plan_problem": "no"}, "plan does not say that it is storage"),
        (0, {"plan_gain": 20.0}, "the cure: plan says +20 points, +46 were seen"),
        (0, {"watch_au": 0.95, "bench_au": 0.95, "plan_au": 0.95}, "is no problem to be cured"),
        (1, {"watch_au": 0.9}, "images over nvme: bench says AU 100.0%"),
        (1, {"cause": "fetch"}, "images over nvme: watch says that it is storage"),
        (2, {"plan_problem": "yes"}, "images over local: plan says that it is storage"),
        (3, {"cause": "blocked"}, "text over nfs: watch says that it is storage"),
        (2, {"cold": False}, "images over local: read from a cache"),
        (4, {"plan_gain": 3.0}, "text over nvme: plan says that it is storage"),
    ],
)
def test_each_way_to_disagree_is_said(rows: list[Row], number: int, change: dict[str, Any], said: str) -> None:
    changed = list(rows)
    changed[number] = replace(rows[number], **change)
    assert any(said in each for each in disagreements(changed)), disagreements(changed)


def test_a_path_that_was_not_measured_is_no_agreement(rows: list[Row]) -> None:
    assert disagreements(rows[:-1]) == ["not measured: [('text', 'nvme')]"]


def test_files_come_in_order_and_all_are_counted() -> None:
    batches = FileBatches(lambda number: [bytes([number]), b"x"], range(10), batch=4, readers=3)
    assert [[bytes(sample[0])[0] for sample in batch] for batch in batches] == [[0, 1, 2, 3], [4, 5, 6, 7]]
    assert batches.waited[2] == 16
