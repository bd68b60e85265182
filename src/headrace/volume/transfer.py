"""A read of a volume under way."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.errors import ChecksumMismatch, HeadraceError, ObjectNotFound
from headrace.volume.catalog import StoredObject
from headrace.volume.extents import Pieces

if TYPE_CHECKING:
    from headrace.device import Transfer
    from headrace.volume.volume import Volume


class VolumeTransfer:
    """Made by `Volume.submit_read`. The buffers are the devices' until it is done."""

    def __init__(self, volume: Volume, stored: StoredObject, pieces: Pieces, transfer: Transfer) -> None:
        self._volume = volume
        self._stored = stored
        self._pieces: Pieces | None = pieces
        self._transfer = transfer
        self._error: HeadraceError | None = None

    def done(self) -> bool:
        """All bytes have arrived, or it failed; never blocks."""
        return self._transfer.done()

    def wait(self, timeout_s: float | None = None) -> None:
        """Wait for the end. `timeout_s`: DeviceTimeout when it passes, and the read goes on.

        ChecksumMismatch names object, offset and member. ObjectNotFound where the object was deleted meanwhile and its
        space was used again: every byte handed over is verified, so nothing of another object is ever seen.
        """
        if self._error is not None:
            raise self._error
        try:
            self._transfer.wait(timeout_s)
        except ChecksumMismatch as error:
            self._error = explain(self._volume, self._stored, error, self._where(error))
            raise self._error from error
        # What is only needed for messages is not kept for as long as the caller keeps this.
        self._pieces = None

    def _where(self, error: ChecksumMismatch) -> str:
        segment = self._transfer.failed_segment
        if segment is None or self._pieces is None:
            return error.where or "an unknown place"
        start, length = int(self._pieces.start[segment]), int(self._pieces.length[segment])
        member = int(self._pieces.member[segment])
        return (
            f"bytes {start} to {start + length}, member {member} ({self._volume.devices[member].uri}) "
            f"offset {int(self._pieces.offset[segment])}"
        )


def explain(volume: Volume, stored: StoredObject, error: ChecksumMismatch, where: str) -> HeadraceError:
    """A mismatch is damage, unless the object is gone and its space was used again: look, then say which."""
    name = stored.entry.name
    volume.refresh()
    current = volume.birth_of(name)
    if current is None:
        return ObjectNotFound("the object was deleted while it was read", where=f"object {name!r}")
    if current != stored.entry.birth:
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
