"""Reading objects only to see that they are good, through the same path as every reader."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

import numpy as np

from headrace.errors import ChecksumMismatch, DeviceError, HeadraceError, ObjectNotFound, VolumeDamaged
from headrace.volume.objects import ObjectInfo
from headrace.volume.transfer import VolumeTransfer
from headrace.volume.volume import Volume

#: Read at a time, and how many such reads are under way.
_PIECE_BYTES = 8 << 20
_UNDER_WAY = 4


def verify_objects(
    volume: Volume, entries: Iterable[ObjectInfo]
) -> Iterator[tuple[ObjectInfo, int, HeadraceError | None]]:
    """(object, bytes read now, what is wrong) for each piece that was read, in order; of a damaged object once.

    An object that was deleted meanwhile counts as read. Raises DeviceError where a device fails for good.
    """
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
            except DeviceError:
                raise
            except HeadraceError as error:
                # Its checksum table, or its extents.
                free.append(place)
                if entry.name not in bad:
                    bad.add(entry.name)
                    yield entry, length, error
                continue
            waiting.append((entry, length, transfer, place))
    while waiting:
        yield oldest()
