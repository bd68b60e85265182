"""Reads of ranges of one object: from columns of numbers to transfers under way.

Where all devices are native, their engine finds segments and checksums (`headrace.device.ranges`). Else, and where that
has met a bad copy of a checksum table, they are found here.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from functools import partial
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from headrace.device import submit_ranges, submit_read
from headrace.device.protocol import Buffer
from headrace.errors import MemberMissing, UsageError, VolumeDamaged
from headrace.volume.data.absent import refuse, solid
from headrace.volume.data.checksums import TableMismatch
from headrace.volume.data.damage import misplaced
from headrace.volume.data.extents import I64, U32, Pieces, spread
from headrace.volume.data.objects import StoredBlob, StoredObject
from headrace.volume.transfer import CutMove, Move, PiecesMove, VolumeTransfer, gone, let_end, mismatch

if TYPE_CHECKING:
    from headrace.volume.volume import Volume


def submit(
    volume: Volume,
    stored: StoredObject,
    offsets: npt.ArrayLike,
    lengths: npt.ArrayLike,
    buffers: Sequence[Buffer],
    buffer_offsets: npt.ArrayLike,
    buffer_index: npt.ArrayLike | None,
    verify: bool,
    room_bytes: int = 0,
) -> VolumeTransfer:
    """`Volume.submit_read`, of an object that was looked up."""
    starts, counts, places = _int64(offsets), _int64(lengths), _int64(buffer_offsets)
    index = None if buffer_index is None else np.ascontiguousarray(buffer_index, dtype=np.uint32)
    if not len(starts) == len(counts) == len(places) == (len(starts) if index is None else len(index)):
        raise UsageError(
            "the columns of a read have different lengths",
            found=f"{len(starts)}, {len(counts)}, {len(places)}, {'none' if index is None else len(index)}",
        )
    if stored.value.blob is None:
        _check_ranges(stored, starts, counts, places)
    moves: list[Move] = []
    cuts = stored.cut(starts, counts)
    if room_bytes and any(cut.within is not None and cut.within.any() for cut in cuts):
        # Behind a part of a range lies the next part of it.
        room_bytes = 0
    for cut in cuts:
        try:
            transfer = submit_ranges(
                volume.devices,
                volume.superblock.volume_id,
                [blob.source for blob in cut.blobs],
                cut.which,
                cut.start,
                cut.length,
                buffers,
                cut.buffers(index),
                cut.places(places),
                volume._checksums.pages if verify else None,
                room_bytes,
            )
        except BaseException as error:
            # Those that have begun still move: the buffers are the caller's again only when they have ended, too.
            let_end([move.transfer for move in moves])
            if not isinstance(error, UsageError):
                raise
            # The engine has looked, too; it names no object.
            _check_ranges(stored, starts, counts, places)
            refuse_misplaced(volume, stored.blobs, f"object {stored.name!r}", error)
            if not table_misplaced(volume, stored.blobs):
                raise
            # The other copy of its checksum table may be where it can be.
            return submit_pieces(volume, stored, starts, counts, places, buffers, index, verify)
        if transfer is None:
            return submit_pieces(volume, stored, starts, counts, places, buffers, index, verify)
        moves.append(CutMove(transfer, cut))
    again = partial(submit_pieces, volume, stored, starts, counts, places, buffers, index, verify)
    return VolumeTransfer(volume, stored, moves, again)


def submit_pieces(
    volume: Volume,
    stored: StoredObject,
    starts: I64,
    counts: I64,
    places: I64,
    buffers: Sequence[Buffer],
    index: U32 | None,
    verify: bool,
) -> VolumeTransfer:
    """The same with segments and checksums that are found here: for devices that have no native engine, and where
    the first copy of a checksum table is not good."""
    _check_ranges(stored, starts, counts, places)
    if index is None:
        index = np.zeros(len(starts), np.uint32)
    by_block: dict[int, list[tuple[StoredBlob, Pieces]]] = {}
    for blob, pieces in stored.parts(starts, counts):
        by_block.setdefault(blob.entry.checksum_block_bytes, []).append((blob, pieces))
    batches = []
    for block_bytes, parts in by_block.items():
        pieces = Pieces.join([pieces for _, pieces in parts])
        births = np.array([blob.entry.birth for blob, _ in parts], np.uint64)
        batch = pieces.batch(
            buffer=index,
            buffer_offset=places,
            birth=np.repeat(births, [len(pieces.member) for _, pieces in parts]),
            block_bytes=block_bytes,
            volume_id=volume.superblock.volume_id,
            mark=0,
        )
        refuse(volume.devices, pieces.member, f"object {stored.name!r}")
        batches.append((parts, batch, _expected(volume, stored, parts) if verify else None))
    moves: list[Move] = []
    for parts, batch, sums in batches:
        try:
            moves.append(PiecesMove(submit_read(solid(volume.devices), batch, buffers, sums), parts))
        except BaseException as error:
            let_end([move.transfer for move in moves])
            if isinstance(error, UsageError):
                refuse_misplaced(volume, stored.blobs, f"object {stored.name!r}", error)
            raise
    return VolumeTransfer(volume, stored, moves)


def _expected(volume: Volume, stored: StoredObject, parts: Sequence[tuple[StoredBlob, Pieces]]) -> U32:
    """The checksums of all blocks of these segments."""
    sums = []
    for blob, pieces in parts:
        blocks = spread(*pieces.blocks(blob.entry.checksum_block_bytes))
        try:
            sums.append(volume.checksums_of(blob, blocks))
        except TableMismatch as error:
            wrong = mismatch(volume, stored, blob, error.low, error.high, error.where or "", error)
            raise gone(volume, stored) or wrong from error
        except MemberMissing as error:
            raise MemberMissing(
                error.what, where=f"object {stored.name!r}", found=error.found, next_step=error.next_step
            ) from error
        except VolumeDamaged as error:
            raise named(error, stored.name) from error
    return sums[0] if len(sums) == 1 else np.concatenate(sums)


def _int64(values: npt.ArrayLike) -> I64:
    if isinstance(values, np.ndarray) and values.dtype == np.int64 and values.ndim == 1:
        return values if values.flags.c_contiguous else np.ascontiguousarray(values)
    array = np.atleast_1d(np.asarray(values))
    if array.ndim != 1 or (array.size and array.dtype.kind not in "iu"):
        raise UsageError("a column of a read", expected="whole numbers, one dimension", found=f"{array.dtype}")
    if array.dtype == np.uint64 and array.size and int(array.max()) >= 1 << 63:
        raise UsageError("a column of a read", expected="below 2^63", found=str(int(array.max())))
    return array.astype(np.int64)


def _check_ranges(stored: StoredObject, starts: I64, counts: I64, places: I64) -> None:
    size = stored.length_bytes
    wrong = np.flatnonzero((starts < 0) | (counts < 0) | (starts > size) | (counts > size - starts))
    if len(wrong):
        i = int(wrong[0])
        raise leaves(stored, int(starts[i]), int(counts[i]))
    if len(places) and int(places.min()) < 0:
        raise UsageError("a range leaves its buffer", found=f"buffer offset {int(places.min())}")


def named(error: VolumeDamaged, name: str) -> VolumeDamaged:
    """What was met in a blob, said of an object that has bytes of it."""
    return VolumeDamaged(
        error.what, where=f"object {name!r}, {error.where}", expected=error.expected, found=error.found
    )


def refuse_misplaced(volume: Volume, blobs: Iterable[StoredBlob], what: str, error: UsageError) -> None:
    """VolumeDamaged where an engine refused to read one of these blobs for where its bytes are said to be."""
    for blob in blobs:
        damage = misplaced(volume.devices, blob.data, what)
        if damage is not None:
            raise damage from error


def table_misplaced(volume: Volume, blobs: Iterable[StoredBlob]) -> bool:
    """Is the first copy of a checksum table, which the native engine reads, where nothing can be?"""
    return any(misplaced(volume.devices, table, "") is not None for blob in blobs for table in blob.tables[:1])


def leaves(stored: StoredObject, start: int, count: int) -> UsageError:
    return UsageError(
        "the range leaves the object",
        where=f"object {stored.name!r}",
        expected=f"within {stored.length_bytes} bytes",
        found=f"{count} bytes from {start}",
    )
