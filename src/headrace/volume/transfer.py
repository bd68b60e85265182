"""A read of a volume under way."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from typing import TYPE_CHECKING, Protocol

from headrace.device import describe_wait
from headrace.errors import ChecksumMismatch, DeviceError, DeviceTimeout, HeadraceError, ObjectNotFound
from headrace.volume.data.damage import BadBlock, find_bad
from headrace.volume.data.extents import Pieces, spread
from headrace.volume.data.objects import Cut, StoredBlob, StoredObject

if TYPE_CHECKING:
    from headrace.device import Transfer
    from headrace.volume.volume import Volume

#: Segments of one batch, blob by blob: what is read of each.
Parts = Sequence[tuple[StoredBlob, Pieces]]


class Move(Protocol):
    """A transfer of the devices, of all that has checksum blocks of one size."""

    transfer: Transfer

    def failed(self) -> tuple[Parts, int | None] | None:
        """Segments, and which of them failed (None: it is not known). None: no segment did, but its checksums are not
        there."""


class PiecesMove:
    """Of segments that were found by `parts`."""

    def __init__(self, transfer: Transfer, parts: Parts) -> None:
        self.transfer = transfer
        self._parts = parts

    def failed(self) -> tuple[Parts, int | None] | None:
        return self._parts, self.transfer.failed_segment


class CutMove:
    """Of ranges, whose segments the native engine found."""

    def __init__(self, transfer: Transfer, cut: Cut) -> None:
        self.transfer = transfer
        self._cut = cut

    def failed(self) -> tuple[Parts, int | None] | None:
        found = self.transfer.failed_range
        if found is None:
            return None
        row, _, _, member, offset = found
        cut = self._cut
        blob = cut.blobs[0 if cut.which is None else int(cut.which[row])]
        pieces = blob.data.pieces(cut.start[row : row + 1], cut.length[row : row + 1])
        places = zip(pieces.member.tolist(), pieces.offset.tolist(), strict=True)
        return [(blob, pieces)], list(places).index((member, offset))


def let_end(transfers: Sequence[Transfer]) -> None:
    """Wait for all of these, whatever becomes of them."""
    for transfer in transfers:
        with suppress(HeadraceError):
            transfer.wait()


class VolumeTransfer:
    """Made by `Volume.submit_read`. The buffers are the devices' until it is done."""

    def __init__(
        self,
        volume: Volume,
        stored: StoredObject,
        moves: Sequence[Move],
        again: Callable[[], VolumeTransfer] | None = None,
    ) -> None:
        """`moves`: one for each size of checksum blocks that is met. `again`: the same read another way, for where
        checksums are not to be had in the first."""
        self._volume = volume
        self._stored = stored
        self._moves = list(moves)
        self._again = again
        self._error: HeadraceError | None = None

    def done(self) -> bool:
        """All bytes have arrived, or it failed; never blocks."""
        return all(move.transfer.done() for move in self._moves)

    def waiting(self) -> str | None:
        """What it waits for, in words: object, member, block, path. None where it has nothing under way."""
        for move in self._moves:
            found = move.transfer.waiting()
            if found is not None:
                member, offset, length = found
                where = f"object {self._stored.name!r}, member {member}"
                return f"{where}, {describe_wait(self._volume.devices[member], offset, length)}"
        return None

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end. `timeout_s`: DeviceTimeout when it passes, and the read goes on.

        ChecksumMismatch names object, offset and member. ObjectNotFound where the object was deleted meanwhile and its
        space was used again: every byte handed over is verified, so nothing of another object is ever seen.
        """
        if self._error is not None:
            raise self._error
        end = None if timeout_s is None else time.monotonic() + timeout_s
        failed: tuple[HeadraceError, Move] | None = None
        for move in self._moves:
            try:
                move.transfer.wait(None if end is None else max(0.0, end - time.monotonic()))
            except HeadraceError as error:
                if isinstance(error, DeviceTimeout) and not move.transfer.done():
                    raise
                # The others still move: the buffers are the caller's again only when they have ended, too.
                failed = failed or (error, move)
        if failed is not None:
            first, move = failed
            where = move.failed() if isinstance(first, (ChecksumMismatch, DeviceError)) else ([], None)
            if where is None and self._again is not None:
                self._read_again(self._again, end)
            elif where is None or not isinstance(first, ChecksumMismatch):
                raise first
            else:
                self._error = gone(self._volume, self._stored) or self._mismatch(first, *where)
                raise self._error from first
        # What is only needed for messages is not kept for as long as the caller keeps this.
        self._moves, self._again = [], None

    def _read_again(self, again: Callable[[], VolumeTransfer], end: float | None) -> None:
        try:
            other = again()
        except HeadraceError as error:
            self._error = error
            raise
        self._moves, self._again = other._moves, None
        other.wait(None if end is None else max(0.0, end - time.monotonic()))

    def _mismatch(self, error: ChecksumMismatch, parts: Parts, segment: int | None) -> ChecksumMismatch:
        """What is wrong, found by a second look at the segment that failed, or at all where it is not known which."""
        base = 0
        for blob, pieces in parts:
            count = len(pieces.member)
            if segment is None or base <= segment < base + count:
                bad = self._look(blob, pieces, None if segment is None else segment - base)
                if bad is not None:
                    expected, found = bad.sums
                    return mismatch(
                        self._volume, self._stored, blob, bad.start, bad.start + bad.length,
                        f"member {bad.member} ({self._volume.devices[bad.member].uri}) offset {bad.offset}",
                        ChecksumMismatch("the bytes do not match their checksum", expected=expected, found=found),
                    )  # fmt: skip
            base += count
        return ChecksumMismatch(
            "the bytes did not match their checksum when they were read, and do at a second look",
            where=f"object {self._stored.name!r}, {error.where}",
            expected=error.expected,
            found=error.found,
            next_step="read it again; what lies between here and the member changes bytes (are digests on?)",
        )

    def _look(self, blob: StoredBlob, pieces: Pieces, row: int | None) -> BadBlock | None:
        entry = blob.entry
        return find_bad(
            self._volume.devices,
            pieces,
            self._volume.checksums_of(blob, spread(*pieces.blocks(entry.checksum_block_bytes))),
            block_bytes=entry.checksum_block_bytes,
            birth=entry.birth,
            volume_id=self._volume.superblock.volume_id,
            row=row,
        )


def gone(volume: Volume, stored: StoredObject) -> ObjectNotFound | None:
    """A mismatch is damage, unless the object is gone and its space was used again: look."""
    name = stored.name
    volume.refresh()
    current = volume.sequence_of(name)
    if current is None:
        return ObjectNotFound("the object was deleted while it was read", where=f"object {name!r}")
    if current != stored.value.sequence:
        return ObjectNotFound(
            "the object was replaced while it was read", where=f"object {name!r}", next_step="read it again"
        )
    return None


def mismatch(
    volume: Volume, stored: StoredObject, blob: StoredBlob, low: int, high: int, place: str, error: ChecksumMismatch
) -> ChecksumMismatch:
    """Bytes `low` to `high` of a blob are not to be had, said as bytes of the object. `error`: what was met."""
    ranges = stored.ranges_of(blob.entry.birth, low, high)
    listed = ", ".join(f"{start} to {end}" for start, end in ranges[:4]) + (" and others" if len(ranges) > 4 else "")
    return ChecksumMismatch(
        error.what,
        where=f"object {stored.name!r}, bytes {listed or 'none'}, {place}",
        expected=error.expected,
        found=error.found,
        next_step="restore the object from another copy; `headrace volume verify` lists all damage",
    )
