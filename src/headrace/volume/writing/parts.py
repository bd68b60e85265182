"""An object's bytes where they lie: in several buffers, and written from there instead of being put together first.

A checksum block is written from one buffer. So

    buffers          |<------ a ------>| |<- b ->| |<----------------- c ----------------->|
    blocks        |       |       |       |       |       |       |       |       |       |
    written       |- from a ------|- put together --------|- from c ------------------|- p. t. -

runs of blocks that lie whole in one buffer go from where they are; the blocks between, and runs too short to be worth
commands of their own, are put together a window at a time. Two windows are under way at once, so the memory it takes is
bounded whatever the object.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

from headrace.device import BlockDevice, Transfer, submit_write
from headrace.device.protocol import Buffer
from headrace.device.reference import U8, as_bytes
from headrace.errors import UsageError
from headrace.volume.data.absent import refuse, solid
from headrace.volume.data.extents import U32, Extents

if TYPE_CHECKING:
    from headrace.volume.writing.paced import Pace

#: Shorter runs within one buffer are put together with what is beside them: a command costs more than the copy.
DIRECT_BYTES = 256 << 10
#: Bytes that are put together at a time.
WINDOW_BYTES = 16 << 20
#: The most that writing an object takes besides its buffers.
PEAK_BYTES = 2 * WINDOW_BYTES


class Parts:
    """`buffers[i]` stands at byte `offsets[i]` of an object of `length_bytes`; the gaps between them are zeros.

    Offsets ascend and no buffer reaches into the next; nothing is copied. UsageError where that is not so, or a buffer
    is not C-contiguous. The buffers must not change until what is made of them is written.
    """

    def __init__(self, buffers: Sequence[Buffer], offsets: Sequence[int], length_bytes: int) -> None:
        if len(buffers) != len(offsets):
            raise UsageError("one offset for each buffer", expected=str(len(buffers)), found=str(len(offsets)))
        self.length_bytes = length_bytes
        #: Where nobody waits for them to be written: how fast they are (`writing.paced`).
        self.pace: Pace | None = None
        #: When they were written: the raw CRC32C (`headrace.device.joined`) of the object, of the checksums that were
        #: taken as it was.
        self.written: int | None = None
        self.views: list[U8] = []
        self.starts: list[int] = []
        self.ends: list[int] = []
        end = 0
        for buffer, start in zip(buffers, offsets, strict=True):
            empty = not (buffer.size if isinstance(buffer, np.ndarray) else len(buffer))
            view = np.zeros(0, np.uint8) if empty else as_bytes(buffer)
            if not end <= start <= length_bytes - len(view):
                raise UsageError(
                    "the parts of an object overlap, or leave it",
                    expected=f"a start of {end} to {length_bytes - len(view)}",
                    found=str(start),
                )
            if len(view):
                end = start + len(view)
                self.views.append(view)
                self.starts.append(start)
                self.ends.append(end)

    @property
    def nbytes(self) -> int:
        return self.length_bytes

    def copy_to(self, into: U8, start: int) -> None:
        """Bytes `start ..` of the object, gaps and all, to all of `into`."""
        end = start + len(into)
        done = 0
        first = int(np.searchsorted(self.ends, start, side="right"))
        for view, low, high in zip(self.views[first:], self.starts[first:], self.ends[first:], strict=True):
            if low >= end:
                break
            a, b = max(low, start), min(high, end)
            into[done : a - start] = 0
            into[a - start : b - start] = view[a - low : b - low]
            done = b - start
        into[done:] = 0


@dataclass
class Window:
    """Ranges of the object, in order, and what they are written from: a part, or (-1) what is put together."""

    starts: list[int]
    lengths: list[int]
    parts: list[int]
    together_bytes: int = 0


def windows(parts: Parts, block_bytes: int) -> list[Window]:
    """All of the object, in order; every range but the last of the object is whole blocks."""
    ranges: list[tuple[int, int, int]] = []
    end = 0
    for number, (low, high) in enumerate(zip(parts.starts, parts.ends, strict=True)):
        first = -(-low // block_bytes) * block_bytes
        last = high if high == parts.length_bytes else high // block_bytes * block_bytes
        if last - first < DIRECT_BYTES and not (first == 0 and last == parts.length_bytes):
            continue
        _put_together(ranges, end, first)
        ranges.append((first, last - first, number))
        end = last
    _put_together(ranges, end, parts.length_bytes)
    result = [Window([], [], [])]
    for start, length, number in ranges:
        together = length if number < 0 else 0
        if result[-1].together_bytes + together > WINDOW_BYTES:
            result.append(Window([], [], []))
        window = result[-1]
        window.starts.append(start)
        window.lengths.append(length)
        window.parts.append(number)
        window.together_bytes += together
    return result


def _put_together(ranges: list[tuple[int, int, int]], start: int, end: int) -> None:
    while start < end:
        # A multiple of every checksum block that there is.
        length = min(WINDOW_BYTES, end - start)
        ranges.append((start, length, -1))
        start += length


def write_parts(
    devices: Sequence[BlockDevice], extents: Extents, parts: Parts, checksums: U32, *, birth: int, volume_id: bytes
) -> None:
    """Write `parts` to all of `extents`; `checksums` (uint32[blocks]) are filled. Nothing is flushed."""
    before: Transfer | None = None
    try:
        for window in windows(parts, extents.block_bytes):
            if not window.starts:
                continue
            transfer = submit_window(devices, extents, parts, window, checksums, birth=birth, volume_id=volume_id)
            previous, before = before, transfer
            if previous is not None:
                previous.wait()
    finally:
        # Also behind an error: the caller's memory is its own again when this returns.
        if before is not None:
            before.wait()


def submit_window(
    devices: Sequence[BlockDevice],
    extents: Extents,
    parts: Parts,
    window: Window,
    checksums: U32,
    *,
    birth: int,
    volume_id: bytes,
) -> Transfer:
    """Start to write these ranges of `parts`. What is put together for them lives as long as the transfer."""
    block_bytes = extents.block_bytes
    together = np.empty(window.together_bytes, np.uint8)
    buffers: list[U8] = [together]
    numbers: list[int] = []
    offsets: list[int] = []
    filled = 0
    for start, length, part in zip(window.starts, window.lengths, window.parts, strict=True):
        if part < 0:
            parts.copy_to(together[filled : filled + length], start)
            numbers.append(0)
            offsets.append(filled)
            filled += length
        else:
            numbers.append(len(buffers))
            offsets.append(start - parts.starts[part])
            buffers.append(parts.views[part])
    pieces = extents.pieces(np.array(window.starts, np.int64), np.array(window.lengths, np.int64))
    batch = pieces.batch(
        buffer=np.array(numbers, np.uint32),
        buffer_offset=np.array(offsets, np.int64),
        birth=birth,
        block_bytes=block_bytes,
        volume_id=volume_id,
        mark=0,
    )
    refuse(devices, pieces.member, f"blob {birth:#x}")
    # Segments lie in the order of the object's bytes, so their checksums do too.
    first = window.starts[0] // block_bytes
    return submit_write(solid(devices), batch, buffers, checksums[first : first + batch.checksum_count])
