"""What is measured of a loader in its process: batches that resume where they were, or that do not."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("torch")

from benchmarks.feed_record_loaders import BATCH, files, same, weigh
from benchmarks.loader_process import Loader, Work, forever
from benchmarks.records import write_records
from headrace.dataset.ingestion.records import ingest_records, open_records
from headrace.torch import RecordLoader
from tests.dataset.corpora import native_volume

COUNT = 5 * BATCH


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    (tmp_path / "files").mkdir()
    write_records(tmp_path / "files", COUNT, 100, 20_000)
    return tmp_path


def test_who_has_states_goes_on_with_the_same_batch(folder: Path) -> None:
    with native_volume() as volume:
        with volume.session(run_id="test") as session:
            ingest_records(open_records(folder / "files"), session, "records")

        def make(state: Any, *, heeds: bool = True) -> Loader:
            loader: RecordLoader[Any] = RecordLoader(volume, "records", global_batch=BATCH, seed=7)
            if state is not None and heeds:
                loader.load_state_dict(state)
            return Loader(([record["bin"] for record in batch] for batch in loader), loader.state_dict)

        work = Work(make, weigh, same, half=2)
        answer = work.resume(2)
        assert answer["same"] and len(answer["resume_s"]) == 2
        careless = Work(lambda state: make(state, heeds=False), weigh, same, half=2)
        assert not careless.resume(1)["same"]
        turn = work.turn(make(None), 0.0)
        assert turn["samples"] == BATCH and turn["bytes"] == weigh(next(make(None).batches))[1]


def test_who_has_none_says_so(folder: Path) -> None:
    work = Work(lambda state: files(folder, "", 0, state), weigh, same, half=2)
    assert work.resume(3) == {"resume_s": None}
    assert len(work.first(2)["first_s"]) == 2
    got = work.make(None).batches
    read = sum(weigh(next(got))[1] for _ in range(COUNT // BATCH))
    assert read == sum(path.stat().st_size for path in (folder / "files").iterdir())


def test_workers_that_end_within_a_turn_have_used_what_they_have_used() -> None:
    burn = "import time\nwhile time.process_time() < 0.2: pass"

    def batches() -> Iterator[list[bytes]]:
        subprocess.run([sys.executable, "-c", burn], check=True)
        yield [b"x"] * BATCH

    assert Work(lambda _: Loader(batches()), weigh, same, half=1).turn(Loader(batches()), 0.0)["cpu_s"] >= 0.2


def test_an_epoch_without_a_batch_is_an_error_and_not_for_ever() -> None:
    def epoch(number: int) -> Iterator[int]:
        return iter([number] if number < 2 else [])

    got = forever(epoch)
    assert [next(got), next(got)] == [0, 1]
    with pytest.raises(RuntimeError, match="epoch 2 has no batch"):
        next(got)
