"""A read of a volume under way."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING

from headrace.errors import ChecksumMismatch, DeviceTimeout, HeadraceError, ObjectNotFound
from headrace.volume.data.extents import I64, Pieces
from headrace.volume.data.objects import StoredObject

if TYPE_CHECKING:
    from headrace.device import Transfer
    from headrace.volume.volume import Volume


class VolumeTransfer:
    """Made by `Volume.submit_read`. The buffers are the devices' until it is done."""

    def __init__(
        self, volume: Volume, stored: StoredObject, starts: I64, moves: Sequence[tuple[Pieces, Transfer]]
    ) -> None:
        """`starts`: of the ranges, in the object. `moves`: one for each size of checksum blocks that is met."""
        self._volume = volume
        self._stored = stored
        self._starts = starts
        self._moves = list(moves)
        self._error: HeadraceError | None = None

    def done(self) -> bool:
        """All bytes have arrived, or it failed; never blocks."""
        return all(transfer.done() for _, transfer in self._moves)

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end. `timeout_s`: DeviceTimeout when it passes, and the read goes on.

        ChecksumMismatch names object, offset and member. ObjectNotFound where the object was deleted meanwhile and its
        space was used again: every byte handed over is verified, so nothing of another object is ever seen.
        """
        if self._error is not None:
            raise self._error
        end = None if timeout_s is None else time.monotonic() + timeout_s
        failed: tuple[HeadraceError, Pieces, Transfer] | None = None
        for pieces, transfer in self._moves:
            try:
                transfer.wait(None if end is None else max(0.0, end - time.monotonic()))
            except HeadraceError as error:
                if isinstance(error, DeviceTimeout) and not transfer.done():
                    raise
                # The others still move: the buffers are the caller's again only when they have ended, too.
                failed = failed or (error, pieces, transfer)
        if failed is not None:
            first, pieces, transfer = failed
            if not isinstance(first, ChecksumMismatch):
                raise first
            self._error = explain(self._volume, self._stored, first, self._where(first, pieces, transfer))
            raise self._error from first
        # What is only needed for messages is not kept for as long as the caller keeps this.
        self._moves = []

    def _where(self, error: ChecksumMismatch, pieces: Pieces, transfer: Transfer) -> str:
        segment = transfer.failed_segment
        if segment is None:
            return error.where or "an unknown place"
        start = int(self._starts[pieces.source[segment]] + pieces.within[segment])
        member = int(pieces.member[segment])
        return (
            f"bytes {start} to {start + int(pieces.take[segment])}, member {member} "
            f"({self._volume.devices[member].uri}) offset {int(pieces.offset[segment])}"
        )


def explain(volume: Volume, stored: StoredObject, error: ChecksumMismatch, where: str) -> HeadraceError:
    """A mismatch is damage, unless the object is gone and its space was used again: look, then say which."""
    name = stored.name
    volume.refresh()
    current = volume.sequence_of(name)
    if current is None:
        return ObjectNotFound("the object was deleted while it was read", where=f"object {name!r}")
    if current != stored.value.sequence:
        return ObjectNotFound(
            "the object was replaced while it was read", where=f"object {name!r}", next_step="read it again"
        )
    return ChecksumMismatch(
        "the bytes do not match their checksum",
        where=f"object {name!r}, {where}",
        expected=error.expected,
        found=error.found,
        next_step="restore the object from another copy; `headrace volume verify` lists all damage",
    )
