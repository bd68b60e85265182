"""Mixtures: shares that hold exactly in every window, sources that go round by themselves, all of it arithmetic."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace.dataset import (
    Feed,
    FeedOptions,
    GlobalOrder,
    LoaderState,
    Mixture,
    Sampler,
    TokenStream,
    open_samples,
)
from headrace.dataset.order.mixture import even_pattern, shares_of
from headrace.errors import DatasetError, DeviceTimeout, UsageError
from headrace.volume import Volume
from tests.dataset.corpora import native_volume, put_stream

SHARES = [
    [1],
    [7],
    [1, 1],
    [3, 2],
    [1, 1, 1],
    [5, 5, 5, 4, 1],
    [700, 200, 99, 1],
    [997, 1, 1, 1],
    [1] * 35,
    [*range(1, 40)],
]


@pytest.mark.parametrize("shares", SHARES, ids=str)
def test_the_pattern_is_as_even_as_one_can_be(shares: list[int]) -> None:
    pattern, window, sources = even_pattern(shares), sum(shares), len(shares)
    seen = np.zeros((window + 1, sources), np.int64)
    seen[1:] = np.cumsum(pattern[:, None] == np.arange(sources), axis=0)
    assert seen[-1].tolist() == shares
    # Whole numbers: |places * share - seen * window| <= window * (1 - 1 / (2n - 2)).
    ahead = np.abs(np.arange(window + 1)[:, None] * np.array(shares) - seen * window)
    bound = 2 * sources - 2
    assert np.all(ahead * bound <= window * (bound - 1)) if sources > 1 else not ahead.any()


@pytest.mark.parametrize("shares", [[3, 2], [5, 5, 5, 4, 1], [70, 20, 9, 1]], ids=str)
def test_any_window_holds_the_shares_exactly(shares: list[int]) -> None:
    window = sum(shares)
    order = GlobalOrder({str(i): 11 + i for i in range(len(shares))}, shares, 5)
    sources, _ = order.at(np.arange(4 * window))
    for first in range(3 * window):
        assert np.bincount(sources[first : first + window], minlength=len(shares)).tolist() == shares
        assert order.counts(first) == np.bincount(sources[:first], minlength=len(shares)).tolist()
    # There and back.
    _, numbers = order.numbers(np.arange(4 * window))
    for place in range(4 * window):
        assert order.position(int(sources[place]), int(numbers[place])) == place
    # Far away, where nobody counts up to.
    far = (1 << 61) + np.arange(window)
    sources, numbers = order.numbers(far)
    assert np.bincount(sources).tolist() == shares
    assert [order.position(*pair) for pair in zip(sources.tolist(), numbers.tolist(), strict=True)] == far.tolist()


def test_every_source_goes_round_by_itself() -> None:
    counts, shares = {"large": 40, "small": 7, "one": 1}, [5, 3, 2]
    order = GlobalOrder(counts, shares, 1)
    end = order.end(3)
    sources, samples = order.at(np.arange(end))
    epochs = []
    for source, count in enumerate(counts.values()):
        seen = samples[sources == source]
        turns = [seen[first : first + count] for first in range(0, len(seen) - count + 1, count)]
        assert all(sorted(turn.tolist()) == list(range(count)) for turn in turns)
        epochs.append(len(turns))
    # All of them three times, and one of them not once more than that in full.
    assert min(epochs) == 3 and max(epochs) > 3
    assert np.bincount(sources[:-1])[0] == 3 * 40 - 1


def test_a_source_keeps_its_order_in_any_company() -> None:
    def order_of_code(others: dict[str, int], shares: list[int], seed: int = 3) -> list[int]:
        order = GlobalOrder({**others, "code": 50}, shares, seed)
        sources, samples = order.at(np.arange(order.end(1)))
        return samples[sources == len(others)][:50].tolist()

    alone = order_of_code({"web": 500}, [9, 1])
    assert alone == order_of_code({"web": 500, "books": 70}, [3, 1, 2])
    assert alone != order_of_code({"web": 500}, [9, 1], seed=4)
    # Two datasets of one size are not in the same order.
    order = GlobalOrder({"a": 50, "b": 50}, [1, 1], 3)
    sources, samples = order.at(np.arange(100))
    assert samples[sources == 0].tolist() != samples[sources == 1].tolist()
    # One alone is in the order of its sampler.
    assert GlobalOrder({"a": 50}, [1], 3).at(np.arange(120))[1].tolist() == Sampler(50, 3).positions(0, 120).tolist()


def test_the_order_of_mixtures_never_changes() -> None:
    # Golden, as that of `Sampler`: another order needs another name (`MIXED_ORDER`).
    assert even_pattern([5, 3, 2]).tolist() == GOLDEN_PATTERN
    sources, samples = GlobalOrder({"a": 10, "b": 20}, [2, 1], 7).at(np.arange(12))
    assert list(zip(sources.tolist(), samples.tolist(), strict=True)) == GOLDEN_ORDER


GOLDEN_PATTERN = [0, 1, 0, 2, 0, 1, 0, 2, 0, 1]
GOLDEN_ORDER = [
    (0, 2), (1, 8), (0, 0), (0, 3), (1, 11), (0, 7), (0, 9), (1, 10), (0, 4), (0, 8), (1, 12), (0, 6),
]  # fmt: skip


# ---- shares --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("weights", "window", "shares"),
    [
        ([0.7, 0.3], 1000, [700, 300]),
        ([7, 3], 10, [7, 3]),
        ([1, 1, 1], 1000, [334, 333, 333]),
        ([2, 1], 4, [3, 1]),
        ([1e-3, 1], 1001, [1, 1000]),
        ([1e300, 1e300], 2, [1, 1]),
    ],
)
def test_weights_become_whole_shares(weights: list[float], window: int, shares: list[int]) -> None:
    assert shares_of({str(i): weight for i, weight in enumerate(weights)}, window) == shares


def test_equal_remainders_go_by_name_however_they_are_told() -> None:
    assert shares_of({"a": 1, "b": 1, "c": 1}, 10) == [4, 3, 3]
    assert shares_of({"c": 1, "a": 1, "b": 1}, 10) == [3, 4, 3]


def test_without_weights_the_shares_are_those_of_the_samples() -> None:
    assert Mixture(weights={"a": None, "b": None}, window=10).shares([300, 100]) == [8, 2]


@pytest.mark.parametrize(
    ("weights", "window", "say"),
    [
        ({}, 10, "no dataset"),
        ({"a": 0.0}, 10, "out of range"),
        ({"a": float("nan")}, 10, "out of range"),
        ({"a": float("inf")}, 10, "out of range"),
        ({"a": "1"}, 10, "out of range"),
        ({"a": 1, "b": None}, 10, "some datasets only"),
        ({"a": 1}, 0, "window"),
        ({"a": 1}, 1.5, "window"),
        ({"a": 1, "b": 1e-6}, 1000, "too small for the window"),
    ],
)
def test_mixtures_that_cannot_be_meant(weights: Any, window: Any, say: str) -> None:
    with pytest.raises(UsageError, match=say):
        Mixture(weights=weights, window=window).shares([1] * len(weights))


# ---- of real datasets ------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def volume() -> Iterator[Volume]:
    with native_volume() as volume:
        put_stream(volume, "web", [50] * 40)
        put_stream(volume, "code", [31] * 20)
        put_stream(volume, "large", [50] * 40, dtype="<i4")
        yield volume


def feed(volume: Volume, mixture: dict[str, int], **options: Any) -> Feed:
    return Feed(
        {name: open_samples(TokenStream.open(volume, name), "windows", 10) for name in mixture},
        FeedOptions(**{"sequence_length": 10, "global_batch": 4, "seed": 1, **options}),
        shares=list(mixture.values()),
    )


def test_rows_are_those_of_their_dataset(volume: Volume) -> None:
    tokens = {name: np.frombuffer(volume.read(f"{name}.bin"), np.uint16) for name in ("web", "code")}
    # However they are told: by name.
    for mixture in ({"web": 3, "code": 2}, {"code": 2, "web": 3}):
        mixed = feed(volume, mixture, epochs=2)
        order = GlobalOrder({"code": 61, "web": 199}, [2, 3], 1)
        assert mixed.end == order.end(2)
        for step in itertools.count():
            batch = mixed.acquire()
            if batch is None:
                break
            sources, samples = order.at(np.arange(4 * step, 4 * step + 4))
            assert batch.sources.tolist() == sources.tolist() and batch.samples.tolist() == samples.tolist()
            for row, (source, sample) in enumerate(zip(sources.tolist(), samples.tolist(), strict=True)):
                window = tokens[("code", "web")[source]][sample * 10 : sample * 10 + 11]
                assert batch.tokens[row].tolist() == window.tolist()
            mixed.release(batch)
        assert step == order.end(2) // 4


def test_datasets_that_do_not_mix(volume: Volume) -> None:
    with pytest.raises(DatasetError, match=r"same dtype.*large int32.*web uint16"):
        feed(volume, {"web": 1, "large": 1})
    with pytest.raises(UsageError, match="another length"):
        feed(volume, {"web": 1}, sequence_length=11)


@pytest.mark.parametrize(
    ("mixture", "options", "say"),
    [
        (
            {"web": 3, "code": 3},
            {},
            "window, code: share: expected window 5, code: share 2, found window 6, code: share 3",
        ),
        ({"web": 2, "code": 3}, {}, "code: share, web: share"),
        ({"web": 3}, {}, "datasets: expected window 5, order .*, datasets code web, found .* datasets one alone"),
        ({"web": 3, "code": 2}, {"seed": 2}, "does not fit: seed:"),
        ({"web": 3, "code": 2}, {"global_batch": 8}, "does not fit: global_batch:"),
    ],
)
def test_a_state_of_another_mixture_says_what_differs(
    volume: Volume, mixture: dict[str, int], options: dict[str, int], say: str
) -> None:
    before = feed(volume, {"web": 3, "code": 2})
    assert before.acquire() is not None
    state = LoaderState.from_dict(before.state().to_dict())
    feed(volume, {"code": 2, "web": 3}).load_state(state)
    with pytest.raises(DatasetError, match=say):
        feed(volume, mixture, **options).load_state(state)


def test_a_state_within_a_step(volume: Volume) -> None:
    running = feed(volume, {"web": 3, "code": 2}, global_batch=12, accumulation=4)
    for _ in range(6):
        batch = running.acquire()
        assert batch is not None
        running.release(batch)
    state = running.state()
    assert state.consumed == 18
    for accumulation in (2, 4, 12):
        feed(volume, {"web": 3, "code": 2}, global_batch=12, accumulation=accumulation).load_state(state)
    for accumulation in (1, 3):
        with pytest.raises(DatasetError, match="within a step"):
            feed(volume, {"web": 3, "code": 2}, global_batch=12, accumulation=accumulation).load_state(state)


def test_steps_are_counted_from_the_change_of_the_global_batch(volume: Volume) -> None:
    def after(steps: int, saved: LoaderState | None, **options: Any) -> LoaderState:
        running = feed(volume, {"web": 3, "code": 2}, **options)
        if saved is not None:
            running.load_state(LoaderState.from_dict(saved.to_dict()))
        for _ in range(steps):
            batch = running.acquire()
            assert batch is not None
            running.release(batch)
        return running.state()

    first = after(3, None, global_batch=4)
    # 12 is no multiple of 32: a step of the new batch begins there all the same, and the next ones behind it.
    second = after(2, first, global_batch=32, allow_global_batch_change=True)
    assert (second.consumed, second.steps_from) == (76, 12)
    third = after(3, second, global_batch=32, accumulation=2)
    assert (third.consumed, third.steps_from) == (124, 12)
    with pytest.raises(DatasetError, match=r"within a step.*found 16 of 32"):
        after(0, third, global_batch=32)
    assert after(1, third, global_batch=32, accumulation=4).consumed == 132
    # Without a change nothing counts anew, and one from before this was kept is as one that never changed.
    old = {name: value for name, value in first.to_dict().items() if name != "steps_from"}
    assert LoaderState.from_dict(old) == first
    assert after(1, first, global_batch=4, allow_global_batch_change=True).steps_from == 0


def test_a_read_in_flight_is_not_forgotten_where_the_next_cannot_begin(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Held:
        """Reads until it is waited for."""

        def __init__(self, transfer: Any) -> None:
            self._transfer, self.ended = transfer, False

        def done(self) -> bool:
            return self.ended

        def wait(self, timeout_s: float) -> None:
            self._transfer.wait(timeout_s)
            self.ended = True

    mixed = feed(volume, {"web": 2, "code": 2}, prefetch=1)
    first, second = (samples.stream for samples in mixed.sources.values())
    begin, begin_second = first.submit_pieces, second.submit_pieces
    held: list[Held] = []
    attempts: list[int] = []

    def slow(*arguments: Any, **more: Any) -> Any:
        assert all(each.ended for each in held), "two reads into one buffer"
        held.append(Held(begin(*arguments, **more)))
        return held[-1]

    def fails_at_first(*arguments: Any, **more: Any) -> Any:
        attempts.append(len(held))
        if len(attempts) <= 3:
            raise DeviceTimeout("no way to it")
        return begin_second(*arguments, **more)

    monkeypatch.setattr(first, "submit_pieces", slow)
    monkeypatch.setattr(second, "submit_pieces", fails_at_first)
    # Once while it reads ahead, and again with each call that wants it.
    for _ in range(2):
        with pytest.raises(DeviceTimeout, match="did not come in time") as caught:
            mixed.acquire()
        assert "no way to it" in str(caught.value.__cause__)
    batch = mixed.acquire()
    assert batch is not None and batch.position == 0
    assert attempts == [1, 2, 3, 4]
