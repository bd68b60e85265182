"""Ranges of objects, read one after another with some of them under way: for whoever walks through a checkpoint."""

from __future__ import annotations

import contextlib
from collections import deque
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import TypeAlias

import numpy as np
import numpy.typing as npt

from headrace.errors import ChecksumMismatch, HeadraceError, MemberMissing, VolumeDamaged
from headrace.units import MIB
from headrace.volume import ObjectInfo, Volume, VolumeTransfer

#: The longest range; longer ones are the caller's to cut.
PIECE_BYTES = 8 * MIB
UNDER_WAY = 4
#: A read may fail with these where bytes are damaged, or not there; with anything else the device failed.
DAMAGES = (ChecksumMismatch, VolumeDamaged, MemberMissing)

Bytes: TypeAlias = npt.NDArray[np.uint8]


@dataclass(frozen=True, kw_only=True)
class Piece:
    """One range that was read; `data` is the reader's again when the next one is asked for."""

    info: ObjectInfo
    offset: int
    length: int
    data: Bytes
    #: One of DAMAGES: then nothing is in `data`.
    problem: HeadraceError | None = None


def pieces_of(info: ObjectInfo, offset: int, length: int) -> Iterator[tuple[ObjectInfo, int, int]]:
    """A range in pieces."""
    for start in range(offset, offset + length, PIECE_BYTES):
        yield info, start, min(PIECE_BYTES, offset + length - start)


def read_ahead(volume: Volume, ranges: Iterable[tuple[ObjectInfo, int, int]]) -> Generator[Piece, None, None]:
    """Each range, in their order; memory for UNDER_WAY of them. What is damaged comes as such, other errors raise."""
    buffers = deque(np.empty(0, np.uint8) for _ in range(UNDER_WAY))
    waiting: deque[tuple[ObjectInfo, int, Bytes, Bytes, VolumeTransfer | HeadraceError]] = deque()

    def oldest() -> Piece:
        info, offset, data, buffer, transfer = waiting.popleft()
        buffers.append(buffer)
        problem = transfer if isinstance(transfer, HeadraceError) else None
        try:
            if not isinstance(transfer, HeadraceError):
                transfer.wait()
        except DAMAGES as error:
            problem = error
        return Piece(info=info, offset=offset, length=len(data), data=data, problem=problem)

    try:
        for info, offset, length in ranges:
            # One buffer is always the caller's.
            if len(buffers) == 1:
                yield oldest()
            buffer = buffers.popleft()
            if len(buffer) < length:
                buffer = np.empty(length, np.uint8)
            data = buffer[:length]
            try:
                began: VolumeTransfer | HeadraceError = volume.submit_read(info, [offset], [length], [data], [0])
            except DAMAGES as error:
                began = error
            waiting.append((info, offset, data, buffer, began))
        while waiting:
            yield oldest()
    finally:
        # Nothing may still be read into memory that is given back.
        for _, _, _, _, transfer in waiting:
            if not isinstance(transfer, HeadraceError):
                with contextlib.suppress(HeadraceError):
                    transfer.wait()
