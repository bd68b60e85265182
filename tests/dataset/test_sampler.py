"""The order: a permutation for every n, as random as numpy's shuffle, and a pure function of seed, epoch and place."""

from __future__ import annotations

import itertools
import math
import tracemalloc
from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest

from headrace.dataset.order.sampler import MAX_SAMPLES, Sampler
from headrace.errors import UsageError

SIZES = [
    *range(1, 70), 97, 127, 128, 129, 251, 255, 256, 257, 509, 511, 512, 513, 1009, 1023, 1024, 1025, 4095, 4096, 4097,
    9973, 65535, 65536, 65537, 99991, 10**6,
]  # fmt: skip


@pytest.mark.parametrize("seed", [0, 1, (1 << 64) - 1])
def test_every_epoch_is_a_permutation(seed: int) -> None:
    for count in SIZES:
        sampler = Sampler(count, seed)
        for epoch in (0, 1, 10**6) if count < 10**5 else (0,):
            samples = sampler.indices(epoch, 0, count)
            assert samples.dtype == np.int64
            assert np.array_equal(np.sort(samples), np.arange(count)), (count, epoch)


def test_any_part_is_a_part_of_the_whole() -> None:
    for count in (1, 2, 3, 10, 257, 5000):
        sampler = Sampler(count, 7)
        whole = np.concatenate([sampler.indices(epoch, 0, count) for epoch in range(3)])
        for start in (0, 1, count - 1, count, count + 1, 2 * count - 1):
            for length in (0, 1, count // 2, count):
                assert np.array_equal(Sampler(count, 7).positions(start, length), whole[start : start + length])
        scattered = np.array([[0, 2 * count], [count, count - 1]])
        assert np.array_equal(sampler.at(scattered), whole[scattered])


def test_the_order_never_changes() -> None:
    # Golden: whoever changes the order breaks the resume of every run, and has to give it another name (`ORDER`).
    assert Sampler(10, 0).indices(0, 0, 10).tolist() == GOLDEN_10
    assert Sampler(MAX_SAMPLES, 12345).indices(7, MAX_SAMPLES - 3, 3).tolist() == GOLDEN_LARGE


GOLDEN_10 = [8, 6, 1, 3, 9, 2, 0, 5, 4, 7]
GOLDEN_LARGE = [228842043652658, 256582654102919, 117025235318309]


def test_no_precision_is_lost_at_2_to_the_48() -> None:
    for count in (MAX_SAMPLES, MAX_SAMPLES - 1, (1 << 47) + 1, 10**14 + 3):
        sampler = Sampler(count, 3)
        samples = np.concatenate([sampler.indices(2, start, 100_000) for start in (0, count // 2, count - 100_000)])
        assert len(np.unique(samples)) == 300_000
        assert samples.min() >= 0 and samples.max() < count
        # Low bits must be as random as high ones.
        assert abs(np.mean(samples & 1) - 0.5) < 0.005
        assert abs(np.mean(samples / count) - 0.5) < 0.005


def _chi_square(observed: np.ndarray, expected: np.ndarray | float) -> float:
    """In standard deviations from what chance gives: |z| < 5 passes once in two million tries by chance alone."""
    freedom = observed.size - 1
    value = float((((observed - expected) ** 2) / expected).sum())
    return (value - freedom) / math.sqrt(2 * freedom)


def _places_by_samples(samples: np.ndarray, count: int, bins: int) -> np.ndarray:
    """How often a sample of each bin stands in each bin of places."""
    places = np.arange(count) * bins // count
    return np.histogram2d(places, samples * bins // count, bins=bins, range=((0, bins), (0, bins)))[0]


Shuffle = Callable[[int, int], np.ndarray]


def _ours(count: int, epoch: int) -> np.ndarray:
    return Sampler(count, 99).indices(epoch, 0, count)


def _numpys(count: int, epoch: int) -> np.ndarray:
    return np.random.default_rng([99, epoch]).permutation(count)


@pytest.mark.parametrize("shuffle", [_ours, _numpys])
@pytest.mark.parametrize("count", [1 << 16, 100_003, 1 << 17])
def test_statistics_of_one_epoch(shuffle: Shuffle, count: int) -> None:
    """The same limits for the computed order and for numpy's true shuffle."""
    samples = shuffle(count, 0)
    table = _places_by_samples(samples, count, 16)
    assert abs(_chi_square(table, table.mean())) < 5
    # Differences of neighbours: triangular for independent places.
    differences = np.diff(samples)
    edges = np.linspace(-count, count, 33)
    observed = np.histogram(differences, edges)[0]

    def below(x: np.ndarray) -> np.ndarray:
        """Distribution of the difference of two independent places."""
        return np.where(x < 0, (count + x) ** 2, 2.0 * count**2 - (count - x) ** 2) / (2.0 * count**2)

    assert abs(_chi_square(observed, np.diff(below(edges)) * len(differences))) < 5
    # Neighbours stay neighbours about twice, whatever n.
    assert np.count_nonzero(np.abs(differences) == 1) < 15
    # Fixed points: about one.
    assert np.count_nonzero(samples == np.arange(count)) < 10
    correlation = np.corrcoef(samples[:-1], samples[1:])[0, 1]
    assert abs(correlation) < 5 / math.sqrt(count)
    lag = 1 << 8
    assert abs(np.corrcoef(samples[:-lag], samples[lag:])[0, 1]) < 5 / math.sqrt(count)


@pytest.mark.parametrize("shuffle", [_ours, _numpys])
@pytest.mark.parametrize("count", [1 << 14, 20_011])
def test_nothing_is_left_of_where_a_sample_stood(shuffle: Shuffle, count: int) -> None:
    samples = shuffle(count, 3)
    places = np.arange(count)
    # How far a sample moves: |d| / n is below x with probability 1 - (1 - x)^2.
    moved = np.abs(samples - places)
    edges = np.linspace(0, 1, 33)
    observed = np.histogram(moved, edges * count)[0]
    assert abs(_chi_square(observed, np.diff(1 - (1 - edges) ** 2) * count)) < 5
    assert abs(moved.mean() / count - 1 / 3) < 5 * math.sqrt(1 / 18 / count)
    # Serial correlation at every lag up to a batch or two, and around every power of two.
    lags = {*range(1, 65), *(max(1, (1 << bit) + near) for bit in range(1, 13) for near in (-1, 0, 1))}
    centred = samples - samples.mean()
    variance = float((centred**2).sum())
    correlations = [float((centred[:-lag] * centred[lag:]).sum()) / variance for lag in sorted(lags)]
    assert max(map(abs, correlations)) < 5.5 / math.sqrt(count)
    assert abs(np.sum(np.square(correlations)) * count / len(lags) - 1) < 5 * math.sqrt(2 / len(lags))
    # How long it rises or falls: 2(n - 2) / 3 places turn, with variance (16 n - 29) / 90.
    rises = np.diff(samples) > 0
    turns = np.count_nonzero(rises[1:] != rises[:-1])
    assert abs(turns - 2 * (count - 2) / 3) < 5 * math.sqrt((16 * count - 29) / 90)


@pytest.mark.parametrize("shuffle", [_ours, _numpys])
def test_a_batch_is_a_sample_of_the_whole(shuffle: Shuffle) -> None:
    """Batches of 64 out of 256 regions of the dataset: as many different regions as balls in boxes would fill."""
    count, batch, regions = 1 << 14, 64, 256
    samples = shuffle(count, 1).reshape(-1, batch) * regions // count
    distinct = np.array([len(np.unique(row)) for row in samples])
    expected = regions * (1 - (1 - 1 / regions) ** batch)
    assert abs(distinct.mean() - expected) < 0.75
    assert distinct.min() > 40


@pytest.mark.parametrize("shuffle", [_ours, _numpys])
def test_neighbours_of_one_epoch_are_not_those_of_the_next(shuffle: Shuffle) -> None:
    count = 1 << 14
    neighbours = []
    for epoch in range(5):
        samples = shuffle(count, epoch)
        low, high = np.minimum(samples[:-1], samples[1:]), np.maximum(samples[:-1], samples[1:])
        neighbours.append(low * count + high)
    for first, second in itertools.combinations(neighbours, 2):
        # Two, more or less, whatever n.
        assert len(np.intersect1d(first, second)) < 15


@pytest.mark.parametrize("shuffle", [_ours, _numpys])
def test_epochs_have_nothing_in_common(shuffle: Shuffle) -> None:
    count = 1 << 15
    epochs = [shuffle(count, epoch) for epoch in range(6)]
    for first, second in itertools.combinations(epochs, 2):
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(count)
        table = np.histogram2d(first * 16 // count, second * 16 // count, bins=16, range=((0, 16), (0, 16)))[0]
        assert abs(_chi_square(table, table.mean())) < 5
        assert np.count_nonzero(first == second) < 10


def test_neighbouring_seeds_have_nothing_in_common() -> None:
    count = 1 << 15
    orders = [Sampler(count, seed).indices(0, 0, count) for seed in (0, 1, 2, 1 << 32, (1 << 64) - 1)]
    for first, second in itertools.combinations(orders, 2):
        assert abs(np.corrcoef(first, second)[0, 1]) < 5 / math.sqrt(count)


@pytest.mark.parametrize("count", [2, 3, 4, 5])
def test_every_order_of_a_few_samples_is_as_likely(count: int) -> None:
    # Small n is where a network of few rounds fails: with four rounds n = 5 is nine standard deviations away.
    tries = 2_000
    seen: Counter[tuple[int, ...]] = Counter()
    for seed in range(tries // 20):
        sampler = Sampler(count, seed)
        seen.update(tuple(sampler.indices(epoch, 0, count).tolist()) for epoch in range(20))
    orders = list(itertools.permutations(range(count)))
    observed = np.array([seen[order] for order in orders])
    assert observed.sum() == tries
    assert abs(_chi_square(observed, tries / len(orders))) < 5


def test_both_parities_come_up_at_nine() -> None:
    # 3 x 3 would be a rectangle whose rounds are all even permutations.
    def parity(order: np.ndarray) -> int:
        return sum(int(a > b) for a, b in itertools.combinations(order.tolist(), 2)) % 2

    odd = sum(parity(Sampler(9, seed).indices(0, 0, 9)) for seed in range(400))
    assert 140 < odd < 260


def test_memory_does_not_grow_with_the_number_of_samples() -> None:
    def peak(count: int) -> int:
        tracemalloc.start()
        Sampler(count, 1).indices(3, count // 2, 1000)
        size = tracemalloc.get_traced_memory()[1]
        tracemalloc.stop()
        return size

    peak(10**4)
    assert peak(1 << 48) < peak(10**4) + 64_000


@pytest.mark.parametrize(("count", "seed"), [(0, 0), (-1, 0), (MAX_SAMPLES + 1, 0), (10, -1), (10, 1 << 64)])
def test_wrong_numbers_are_refused(count: int, seed: int) -> None:
    with pytest.raises(UsageError):
        Sampler(count, seed)


@pytest.mark.parametrize(("epoch", "start", "length"), [(-1, 0, 1), (0, -1, 1), (0, 0, 11), (0, 10, 1), (0, 1, -1)])
def test_places_outside_the_epoch_are_refused(epoch: int, start: int, length: int) -> None:
    with pytest.raises(UsageError):
        Sampler(10, 0).indices(epoch, start, length)
