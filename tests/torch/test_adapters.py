"""Datasets and samplers for torch's own DataLoader: order and states are those of the loader that needs neither."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import islice
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.utils.data import DataLoader, DistributedSampler

from headrace.dataset import Mixture, PackOptions, pack_stream
from headrace.dataset.feed.chosen import ChosenRead
from headrace.errors import DatasetError, DeviceError, UsageError
from headrace.torch import DocumentLoader, OrderSampler, TokenDataset, TokenIterable, TokenLoader
from headrace.torch.megatron import AheadSampler
from headrace.units import MIB
from headrace.volume import Volume
from tests.dataset.corpora import ingest_texts, put_stream

LENGTH, BATCH, SEED = 32, 8, 3


@pytest.fixture(scope="module")
def volume(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Volume]:
    """In a file: worker processes open it, too."""
    folder = tmp_path_factory.mktemp("volume")
    with Volume.create(f"file:{folder}/disk?create={16 * MIB}") as volume:
        ingest_texts(volume, folder, count=40)
        with volume.session(run_id="test") as session:
            pack_stream(session, "corpus", PackOptions(sequence_length=LENGTH))
        put_stream(volume, "plain", [300, 200, 400], manifest=False)
        yield volume


def dataset(volume: Volume, **options: Any) -> TokenDataset:
    return TokenDataset(volume, "corpus", **{"sequence_length": LENGTH, "seed": SEED, **options})


def expected(volume: Volume, count: int, state: dict[str, Any] | None = None) -> list[torch.Tensor]:
    """The global batches."""
    options: dict[str, Any] = {"sequence_length": LENGTH, "global_batch": BATCH, "rank": 0, "world": 1, "seed": SEED}
    with TokenLoader(volume, "corpus", **options) as each:
        if state is not None:
            each.load_state_dict(state)
        return list(islice(each, count))


def same(first: list[torch.Tensor], second: list[torch.Tensor]) -> bool:
    return len(first) == len(second) and all(torch.equal(a, b) for a, b in zip(first, second, strict=True))


def joined(ranks: list[list[torch.Tensor]]) -> list[torch.Tensor]:
    return [torch.cat(parts) for parts in zip(*ranks, strict=True)]


def loader(volume: Volume, rank: int, world: int, state: dict[str, Any] | None = None, **options: Any) -> Any:
    data = dataset(volume)
    sampler = OrderSampler(data, global_batch=BATCH, rank=rank, world=world)
    if state is not None:
        sampler.load_state_dict(state)
    return DataLoader(data, batch_size=sampler.rows, sampler=sampler, **options), sampler


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "multiprocessing_context": "fork"}])
def test_a_dataloader_hands_out_the_global_order(volume: Volume, options: dict[str, Any]) -> None:
    """Two ranks; the second is broken off in the middle, and goes on as one of one and one of four."""
    volume.read("corpus.json")  # The parent's connections are in use when workers are forked.
    first, _ = loader(volume, 0, 2, **options)
    steps = len(dataset(volume)) // BATCH
    assert len(first) == steps > 12
    second, sampler = loader(volume, 1, 2)
    assert same(joined([list(first), list(second)]), expected(volume, steps))
    running = iter(loader(volume, 1, 2, **options)[0])
    for _ in range(5):
        next(running)
    state = OrderSampler(dataset(volume), global_batch=BATCH, rank=1, world=2).state_after(5)
    assert state["consumed"] == 5 * BATCH
    whole = [list(loader(volume, rank, 4, state)[0]) for rank in range(4)]
    assert same(joined(whole), expected(volume, steps)[5:])
    # The next epoch goes on where the first one ended, on both ways.
    assert sampler.state_after(steps)["consumed"] == steps * BATCH
    following = [list(islice(loader(volume, rank, 2, sampler.state_after(steps))[0], 3)) for rank in range(2)]
    assert same(joined(following), expected(volume, steps + 3)[steps:])
    assert same(list(islice(second, 3)), following[1])


@pytest.mark.parametrize("options", [{}, {"num_workers": 2, "multiprocessing_context": "fork"}])
def test_states_count_what_was_handed_out_also_where_the_sampler_is_at_its_end(
    volume: Volume, options: dict[str, Any]
) -> None:
    """Workers are asked for batches ahead: the sampler ends some batches before the loader does."""
    each, sampler = loader(volume, 0, 1, **options)
    for epoch in range(2):
        for number, _ in enumerate(each, 1):
            assert sampler.state_after(number)["consumed"] == (epoch * len(each) + number) * BATCH


def test_spawned_workers_open_the_volume_by_themselves(volume: Volume) -> None:
    each, _ = loader(volume, 0, 1, num_workers=2, multiprocessing_context="spawn")
    assert same(list(each), expected(volume, len(each)))


def test_epochs_by_number_and_iterations_that_were_broken_off(volume: Volume) -> None:
    each, sampler = loader(volume, 0, 1)
    steps = len(each)
    begun = list(islice(each, 3))
    assert same(list(islice(each, 3)), begun)
    sampler.set_epoch(0)
    assert same(list(islice(each, 3)), begun)
    sampler.set_epoch(2)
    assert same(list(islice(each, 2)), expected(volume, 2 * steps + 2)[2 * steps :])
    data = dataset(volume)
    in_order = torch.stack([data[index] for index in range(4)])
    assert torch.equal(in_order, begun[0][:4])
    data.set_epoch(1)
    assert torch.equal(data[0], torch.cat(expected(volume, steps + 2))[len(data)])
    with pytest.raises(IndexError):
        data[-1]
    assert data.__getitems__([]) == []


@pytest.mark.parametrize("workers", [0, 2])
def test_an_iterable_hands_out_the_global_order(volume: Volume, workers: int) -> None:
    def run(rank: int, world: int, state: dict[str, Any] | None = None) -> tuple[TokenIterable, Any]:
        data = TokenIterable(dataset(volume), global_batch=BATCH, rank=rank, world=world, prefetch=3)
        if state is not None:
            data.load_state_dict(state)
        return data, DataLoader(data, batch_size=None, num_workers=workers)

    steps = len(dataset(volume)) // BATCH
    whole = expected(volume, steps + 4)
    ranks = [run(rank, 2) for rank in range(2)]
    assert same(joined([list(islice(each, steps + 2)) for _, each in ranks]), whole[: steps + 2])
    if workers:
        return
    # What was read ahead does not count; any world goes on.
    state = ranks[0][0].state_dict()
    assert state["consumed"] == (steps + 2) * BATCH and state == ranks[1][0].state_dict()
    assert same(joined([list(islice(run(rank, 4, state)[1], 2)) for rank in range(4)]), whole[steps + 2 :])
    assert same(expected(volume, 2, state), whole[steps + 2 :])
    with pytest.raises(DatasetError, match="another number of worker processes"):
        run(0, 1, {**state, "worker": 1, "workers": 2})


def test_the_form_of_causal_models(volume: Volume) -> None:
    """The model shifts labels by itself: what it then learns is what the document loader says."""
    data = dataset(volume, samples="packed", form="causal")
    options: dict[str, Any] = {"sequence_length": LENGTH, "global_batch": BATCH, "rank": 0, "world": 1, "seed": SEED}
    batches = DataLoader(data, batch_size=BATCH)
    with DocumentLoader(volume, "corpus", **options) as documents:
        for got, wanted in islice(zip(batches, documents, strict=False), 12):
            assert torch.equal(got["input_ids"][:, :-1], wanted["input_ids"])
            assert torch.equal(got["labels"][:, 1:], wanted["labels"])
            assert torch.equal(got["position_ids"][:, :-1], wanted["position_ids"])
    plain = dataset(volume, form="causal")[0]
    assert torch.equal(plain["input_ids"], plain["labels"]) and set(plain) == {"input_ids", "labels"}


def test_a_mixture_of_packed_documents_and_windows(volume: Volume) -> None:
    mixture = Mixture(weights={"corpus": 3, "plain": 1}, window=4)
    told = {"corpus": "packed", "plain": "windows"}
    data = TokenDataset(volume, mixture, sequence_length=LENGTH, seed=SEED, samples=told)
    options: dict[str, Any] = {"sequence_length": LENGTH, "global_batch": BATCH, "rank": 0, "world": 1, "seed": SEED}
    sampler = OrderSampler(data, global_batch=BATCH, rank=0, world=1)
    with TokenLoader(volume, mixture, **options) as each:
        shares = each.shares
    assert shares == {"corpus": 3, "plain": 1}
    got = list(islice(DataLoader(data, batch_size=BATCH, sampler=sampler), 6))
    assert all(batch.shape == (BATCH, LENGTH + 1) for batch in got)
    again = OrderSampler(data, global_batch=BATCH, rank=0, world=1)
    again.load_state_dict(sampler.state_after(4))
    assert same(list(islice(DataLoader(data, batch_size=BATCH, sampler=again), 2)), got[4:])


@pytest.mark.parametrize("accumulation", [1, 2])
def test_a_change_of_the_global_batch_leaves_nothing_out(volume: Volume, accumulation: int) -> None:
    """At no end of an epoch."""
    data = dataset(volume)
    state = OrderSampler(data, global_batch=BATCH, rank=0, world=1).state_after(4)
    samplers = [
        OrderSampler(
            data, global_batch=12, accumulation=accumulation, rank=rank, world=2, allow_global_batch_change=True
        )
        for rank in range(2)
    ]
    at = 4 * BATCH
    for sampler in samplers:
        sampler.load_state_dict(state)
    for epoch in range(3):
        deals = []
        for sampler in samplers:
            sampler.set_epoch(epoch)
            deals.append(torch.tensor(list(sampler)).reshape(-1, sampler.rows))
        places = torch.cat(deals, 1).flatten().tolist()
        assert places == list(range(at, at + len(places)))
        assert epoch == 0 or len(places) == 2 * len(samplers[0])
        at += len(places)
        assert at // 12 == (epoch + 1) * (len(data) // 12) and samplers[0].state_after(len(deals[0]))["consumed"] == at


def test_a_batch_that_could_not_be_asked_for_is_asked_for_again(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It is known by then where its documents lie."""
    data = dataset(volume, samples="packed")
    wanted = data.submit(range(4)).wait()
    stream = data.sources["corpus"].stream
    with monkeypatch.context() as patch:
        patch.setattr(ChosenRead, "advance", lambda read: None)
        read = data.submit(range(4))
        patch.setattr(stream, "submit_pieces", _refuse)
        with pytest.raises(DeviceError, match="no way there"):
            read.wait()
    found = read.wait()
    assert found.tokens.tolist() == wanted.tokens.tolist()
    assert found.segments().begins.tolist() == wanted.segments().begins.tolist()


def _refuse(*_: Any, **__: Any) -> Any:
    raise DeviceError("no way there")


def test_what_is_dealt_out_twice_is_refused(volume: Volume) -> None:
    """As Lightning would do it, which puts a DistributedSampler in the place of ours, and with a wrong batch size."""
    data = dataset(volume)
    sampler = OrderSampler(data, global_batch=BATCH, rank=0, world=2)
    other = DistributedSampler(data, num_replicas=2, rank=0, shuffle=False)
    with pytest.raises(UsageError, match="deals it out once more"):
        next(iter(DataLoader(data, batch_size=sampler.rows, sampler=other)))
    with pytest.raises(UsageError, match="expected 4 places one after another"):
        next(iter(DataLoader(data, batch_size=2, sampler=sampler)))


def test_batches_that_nobody_takes_are_not_kept() -> None:
    """As where worker processes read what the sampler has read ahead in this one."""
    ahead: dict[tuple[int, ...], list[Any]] = {}
    data: Any = SimpleNamespace(_ahead=ahead, prefetch=lambda batch: ahead.setdefault(tuple(batch), []))
    wanted = [[number] for number in range(1000)]
    assert list(AheadSampler(data, wanted, 3)) == wanted and (999,) in ahead and len(ahead) <= 16


def test_states_that_do_not_fit(volume: Volume) -> None:
    data = dataset(volume)
    state = OrderSampler(data, global_batch=BATCH, rank=0, world=1).state_after(3)
    for each in (
        OrderSampler(dataset(volume, seed=4), global_batch=BATCH, rank=0, world=1),
        TokenIterable(dataset(volume, seed=4), global_batch=BATCH, rank=0, world=1),
    ):
        with pytest.raises(DatasetError, match="expected seed 3, found seed 4"):
            each.load_state_dict(state)
    other = OrderSampler(data, global_batch=4, rank=0, world=1, allow_global_batch_change=True)
    other.load_state_dict(state)
    with pytest.raises(UsageError, match="has not one step"):
        OrderSampler(data, global_batch=1 << 20, rank=0, world=1)
    for wrong in ({"form": "words"}, {"sequence_length": 0}, {"seed": -1}):
        with pytest.raises((UsageError, DatasetError)):
            dataset(volume, **wrong)
    with pytest.raises(UsageError, match="prefetch"):
        TokenIterable(data, global_batch=BATCH, rank=0, world=1, prefetch=0)
