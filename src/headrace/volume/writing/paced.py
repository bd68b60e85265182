"""Writing what nobody waits for: a piece at a time, each when its turn has come.

    Pace.take      how much may go now, besides what is under way        (a policy: `headrace.torch.save.pacing`)
    a piece        so much of the object, from where it lies, in one request to the engine
    Pace.answered  how long that took, from when it was sent

Pieces are answered in the order in which they were sent, or nearly so, and waited for in it.
"""

from __future__ import annotations

import contextlib
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

from headrace.device import BlockDevice, Transfer
from headrace.errors import HeadraceError
from headrace.volume.data.extents import U32, Extents
from headrace.volume.writing.parts import PEAK_BYTES, WINDOW_BYTES, Parts, Window, submit_window, windows


class Pace(Protocol):
    """Asked and told by the one thread that writes."""

    def take(self, under_way_bytes: int) -> int:
        """Bytes that may be sent now, at least; what is more than one block is rounded to whole ones. Waits for the
        turn where nothing is under way; else 0 means: not before some of that is answered."""

    def answered(self, length_bytes: int, seconds: float) -> None: ...


@dataclass
class _Piece:
    transfer: Transfer
    length_bytes: int
    together_bytes: int
    sent: float


def write_paced(
    devices: Sequence[BlockDevice],
    extents: Extents,
    parts: Parts,
    checksums: U32,
    pace: Pace,
    *,
    birth: int,
    volume_id: bytes,
) -> None:
    """As `write_parts`, at this pace: the same bytes, to the same places."""
    block_bytes = extents.block_bytes
    ranges = deque(
        each
        for window in windows(parts, block_bytes)
        for each in zip(window.starts, window.lengths, window.parts, strict=True)
    )
    under_way: deque[_Piece] = deque()

    def answer() -> None:
        piece = under_way.popleft()
        piece.transfer.wait()
        pace.answered(piece.length_bytes, time.perf_counter() - piece.sent)

    try:
        while ranges:
            room = pace.take(sum(piece.length_bytes for piece in under_way))
            if not room and under_way:
                answer()
                continue
            window = cut(ranges, room, block_bytes)
            while under_way and window.together_bytes + sum(piece.together_bytes for piece in under_way) > PEAK_BYTES:
                answer()
            sent = time.perf_counter()
            transfer = submit_window(devices, extents, parts, window, checksums, birth=birth, volume_id=volume_id)
            under_way.append(_Piece(transfer, sum(window.lengths), window.together_bytes, sent))
        while under_way:
            answer()
    finally:
        # Also behind an error: the caller's memory is its own again when this returns. The first one is what counts.
        for piece in under_way:
            with contextlib.suppress(HeadraceError):
                piece.transfer.wait()


def cut(ranges: deque[tuple[int, int, int]], length_bytes: int, block_bytes: int) -> Window:
    """The next `length_bytes` of `ranges` (start, length, part), in whole blocks, one at least, and not more than may
    be put together at a time. They are taken out."""
    window = Window([], [], [])
    left = max(block_bytes, length_bytes // block_bytes * block_bytes)
    while ranges and left:
        start, length, part = ranges.popleft()
        count = min(length, left)
        if part < 0:
            room = WINDOW_BYTES - window.together_bytes
            if not room:
                ranges.appendleft((start, length, part))
                break
            count = min(count, room)
            window.together_bytes += count
        window.starts.append(start)
        window.lengths.append(count)
        window.parts.append(part)
        if count < length:
            ranges.appendleft((start + count, length - count, part))
        left -= min(left, -(-count // block_bytes) * block_bytes)
    return window
