"""Exact resume: from every step of an epoch, on any number of ranks, in any number of batches a step, read ahead by any
depth, the union of what the ranks get is the same, for windows, packed documents and a mixture of both."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace.dataset import (
    Feed,
    FeedOptions,
    LoaderState,
    PackOptions,
    TokenStream,
    open_samples,
    pack_stream,
)
from headrace.volume import Volume
from tests.dataset.corpora import native_volume, put_stream, some_lengths

LENGTH, BATCH = 15, 24
#: Of each: kinds of samples, and shares.
KINDS: dict[str, dict[str, tuple[str, int]]] = {
    "plain": {"web": ("windows", 1)},
    "packed": {"web": ("packed", 1)},
    "mixed": {"web": ("packed", 5), "code": ("windows", 3), "books": ("padded", 2)},
}
#: Ranks, batches a step, batches ahead.
WORLDS = [(1, 1, 1), (2, 4, 3), (3, 2, 2), (8, 1, 5)]


@pytest.fixture(scope="module")
def volume() -> Iterator[Volume]:
    with native_volume() as volume:
        for seed, (name, count) in enumerate({"web": 260, "code": 110, "books": 40}.items()):
            put_stream(volume, name, some_lengths(count, 9, seed))
        with volume.session(run_id="test") as session:
            pack_stream(session, "web", PackOptions(sequence_length=LENGTH))
            pack_stream(session, "books", PackOptions(sequence_length=LENGTH, layout="padded", long="truncate"))
        yield volume


Step = tuple[np.ndarray, ...]


class Case:
    def __init__(self, volume: Volume, kind: str) -> None:
        self._told = KINDS[kind]
        self._samples = {
            name: open_samples(TokenStream.open(volume, name), samples, LENGTH)
            for name, (samples, _) in self._told.items()
        }

    def feed(self, **options: Any) -> Feed:
        options = {"sequence_length": LENGTH, "global_batch": BATCH, "seed": 11, "epochs": 1, **options}
        return Feed(self._samples, FeedOptions(**options), shares=[share for _, share in self._told.values()])

    @property
    def steps(self) -> int:
        """Whole steps until every dataset was seen once."""
        return (self.feed().end or 0) // BATCH


def step(feed: Feed) -> Step:
    """What a rank gets in its next step: datasets, samples, tokens, and all that is said of documents."""
    parts = []
    for _ in range(feed.options.accumulation):
        batch = feed.acquire()
        assert batch is not None
        segments = batch.segments()
        parts.append(
            (batch.sources, batch.samples, batch.tokens.copy(), segments.position_ids(), segments.labels(batch.tokens))
        )
        feed.release(batch)
    return tuple(np.concatenate(column) for column in zip(*parts, strict=True))


def union(case: Case, world: int, accumulation: int, prefetch: int, state: LoaderState) -> Step:
    """What all ranks get in the step after `state`, in the order of the samples."""
    options = {"world": world, "accumulation": accumulation, "prefetch": prefetch}
    ranks = []
    for rank in range(world):
        feed = case.feed(rank=rank, **options)
        feed.load_state(state)
        ranks.append(step(feed))
        feed.close()
    # Rank by rank in each batch of the step, batch by batch.
    return tuple(
        np.concatenate([part.reshape(accumulation, -1, *part.shape[1:]) for part in column], axis=1).reshape(
            BATCH, *column[0].shape[1:]
        )
        for column in zip(*ranks, strict=True)
    )


@pytest.mark.parametrize("kind", KINDS)
def test_resume_at_every_step_with_any_world(volume: Volume, kind: str) -> None:
    case = Case(volume, kind)
    running = case.feed(rank=0, world=1)
    assert 8 <= case.steps <= 30
    for number in range(case.steps):
        # Through a checkpoint: nothing but numbers and strings.
        state = LoaderState.from_dict(dict(running.state().to_dict()))
        assert state.consumed == number * BATCH
        whole = step(running)
        for world, accumulation, prefetch in WORLDS:
            found = union(case, world, accumulation, prefetch, state)
            for expected, column in zip(whole, found, strict=True):
                assert np.array_equal(expected, column), (number, world)
    assert running.acquire() is None


@pytest.mark.parametrize("kind", KINDS)
def test_two_epochs_are_permutations(volume: Volume, kind: str) -> None:
    case = Case(volume, kind)
    feed = case.feed(global_batch=1, epochs=2)
    seen: dict[int, list[int]] = {}
    while (batch := feed.acquire()) is not None:
        seen.setdefault(int(batch.sources[0]), []).append(int(batch.samples[0]))
        feed.release(batch)
    counts = [samples.sample_count for samples in feed.sources.values()]
    assert sorted(seen) == list(range(len(counts)))
    for source, count in enumerate(counts):
        first, second = seen[source][:count], seen[source][count : 2 * count]
        assert sorted(first) == sorted(second) == list(range(count))
        assert first != second
