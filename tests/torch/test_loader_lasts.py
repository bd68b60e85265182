"""A loader that lives long, and beside others: memory that does not grow, and workers of the user's own."""

from __future__ import annotations

import json
import pickle
import subprocess
import sys
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, Dataset

from headrace.errors import UsageError
from headrace.testing.serve import ServeProcess, serving
from headrace.torch import TokenLoader
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts

NQN = "nqn.2026-01.io.headrace:test-lasts"
OPTIONS: dict[str, Any] = {"sequence_length": 32, "global_batch": 8, "rank": 0, "world": 1, "seed": 3}


def test_memory_does_not_grow_with_the_samples_that_are_drawn() -> None:
    """In a process of its own; `python -m tests.torch.memory` draws a million, over half an hour."""
    command = [sys.executable, "-m", "tests.torch.memory", "--samples", "128000", "--for-s", "0"]
    answer = subprocess.run(command, capture_output=True, text=True, check=True, cwd=Path(__file__).parents[2])
    said = json.loads(answer.stdout)
    assert said["samples"] == 128_000 and said["epochs"] > 100
    # Some 670 batches lie between: a kilobyte each would be seen.
    assert said["growth_kib_last_thirds"] < 512, said


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ServeProcess]:
    with serving(NQN, "mem:32MiB") as target:
        with Volume.create([target.uri()]) as volume:
            ingest_texts(volume, tmp_path_factory.mktemp("corpus"), count=60)
        yield target


class Squares(Dataset[int]):
    """The user's own data, which have nothing to do with ours."""

    def __len__(self) -> int:
        return 64

    def __getitem__(self, index: int) -> int:
        return index * index


class Tangled(Squares):
    """It has the loader, and uses it in workers."""

    def __init__(self, loader: TokenLoader) -> None:
        self.loader = loader

    def __getitem__(self, index: int) -> int:
        return int(next(self.loader).sum())


@pytest.mark.parametrize("how", ["fork", "spawn"])
def test_workers_of_the_users_own_beside_an_open_loader(target: ServeProcess, how: str) -> None:
    with Volume.open(target.uri()) as volume:
        with TokenLoader(volume, "corpus", **OPTIONS) as each:
            expected = list(islice(each, 40))
        with TokenLoader(volume, "corpus", **OPTIONS) as each:
            seen = list(islice(each, 5))
            workers = DataLoader(Squares(), batch_size=8, num_workers=1, multiprocessing_context=how)
            squares: list[int] = []
            for batch in workers:
                squares += batch.tolist()
                seen.append(next(each))
            assert squares == [number * number for number in range(64)]
            # The workers have ended, and took nothing of it along.
            seen += islice(each, 40 - len(seen))
        assert all(torch.equal(a, b) for a, b in zip(seen, expected, strict=True))


def test_a_loader_that_is_used_in_a_forked_worker_says_so(target: ServeProcess) -> None:
    with Volume.open(target.uri()) as volume, TokenLoader(volume, "corpus", **OPTIONS) as each:
        first = next(each)
        workers = DataLoader(Tangled(each), batch_size=1, num_workers=1, multiprocessing_context="fork")
        with pytest.raises(Exception, match="made in another process"):
            next(iter(workers))
        # It goes on where it was made.
        assert not torch.equal(next(each), first) and each.consumed == 16


def test_a_loader_does_not_leave_its_process(target: ServeProcess) -> None:
    with Volume.open(target.uri()) as volume, TokenLoader(volume, "corpus", **OPTIONS) as each:
        with pytest.raises(UsageError, match="a loader cannot leave its process"):
            pickle.dumps(each)
        with pytest.raises(UsageError, match="a loader cannot leave its process"):
            next(iter(DataLoader(Tangled(each), num_workers=1, multiprocessing_context="spawn")))
        next(each)
