"""Rows with room around them: what is read into a ring is the samples, wherever they begin and lie."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import pairwise

import numpy as np
import pytest

from headrace.dataset import (
    Feed,
    FeedOptions,
    PackOptions,
    TokenStream,
    open_samples,
    pack_stream,
)
from headrace.dataset.feed.ring import Ring
from headrace.dataset.tokens.idx import encode_idx
from headrace.errors import ChecksumMismatch
from headrace.volume import Volume
from tests.dataset.corpora import native_volume, put_stream, some_lengths

TOKENS = np.random.default_rng(1).integers(1, 1 << 30, 300_001, np.int32)


@pytest.fixture(scope="module")
def volume() -> Iterator[Volume]:
    """The same tokens as one object, and as slices of others, which begin and end anywhere in blocks."""
    with native_volume() as volume, volume.session() as session:
        header = b"".join(encode_idx(np.dtype("<i4"), np.array([len(TOKENS)], np.int32)))
        cuts = [0, 41_111, 90_003, 90_010, 200_000, len(TOKENS)]
        with session.transaction() as transaction:
            transaction.put("whole.bin", TOKENS, checksum_block_bytes=4096)
            for number, (low, high) in enumerate(pairwise(cuts)):
                transaction.put(f"part{number}", TOKENS[low:high], checksum_block_bytes=4096)
        with session.transaction() as transaction:
            parts = [(f"part{n}", 0, 4 * (high - low)) for n, (low, high) in enumerate(pairwise(cuts))]
            transaction.compose("parts.bin", parts)
            for name in ("whole", "parts"):
                transaction.put(f"{name}.idx", header)
        yield volume


# Rows that begin at blocks, rows that do not, and rows too short for room.
@pytest.mark.parametrize("length", [8192, 5001, 1000])
@pytest.mark.parametrize("name", ["whole", "parts"])
@pytest.mark.parametrize("verify", [True, False])
def test_rows_are_the_samples(volume: Volume, name: str, length: int, verify: bool) -> None:
    samples = open_samples(TokenStream.open(volume, name), "windows", length)
    options = FeedOptions(sequence_length=length, global_batch=3, seed=5, prefetch=2, epochs=2, verify=verify)
    feed = Feed({name: samples}, options)
    seen = 0
    while (batch := feed.acquire()) is not None:
        for row, sample in zip(batch.tokens, batch.samples.tolist(), strict=True):
            assert np.array_equal(row, TOKENS[sample * length : sample * length + length + 1])
        seen += len(batch.samples)
        feed.release(batch)
    assert seen >= 2 * samples.sample_count - 3
    bare = 2 * 3 * (length + 1) * 4
    # Two blocks around each row, and a line.
    assert bare <= feed.ring_bytes <= bare + (2 * 3 * (2 * 4096 + 64) if length > 1000 else 0)
    feed.close()


@pytest.mark.parametrize("layout", ["packed", "padded"])
def test_pieces_of_one_row_do_not_overwrite_each_other(layout: str) -> None:
    """Between the documents of a row there is no room."""
    length = 8192
    with native_volume() as volume:
        tokens = put_stream(volume, "docs", some_lengths(200, 1500), dtype="<i4", vocabulary=1 << 30)
        with volume.session() as session:
            pack_stream(session, "docs", PackOptions(sequence_length=length, layout=layout))
        samples = open_samples(TokenStream.open(volume, "docs"), layout, length)
        feed = Feed({"docs": samples}, FeedOptions(sequence_length=length, global_batch=4, seed=5, epochs=1))
        assert feed._ring.room_bytes > 0
        most = 0
        while (batch := feed.acquire()) is not None:
            for start, count, row, place in zip(*(column.tolist() for column in batch.pieces), strict=True):
                assert np.array_equal(batch.tokens[row, place : place + count], tokens[start : start + count])
            most = max(most, len(batch.pieces.rows))
            feed.release(batch)
        assert most > 4 if layout == "packed" else most == 4
        feed.close()


def test_rooms_do_not_meet() -> None:
    for width, dtype in ((8193, np.dtype(np.int32)), (20_001, np.dtype(np.uint16))):
        ring = Ring.make(2, 5, width, dtype)
        assert len(ring) == len(ring.tokens) == 2 and ring.room_bytes > 0
        # All rows of both slots, one behind the other.
        slots, rows = np.divmod(np.arange(10), 5)
        first = ring.places(slots, rows, np.zeros(10, np.int64)) * dtype.itemsize
        last = ring.places(slots, rows, np.full(10, width, np.int64)) * dtype.itemsize
        assert int(first[0]) >= ring.room_bytes
        assert int(last[-1]) + ring.room_bytes <= ring.nbytes == ring.memory.nbytes
        assert np.all(first[1:] - last[:-1] >= 2 * ring.room_bytes)
        for slot, tokens in enumerate(ring.tokens):
            ring.memory[:] = 0
            ring.memory[ring.places(np.array([slot]), np.array([3]), np.array([7]))] = 9
            assert tokens[3, 7] == 9 and tokens.sum() == ring.memory.sum() == 9


def test_a_wrong_byte_beside_a_row_is_found() -> None:
    """In the part of a block that stands in the room, too: a block is verified as a whole."""
    with native_volume() as volume, volume.session() as session:
        header = b"".join(encode_idx(np.dtype("<i4"), np.array([len(TOKENS)], np.int32)))
        with session.transaction() as transaction:
            transaction.put("whole.bin", TOKENS, checksum_block_bytes=4096)
            transaction.put("whole.idx", header)
        stored = volume.stored("whole.bin")
        samples = open_samples(TokenStream.open(volume, "whole"), "windows", 8192)
        feed = Feed({"whole": samples}, FeedOptions(sequence_length=8192, global_batch=1, seed=5, prefetch=1))
        batch = feed.acquire()
        assert batch is not None
        following = int(feed.order.at([1])[1][0])
        feed.close()
        # The last byte of the block in which the sample's last token is the first.
        place = np.array([(following + 1) * 8192 * 4 + 4095])
        pieces = stored.blobs[0].data.pieces(place, np.ones(1, np.int64))
        device, offset = volume.devices[int(pieces.member[0])], int(pieces.offset[0])
        block = np.empty(4096, np.uint8)
        device.read_into(offset, block)
        block[4095] ^= 1
        device.write(offset, block)
        feed = Feed({"whole": samples}, FeedOptions(sequence_length=8192, global_batch=1, seed=5, prefetch=1))
        batch = feed.acquire()
        assert batch is not None
        feed.release(batch)
        with pytest.raises(ChecksumMismatch):
            feed.acquire()
        feed.close()
