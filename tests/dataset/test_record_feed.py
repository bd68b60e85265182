"""A feed of records: exact resume from every step, on any number of ranks, in any number of batches a step, read ahead
by any depth; a mixture of datasets; and nothing left out, whatever goes wrong in a call."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from headrace.dataset import GlobalOrder, Mixture, RecordFeed, RecordFeedOptions, Records, RecordState
from headrace.dataset.ingestion.records import ingest_records, open_records
from headrace.errors import ChecksumMismatch, DatasetError, DeviceError, UsageError
from headrace.testing.devices import MemoryDevice
from headrace.volume import Volume
from tests.dataset.corpora import native_volume
from tests.dataset.test_records_ahead import Broken

COUNTS = {"a": 100, "b": 50, "c": 10}
BATCH = 24
#: Datasets, and their shares.
CASES = {"plain": {"a": 1}, "mixed": {"a": 5, "b": 3, "c": 1}}
#: Ranks, batches a step, batches ahead.
WORLDS = [(1, 1, 1), (2, 4, 3), (3, 2, 2), (8, 1, 5)]


def content(name: str, number: int) -> bytes:
    return name.encode() * (number * 37 % 500) + b" %d" % number


def fill(volume: Volume, folder: Path, counts: dict[str, int]) -> None:
    for name, count in counts.items():
        (folder / name).mkdir()
        for number in range(count):
            (folder / name / f"{number:03}.bin").write_bytes(content(name, number))
            (folder / name / f"{number:03}.n").write_bytes(b"%d" % number)
        with volume.session(run_id="test") as session:
            ingest_records(open_records(folder / name), session, name)


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    with native_volume() as volume:
        fill(volume, tmp_path_factory.mktemp("records"), COUNTS)
        yield volume


def decoded(record: dict[str, memoryview]) -> tuple[int, bytes]:
    return int(bytes(record["n"])), bytes(record["bin"])


def feed(volume: Volume, case: str = "plain", **options: Any) -> RecordFeed[tuple[int, bytes]]:
    decode = options.pop("decode", decoded)
    shares = CASES[case]
    return RecordFeed(
        {name: Records.open(volume, name) for name in shares},
        RecordFeedOptions(**{"global_batch": BATCH, "seed": 11, "epochs": 1, **options}),
        shares=list(shares.values()),
        decode=decode,
    )


#: Datasets, numbers, and what was made of the records.
Step = tuple[np.ndarray, np.ndarray, np.ndarray]


def step(running: RecordFeed[tuple[int, bytes]]) -> Step:
    """What a rank gets in its next step."""
    parts = []
    for _ in range(running.options.accumulation):
        batch = running.acquire()
        assert batch is not None
        names = [list(running.sources)[source] for source in batch.sources.tolist()]
        expected = [(number, content(*where)) for where in zip(names, batch.samples.tolist(), strict=True)
                    for number in [where[1]]]  # fmt: skip
        assert batch.items == expected
        parts.append((batch.sources, batch.samples, np.array([item for _, item in batch.items], object)))
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))  # type: ignore[return-value]


def union(volume: Volume, case: str, world: int, accumulation: int, prefetch: int, state: RecordState) -> Step:
    """What all ranks get in the step after `state`, in the order of the samples."""
    ranks = []
    for rank in range(world):
        each = feed(volume, case, rank=rank, world=world, accumulation=accumulation, prefetch=prefetch)
        each.load_state(state)
        ranks.append(step(each))
        each.close()
    # Rank by rank in each batch of the step, batch by batch.
    return tuple(
        np.concatenate([part.reshape(accumulation, -1) for part in column], axis=1).reshape(BATCH)
        for column in zip(*ranks, strict=True)
    )  # type: ignore[return-value]


@pytest.mark.parametrize("case", CASES)
def test_resume_at_every_step_with_any_world(volume: Volume, case: str) -> None:
    running = feed(volume, case)
    steps = (running.place.end or 0) // BATCH
    assert 4 <= steps <= 8
    for number in range(steps):
        # Through a checkpoint: nothing but numbers and strings.
        state = RecordState.from_dict(dict(running.state().to_dict()))
        assert state.consumed == number * BATCH
        whole = step(running)
        for world, accumulation, prefetch in WORLDS:
            found = union(volume, case, world, accumulation, prefetch, state)
            for expected, column in zip(whole, found, strict=True):
                assert np.array_equal(expected, column), (number, world)
    assert running.acquire() is None and running.acquire() is None


@pytest.mark.parametrize("case", CASES)
def test_two_epochs_are_permutations(volume: Volume, case: str) -> None:
    running = feed(volume, case, global_batch=1, epochs=2, prefetch=16)
    seen: dict[int, list[int]] = {}
    while (batch := running.acquire()) is not None:
        seen.setdefault(int(batch.sources[0]), []).append(int(batch.samples[0]))
    for source, count in enumerate(COUNTS[name] for name in CASES[case]):
        first, second = seen[source][:count], seen[source][count : 2 * count]
        assert sorted(first) == sorted(second) == list(range(count))
        assert first != second


def test_the_order_is_that_of_every_loader(volume: Volume) -> None:
    mixture = Mixture(weights={"b": 3, "c": 1, "a": 5}, window=9)
    assert mixture.shares([0, 0, 0]) == [3, 1, 5]
    order = GlobalOrder(COUNTS, [5, 3, 1], 11)
    running = feed(volume, "mixed", rank=1, world=2, epochs=None)
    for number in range(20):
        batch = running.acquire()
        assert batch is not None and batch.position == number * BATCH
        sources, samples = order.at(np.arange(number * BATCH + 12, (number + 1) * BATCH))
        assert np.array_equal(batch.sources, sources) and np.array_equal(batch.samples, samples)


# ---- states that do not fit ------------------------------------------------------------------------------------------


def test_what_differs_is_said(volume: Volume, tmp_path: Path) -> None:
    running = feed(volume)
    step(running)
    state = running.state()
    for told, different in (
        ({"seed": 12}, "does not fit: seed: expected seed 11, found seed 12"),
        ({"global_batch": 12}, "does not fit: global_batch.*allow_global_batch_change"),
        ({"case": "mixed"}, "does not fit: .*datasets"),
    ):
        with pytest.raises(DatasetError, match=different):
            feed(volume, **told).load_state(state)
    with pytest.raises(DatasetError, match="comes too late"):
        running.load_state(state)
    with native_volume() as other:
        fill(other, tmp_path, {"a": 100})
        with pytest.raises(DatasetError, match=r"does not fit: object: expected object .*/a\.records#"):
            feed(other).load_state(state)
    changed = feed(volume, global_batch=12, allow_global_batch_change=True)
    changed.load_state(state)
    assert changed.consumed == BATCH and changed.state().steps_from == BATCH
    within = feed(volume, accumulation=4)
    assert within.acquire() is not None
    with pytest.raises(DatasetError, match="within a step"):
        feed(volume, accumulation=2).load_state(within.state())
    plain = state.to_dict()
    with pytest.raises(DatasetError, match="another kind of loader: expected of records, found of tokens"):
        RecordState.from_dict({key: value for key, value in plain.items() if key != "of"})
    with pytest.raises(DatasetError, match="no valid 'record_bytes'"):
        RecordState.from_dict({**plain, "record_bytes": "many"})


def test_what_cannot_be_meant(volume: Volume) -> None:
    with pytest.raises(UsageError, match="no record has a field 'jpg'"):
        RecordFeed({"a": Records.open(volume, "a")}, RecordFeedOptions(global_batch=1), kinds=["jpg"])
    with pytest.raises(UsageError, match="global_batch does not divide"):
        feed(volume, world=5)
    with pytest.raises(UsageError, match="threads is out of range"):
        feed(volume, threads=-1)
    running = feed(volume)
    running.skip(3)
    assert running.consumed == 3 * BATCH and np.array_equal(step(running)[1], steps_of(volume, 4)[3][1])
    with pytest.raises(UsageError, match="cannot be left out"):
        running.skip(1)
    running.close()
    with pytest.raises(UsageError, match="is closed"):
        running.acquire()


def steps_of(volume: Volume, count: int) -> list[Step]:
    running = feed(volume, epochs=None)
    return [step(running) for _ in range(count)]


# ---- what goes wrong leaves nothing out ------------------------------------------------------------------------------


@pytest.mark.parametrize("threads", [0, 2])
def test_what_decode_raises_comes_in_its_step_and_names_the_record(volume: Volume, threads: int) -> None:
    wrong = int(steps_of(volume, 3)[2][1][5])
    bad = [True]

    def decode(record: dict[str, memoryview]) -> tuple[int, bytes]:
        found = decoded(record)
        if bad[0] and found[0] == wrong:
            # Of all exceptions the one that ends an iteration.
            raise StopIteration if threads == 0 else ValueError("no picture")
        return found

    running = feed(volume, decode=decode, threads=threads)
    step(running), step(running)
    for _ in range(2):
        with pytest.raises((ValueError, RuntimeError)) as told:
            running.acquire()
        said = [str(told.value), *getattr(told.value, "__notes__", [])]
        assert f"while record {wrong} of a.records was decoded" in " ".join(said)
        assert running.state().consumed == 2 * BATCH
    bad[0] = False
    assert np.array_equal(step(running)[1], steps_of(volume, 3)[2][1])


def test_a_record_of_a_mixture_is_called_by_its_own_number(volume: Volume) -> None:
    def decode(record: dict[str, memoryview]) -> tuple[int, bytes]:
        if bytes(record["bin"]).startswith(b"c"):
            raise ValueError("none of c")
        return decoded(record)

    running = feed(volume, "mixed", decode=decode, global_batch=9)
    (number,) = GlobalOrder(COUNTS, [5, 3, 1], 11).at(np.arange(9))[1][
        GlobalOrder(COUNTS, [5, 3, 1], 11).at(np.arange(9))[0] == 2
    ]
    with pytest.raises(ValueError, match="none of c") as told:
        running.acquire()
    assert f"record {number} of c.records" in told.value.__notes__[0]


def test_reads_that_fail_are_tried_again(tmp_path: Path) -> None:
    device = Broken(16 << 20)
    with Volume.create(devices=[device]) as volume:
        fill(volume, tmp_path, COUNTS)
        expected = feed(volume, "mixed")
        running = feed(volume, "mixed", prefetch=2)
        for number in range(4):
            device.broken = number % 2 == 1
            try:
                found = step(running)
            except DeviceError:
                device.broken = False
                found = step(running)
            device.broken = False
            assert np.array_equal(found[1], step(expected)[1])


def test_damage_is_an_error_in_its_step_and_of_its_dataset(tmp_path: Path) -> None:
    device = MemoryDevice(16 << 20)
    with Volume.create(devices=[device]) as volume:
        fill(volume, tmp_path, {"b": 70, "c": 11})
        device.data[device.data.index(content("b", 33))] ^= 1
        running = RecordFeed(
            {name: Records.open(volume, name) for name in "bc"},
            RecordFeedOptions(global_batch=1, prefetch=1),
            shares=[1, 1],
        )
        while True:
            position = running.consumed
            try:
                assert running.acquire() is not None
            except ChecksumMismatch as error:
                # The whole of b has room in a few checksum blocks.
                assert "b.records" in str(error) and running.order.at([position])[0] == [0]
                break
        # What is behind it can be had.
        beyond = RecordFeed(running.sources, running.options, shares=[1, 1])
        beyond.skip(next(at for at in range(position, 140) if running.order.at([at])[0] == [1]))
        assert beyond.acquire() is not None


def test_metrics_count_what_was_handed_out(volume: Volume) -> None:
    running = feed(volume, threads=2, rank=1, world=2)
    asked: list[Any] = []
    stop = threading.Event()

    def ask() -> None:
        while not stop.is_set():
            asked.append(running.metrics())
            time.sleep(0)

    thread = threading.Thread(target=ask)
    thread.start()
    try:
        given = [step(running) for _ in range(4)]
    finally:
        stop.set()
        thread.join()
    metrics = running.metrics()
    assert metrics.batches == 4 and metrics.samples == 48
    assert metrics.token_bytes == sum(
        len(item) + len(str(number)) for each in given for number, item in zip(each[1], each[2], strict=True)
    )
    assert 0 < metrics.last_wait_s <= metrics.longest_wait_s <= metrics.wait_s
    assert all(each.batches <= 4 for each in asked)
    assert running.devices == volume.devices and running.name == "a"
    assert running.describe() == {"a": {"volume": volume.uris, "stage": None}}
