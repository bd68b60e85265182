"""Batches that are read with one request: few requests, and each batch has its own end."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import numpy as np
import pytest

from headrace.dataset import Feed, FeedBatch, FeedOptions, TokenStream, open_samples
from headrace.dataset.feed.flight import group_size
from headrace.dataset.tokens.stream import CHECKSUM_BLOCK_BYTES
from headrace.errors import ChecksumMismatch, DeviceTimeout, UsageError
from headrace.testing.devices import MemoryDevice
from headrace.volume import Volume
from tests.dataset.corpora import native_volume, put_stream

#: Two checksum blocks.
LENGTH, BATCH = 2048, 2
DOCUMENTS = [LENGTH] * 100


@pytest.fixture(scope="module")
def volume() -> Iterator[Volume]:
    with native_volume() as volume:
        put_stream(volume, "corpus", DOCUMENTS, dtype="<i4", vocabulary=1 << 30)
        yield volume


def feed(volume: Volume, **options: Any) -> Feed:
    samples = open_samples(TokenStream.open(volume, "corpus"), "windows", LENGTH)
    every = {"sequence_length": LENGTH, "global_batch": BATCH, "seed": 3, "prefetch": 8, "epochs": 1, **options}
    return Feed({"corpus": samples}, FeedOptions(**every))


def take(feed: Feed) -> FeedBatch:
    batch = feed.acquire()
    assert batch is not None
    return batch


def seen(batch: FeedBatch) -> tuple[list[int], list[int]]:
    return batch.samples.tolist(), batch.tokens.ravel().tolist()


def test_few_requests_and_the_first_are_small(volume: Volume, monkeypatch: pytest.MonkeyPatch) -> None:
    running = feed(volume)
    stream = running.sources["corpus"].stream
    submit, asked = stream.submit_pieces, []

    def counted(starts: Any, *arguments: Any, **more: Any) -> Any:
        asked.append(len(starts) // BATCH)
        return submit(starts, *arguments, **more)

    monkeypatch.setattr(stream, "submit_pieces", counted)
    running.begin()
    assert asked == [1, 1, 2, 4]
    batches = 0
    while (batch := running.acquire()) is not None:
        running.release(batch)
        batches += 1
    # What is left at the end comes as it is.
    assert sum(asked) == batches == 49 and asked[4:-1] == [4] * 10 and asked[-1] == 1


@pytest.mark.parametrize(
    ("batch_bytes", "prefetch", "size"),
    [(1, 1, 1), (1, 2, 1), (1, 3, 1), (1, 1024, 512), (8 * 8193 * 4, 64, 4), (1 << 20, 64, 1), (1 << 30, 64, 1)],
)
def test_how_many_are_read_together(batch_bytes: int, prefetch: int, size: int) -> None:
    assert group_size(batch_bytes, prefetch) == size


@pytest.mark.parametrize("lent", [1, 3, 5, 7])
def test_buffers_that_are_lent_for_long_stop_nobody(volume: Volume, lent: int) -> None:
    running = feed(volume)
    held, expected = [], [seen(batch) for batch in _all(feed(volume))]
    found = []
    while (batch := running.acquire()) is not None:
        found.append(seen(batch))
        held.append(batch)
        if len(held) > lent:
            # Not the oldest.
            running.release(held.pop(len(held) // 2))
    assert found == expected


def _all(running: Feed) -> Iterator[FeedBatch]:
    while (batch := running.acquire()) is not None:
        yield batch
        running.release(batch)


def test_all_buffers_lent_is_said_and_any_that_comes_back_is_used(volume: Volume) -> None:
    running, expected = feed(volume), [seen(batch) for batch in _all(feed(volume))]
    held = [take(running) for _ in range(8)]
    with pytest.raises(UsageError, match="every buffer is lent"):
        running.acquire()
    assert [seen(batch) for batch in held] == expected[:8]
    running.release(held[5])
    assert seen(take(running)) == expected[8]
    assert [seen(batch) for batch in held[:5] + held[6:]] == expected[:5] + expected[6:8]


@pytest.mark.parametrize("damaged", [0, 1, 5, 10, 14])
def test_a_damaged_batch_of_a_group_raises_at_its_turn_and_no_other_does(damaged: int) -> None:
    devices = [MemoryDevice(16 << 20)]
    with Volume.create(devices=devices) as volume:
        put_stream(volume, "corpus", DOCUMENTS, dtype="<i4", vocabulary=1 << 30)
        expected = [seen(batch) for batch in _all(feed(volume))]
        # The second block of a sample: no other has tokens in it.
        at = expected[damaged][0][0] * 2 * CHECKSUM_BLOCK_BYTES + CHECKSUM_BLOCK_BYTES
        place = devices[0].data.find(volume.read("corpus.bin")[at : at + CHECKSUM_BLOCK_BYTES])
        devices[0].data[place] ^= 1
        running = feed(volume)
        for number, batch in enumerate(expected):
            if number == damaged:
                for _ in range(2):
                    with pytest.raises(ChecksumMismatch, match=r"corpus\.bin"):
                        running.acquire()
                    assert running.consumed == number * BATCH
                devices[0].data[place] ^= 1
            found = take(running)
            assert seen(found) == batch
            running.release(found)
        assert running.acquire() is None


def test_tokens_do_not_move_while_the_rest_of_their_group_is_read(volume: Volume) -> None:
    """A group's slots are used again one by one."""
    running = feed(volume)
    expected = [(samples, np.array(tokens)) for samples, tokens in map(seen, _all(feed(volume)))]
    first = [take(running) for _ in range(4)]
    for batch in first[1:]:
        running.release(batch)
    for number in range(4, 20):
        batch = take(running)
        assert batch.samples.tolist() == expected[number][0]
        assert np.array_equal(batch.tokens.ravel(), expected[number][1])
        running.release(batch)
    assert seen(first[0])[1] == expected[0][1].tolist()


def test_memory_that_is_given_is_read_into_slot_by_slot(volume: Volume) -> None:
    """As a loader for CUDA does: pinned memory, one slot more than is read ahead."""
    samples = open_samples(TokenStream.open(volume, "corpus"), "windows", LENGTH)
    memory = np.zeros((9, BATCH, LENGTH + 1), np.int32)
    options = FeedOptions(sequence_length=LENGTH, global_batch=BATCH, seed=3, prefetch=8, epochs=1)
    running = Feed({"corpus": samples}, options, buffers=lambda: memory)
    expected, last = [seen(batch) for batch in _all(feed(volume))], None
    for each in expected:
        batch = take(running)
        assert (memory[batch.slot].ravel().tolist(), batch.samples.tolist()) == (each[1], each[0])
        if last is not None:
            running.release(last)
        last = batch
    assert running.acquire() is None


class Late:
    """A read whose bytes come when they are let through."""

    def __init__(self, read: Any) -> None:
        self._read, self.through = read, False

    def done(self) -> bool:
        return self.through

    def waiting(self) -> str | None:
        return None if self.through else "a slow path"

    def wait(self, timeout_s: float | None = None) -> None:
        if not self.through:
            raise DeviceTimeout("not yet")

    def let_through(self) -> None:
        self.through = True
        self._read().wait()


def test_a_read_that_comes_late_does_not_write_to_the_slot_of_another_batch(
    volume: Volume, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Where one dataset of a mixture could not be looked up in time, and the read of another is on its way."""
    with volume.session() as session, session.transaction() as transaction:
        for end in ("bin", "idx"):
            transaction.compose(f"second.{end}", [(f"corpus.{end}", 0, volume.stat(f"corpus.{end}").length_bytes)])

    def mixture() -> Feed:
        sources = {n: open_samples(TokenStream.open(volume, n), "windows", LENGTH) for n in ("corpus", "second")}
        options = FeedOptions(sequence_length=LENGTH, global_batch=2, seed=3, prefetch=1, stall_timeout_s=0.1)
        return Feed(sources, options, shares=[1, 1])

    expected, running = mixture(), mixture()
    streams = [running.sources[name].stream for name in ("corpus", "second")]
    with monkeypatch.context() as patch:
        submit = streams[0].submit_pieces
        late: list[Late] = []

        def slow(*arguments: Any, **more: Any) -> Late:
            late.append(Late(lambda: submit(*arguments, **more)))
            return late[-1]

        def refused(*_: Any, **__: Any) -> Any:
            raise DeviceTimeout("what is looked up in the volume did not come in time")

        patch.setattr(streams[0], "submit_pieces", slow)
        patch.setattr(streams[1], "submit_pieces", refused)
        running.begin()
    for number in range(4):
        try:
            batch = take(running)
        except DeviceTimeout:
            # What is on its way is waited for.
            late[0].let_through()
            batch = take(running)
        if number == 1 and not late[0].through:
            late[0].let_through()
        wanted = take(expected)
        assert np.array_equal(batch.tokens, wanted.tokens), number
        running.release(batch)
        expected.release(wanted)
    assert late[0].through and len(late) == 1
