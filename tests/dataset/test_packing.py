"""Documents in samples: as full as best fit makes them, nothing lost, nothing twice; what a batch says of them."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace.dataset import (
    Feed,
    FeedOptions,
    Packing,
    PackOptions,
    TokenStream,
    open_samples,
    pack_stream,
)
from headrace.dataset.tokens import packs, stream
from headrace.dataset.tokens.packing import LONG, best_fit, cut, pack, pad
from headrace.errors import ChecksumMismatch, DatasetError, ObjectExists, ObjectNotFound, UsageError
from headrace.testing.devices import MemoryDevice
from headrace.volume import Volume
from tests.dataset.corpora import memory_volume, native_volume, put_stream, some_lengths
from tests.dataset.test_idx import written_plainly

LENGTH = 31
LENGTHS = [*some_lengths(300, 18), 0, 1, 2, LENGTH, LENGTH + 1, LENGTH + 2, 2 * LENGTH + 1, 2 * LENGTH + 2, 400]


# ---- which documents share a sample ----------------------------------------------------------------------------------


def plain_best_fit(lengths: list[int], capacity: int) -> list[int]:
    """What is left in each bin, one item after another."""
    left: list[int] = []
    for length in sorted(lengths, reverse=True):
        fitting = [(room, place) for place, room in enumerate(left) if room >= length]
        if fitting:
            left[min(fitting)[1]] -= length
        else:
            left.append(capacity - length)
    return sorted(left)


@pytest.mark.parametrize("capacity", [1, 2, 7, 33, 257])
@pytest.mark.parametrize("count", [1, 2, 50, 700])
def test_it_is_best_fit_decreasing(capacity: int, count: int) -> None:
    lengths = np.random.default_rng(capacity + count).integers(1, capacity + 1, count)
    bins = best_fit(lengths, capacity)
    held = np.bincount(bins, weights=lengths)
    assert sorted(capacity - held) == plain_best_fit(lengths.tolist(), capacity)
    assert best_fit(lengths, capacity).tolist() == bins.tolist()


def test_no_document_loses_a_target_where_it_is_split() -> None:
    for length in range(2, 6 * LENGTH):
        (pieces,) = cut(np.array([100, 100 + length]), LENGTH, "split")
        targets = [
            token
            for start, size in zip(pieces.starts.tolist(), pieces.lengths.tolist(), strict=True)
            for token in range(start + 1, start + size)
        ]
        assert targets == list(range(101, 100 + length))
        assert pieces.lengths.max() <= LENGTH + 1
        assert pieces.parts.tolist() == list(range(len(pieces.parts)))


@pytest.mark.parametrize("long", LONG)
def test_documents_are_cut_by_the_rule(long: str) -> None:
    starts = np.concatenate([[0], np.cumsum(LENGTHS)])
    (whole,) = cut(starts, LENGTH, long)
    # Chunks change nothing, also where they end within a document.
    parts = list(cut(starts, LENGTH, long, chunk_pieces=7))
    assert all(len(each.starts) <= 7 for each in parts)
    for column in ("starts", "lengths", "parts"):
        assert np.array_equal(np.concatenate([getattr(each, column) for each in parts]), getattr(whole, column))
    begins = set(starts[:-1].tolist())
    if long == "split":
        kept = sum(length - 1 for length in LENGTHS if length >= 2)
        assert (whole.lengths - 1).sum() == kept
    else:
        assert set(whole.starts.tolist()) <= begins
        fitting = [length for length in LENGTHS if 2 <= length <= LENGTH + 1]
        cut_off = [LENGTH + 1 for length in LENGTHS if length > LENGTH + 1]
        expected = fitting + (cut_off if long == "truncate" else [])
        assert sorted(whole.lengths.tolist()) == sorted(expected)


def test_samples_are_ordered_by_their_pieces_and_pieces_by_the_stream() -> None:
    (pieces,) = cut(np.concatenate([[0], np.cumsum(LENGTHS)]), LENGTH, "split")
    chunk = pack(pieces, LENGTH + 1)
    assert np.all(np.diff(chunk.run_pieces) > 0)
    each = np.repeat(chunk.run_pieces, chunk.run_samples)
    assert each.sum() == len(pieces.starts)
    sample = np.repeat(np.arange(len(each)), each)
    assert np.bincount(sample, weights=chunk.pieces.lengths).max() <= LENGTH + 1
    assert np.all(np.diff(chunk.pieces.starts)[np.diff(sample) == 0] > 0)
    assert sorted(chunk.pieces.starts.tolist()) == pieces.starts.tolist()
    alone = pad(pieces)
    assert alone.run_samples.tolist() == [len(pieces.starts)] and alone.run_pieces.tolist() == [1]


# ---- stored --------------------------------------------------------------------------------------------------------


def packed(volume: Volume, name: str = "corpus", length: int = LENGTH, **options: Any) -> packs.PackManifest:
    replace = options.pop("replace", False)
    with volume.session(run_id="test") as session:
        return pack_stream(session, name, PackOptions(sequence_length=length, **options), replace=replace)


@pytest.fixture(scope="module")
def volume() -> Iterator[Volume]:
    with native_volume() as volume:
        put_stream(volume, "corpus", LENGTHS)
        for layout in ("packed", "padded"):
            packed(volume, layout=layout)
        yield volume


@pytest.fixture(scope="module")
def tokens(volume: Volume) -> np.ndarray:
    return np.frombuffer(volume.read("corpus.bin"), np.uint16)


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_every_piece_is_in_one_sample(volume: Volume, layout: str) -> None:
    packing = Packing.open(TokenStream.open(volume, "corpus"), layout, LENGTH)
    read = packing.submit(np.arange(packing.manifest.samples))
    starts, lengths, rows, places = read.pieces()
    (expected,) = cut(np.concatenate([[0], np.cumsum(LENGTHS)]), LENGTH, "split")
    order = np.argsort(starts)
    assert np.array_equal(starts[order], expected.starts) and np.array_equal(lengths[order], expected.lengths)
    assert set(rows.tolist()) == set(range(packing.manifest.samples))
    # In a row without gaps, from its begin.
    follows = np.diff(rows) == 0
    assert np.array_equal(places[1:][follows], (places + lengths)[:-1][follows]) and not places[1:][~follows].any()
    # Any of them, in any order, are the same.
    some = np.random.default_rng(1).integers(0, packing.manifest.samples, 20)
    again = packing.submit(some).pieces()
    for row, sample in enumerate(some.tolist()):
        assert again[0][again[2] == row].tolist() == starts[rows == sample].tolist()
    if layout == "packed":
        assert packing.manifest.fill > 0.99
    else:
        assert len(starts) == packing.manifest.samples and packing.manifest.most_pieces == 1


def test_the_same_documents_give_the_same_bytes(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    with memory_volume() as other:
        put_stream(other, "corpus", LENGTHS)
        first = packed(other)
        assert other.read("corpus.packed-31") == volume.read("corpus.packed-31")
        # In chunks, memory is bounded: other samples, hardly more of them.
        monkeypatch.setattr(packs, "_DOCUMENTS", 50)
        chunked = packed(other, replace=True)
        assert chunked.runs > first.runs and chunked.tokens == first.tokens
        assert chunked.samples <= first.samples * 1.1 + 7
        assert other.read("corpus.packed-31") != volume.read("corpus.packed-31")


@pytest.mark.parametrize("entries", [3, 1 << 18])
def test_documents_are_found_without_the_whole_index(entries: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream, "_INDEX_ENTRIES", entries)
    lengths = [4, 0, 6, 1, 9, 2, 2, 5]
    with memory_volume() as volume:
        put_stream(volume, "plain", lengths, manifest=False)
        # Documents of several sequences, and of none.
        idx = written_plainly(np.dtype("<u2"), lengths, [0, 2, 2, 3, 7, 8, 8])
        with volume.session(run_id="test") as session, session.transaction() as transaction:
            transaction.put("several.bin", bytes(2 * sum(lengths)))
            transaction.put("several.idx", idx)
        for name in ("plain", "several"):
            opened = TokenStream.open(volume, name)
            whole = opened.index().document_starts()
            count = opened.document_count
            for first in range(count + 1):
                for number in range(count + 1 - first):
                    assert opened.document_starts(first, number).tolist() == whole[first : first + number + 1].tolist()
            for first, number in ((-1, 1), (0, count + 1), (count, 1)):
                with pytest.raises(UsageError, match="no such documents"):
                    opened.document_starts(first, number)


# ---- batches -------------------------------------------------------------------------------------------------------


def test_rows_hold_whole_documents_and_say_where_they_are(volume: Volume, tokens: np.ndarray) -> None:
    for layout in ("packed", "padded"):
        packing = Packing.open(TokenStream.open(volume, "corpus"), layout, LENGTH)
        options = FeedOptions(sequence_length=LENGTH, global_batch=5, epochs=1)
        feed = Feed({"corpus": open_samples(packing.stream, layout, LENGTH)}, options)
        handed = batches = 0
        while (batch := feed.acquire()) is not None:
            segments = batch.segments()
            positions, labels, bounds = segments.position_ids(), segments.labels(batch.tokens), segments.cu_seqlens()
            starts, lengths, rows, _ = packing.submit(batch.samples).pieces()
            expected_bounds = []
            for row in range(5):
                place = 0
                for start, length in zip(starts[rows == row], lengths[rows == row], strict=True):
                    there = slice(place, place + length)
                    assert batch.tokens[row, there].tolist() == tokens[start : start + length].tolist()
                    seen = positions[row, there]
                    assert seen.tolist() == list(range(len(seen)))
                    # All its targets but none behind it.
                    assert (
                        labels[row, place : place + length - 1].tolist() == tokens[start + 1 : start + length].tolist()
                    )
                    assert (labels[row, place + length - 1 : place + length] == -100).all()
                    expected_bounds.append(row * LENGTH + place)
                    handed += length
                    place += int(length)
                assert (batch.tokens[row, place:] == feed.pad_id).all() and (labels[row, place:] == -100).all()
                if place < LENGTH:
                    expected_bounds.append(row * LENGTH + place)
            assert bounds.tolist() == [*expected_bounds, 5 * LENGTH]
            batches += 1
            feed.release(batch)
        assert batches == packing.manifest.samples // 5
        assert feed.metrics().token_bytes == 2 * handed
        feed.close()


def test_windows_are_told_apart_by_the_token_that_ends_documents(volume: Volume, tokens: np.ndarray) -> None:
    options = FeedOptions(sequence_length=LENGTH, global_batch=4)
    feed = Feed({"corpus": open_samples(TokenStream.open(volume, "corpus"), "windows", LENGTH)}, options)
    batch = feed.acquire()
    assert batch is not None and feed.tells_documents
    segments = batch.segments()
    for row, sample in enumerate(batch.samples.tolist()):
        window = tokens[sample * LENGTH : (sample + 1) * LENGTH + 1].tolist()
        begins = [place == 0 or window[place - 1] == 0 for place in range(LENGTH + 1)]
        assert segments.begins[row].tolist() == begins
        expected = [-100 if begins[place + 1] else window[place + 1] for place in range(LENGTH)]
        assert segments.labels(batch.tokens)[row].tolist() == expected
    assert not segments.padding.any()
    feed.close()


@pytest.mark.parametrize("prefetch", [3, 8])
def test_damage_of_a_packing_stops_the_batch_that_needs_it_and_nothing_is_left_out(prefetch: int) -> None:
    devices = [MemoryDevice(16 << 20)]
    with Volume.create(devices=devices) as volume:
        put_stream(volume, "corpus", some_lengths(600, 15))
        manifest = packed(volume)
        table = volume.read("corpus.packed-31")
        assert len(table) > 2 * 4096
        options = FeedOptions(sequence_length=LENGTH, global_batch=20, epochs=1, prefetch=prefetch)

        def feed() -> Feed:
            return Feed({"corpus": open_samples(TokenStream.open(volume, "corpus"), "packed", LENGTH)}, options)

        def batches(feed: Feed, seen: list[list[int]]) -> None:
            while (batch := feed.acquire()) is not None:
                seen.append([*batch.samples.tolist(), *batch.tokens.ravel().tolist()])
                feed.release(batch)

        expected: list[list[int]] = []
        batches(feed(), expected)
        assert len(expected) == manifest.samples // 20
        place = devices[0].data.find(table[4096:8192])
        running, seen = feed(), []
        devices[0].data[place] ^= 1
        for _ in range(2):
            with pytest.raises(ChecksumMismatch, match=r"corpus\.packed-31"):
                batches(running, seen)
        assert seen == expected[: len(seen)] and len(seen) < len(expected)
        assert running.consumed == 20 * len(seen)
        devices[0].data[place] ^= 1
        # Mended: on with the same batch. What was asked for before fails once more, each batch once.
        failed = 0
        while len(seen) < len(expected):
            try:
                batches(running, seen)
            except ChecksumMismatch:
                failed += 1
        assert seen == expected and failed <= options.prefetch


# ---- what is refused -----------------------------------------------------------------------------------------------


def test_a_packing_that_is_not_there_or_is_there_already(volume: Volume) -> None:
    opened = TokenStream.open(volume, "corpus")
    with pytest.raises(ObjectNotFound, match=r"not packed so.*headrace dataset pack corpus --sequence-length 30"):
        Packing.open(opened, "packed", 30)
    before = volume.read("corpus.packed-31.json")
    with pytest.raises(ObjectExists, match="--replace"):
        packed(volume)
    assert volume.read("corpus.packed-31.json") == before
    with pytest.raises(UsageError, match="no such sample"):
        Packing.open(opened, "packed", LENGTH).submit(np.array([0, 1 << 40]))


@pytest.mark.parametrize(
    "options",
    [{"length": 0}, {"length": 1 << 30}, {"layout": "windows"}, {"long": "keep"}],
)
def test_options_that_cannot_be_meant(volume: Volume, options: dict[str, Any]) -> None:
    with pytest.raises(UsageError):
        packed(volume, **options)


@pytest.mark.parametrize("manifest", [True, False])
def test_a_packing_of_other_tokens_is_refused(manifest: bool) -> None:
    with memory_volume() as volume:
        put_stream(volume, "d", [5, 6, 7], manifest=manifest)
        packed(volume, "d", 9)
        Packing.open(TokenStream.open(volume, "d"), "packed", 9)
        put_stream(volume, "d", [7, 6, 5], manifest=manifest)
        with pytest.raises(DatasetError, match=r"of other tokens.*--replace"):
            Packing.open(TokenStream.open(volume, "d"), "packed", 9)
        packed(volume, "d", 9, replace=True)
        Packing.open(TokenStream.open(volume, "d"), "packed", 9)


def test_a_state_of_other_samples_says_so() -> None:
    with memory_volume() as volume:
        put_stream(volume, "d", [5, 6, 17, 30])
        packed(volume, "d", 9)

        def feed(kind: str) -> Feed:
            samples = open_samples(TokenStream.open(volume, "d"), kind, 9)
            return Feed({"d": samples}, FeedOptions(sequence_length=9, global_batch=1))

        state = feed("packed").state()
        feed("packed").load_state(state)
        with pytest.raises(DatasetError, match="does not fit: samples, packing:"):
            feed("windows").load_state(state)
        packed(volume, "d", 9, long="truncate", replace=True)
        with pytest.raises(DatasetError, match=r"does not fit: packing: expected packing [0-9a-f]{64}, found"):
            feed("packed").load_state(state)


def test_a_dataset_that_gives_no_sample_leaves_nothing() -> None:
    with memory_volume() as volume:
        put_stream(volume, "d", [1, 0, 1])
        with pytest.raises(DatasetError, match="no sample"):
            packed(volume, "d", 9)
        put_stream(volume, "d", [100, 200])
        with pytest.raises(DatasetError, match="2 left out"):
            packed(volume, "d", 9, long="drop")
        assert [info.name for info in volume.list()] == ["d.bin", "d.idx", "d.json"]


def _piece(**fields: int) -> Any:
    def change(table: np.ndarray, told: dict[str, Any]) -> None:
        for name, value in fields.items():
            table[name][0] = value

    return change


def _told(**fields: object) -> Any:
    return lambda table, told: told.update(fields)


@pytest.mark.parametrize(
    ("change", "say"),
    [
        (_piece(length=0), "a piece that cannot be"),
        (_piece(length=11), "a piece that cannot be"),
        (_piece(start=1 << 62), "a piece that cannot be"),
        (_piece(start=(1 << 64) - 1), "a piece that cannot be"),
        (_piece(start=18, length=2), "a piece that cannot be"),
        (_told(packing=2), "not a packing's manifest"),
        (_told(samples=1 << 60), "no valid 'samples'"),
        (_told(samples=-1), "no valid 'samples'"),
        (_told(pieces=1 << 60), "no valid 'pieces'"),
        (_told(runs=1 << 40), "no valid 'runs'"),
        (_told(samples=2, pieces=2), "does not fit its manifest"),
        (_told(most_pieces=5), "do not fit its manifest"),
        (_told(sha256=None), "no valid 'sha256'"),
        (_told(sequence_length=8), "of other tokens"),
    ],
)
def test_a_packing_that_is_damaged_is_refused_before_anything_is_read_by_it(change: Any, say: str) -> None:
    with memory_volume() as volume:
        put_stream(volume, "d", [5, 6, 8])
        manifest = packed(volume, "d", 9)
        data = bytearray(volume.read("d.packed-9"))
        table = np.frombuffer(data, packs.PIECE, manifest.pieces)
        told = json.loads(volume.read("d.packed-9.json"))
        change(table, told)
        with volume.session(run_id="test") as session, session.transaction() as transaction:
            for name, content in (("d.packed-9", bytes(data)), ("d.packed-9.json", json.dumps(told).encode())):
                transaction.delete(name)
                transaction.put(name, content)
        with pytest.raises(DatasetError) as caught:
            feed = Feed(
                {"d": open_samples(TokenStream.open(volume, "d"), "packed", 9)},
                FeedOptions(sequence_length=9, global_batch=manifest.samples),
            )
            feed.acquire()
        assert say in str(caught.value)
