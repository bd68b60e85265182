"""Many small objects read at once: one batch for all, whatever blobs they are slices of.

`Volume.submit_read` costs some Python for each object; here it is a few numbers each. Objects that were packed together
and are wanted together are read in one piece, since their bytes lie in a row.
"""

from __future__ import annotations

import struct
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, TypeAlias

import numpy as np

from headrace.device import Transfer, read_batch, submit_ranges
from headrace.device.reference import U8
from headrace.errors import HeadraceError, UsageError, VolumeDamaged
from headrace.volume.data.absent import refuse, solid
from headrace.volume.data.extents import I64, U32, Pieces, spread
from headrace.volume.data.objects import ObjectInfo, StoredBlob, replaced
from headrace.volume.layout import OBJECT_BYTES, ObjectHead
from headrace.volume.read import named, refuse_misplaced, table_misplaced
from headrace.volume.transfer import let_end

if TYPE_CHECKING:
    from headrace.volume.volume import Volume

_SLICE = struct.Struct("<QQQ")
#: Blobs with checksum blocks of one size, and ranges of each: where it begins, its bytes, its place in the buffer.
Ranges: TypeAlias = dict[int, list[tuple[StoredBlob, I64]]]


def read_many(volume: Volume, infos: Sequence[ObjectInfo], offsets: Sequence[int], buffer: U8) -> None:
    """Each whole object to its offset of the buffer, every block verified.

    Raises the first error, and then nothing is said about the others: ChecksumMismatch (of which object is found out by
    reading them one by one), ObjectNotFound where one was deleted or replaced, VolumeDamaged, DeviceError.
    """
    ranges: dict[int, list[tuple[int, int, int]]] = {}
    blobs: dict[int, StoredBlob] = {}
    #: Of each blob one of the objects, for messages.
    names: dict[int, str] = {}
    for info, offset in zip(infos, offsets, strict=True):
        for birth, start, length in _slices(volume, info, blobs):
            ranges.setdefault(birth, []).append((start, length, offset))
            names.setdefault(birth, info.name)
            offset += length
    by_block: Ranges = {}
    for birth, rows in ranges.items():
        blob = blobs[birth]
        by_block.setdefault(blob.entry.checksum_block_bytes, []).append((blob, _joined(np.array(rows, np.int64))))
    try:
        if not _read(volume, by_block, buffer):
            _read_pieces(volume, by_block, buffer, names)
    except UsageError as error:
        for birth, name in names.items():
            refuse_misplaced(volume, [blobs[birth]], f"object {name!r}", error)
        if not table_misplaced(volume, blobs.values()):
            raise
        # The other copies of their checksum tables may be where they can be.
        _read_pieces(volume, by_block, buffer, names)


def _read(volume: Volume, by_block: Ranges, buffer: U8) -> bool:
    """False where devices have no native engine, or where that does not get at a checksum table."""
    transfers: list[Transfer] = []
    for some in by_block.values():
        columns = np.concatenate([table for _, table in some])
        try:
            transfer = submit_ranges(
                volume.devices,
                volume.superblock.volume_id,
                [blob.source for blob, _ in some],
                np.repeat(np.arange(len(some), dtype=np.uint32), [len(table) for _, table in some]),
                np.ascontiguousarray(columns[:, 0]),
                np.ascontiguousarray(columns[:, 1]),
                [buffer],
                None,
                np.ascontiguousarray(columns[:, 2]),
                volume._checksums.pages,
            )
        except BaseException:
            let_end(transfers)
            raise
        if transfer is None:
            return False
        transfers.append(transfer)
    errors = []
    for transfer in transfers:
        try:
            transfer.wait()
        except HeadraceError as error:
            # The others still move: the buffer is the caller's again only when they have ended, too.
            errors.append((error, transfer.failed_segment))
        except BaseException:
            let_end(transfers)
            raise
    if any(segment is None for _, segment in errors):
        # No bytes were wrong: the first copy of a checksum table was.
        return False
    if errors:
        raise errors[0][0]
    return True


def _read_pieces(volume: Volume, by_block: Ranges, buffer: U8, names: Mapping[int, str]) -> None:
    """The same with segments and checksums that are found here. `names`: an object of each blob."""
    for block_bytes, some in by_block.items():
        parts = [(blob, blob.data.pieces(table[:, 0], table[:, 1]), table[:, 2]) for blob, table in some]
        counts = [len(places) for _, _, places in parts]
        first = np.cumsum([0, *counts[:-1]])
        pieces = Pieces.join(
            [
                each._replace(source=each.source + before)
                for (_, each, _), before in zip(parts, first.tolist(), strict=True)
            ]
        )
        births = np.array([blob.entry.birth for blob, _, _ in parts], np.uint64)
        batch = pieces.batch(
            buffer=np.zeros(sum(counts), np.uint32),
            buffer_offset=np.concatenate([places for _, _, places in parts]),
            birth=np.repeat(births, [len(each.member) for _, each, _ in parts]),
            block_bytes=block_bytes,
            volume_id=volume.superblock.volume_id,
            mark=0,
        )
        sums = np.concatenate([_sums(volume, blob, each, names) for blob, each, _ in parts])
        refuse(volume.devices, pieces.member, "one of several objects")
        read_batch(solid(volume.devices), batch, [buffer], sums)


def _sums(volume: Volume, blob: StoredBlob, pieces: Pieces, names: Mapping[int, str]) -> U32:
    try:
        return volume.checksums_of(blob, spread(*pieces.blocks(blob.entry.checksum_block_bytes)))
    except VolumeDamaged as error:
        raise named(error, names[blob.entry.birth]) from error


def _slices(volume: Volume, info: ObjectInfo, blobs: dict[int, StoredBlob]) -> list[tuple[int, int, int]]:
    """(birth, start, length) of an object; `blobs` gets those that they are of."""
    with volume.lock:
        return volume.of_one_state(lambda: _look(volume, info, blobs))


def _look(volume: Volume, info: ObjectInfo, blobs: dict[int, StoredBlob]) -> list[tuple[int, int, int]]:
    value = volume._value(info.name)
    head = ObjectHead.decode(value, info.name)
    if head.sequence != info.sequence:
        raise replaced(info.name)
    if not head.length_bytes:
        return []
    if head.flags == 0 and head.slice_count == 1 and len(value) == OBJECT_BYTES + _SLICE.size:
        birth, start, length = _SLICE.unpack_from(value, OBJECT_BYTES)
        blob = volume._blob(birth)
        room = blob.entry.length_bytes
        if length == head.length_bytes and start <= room and length <= room - start:
            blobs[birth] = blob
            return [(birth, start, length)]
    stored = volume.stored(info)
    blobs.update({blob.entry.birth: blob for blob in stored.blobs})
    if stored.value.blob is not None:
        return [(stored.value.blob.birth, 0, head.length_bytes)]
    return [(birth, start, length) for birth, start, length in stored.value.slices.tolist()]


def _joined(rows: I64) -> I64:
    """Ranges that go on where the one before ends, in the blob and in the buffer, become one."""
    rows = rows[np.argsort(rows[:, 0], kind="stable")]
    ends = rows[:, :1] + rows[:, 1:2]
    new = np.ones(len(rows), np.bool_)
    new[1:] = (rows[1:, 0] != ends[:-1, 0]) | (rows[1:, 2] - rows[1:, 0] != rows[:-1, 2] - rows[:-1, 0])
    starts = np.flatnonzero(new)
    lengths = np.add.reduceat(rows[:, 1], starts)
    return np.stack([rows[starts, 0], lengths, rows[starts, 2]], axis=1)
