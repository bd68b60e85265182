"""Reading objects only to see that they are good, through the same path as every reader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from headrace.device.reference import U8
from headrace.errors import ChecksumMismatch, DeviceError, HeadraceError, MemberMissing, ObjectNotFound, VolumeDamaged
from headrace.volume.data.objects import ObjectInfo
from headrace.volume.many import read_many
from headrace.volume.transfer import VolumeTransfer
from headrace.volume.volume import Volume

#: Read at a time, and how many such reads are under way.
_PIECE_BYTES = 8 << 20
_UNDER_WAY = 4
#: Objects up to this are read many at once.
_SMALL_BYTES = 1 << 20
_MANY = 2048


def verify_objects(
    volume: Volume, entries: Iterable[ObjectInfo]
) -> Iterator[tuple[ObjectInfo, int, HeadraceError | None]]:
    """(object, bytes read now, what is wrong) for each piece that was read; of a damaged object once.

    An object that was deleted meanwhile counts as read. Raises DeviceError where a device fails for good.
    """
    buffer = np.empty(_PIECE_BYTES, np.uint8)
    pack: list[ObjectInfo] = []
    size = 0
    for entry in entries:
        if entry.length_bytes > _SMALL_BYTES:
            yield from _large(volume, [entry])
            continue
        if size + entry.length_bytes > _PIECE_BYTES or len(pack) == _MANY:
            yield from _small(volume, pack, buffer)
            pack, size = [], 0
        pack.append(entry)
        size += entry.length_bytes
    yield from _small(volume, pack, buffer)


Verdicts = Iterator[tuple[ObjectInfo, int, HeadraceError | None]]


def _small(volume: Volume, pack: list[ObjectInfo], buffer: U8) -> Verdicts:
    lengths = [entry.length_bytes for entry in pack]
    try:
        read_many(volume, pack, (np.cumsum([0, *lengths])[:-1]).tolist(), buffer)
    except (ChecksumMismatch, VolumeDamaged, ObjectNotFound, MemberMissing):
        # One by one, to find out which.
        yield from _large(volume, pack)
    else:
        for entry in pack:
            yield entry, entry.length_bytes, None


def _large(volume: Volume, entries: Iterable[ObjectInfo]) -> Verdicts:
    """In order."""
    waiting: deque[tuple[ObjectInfo, int, VolumeTransfer, int]] = deque()
    buffers = [np.empty(_PIECE_BYTES, np.uint8) for _ in range(_UNDER_WAY)]
    free = list(range(_UNDER_WAY))
    bad: set[str] = set()

    def oldest() -> tuple[ObjectInfo, int, HeadraceError | None]:
        entry, length, transfer, place = waiting.popleft()
        try:
            transfer.wait()
        except ObjectNotFound:
            return entry, length, None
        except (ChecksumMismatch, VolumeDamaged) as error:
            if entry.name in bad:
                return entry, length, None
            bad.add(entry.name)
            return entry, length, error
        finally:
            free.append(place)
        return entry, length, None

    for entry in entries:
        if entry.length_bytes == 0:
            yield entry, 0, None
        for start in range(0, entry.length_bytes, _PIECE_BYTES):
            length = min(_PIECE_BYTES, entry.length_bytes - start)
            if not free:
                yield oldest()
            place = free.pop()
            try:
                transfer = volume.submit_read(entry, [start], [length], [buffers[place][:length]], [0])
            except ObjectNotFound:
                free.append(place)
                yield entry, length, None
                continue
            except HeadraceError as error:
                if isinstance(error, DeviceError) and not isinstance(error, MemberMissing):
                    raise
                # Its checksum table, or its extents.
                free.append(place)
                if entry.name not in bad:
                    bad.add(entry.name)
                    yield entry, length, error
                continue
            waiting.append((entry, length, transfer, place))
    while waiting:
        yield oldest()
