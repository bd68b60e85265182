"""Records as tensors: batches that are collated, any number of ranks, states, and what goes wrong."""

from __future__ import annotations

import json
import pickle
from collections.abc import Callable, Iterator
from itertools import chain, islice
from typing import Any

import numpy as np
import pytest
import torch

from headrace.dataset import Mixture
from headrace.dataset.feed import records as feed
from headrace.dataset.records import ahead
from headrace.errors import DatasetError, ObjectNotFound, UsageError
from headrace.metrics import NodeMetrics
from headrace.torch import Epochs, RecordLoader, TokenLoader
from headrace.torch.feed import records as loader
from headrace.volume import Volume
from tests.dataset.corpora import native_volume, put_stream, some_lengths
from tests.dataset.test_record_feed import content, fill
from tests.torch.test_loader_failures import interrupted_at

COUNTS = {"a": 90, "b": 40}
MIXED = Mixture(weights={"a": 3, "b": 1}, window=4)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    with native_volume() as volume:
        fill(volume, tmp_path_factory.mktemp("records"), COUNTS)
        put_stream(volume, "tokens", some_lengths(40, 30))
        yield volume


def decode(record: dict[str, memoryview]) -> dict[str, Any]:
    data = np.frombuffer(record["bin"], np.uint8)
    return {"n": int(bytes(record["n"])), "first": torch.from_numpy(data[:2].copy()), "sum": data.sum(dtype=np.float32)}


def number(record: dict[str, memoryview]) -> int:
    return int(bytes(record["n"]))


def made(name: str, number: int) -> tuple[int, list[int], float]:
    data = content(name, number)
    return number, list(data[:2]), float(sum(data))


def told(batch: Any) -> list[tuple[int, list[int], float]]:
    return list(zip(batch["n"].tolist(), batch["first"].tolist(), batch["sum"].tolist(), strict=True))


def open_loader(volume: Volume, data: Any = "a", **options: Any) -> RecordLoader[Any]:
    return RecordLoader(
        volume, data, **{"global_batch": 8, "rank": 0, "world": 1, "seed": 3, "decode": decode, **options}
    )


@pytest.mark.parametrize("data", ["a", MIXED])
@pytest.mark.parametrize("threads", [0, 2])
def test_batches_are_collated_in_the_order_of_the_samples(volume: Volume, data: Any, threads: int) -> None:
    with open_loader(volume, data, threads=threads) as each:
        for step, batch in enumerate(islice(each, 30)):
            assert batch["n"].dtype == torch.int64 and batch["first"].shape == (8, 2)
            where = zip(each.last_batch_datasets, each.last_batch_ids.tolist(), strict=True)
            assert told(batch) == [made(*each) for each in where]
            if data is MIXED:
                assert sorted(each.last_batch_datasets) == ["a"] * 6 + ["b"] * 2
            assert each.consumed == 8 * (step + 1)
        assert each.sample_count == (130 if data is MIXED else 90)
        assert each.shares == ({"a": 3, "b": 1} if data is MIXED else {"a": 1})
        assert each.epochs["a"] == (180 if data is MIXED else 240) / 90


@pytest.mark.parametrize("data", ["a", MIXED])
def test_a_state_goes_on_in_any_world(volume: Volume, data: Any) -> None:
    with open_loader(volume, data) as each:
        whole = [told(next(each)) for _ in range(14)]
    with open_loader(volume, data, rank=1, world=2, prefetch=7) as each:
        states = [each.state_dict()]
        for _ in islice(each, 12):
            states.append(each.state_dict())
    for step, world in ((0, 8), (3, 4), (7, 1), (12, 2)):
        state = states[step]
        ranks = []
        for rank in range(world):
            with open_loader(volume, data, rank=rank, world=world, prefetch=1 + step % 3) as each:
                each.load_state_dict(json.loads(json.dumps(state)))
                ranks.append([told(next(each)) for _ in range(2)])
        assert [list(chain(*parts)) for parts in zip(*ranks, strict=True)] == whole[step : step + 2], step
    with open_loader(volume, data, epochs=1) as each:
        # Until the last dataset was seen once.
        assert len(list(each)) == (90 if data == "a" else 159) // 8
        with pytest.raises(DatasetError, match="comes too late"):
            each.load_state_dict(states[0])
    with (
        open_loader(volume, data) as each,
        TokenLoader(volume, "tokens", sequence_length=8, global_batch=8, rank=0, world=1) as tokens,
        pytest.raises(DatasetError, match="of records, found of tokens"),
    ):
        each.load_state_dict(tokens.state_dict())
    with open_loader(volume, data) as each:
        each.load_state_dict(states[2])
        each.skip(3)
        assert told(next(each)) == whole[5]


def test_rows_as_they_are(volume: Volume) -> None:
    with open_loader(volume, decode=None, kinds=["n"]) as each:
        rows = next(each)
        assert [int(bytes(row["n"])) for row in rows] == each.last_batch_ids.tolist()
        assert all(list(row) == ["n"] for row in rows)
    with open_loader(volume, decode=lambda record: bytes(record["bin"]), collate=b"|".join) as each:
        assert next(each) == b"|".join(content("a", number) for number in each.last_batch_ids.tolist())


def test_rows_that_cannot_be_collated_are_the_next_ones_again(volume: Volume) -> None:
    """Arrays of different lengths; and memory that is short."""
    short = [True]

    def collate(rows: list[Any]) -> Any:
        if short[0]:
            raise MemoryError
        return torch.utils.data.default_collate(rows)

    with open_loader(volume) as each:
        expected = [told(next(each)) for _ in range(3)]
    with open_loader(volume, collate=collate) as each:
        for number in range(3):
            short[0] = True
            with pytest.raises(MemoryError):
                next(each)
            assert each.consumed == 8 * number
            short[0] = False
            assert told(next(each)) == expected[number]
    with open_loader(volume, decode=lambda record: np.frombuffer(record["bin"], np.uint8)) as each:
        for _ in range(2):
            with pytest.raises(RuntimeError, match="equal size"):
                next(each)
        assert each.consumed == 0
        with pytest.raises(UsageError, match="no batch was handed out"):
            each.last_batch_ids  # noqa: B018


@pytest.mark.parametrize("batches", [None, 1])
def test_ctrl_c_at_any_line_loses_no_batch_and_gives_none_twice(volume: Volume, batches: int | None) -> None:
    """When it begins, and at a batch."""
    with open_loader(volume, global_batch=1, kinds=["n"], decode=number) as each:
        expected = [next(each) for _ in range(4)]
    lines, interrupted = 0, True
    while interrupted:
        lines += 1
        with open_loader(volume, global_batch=1, kinds=["n"], decode=number, prefetch=2) as each:
            seen = [next(each) for _ in range(batches or 0)]
            before = _standing(each)
            call: Callable[[], object] = each.__iter__ if batches is None else each.__next__
            interrupted = interrupted_at(lines, call, (loader, feed, ahead))
            assert not interrupted or before == _standing(each)
            while interrupted and len(seen) < len(expected):
                seen.append(next(each))
        assert not interrupted or seen == expected, lines
    assert lines > 40


def _standing(each: RecordLoader[Any]) -> tuple[Any, ...]:
    metrics = each.metrics()
    return each.state_dict(), metrics.samples, metrics.token_bytes, each._last and each.last_batch_ids.tolist()


def test_epochs_of_one_length(volume: Volume) -> None:
    with open_loader(volume, decode=number, kinds=["n"], collate=list, accumulation=2) as each:
        epochs: Epochs[list[int]] = Epochs(each)
        assert len(epochs) == 90 // 8 * 2
        first = [rows for _, rows in zip(range(5), epochs, strict=False)]
        state = epochs.state_dict()
        rest = list(epochs)
        assert [len(rows) for rows in first + rest] == [4] * 22
    with open_loader(volume, decode=number, kinds=["n"], collate=list) as each:
        again: Epochs[list[int]] = Epochs(each)
        with pytest.raises(DatasetError, match="within a step"):
            again.load_state_dict(state)
    with open_loader(volume, decode=number, kinds=["n"], collate=list, accumulation=8) as each:
        again = Epochs(each)
        again.load_state_dict(state)
        assert list(chain(*again)) == list(chain(*rest))


def test_metrics_of_a_node_have_it(volume: Volume, tmp_path: Any) -> None:
    with open_loader(volume, MIXED) as each, NodeMetrics(each, folder=tmp_path / "run") as metrics:
        for _ in islice(each, 3):
            pass
        (rank,) = metrics.node()["ranks"]
        (said,) = rank["feeds"]
        assert said["name"] == "a, b" and said["batches"] == 3 and said["samples"] == 24 and said["token_bytes"] > 0
        assert len(rank["devices"]) == 2


def test_what_cannot_be_meant(volume: Volume) -> None:
    with pytest.raises(ObjectNotFound):
        open_loader(volume, "nothing")
    with pytest.raises(UsageError, match="no record has a field 'jpg'"):
        open_loader(volume, kinds=["jpg"])
    with pytest.raises(UsageError, match="rank and world belong together"):
        open_loader(volume, world=None)
    with open_loader(volume) as each, pytest.raises(UsageError, match="cannot leave its process"):
        pickle.dumps(each)
    with pytest.raises(UsageError, match="is closed"):
        next(each)
