"""The loader: one global order for any number of ranks, exact resume, own tensors, bounded memory."""

from __future__ import annotations

import os
import pickle
from collections.abc import Iterator
from itertools import islice
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from headrace.dataset import (
    FeedOptions,
    IngestOptions,
    Mixture,
    PackOptions,
    Sampler,
    TokenStream,
    WindowFeed,
    ingest,
    pack_stream,
)
from headrace.errors import ChecksumMismatch, DatasetError, ObjectNotFound, UsageError
from headrace.testing.devices import MemoryDevice
from headrace.torch import DocumentLoader, TokenLoader
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts, native_volume, put_stream, write_jsonl
from tests.dataset.corpora import texts as some_texts

LENGTH, BATCH = 32, 8


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    with native_volume() as volume:
        ingest_texts(volume, tmp_path_factory.mktemp("corpus"), count=40)
        yield volume


@pytest.fixture(scope="module")
def tokens(volume: Volume) -> np.ndarray:
    return np.frombuffer(volume.read("corpus.bin"), np.uint16)


def loader(volume: Volume, **options: Any) -> TokenLoader:
    return TokenLoader(
        volume,
        "corpus",
        **{"sequence_length": LENGTH, "global_batch": BATCH, "rank": 0, "world": 1, "seed": 3, **options},
    )


def steps(volume: Volume, count: int, state: dict[str, Any] | None = None, **options: Any) -> list[torch.Tensor]:
    """The next `count` local batches."""
    with loader(volume, **options) as fresh:
        if state is not None:
            fresh.load_state_dict(state)
        return list(islice(fresh, count))


def union(volume: Volume, world: int, count: int, state: dict[str, Any] | None = None) -> list[torch.Tensor]:
    """The global batch of each step, from all ranks of a world, in rank order."""
    ranks = [steps(volume, count, state, rank=rank, world=world) for rank in range(world)]
    return [torch.cat(parts) for parts in zip(*ranks, strict=True)]


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def test_samples_are_the_windows_that_the_order_says(volume: Volume, tokens: np.ndarray) -> None:
    count = (len(tokens) - 1) // LENGTH
    epochs = [Sampler(count, 3).indices(epoch, 0, count) for epoch in range(3)]
    order = np.concatenate(epochs)
    number = 2 * count // BATCH + 3
    with loader(volume) as each:
        assert each.sample_count == count
        for step, batch in enumerate(islice(each, number)):
            ids = order[step * BATCH : (step + 1) * BATCH]
            assert batch.dtype == torch.int64 and batch.shape == (BATCH, LENGTH + 1)
            assert each.last_batch_ids.tolist() == ids.tolist()
            expected = np.stack([tokens[i * LENGTH : i * LENGTH + LENGTH + 1] for i in ids]).astype(np.int64)
            assert np.array_equal(batch.numpy(), expected)
            assert each.consumed == (step + 1) * BATCH


def test_any_world_sees_the_same_steps(volume: Volume) -> None:
    whole = steps(volume, 60)
    for world in (2, 4, 8):
        assert same(union(volume, world, 60), whole)


def test_resume_at_every_step_with_another_world(volume: Volume) -> None:
    number = 50  # Over the end of the first epoch.
    whole = steps(volume, number)
    with loader(volume, rank=1, world=2) as running:
        assert running.sample_count < (number - 6) * BATCH
        states = [running.state_dict()]
        for _ in islice(running, number - 2):
            states.append(running.state_dict())
    for step, state in enumerate(states):
        world = (1, 4, 2, 8)[step % 4]
        assert state["consumed"] == step * BATCH
        restored = pickle.loads(pickle.dumps(state))
        assert same(union(volume, world, 2, restored), whole[step : step + 2]), step


def test_resume_of_a_resume(volume: Volume) -> None:
    whole = steps(volume, 40)
    seen: list[torch.Tensor] = []
    state = None
    for count in (7, 1, 0, 12, 20):
        with loader(volume) as part:
            if state is not None:
                part.load_state_dict(state)
            seen += list(islice(part, count))
            state = part.state_dict()
    assert same(seen, whole)


@pytest.mark.parametrize("prefetch", [1, 2, 7, 64])
def test_the_ring_never_shows(volume: Volume, prefetch: int) -> None:
    """Tensors are the caller's own: held over many turns of the ring, and written to, they change nothing."""
    expected = steps(volume, 100, prefetch=4)
    with loader(volume, prefetch=prefetch) as each:
        held = list(islice(each, 50))
        assert same(held, expected[:50])
        kept = [batch.clone() for batch in held]
        for batch in held[::2]:
            batch.fill_(-1)
        assert same(list(islice(each, 50)), expected[50:])
        assert same(held[1::2], kept[1::2])
        assert each.ring_bytes == prefetch * BATCH * (LENGTH + 1) * 2
        metrics = each.metrics()
        # What is not asked for yet waits until there is room for a group.
        assert prefetch - max(1, prefetch // 2) < metrics.in_flight <= prefetch
        assert metrics.batches == 100 and metrics.samples == 100 * BATCH
        assert metrics.token_bytes == 100 * BATCH * (LENGTH + 1) * 2
        assert 0 <= metrics.last_wait_s <= metrics.longest_wait_s <= metrics.wait_s


def test_what_is_left_out_takes_no_time(volume: Volume) -> None:
    whole = steps(volume, 40)
    with loader(volume) as running:
        state = [running.state_dict() for _ in islice(running, 10)][-1]
    with loader(volume) as each:
        each.load_state_dict(state)
        each.skip(25)
        assert each.consumed == 35 * BATCH
        assert same(list(islice(each, 5)), whole[35:])
        with pytest.raises(UsageError, match="before the first"):
            each.skip(1)
    with loader(volume) as each:
        each.skip(10**12)
        for batches in (-1, 1 << 62):
            with pytest.raises(UsageError):
                each.skip(batches)
        next(each)


def test_epochs_end(volume: Volume, tokens: np.ndarray) -> None:
    count = len(tokens) - 1
    length = next(length for length in range(20, 60) if 2 * (count // length) % BATCH)  # The last batch is short.
    with loader(volume, epochs=2, sequence_length=length) as each:
        total = 2 * each.sample_count // BATCH
        seen = list(each)
        assert len(seen) == total
        assert list(each) == []
        state = each.state_dict()
    assert same(seen, steps(volume, total, sequence_length=length))
    assert steps(volume, 5, state, epochs=2, sequence_length=length) == []
    assert same(
        steps(volume, 5, state, sequence_length=length), steps(volume, total + 5, sequence_length=length)[total:]
    )


def test_every_sample_once_an_epoch(volume: Volume) -> None:
    with loader(volume, global_batch=4, sequence_length=50) as each:
        ids: list[int] = []
        for _ in range(each.sample_count // 4):
            next(each)
            ids += each.last_batch_ids.tolist()
    assert len(set(ids)) == len(ids)


# ---- documents and mixtures --------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def mixed(volume: Volume, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    with native_volume() as volume:
        # One tokenizer for both, as a mixture wants it.
        texts = write_jsonl(tmp_path_factory.mktemp("texts") / "a.jsonl", some_texts(40))
        with volume.session(run_id="test") as session:
            ingest(texts, session, "web", IngestOptions(vocab_size=300))
            tokenizer = tmp_path_factory.mktemp("tokenizer") / "tokenizer.json"
            tokenizer.write_bytes(volume.read("web.tokenizer.json"))
            ingest(texts, session, "code", IngestOptions(tokenizer=tokenizer))
            pack_stream(session, "web", PackOptions(sequence_length=LENGTH))
        yield volume


def test_a_batch_of_documents(mixed: Volume) -> None:
    """Attention in blocks, as `cu_seqlens` says, sees exactly what a model of each document alone would see."""
    end = TokenStream.open(mixed, "web").manifest
    assert end is not None
    options: dict[str, Any] = {"sequence_length": LENGTH, "global_batch": 6, "rank": 0, "world": 1}
    held = []
    with DocumentLoader(mixed, "web", **options, accumulation=2) as each:
        for batch in islice(each, 20):
            held.append((batch, {name: torch.as_tensor(value).clone() for name, value in batch.items()}))
            ids, labels, places, bounds = (batch[k] for k in ("input_ids", "labels", "position_ids", "cu_seqlens"))
            assert ids.shape == labels.shape == places.shape == (3, LENGTH)
            assert ids.dtype == labels.dtype == places.dtype == torch.int64 and bounds.dtype == torch.int32
            assert bounds[0] == 0 and bounds[-1] == 3 * LENGTH
            lengths = torch.diff(bounds)
            assert lengths.min() > 0 and lengths.max() == batch["max_seqlen"]
            # Every row begins a segment, positions count from its begin, labels are the next input within it.
            assert set(range(0, 3 * LENGTH + 1, LENGTH)) <= set(bounds.tolist())
            expected = torch.cat([torch.arange(length) for length in lengths.tolist()])
            assert torch.equal(places.flatten(), expected)
            learnt = labels.flatten()[:-1] != -100
            inside = places.flatten()[1:] > 0
            assert torch.equal(labels.flatten()[:-1][learnt & inside], ids.flatten()[1:][learnt & inside])
            # What ends a document predicts nothing.
            assert (labels[ids == end.end_of_document_id] == -100).all()
            assert learnt.float().mean() > 0.7
    # They are the caller's own.
    assert all(torch.equal(torch.as_tensor(batch[name]), kept) for batch, each in held for name, kept in each.items())


def test_a_mixture_of_packed_documents_and_windows(mixed: Volume) -> None:
    def loader(**options: Any) -> DocumentLoader:
        return DocumentLoader(
            mixed,
            Mixture(weights={"web": 0.75, "code": 0.25}, window=8),
            samples={"web": "packed", "code": "windows"},
            **{"sequence_length": LENGTH, "global_batch": BATCH, "rank": 0, "world": 1, "seed": 3, **options},
        )

    with loader() as each:
        assert each.shares == {"code": 2, "web": 6}
        seen = []
        for batch in islice(each, 30):
            assert sorted(each.last_batch_datasets) == ["code"] * 2 + ["web"] * 6
            seen.append(batch["input_ids"])
        assert each.epochs["web"] == pytest.approx(180 / each.sample_counts["web"])
        state = each.state_dict()
        following = next(each)["input_ids"]
    assert all(isinstance(value, (int, str)) for value in state.values())
    ranks = []
    for rank in range(4):
        with loader(rank=rank, world=4, prefetch=2) as each:
            each.load_state_dict(pickle.loads(pickle.dumps(state)))
            ranks.append(next(each)["input_ids"])
    assert torch.equal(torch.cat(ranks), following)


def test_documents_that_nobody_can_tell_apart(volume: Volume, mixed: Volume) -> None:
    options: dict[str, Any] = {"sequence_length": LENGTH, "global_batch": 4, "rank": 0, "world": 1}
    with pytest.raises(ObjectNotFound, match="headrace dataset pack corpus"):
        DocumentLoader(volume, "corpus", **options)
    with pytest.raises(UsageError, match="samples are not told for each"):
        DocumentLoader(mixed, Mixture(weights={"web": 1, "code": 1}), samples={"web": "packed"}, **options)
    with native_volume() as other:
        put_stream(other, "corpus", [40] * 9, manifest=False)
        with pytest.raises(UsageError, match="where documents end"):
            DocumentLoader(other, "corpus", samples="windows", **options)


# ---- states that do not fit ---------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def state(volume: Volume) -> dict[str, Any]:
    with loader(volume) as each:
        next(each)
        return each.state_dict()


@pytest.mark.parametrize(
    ("options", "say"),
    [
        ({"seed": 4}, "seed: expected seed 3, found seed 4"),
        ({"sequence_length": 16}, "sequence_length: expected sequence_length 32, found sequence_length 16"),
        ({"global_batch": 16}, "global_batch: expected global_batch 8, found global_batch 16"),
        ({"seed": 4, "global_batch": 4}, "seed, global_batch"),
    ],
)
def test_a_state_of_other_settings_says_what_differs(
    volume: Volume, state: dict[str, Any], options: dict[str, int], say: str
) -> None:
    with loader(volume, **options) as each:
        with pytest.raises(DatasetError) as caught:
            each.load_state_dict(state)
        assert say in str(caught.value)
        # Nothing was taken over.
        assert each.consumed == 0


def test_a_state_of_other_data_says_what_differs(volume: Volume, state: dict[str, Any], tmp_path: Path) -> None:
    with native_volume() as other:
        ingest_texts(other, tmp_path, count=61)
        with loader(other) as each, pytest.raises(DatasetError, match="token_count, tokens_sha256"):
            each.load_state_dict(state)


def test_the_same_data_elsewhere_is_the_same_data(volume: Volume, state: dict[str, Any], tmp_path: Path) -> None:
    with native_volume() as other:
        ingest_texts(other, tmp_path, count=40)
        assert same(steps(other, 5, state), steps(volume, 6)[1:])


def test_without_a_hash_only_the_object_itself_will_do(volume: Volume) -> None:
    pair = {end: volume.read(f"corpus.{end}") for end in ("bin", "idx")}

    def put(into: Volume) -> None:
        with into.session(run_id="test") as session, session.transaction() as transaction:
            for end, data in pair.items():
                if f"corpus.{end}" in into:
                    transaction.delete(f"corpus.{end}")
                transaction.put(f"corpus.{end}", data)

    with native_volume() as other:
        put(other)
        with loader(other) as each:
            next(each)
            saved = each.state_dict()
        assert len(steps(other, 2, saved)) == 2
        put(other)
        with loader(other) as each, pytest.raises(DatasetError, match="does not fit: object"):
            each.load_state_dict(saved)


def test_another_global_batch_when_it_is_meant(volume: Volume, state: dict[str, Any]) -> None:
    with loader(volume, global_batch=4, allow_global_batch_change=True) as each:
        each.load_state_dict(state)
        batches = list(islice(each, 4))
        assert each.consumed == BATCH + 16
    assert torch.equal(torch.cat(batches), torch.cat(steps(volume, 3)[1:]))


def test_a_state_that_comes_too_late(volume: Volume, state: dict[str, Any]) -> None:
    with loader(volume) as each:
        iter(each)
        with pytest.raises(DatasetError, match="too late"):
            each.load_state_dict(state)
    with loader(volume) as each:
        next(each)
        with pytest.raises(DatasetError, match="too late"):
            each.load_state_dict(state)


@pytest.mark.parametrize(
    ("change", "say"),
    [
        ({"version": 99}, "not a loader's state"),
        ({"consumed": -1}, "'consumed'"),
        ({"consumed": 1 << 70}, "'consumed'"),
        ({"consumed": "8"}, "'consumed'"),
        ({"consumed": True}, "'consumed'"),
        ({"global_batch": 0}, "'global_batch'"),
        ({"global_batch": -8}, "'global_batch'"),
        ({"steps_from": 9}, "'steps_from'"),
        ({"steps_from": -1}, "'steps_from'"),
        ({"seed": None}, "'seed'"),
        ({"order": "another"}, "order: expected order another"),
        ({"next_samples": "00"}, "next_samples"),
        ({"consumed": 16}, "next_samples"),
    ],
)
def test_a_state_that_is_none(volume: Volume, state: dict[str, Any], change: dict[str, Any], say: str) -> None:
    with loader(volume) as each, pytest.raises(DatasetError) as caught:
        each.load_state_dict({**state, **change})
    assert say in str(caught.value)


def test_a_checkpointer_may_give_tensors_back(volume: Volume, state: dict[str, Any]) -> None:
    as_tensors = {name: torch.tensor(value) if isinstance(value, int) else value for name, value in state.items()}
    as_tensors["version"] = state["version"]
    assert same(steps(volume, 2, as_tensors), steps(volume, 3)[1:])


# ---- wrong use ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "options",
    [
        {"global_batch": 9, "rank": 0, "world": 2},
        {"global_batch": 0},
        {"rank": 2, "world": 2},
        {"rank": -1},
        {"rank": None},
        {"prefetch": 0},
        {"sequence_length": 0},
        {"sequence_length": 1.5},
        {"epochs": 0},
        {"stall_timeout_s": 0.0},
        {"stall_timeout_s": float("nan")},
        {"seed": -1},
        {"device": "meta"},
        {"device": "none:such"},
        {"device": f"cuda:{torch.cuda.device_count()}"},
    ],
)
def test_options_that_cannot_be_meant(volume: Volume, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        loader(volume, **options)


def test_closed_and_never_begun(volume: Volume) -> None:
    each = loader(volume)
    with pytest.raises(UsageError, match="no batch"):
        each.last_batch_ids  # noqa: B018
    next(each)
    each.close()
    each.close()
    with pytest.raises(UsageError, match="closed"):
        next(each)


def test_a_forked_child_is_told_instead_of_left_waiting(volume: Volume) -> None:
    with loader(volume) as each:
        next(each)
        reader, writer = os.pipe()
        child = os.fork()
        if child == 0:
            try:
                next(each)
                os.write(writer, b"a batch")
            except UsageError as error:
                os.write(writer, str(error).encode())
            finally:
                os._exit(0)
        os.close(writer)
        said = os.read(reader, 1000).decode()
        os.close(reader)
        os.waitpid(child, 0)
    assert "made in another process" in said


def test_damage_stops_the_step_that_needs_it_and_nothing_is_left_out(tmp_path: Path) -> None:
    devices = [MemoryDevice(16 << 20)]
    with Volume.create(devices=devices) as volume:
        ingest_texts(volume, tmp_path, count=60)
        expected = steps(volume, 30)
        place = devices[0].data.find(volume.read("corpus.bin")[8192:12288])
        with loader(volume) as each:
            devices[0].data[place + 5] ^= 0xFF
            seen: list[torch.Tensor] = []
            with pytest.raises(ChecksumMismatch, match=r"corpus\.bin"):
                for batch in islice(each, 30):
                    seen.append(batch)
            assert len(seen) < 30
            with pytest.raises(ChecksumMismatch):
                next(each)
            assert each.consumed == len(seen) * BATCH
            devices[0].data[place + 5] ^= 0xFF
            # Mended: the same step again, and on in order. What was read ahead before fails once more, each batch once.
            failed = 0
            while len(seen) < 30:
                try:
                    seen.append(next(each))
                except ChecksumMismatch:
                    failed += 1
            assert failed < each.options.prefetch
        assert same(seen, expected)


def test_a_batch_is_released_once(volume: Volume) -> None:
    """Twice would put one buffer under two reads."""
    options = FeedOptions(sequence_length=LENGTH, global_batch=BATCH)
    feed = WindowFeed(TokenStream.open(volume, "corpus"), options)
    first = feed.acquire()
    assert first is not None
    feed.release(first)
    with pytest.raises(UsageError, match="released already"):
        feed.release(first)
    feed.close()
