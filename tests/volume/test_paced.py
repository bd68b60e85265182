"""Writing at a pace: the same bytes in the same places, whatever the pieces."""

from __future__ import annotations

from collections import deque
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace.volume import Parts, Volume
from headrace.volume.writing.paced import cut
from headrace.volume.writing.parts import WINDOW_BYTES

BLOCK = 64 << 10


class Chances:
    """Pieces of any size, as many under way as `most`."""

    def __init__(self, seed: int, most: int) -> None:
        self._chance = np.random.default_rng(seed)
        self._most = most
        self.answers: list[int] = []
        self.refused = 0

    def take(self, under_way_bytes: int) -> int:
        if under_way_bytes > self._most:
            self.refused += 1
            return 0
        return int(self._chance.integers(1, 3 << 20))

    def answered(self, length_bytes: int, seconds: float) -> None:
        assert seconds >= 0
        self.answers.append(length_bytes)


@pytest.mark.parametrize("most", [0, 1 << 20, 1 << 40])
def test_what_is_written_at_a_pace_is_what_was_given(tmp_path: Path, most: int) -> None:
    uris = [f"file:{tmp_path}/{member}" for member in range(2)]
    Volume.create([f"{uri}?create=64MiB" for uri in uris]).close()
    chance = np.random.default_rng(most % 97)
    lengths = [5 << 20, 1000, 300_000, 70_000, 2 << 20, 1]
    offsets = [0, 5 << 20, (5 << 20) + 4096, 6 << 20, (7 << 20) + 17, 11 << 20]
    buffers = [chance.integers(0, 256, length, np.uint8) for length in lengths]
    parts = Parts(buffers, offsets, (11 << 20) + 9)
    pace = Chances(7, most)
    parts.pace = pace
    whole = np.zeros(parts.length_bytes, np.uint8)
    parts.copy_to(whole, 0)
    with Volume.open(uris, write=True) as volume, volume.session(run_id="test", unfenced=True) as session:
        with session.transaction() as transaction:
            grant = transaction.allocate("object", parts.length_bytes)
            transaction.accept(volume.write_grant(grant, parts))
        assert np.array_equal(np.frombuffer(volume.read("object"), np.uint8), whole)
    assert sum(pace.answers) == parts.length_bytes and len(pace.answers) > 4
    assert (pace.refused > 0) is (most < 1 << 40)


@settings(max_examples=50)
@given(
    st.lists(st.tuples(st.integers(1, 40), st.booleans()), min_size=1, max_size=12),
    st.lists(st.integers(0, 20 << 20), min_size=1, max_size=20),
    st.integers(0, BLOCK - 1),
)
def test_pieces_are_whole_blocks_in_order_and_nothing_is_left(
    blocks: list[tuple[int, bool]], rooms: list[int], short: int
) -> None:
    ranges: deque[tuple[int, int, int]] = deque()
    end = 0
    for number, (count, together) in enumerate(blocks):
        length = count * BLOCK * 3 - (short if number == len(blocks) - 1 else 0)
        ranges.append((end, length, -1 if together else number))
        end += length
    of = list(ranges)
    at, asked = 0, 0
    while ranges:
        room = rooms[asked % len(rooms)]
        window = cut(ranges, room, BLOCK)
        asked += 1
        assert window.starts and window.together_bytes <= WINDOW_BYTES
        assert sum(window.lengths) <= max(room, BLOCK)
        for start, length, part in zip(window.starts, window.lengths, window.parts, strict=True):
            assert start == at and start % BLOCK == 0 and length > 0
            assert any(low <= start and start + length <= low + size and part == p for low, size, p in of)
            at += length
    assert at == end
